"""No alarm on any real recording, and an alarm, with count and place, on every planted fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import faults
from faults import EAGER_FAULTS, GRAPH_FAULTS, KinetoFile, Planted
from helpers import DATA, FSDP, RECORDINGS, TORCH, recording
from thence.analysis.soundness.check import check
from thence.readers.registry import read

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

JAX = sorted((DATA / "jax").glob("*.xplane.pb*"))
NSIGHT = [*(DATA / "nsight").glob("*.sqlite.gz"), *(DATA / "nsight").glob("*_cuda_gpu_trace.csv.gz")]
GRAPHS = sorted((TORCH / "graphs").glob("*_re*y*.json.gz")) + sorted((TORCH / "graphs").glob("*eager*.json.gz"))
OTHERS = [path for name in ("waits", "events", "checkpoints") for path in sorted((TORCH / name).glob("*.json.gz"))]
OTHERS = [path for path in OTHERS if not path.name.endswith(("_rank1.json.gz", "_rank2.json.gz"))]
"""Of a job of four, the first and the last rank."""
RECORDED = [DATA / "recording" / "two_ranks", DATA / "jax" / "recording"]
SOUND: list[Sequence[Path]] = [
    *([path] for path in (*RECORDINGS, *GRAPHS, *OTHERS, *JAX, *NSIGHT, *RECORDED)),
    FSDP,
    sorted((TORCH / "graphs").glob("comm_replay*")),
    sorted((TORCH / "graphs").glob("comm_eager*")),
]


@pytest.mark.parametrize("paths", SOUND, ids=lambda paths: paths[0].name)
def test_no_alarm_on_a_real_recording(paths: Sequence[Path]) -> None:
    soundness = check(read(paths))
    assert [finding.text for finding in soundness.findings] == []
    assert soundness.sound


def test_there_are_recordings_of_every_producer() -> None:
    assert len(JAX) >= 5
    assert len(NSIGHT) >= 5
    assert len(RECORDINGS) >= 8
    assert len(GRAPHS) >= 5
    assert len(OTHERS) >= 8


def planted(plant: Callable[[KinetoFile], Planted], name: str, folder: Path) -> tuple[Planted, list[object]]:
    trace = KinetoFile.of(recording(name))
    what = plant(trace)
    soundness = check(read([trace.written(folder / "trace.json")]))
    assert not soundness.sound
    return what, [finding for finding in soundness.findings if finding.code == what.code]


def assert_found(what: Planted, found: list[object]) -> None:
    (finding,) = found
    assert (finding.rank, finding.device) == (what.rank, what.device)
    assert finding.count == what.count
    assert 0 <= finding.span_share <= 1
    for words in what.words:
        assert words in finding.text
    if what.share is not None:
        assert finding.span_share == pytest.approx(what.share, rel=0.001)


@pytest.mark.parametrize("plant", EAGER_FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_an_eager_trace_is_found(plant: Callable[[KinetoFile], Planted], tmp_path: Path) -> None:
    what, found = planted(plant, "torch-2.12_torch_eager_rank0", tmp_path)
    if what.code in ("damaged_input", "no_device_work"):
        what = Planted(what.code, what.count, what.rank, None, what.words)
    assert_found(what, found)


@pytest.mark.parametrize("plant", GRAPH_FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_a_trace_of_graphs_is_found(plant: Callable[[KinetoFile], Planted], tmp_path: Path) -> None:
    names = ("graph_replay_rank0", "torch-2.12_graph_replay_rank0", "graphs/block_replay")
    assert_found(*planted(plant, names[GRAPH_FAULTS.index(plant) % 3], tmp_path))


def test_a_truncated_file_is_unsound(tmp_path: Path) -> None:
    content = recording("torch_eager_rank0").read_bytes()
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(content[: len(content) // 2])
    findings = check(read([cut])).findings
    assert "damaged_input" in {finding.code for finding in findings}
    assert any("cut short" in finding.text for finding in findings)


def test_an_event_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    trace = KinetoFile.of(recording("torch_eager_rank0"))
    what = faults.unreadable_events(trace)
    (finding,) = check(read([trace.written(tmp_path / "trace.json")])).findings
    assert (finding.code, finding.count) == (what.code, 1)
