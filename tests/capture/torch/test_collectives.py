"""Collectives of torch.distributed, labelled: over Gloo, in a group of one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import thence  # noqa: E402
from marks_notes import Notes  # noqa: E402
from thence.capture.marks import listen, unlisten  # noqa: E402

distributed = pytest.importorskip("torch.distributed")


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = distributed.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@pytest.fixture
def notes(group):  # noqa: ARG001 - there must be one
    listener = Notes()
    listen(listener)
    undo = thence.torch.label_collectives()
    yield listener
    undo()
    unlisten(listener)


def one(notes: Notes) -> tuple[str, str | None, dict[str, object]]:
    (found,) = notes.opened_with
    return found[0], found[1], found[2]


def test_an_all_reduce_carries_what_the_profiler_writes_beside_one(notes) -> None:
    x = torch.ones(3, 5)
    distributed.all_reduce(x)
    name, lane, facts = one(notes)
    assert torch.equal(x, torch.ones(3, 5))
    assert name == "nccl:allreduce"
    seq = facts.pop("Seq")
    assert isinstance(seq, int)
    assert facts == {
        "Collective name": "allreduce",
        "In msg nelems": 15,
        "Out msg nelems": 15,
        "dtype": "Float",
        "Group size": 1,
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0]",
    }
    assert lane == "default_pg (process group 0)"
    distributed.all_reduce(x)
    assert notes.opened_with[1][2]["Seq"] == seq + 1


@pytest.mark.parametrize(
    ("call", "name", "elements"),
    [
        (lambda x, _: distributed.broadcast(x, 0), "broadcast", (8, 8)),
        (lambda x, y: distributed.all_gather_into_tensor(y, x), "_allgather_base", (8, 8)),
        (lambda x, y: distributed.all_gather([y], x), "all_gather", (8, 8)),
        (lambda x, _: distributed.reduce(x, 0), "reduce", (8, 8)),
        (lambda x, y: distributed.all_to_all_single(y, x), "all_to_all", (8, 8)),
        (lambda x, y: distributed.all_to_all_single(y, x, [8], [8]), "all_to_allv", (8, 8)),
    ],
)
def test_each_collective_has_the_name_that_kineto_gives_it(notes, call, name, elements) -> None:
    call(torch.ones(8, dtype=torch.bfloat16), torch.empty(8, dtype=torch.bfloat16))
    _, _, facts = one(notes)
    assert facts["Collective name"] == name
    assert (facts["In msg nelems"], facts["Out msg nelems"]) == elements
    assert facts["dtype"] == "BFloat16"


def test_calls_from_c_plus_plus_and_functional_ones_are_seen(notes, group) -> None:
    functional = torch.ops._c10d_functional
    functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", group.group_name))
    assert one(notes)[2]["In msg nelems"] == 4
    notes.opened_with.clear()
    with torch.inference_mode():
        distributed.all_reduce(torch.ones(6))
    assert one(notes)[2]["In msg nelems"] == 6
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    notes.opened_with.clear()
    model(torch.ones(1, 3)).sum().backward()
    sums = [facts for name, _, facts, _ in notes.opened_with if name == "nccl:allreduce"]
    assert [facts["In msg nelems"] for facts in sums] == [3 * 2 + 2]  # weight and bias


@pytest.mark.usefixtures("notes")
def test_results_and_asynchronous_work_are_passed_on() -> None:
    x = torch.full((4,), 2.0)
    work = distributed.all_reduce(x, async_op=True)
    work.wait()
    assert x.tolist() == [2.0] * 4


@pytest.mark.usefixtures("group")
def test_undoing_and_asking_twice() -> None:
    listener = Notes()
    listen(listener)
    thence.torch.label_collectives()
    undo = thence.torch.label_collectives()
    distributed.all_reduce(torch.ones(2))
    assert len(listener.opened_with) == 1
    undo()
    distributed.all_reduce(torch.ones(2))
    assert len(listener.opened_with) == 1
    unlisten(listener)


@pytest.mark.usefixtures("group")
def test_ranks_without_the_tensors_of_the_root_move_what_the_root_says() -> None:
    """ProcessGroupNCCL writes the output times the ranks as input of a scatter on all ranks; a gather alike."""
    from thence.capture.torch.collectives import _Known

    class Three:
        group_name, group_desc = "g", "d"

        def size(self) -> int:
            return 3

    known = _Known(distributed, Three())
    x = torch.ones(4)
    for name, values in (
        ("scatter_", {"output_tensors": [x], "input_tensors": []}),
        ("scatter_", {"output_tensors": [x], "input_tensors": [[x, x, x]]}),
    ):
        facts = known.of_call(name, values)
        assert (facts["In msg nelems"], facts["Out msg nelems"]) == (12, 4)
    for outputs in ([], [[x, x, x]]):
        facts = known.of_call("gather_", {"output_tensors": outputs, "input_tensors": [x]})
        assert (facts["In msg nelems"], facts["Out msg nelems"]) == (4, 12)


def test_a_collective_of_another_library(notes, group) -> None:
    x = torch.ones(10, dtype=torch.float16)
    with thence.torch.collective("custom_allreduce", x, [x[:5], x[5:]], group):
        pass
    name, lane, facts = one(notes)
    assert (name, lane) == ("nccl:custom_allreduce", "default_pg (process group 0)")
    assert (facts["In msg nelems"], facts["Out msg nelems"], facts["dtype"]) == (10, 10, "Half")


def test_what_is_coalesced_is_labelled_together_at_its_end() -> None:
    """The kernel of a coalesced group is launched when the group ends."""
    from thence.capture.torch import collectives as ours

    class Group:
        group_name, group_desc = "g", "d"

        def _start_coalescing(self, _device) -> None:
            pass

        def _end_coalescing(self, _device) -> str:
            return "work"

    (undo,) = ours._patch_coalescing(Group)
    listener = Notes()
    listen(listener)
    try:
        one = Group()
        one._start_coalescing(None)
        for elements, peer in ((3, 1), (4, 2)):
            facts = {"Collective name": "send", "In msg nelems": elements, "Out msg nelems": elements}
            ours._remember(one, ours.LibraryMark("nccl:send", "lane", **facts, **{"Dst Rank": peer}))
        assert one._end_coalescing(None) == "work"
        assert one._end_coalescing(None) == "work"  # nothing was coalesced: no label
    finally:
        unlisten(listener)
        undo()
    (found,) = listener.opened_with
    assert found[0] == "nccl:send"
    assert found[2] == {"Collective name": "send", "In msg nelems": 7, "Out msg nelems": 7}


def test_without_a_process_group_it_says_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    with (
        pytest.raises(thence.MissingRequirement, match="init_process_group"),
        thence.torch.collective("allreduce", None, None),
    ):
        pass


@pytest.fixture
def one_group_after(group):  # noqa: ARG001
    """For tests that make groups of their own."""
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def test_a_backend_that_counts_nothing_in_a_group_of_thousands(one_group_after, notes) -> None:  # noqa: ARG001
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = 4096
    distributed.destroy_process_group()
    distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=size)
    for _ in range(2):
        distributed.all_reduce(torch.ones(5))
        distributed.send(torch.ones(5), 9)
    reduced, sent, again, _ = (facts for _, _, facts, _ in notes.opened_with)
    assert reduced == again
    assert "Seq" not in reduced
    assert reduced["Group size"] == size
    # Kineto writes 30 ranks of a larger group.
    assert reduced["Process Group Ranks"] == f"[{', '.join(map(str, range(30)))}, ...]"
    assert (sent["Src Rank"], sent["Dst Rank"]) == (3, 9)


def test_a_group_that_is_made_anew_is_another(one_group_after, notes) -> None:  # noqa: ARG001
    """Names of groups come again when all of them were destroyed."""
    distributed.all_reduce(torch.ones(2))
    distributed.destroy_process_group()
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    distributed.group.WORLD._set_group_desc("another")
    distributed.all_reduce(torch.ones(2))
    first, second = (facts for _, _, facts, _ in notes.opened_with)
    assert first["Process Group Name"] == second["Process Group Name"]
    assert first["Process Group Description"] == "default_pg"
    assert second["Process Group Description"] == "another"
