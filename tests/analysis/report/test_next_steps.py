"""Every command that the first screen proposes works on its input, and shows something new."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import DATA, FSDP, TORCH, event, kernel, launch, opened, run_thence
from stores import kept
from thence.analysis.report.next_steps import MAX_SHOWN, advice
from thence.model.places import STEP_KIND

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("read_once")

# Each proposes something that the others of its format do not.
FILES = {
    "torch": (
        *(
            TORCH / f"{name}.json.gz"
            for name in ("torch_eager_rank0", "checkpoints/with_stacks", "graphs/block_replay", "layers/layers36")
        ),
    ),
    "xplane": (DATA / "jax" / "jax_fsdp2.xplane.pb.gz",),
    "nsight": (DATA / "nsight" / "jax_train.sqlite.gz", DATA / "nsight" / "torch_graph_cuda_gpu_trace.csv.gz"),
    "recording": (DATA / "jax" / "recording", DATA / "recording" / "two_ranks"),
}
JOBS = (FSDP[:2], tuple(sorted((TORCH / "waits").glob("pipeline_rank*")))[:2])


Command = tuple[str, ...]


def try_all(folder: Path, *inputs: Path, by: str = "", tried: set[Command] | None = None) -> set[str]:
    """Runs the commands that the first screen of these inputs proposes; returns their verbs.

    Those that were tried on other inputs of the format are not run again.
    """
    found = thence.open(*inputs).first_screen(by or None)  # type: ignore[arg-type]
    assert 1 <= len(found.next_steps) <= MAX_SHOWN
    commands = [(step.verb, *step.options) for step in found.next_steps]
    assert len(set(commands)) == len(commands)
    assert ("report", "--by", found.summary.by) not in commands, "this is shown already"
    tried = set() if tried is None else tried
    for verb, *options in [command for command in commands if command not in tried]:
        tried.add((verb, *options))
        done = run_thence(verb, *inputs, *options)
        told = done.stderr.decode()
        assert done.returncode == (1 if verb == "check" else 0), (verb, options, told)
        written = (folder / "flame.html").exists() if verb == "flame" else done.stdout.strip()
        assert written, (verb, options)
    return {verb for verb, *_ in commands}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the commands."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("format_", FILES)
def test_what_is_proposed_works(format_: str, folder: Path) -> None:
    tried: set[Command] = set()
    for path in FILES[format_]:
        try_all(folder, path, tried=tried)


def test_what_is_proposed_for_a_job_works(folder: Path) -> None:
    tried: set[Command] = set()
    for job in JOBS:
        assert "ranks" in try_all(folder, *job, tried=tried)


def test_what_is_proposed_for_a_store_works(folder: Path) -> None:
    """Without host ranges, nothing is proposed that needs them."""
    tried: set[Command] = set()
    assert "idle" not in try_all(folder, kept(FSDP[:2]), tried=tried)
    assert "idle" in try_all(folder, kept(FSDP[:2], host=True), tried=tried)


@pytest.mark.parametrize("by", ["op", "label"])
def test_the_table_that_is_shown_is_not_proposed(by: str) -> None:
    first = thence.open(TORCH / "torch_eager_rank0.json.gz").first_screen(by)  # type: ignore[arg-type]
    assert ("report", "--by", by) not in {(step.verb, *step.options) for step in first.next_steps}


@pytest.mark.parametrize(
    ("lines", "modules", "told"),
    [
        (["train.py:9 main"] * 10, ["a", "b"] * 5, 1),
        (["train.py:9 main"] * 8 + ["net.py:3 f"] * 2, ["a", "b"] * 5, 0),
        (["train.py:9 main"] * 10, [None] * 10, 0),
    ],
    ids=["a loop of a library", "two lines", "no modules"],
)
def test_a_program_that_launches_all_from_one_line_is_told_how_to_see_inside(
    lines: list[str], modules: list[str | None], told: int
) -> None:
    """The loop of a Trainer is the library's, so nearly all time is on the line that calls it."""
    categories = pl.Categorical()
    trace = SimpleNamespace(
        gpu=pl.DataFrame({"duration": [10] * 10}),
        places=pl.DataFrame(
            {"source": pl.Series(lines, dtype=categories), "module": pl.Series(modules, dtype=categories)}
        ),
        meta=SimpleNamespace(formats=["thence recording"], accelerators={"cuda"}),
        programs=pl.DataFrame(),
    )
    summary = SimpleNamespace(by="module", unattributed={}, attributed_ns={"source": 100}, sum_ns=100)
    sentences = list(advice(trace, summary))  # type: ignore[arg-type]
    assert len(sentences) == told
    assert all("100.0 %" in one and "train.py:9 main" in one and "--own PACKAGE" in one for one in sentences)


def test_a_recording_is_not_told_to_record() -> None:
    assert thence.open(DATA / "recording" / "two_ranks").first_screen().advice == ()
    assert thence.open(DATA / "jax" / "recording").first_screen().advice == ()
    (told,) = thence.open(TORCH / "graph_replay_rank0.json.gz").first_screen().advice
    assert "CUDA graphs without labels" in told


def test_programs_of_jax_have_op_names_where_modules_are_asked_for() -> None:
    (told,) = thence.open(DATA / "jax" / "recording").first_screen("module").advice
    assert told.startswith("0.0 % of the GPU time has a module")
    assert told.endswith("thence report --by op_name shows it")


def test_shares_are_of_the_same_steps_as_the_table() -> None:
    screen = thence.open(DATA / "jax" / "jax_single_nocb.xplane.pb.gz").first_screen()
    (step,) = (step for step in screen.next_steps if step.options == ("--by", "label"))
    share = screen.summary.attributed_ns["label"] / screen.summary.sum_ns
    assert share < 1
    assert f"({100 * share:.1f} %)" in step.why


def test_the_verdict_decides_what_comes_first(late_in_backward: Path, tmp_path: Path) -> None:
    assert thence.open(late_in_backward).first_screen().next_step.verb == "ranks"
    assert thence.open(*FSDP).first_screen().next_step.verb == "idle"  # its communication is waiting for late hosts
    assert thence.open(TORCH / "torch_eager_rank0.json.gz").first_screen().next_step.verb == "idle"
    lost = [launch(1, 10), kernel(1, 20), launch(2, 50), launch(3, 60), kernel(3, 70)]
    assert opened(tmp_path, lost).first_screen().next_step.verb == "check"


def test_steps_and_passes_are_proposed_where_there_is_something_to_see(tmp_path: Path) -> None:
    events = []
    for i in range(9):
        at = 1000 * i
        length = 900 if i == 5 else 90
        events.append(event("user_annotation", f"step[DECODE bs={8 if i % 2 else 4}]", at, length))
        events += [launch(1 + i, at + 1), kernel(1 + i, at + 5, length - 10)]
    found = opened(tmp_path, events).first_screen()
    assert ("report", "--by", STEP_KIND) in {(s.verb, *s.options) for s in found.next_steps}
    assert "steps" in {step.verb for step in found.next_steps}
