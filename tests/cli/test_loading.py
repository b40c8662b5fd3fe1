"""How the command line is loaded: what a verb imports, and what it sets for its process."""

from __future__ import annotations

import gc
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import forking
import thence.cli
from helpers import DATA, FSDP, TORCH
from thence import __main__
from thence.__main__ import run

if TYPE_CHECKING:
    from collections.abc import Iterator


_GRAPHS = TORCH / "graph_replay_rank0.json.gz"
_XSPACE = DATA / "jax" / "jax_single.xplane.pb.gz"
_NSIGHT = DATA / "nsight" / "torch_graph.sqlite.gz"

_VERB = (
    "import sys\nfrom thence.cli import main\n"
    "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    "print(*sys.modules, file=sys.stderr)"
)
_OPENED = "import sys, thence\nthence.open(sys.argv[1])\nprint(*sys.modules, file=sys.stderr)"

QUESTIONS = {
    f"thence.analysis.{name}"
    for name in (
        "collectives.answer", "cuda_graphs.lanes", "diff.answer", "explain.answer", "flame.answer", "history.answer",
        "idle.answer", "memory.answer",
        "programs.answer", "programs.compilation", "ranks.answer", "report.first_screen", "report.summary",
        "soundness.check", "steps.answer", "streams", "timelines.overview", "timelines.timeline",
        "whatif.answer", "whatif.critical_path",
    )
}  # fmt: skip
"""The analyses that questions begin with."""
READERS = {
    f"thence.readers.{name}"
    for name in ("jax.xplane", "kineto.read", "nsight.tables", "nsys_jax.read", "recording.read")
}


def test_the_questions_and_readers_are_modules() -> None:
    assert all(find_spec(name) is not None for name in QUESTIONS | READERS)


def loaded(code: str, *arguments: str | Path) -> set[str]:
    """Modules that are imported after a run, in a process that had imported Polars and nothing of thence."""
    done = forking.run(["-c", code, *map(str, arguments)], imported=forking.POLARS)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.decode().splitlines()[-1].split())


@pytest.mark.parametrize(
    ("arguments", "questions"),
    [
        (("report", _GRAPHS), {"idle.answer", "report.first_screen", "report.summary", "soundness.check"}),
        (("check", _GRAPHS), {"soundness.check"}),
        (
            ("explain", _GRAPHS),
            {
                "collectives.answer",
                "explain.answer",
                "idle.answer",
                "memory.answer",
                "report.summary",
                "soundness.check",
                "whatif.answer",
            },
        ),
        # collectives repeats who is late, as ranks says it
        (("collectives", FSDP[0]), {"collectives.answer", "ranks.answer", "soundness.check"}),
        (("diff", *FSDP[:2]), {"diff.answer", "soundness.check", "steps.answer"}),
        (("history", *FSDP[:2]), {"diff.answer", "history.answer", "soundness.check", "steps.answer"}),
        (("idle", _GRAPHS), {"idle.answer", "soundness.check"}),
        (("memory", TORCH / "memory" / "conv_training.json.gz"), {"memory.answer", "soundness.check"}),
        (("programs", _XSPACE), {"programs.answer", "soundness.check"}),
        (("ranks", *FSDP[:2]), {"ranks.answer", "soundness.check"}),
        (("sql", _GRAPHS, "select 1"), {"soundness.check"}),
        (("steps", FSDP[0]), {"soundness.check", "steps.answer"}),
        (("streams", _GRAPHS), {"soundness.check", "streams"}),
        (("top", DATA / "watch", "--once"), set()),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_a_verb_imports_the_analyses_that_it_asks(arguments: tuple[str | Path, ...], questions: set[str]) -> None:
    modules = loaded(_VERB, *arguments)
    assert {name.removeprefix("thence.analysis.") for name in QUESTIONS & modules} == questions
    assert not {name for name in modules if name.startswith(("thence.writers.charts", "thence.writers.page"))}


@pytest.mark.parametrize(
    ("trace", "reader", "xla"),
    [(_GRAPHS, "kineto.read", False), (_XSPACE, "jax.xplane", True), (_NSIGHT, "nsight.tables", False)],
)
def test_only_the_reader_of_the_format_is_imported(trace: Path, reader: str, *, xla: bool) -> None:
    modules = loaded(_VERB, "report", trace)
    assert READERS & modules == {f"thence.readers.{reader}"}
    assert ("thence.attribution.xla.hlo_places" in modules) is xla
    assert ("google.protobuf" in modules) is xla


def test_a_folder_imports_no_reader_of_what_is_not_in_it(tmp_path: Path) -> None:
    (tmp_path / FSDP[0].name).write_bytes(FSDP[0].read_bytes())
    modules = loaded(_VERB, "check", tmp_path)
    assert READERS & modules == {"thence.readers.kineto.read"}
    assert "google.protobuf" not in modules


def test_opening_a_trace_attributes_and_analyses_nothing() -> None:
    modules = loaded(_OPENED, _GRAPHS)
    rooms = ("thence.analysis", "thence.attribution", "thence.writers", "thence.cli")
    assert {name for name in modules if name.startswith(rooms)} == set()
    assert not {"click", "rich"} & modules


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `run` sets for its process is as before afterwards."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")  # so that it is removed again
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    yield
    gc.set_threshold(*before)


def run_noting_threads(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, int, bool]]:
    """For each time that the command line ran: threads of NumPy's algebra, objects between collections, collecting."""
    found = []

    def main() -> None:
        threads = os.environ.get("OPENBLAS_NUM_THREADS")
        found.append((threads, gc.get_threshold()[0], gc.isenabled()))

    monkeypatch.setattr(sys, "argv", ["thence", *arguments])
    monkeypatch.setattr(thence.cli, "main", main)
    run()
    return found


@pytest.mark.usefixtures("own_process")
def test_garbage_is_collected_seldom_and_not_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = gc.get_freeze_count()
    [(threads, between, enabled)] = run_noting_threads(["report", "trace.json"], monkeypatch)
    assert threads == "1"
    assert enabled
    assert between > 700
    assert gc.get_freeze_count() > frozen


@pytest.mark.usefixtures("own_process")
def test_a_recorded_program_has_the_environment_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    [(threads, _, _)] = run_noting_threads(["record", "--", "python", "train.py"], monkeypatch)
    assert threads is None


@pytest.mark.usefixtures("own_process")
def test_a_number_of_threads_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    [(threads, _, _)] = run_noting_threads(["report", "trace.json"], monkeypatch)
    assert threads == "3"


def test_verbs_that_read_one_trace_read_ahead() -> None:
    cli = Path(thence.cli.__file__).parent
    reading = {path.stem for path in cli.glob("*.py") if "inputs.open(" in path.read_text(encoding="utf-8")}
    assert (reading | {"check"}) - {"label", "inputs"} == {*__main__._READING}, "label opens two traces"
