"""The recorder beside a real PyTorch, on a libcupti made for the tests."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

import thence
from recorder_programs import Copies, program
from thence.model.column_file import decode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    """Runs programs in which torch was imported before thence."""
    with Copies("import torch.distributed", tmp_path_factory.mktemp("copies")) as programs:
        yield programs


def test_recording_begins_while_cuda_is_initialised_and_follows_autograd(tmp_path: Path, copies: Copies) -> None:
    body = """
        import torch
        from thence.capture.launcher import first_use as hooks

        # torch.cuda._lazy_init holds this lock while it calls what waited for CUDA.
        with torch.cuda._initialization_lock:
            hooks._begin(str(OUT), {})
        x = torch.randn(4, 4, requires_grad=True)
        with thence.mark("attention"):
            y = (x @ x).relu().sum()
        y.backward()
        fake.emit(kernel())
    """
    copies.program(body, tmp_path)
    trace = thence.open(tmp_path)
    assert trace.tables.gpu.height == 1
    assert not [text for text in trace.meta.warnings if "cut" in text]
    host = trace.tables.host.with_columns(trace.tables.host["name"].cast(str)).with_row_index("row")
    nodes = host.filter(host["name"].str.contains("evaluate_function: .*Backward"))
    # One node each for mm, relu and sum; all belong to the mark that was open around their forward.
    assert nodes.height == 3
    [mark] = host.filter(host["name"] == "attention")["row"]
    assert nodes["forward"].to_list() == [mark] * 3


GROUP = '''
import itertools
from thence.capture.marks import listen, unlisten

def distributed_of_one(name="store"):
    import torch
    from torch import distributed
    store = distributed.FileStore(str(OUT.parent / name), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return torch, distributed

class Launches:
    """Launches a kernel inside every collective, as NCCL does."""
    numbers = itertools.count(1)

    def opened(self, number, name, lane, metadata):
        if name.startswith("nccl:"):
            launch("ncclDevKernel", next(self.numbers))

    def closed(self, number): ...
    def backward_opened(self, number, name): ...
    def backward_closed(self): ...

def labelled(torch):
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")
'''


def with_group(body: str) -> str:
    """The program with what its collectives need."""
    return textwrap.indent(GROUP + textwrap.dedent(body), " " * 4)


def collectives(tmp_path: Path, body: str, copies: Copies | None = None) -> thence.Trace:
    """What a program with collectives recorded, in a process that imports all itself or in a copy of one."""
    run = program if copies is None else copies.program
    run(with_group(body), tmp_path / "out")
    return thence.open(tmp_path / "out")


def test_a_recording_describes_the_collectives_of_a_program_that_knows_nothing_of_it(tmp_path: Path) -> None:
    trace = collectives(
        tmp_path,
        """
        torch, distributed = distributed_of_one()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        with thence.record(OUT):
            listen(Launches())  # after the recording's own, so inside the mark that it notes
            for _ in range(3):
                distributed.all_reduce(torch.ones(4, 5, dtype=torch.bfloat16))
            model(torch.ones(1, 3)).sum().backward()
        assert not labelled(torch)
        """,
    )
    rows = trace.tables.collectives.sort("sequence")
    assert rows["collective"].to_list() == ["allreduce"] * 4
    # The last one is DistributedDataParallel's: weight and bias of the layer.
    assert rows["in_elements"].to_list() == [4 * 5] * 3 + [3 * 2 + 2]
    assert rows["bytes"].to_list() == [4 * 5 * 2] * 3 + [(3 * 2 + 2) * 4]
    assert rows["element_type"].to_list() == ["BFloat16"] * 3 + ["Float"]
    assert set(rows["group_ranks"]) == {"[0]"}
    first = rows["sequence"][0]
    assert first is not None
    assert rows["sequence"].to_list() == [first, first + 1, first + 2, first + 3]
    assert sorted(rows["gpu"]) == list(range(4))
    trace.self_check()
    assert trace.collectives().by_size["count"].sum() == 4


@pytest.mark.parametrize("moment", ["before torch", "within torch", "at CUDA"])
def test_labels_come_with_torch_whenever_the_recording_begins(tmp_path: Path, copies: Copies, moment: str) -> None:
    """In the midst of its import, torch looks for cuda.bindings, which begins a recording."""
    trace = collectives(
        tmp_path,
        f"""
        from thence.capture.launcher import first_use as hooks

        def begin():
            hooks._begin(str(OUT), {{}})
            listen(Launches())

        class Within:
            def find_spec(self, name, path=None, target=None):
                if name == "torch.cuda._utils":
                    sys.meta_path.remove(self)
                    assert sys.modules["torch"].__spec__._initializing
                    begin()

        moment = {moment!r}
        if moment == "before torch":
            begin()
        if moment == "within torch":
            sys.meta_path.insert(0, Within())
        torch, distributed = distributed_of_one()
        if moment == "at CUDA":
            assert not labelled(torch)
            with torch.cuda._initialization_lock:
                begin()
        if not labelled(torch):  # what torch.cuda._lazy_init does first
            with torch.cuda._initialization_lock:
                for call, _ in list(torch.cuda._queued_calls):
                    if "CollectiveLabels" in repr(call):
                        call()
        assert labelled(torch)
        assert not [one for one in sys.meta_path if "CollectiveLabels" in repr(one)]
        distributed.all_reduce(torch.ones(7))
        """,
        copies if moment == "at CUDA" else None,
    )
    assert trace.tables.collectives["in_elements"].to_list() == [7]


def test_collectives_are_not_described_where_that_is_switched_off(tmp_path: Path, copies: Copies) -> None:
    trace = collectives(
        tmp_path,
        """
        torch, distributed = distributed_of_one()
        with thence.record(OUT, thence.RecordOptions(collectives=False)):
            assert not labelled(torch)
            launch("ncclDevKernel_AllReduce", 1)
            distributed.all_reduce(torch.ones(7))
        """,
        copies,
    )
    assert trace.tables.collectives.is_empty()
    times = trace.collectives()
    assert times.by_size.select("collective", "described").rows() == [("all-reduce", False)]
    (said,) = [note for note in times.notes if "no description" in note]
    assert "--without collectives" in said
    with pytest.raises(thence.MissingData, match="--without collectives"):
        trace.report("collective")


def test_labels_that_the_program_asked_for_stay_when_the_recording_ends(tmp_path: Path, copies: Copies) -> None:
    trace = collectives(
        tmp_path,
        """
        torch, distributed = distributed_of_one()
        undo = thence.torch.label_collectives()
        with thence.record(OUT):
            listen(Launches())
            distributed.all_reduce(torch.ones(7))
        assert labelled(torch)
        undo()
        assert not labelled(torch)
        with thence.record(OUT.parent / "second"):
            undo = thence.torch.label_collectives()
            undo()
            assert labelled(torch)  # the recording still wants them
            undo = thence.torch.label_collectives()
        assert labelled(torch)
        undo()
        assert not labelled(torch)
        """,
        copies,
    )
    assert trace.tables.collectives["in_elements"].to_list() == [7]


def test_what_cannot_be_labelled_harms_nothing(tmp_path: Path, copies: Copies) -> None:
    out = tmp_path / "out"
    told = copies.program(
        with_group("""
        torch, distributed = distributed_of_one()
        library = torch.library.Library

        def broken(*_):
            raise OSError("not today")

        torch.library.Library = broken
        with thence.record(OUT):
            launch("ncclDevKernel", 1)
            distributed.all_reduce(torch.ones(7))
        torch.library.Library = library
        with thence.record(OUT.parent / "second"):
            distributed.get_process_group_ranks = broken
            for _ in range(3):
                x = torch.full((7,), 2.0)
                distributed.all_reduce(x)
                assert x.tolist() == [2.0] * 7
        """),
        out,
    )
    said = [line for line in told.splitlines() if "thence" in line]
    first, second = (line for line in said if "sys.monitoring" not in line)  # which Python 3.11 lacks
    assert "recorded without facts" in first
    assert "not today" in first
    assert "run without labels" in second
    assert thence.open(out).tables.gpu.height == 1


def test_numbers_of_collectives_make_no_text_of_their_own(tmp_path: Path, copies: Copies) -> None:
    trace = collectives(
        tmp_path,
        """
        torch, distributed = distributed_of_one()
        with thence.record(OUT):
            listen(Launches())
            for _ in range(50):
                distributed.all_reduce(torch.ones(7))
        """,
        copies,
    )
    parts = [decode(file.read_bytes()) for file in (tmp_path / "out").glob("*/names-*.npz")]
    texts = [str(name) for part in parts for name in part["name"]]
    assert texts.count("nccl:allreduce") == 1
    assert not any("Collective name" in text for text in texts)
    assert trace.tables.collectives.select("in_elements", "element_type").unique().rows() == [(7, "Float")]
    assert trace.tables.collectives["sequence"].n_unique() == 50
