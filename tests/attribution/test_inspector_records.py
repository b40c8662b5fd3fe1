"""Collective kernels described by what NCCL's Inspector plugin recorded: true facts, or none.

Traces and files are of two ranks on two GPUs (make.py). What each call moved is in made.json, in the order of the
calls, which is that of the kernels.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import TORCH, unzipped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FOLDER = TORCH / "nccl_inspector"
MADE = json.loads((FOLDER / "made.json").read_text())
TRUTH = {"eager": [call["bytes"] for call in MADE["eager"]], "replay": 4 * [call["bytes"] for call in MADE["replay"]]}
LOGS = {0: "vm-pid784.log.gz", 1: "vm-pid785.log.gz"}
Event = dict[str, Any]


def trace(folder: Path, name: str, rank: int, change: Callable[[list[Event]], list[Event]] = list) -> Path:
    """A recorded trace without what PyTorch says of collectives, its kernels of NCCL in order and changed."""
    document = json.loads(unzipped(FOLDER / f"{name}_rank{rank}.json.gz"))
    for event in document["traceEvents"]:
        for key in ("Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype"):
            event.get("args", {}).pop(key, None)
    ours = [e for e in document["traceEvents"] if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
    others = [e for e in document["traceEvents"] if not any(e is kernel for kernel in ours)]
    ours.sort(key=lambda event: float(event["ts"]))
    for number, kernel in enumerate(ours):
        kernel["args"]["true"] = TRUTH[name][number]
    changed = change(ours)
    document["traceEvents"] = others + changed
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document))
    (folder / "truth.json").write_text(json.dumps([[float(k["ts"]), k["args"]["true"]] for k in changed]))
    return path


def known(path: Path) -> tuple[int, int]:
    """How many kernels of NCCL have the size that they moved, and how many have another one."""
    found = thence.open(path)
    found.self_check()
    rows = found.tables.gpu.with_row_index("gpu").select(pl.col("gpu").cast(pl.Int32), "start", "name")
    rows = rows.filter(pl.col("name").cast(pl.String).str.starts_with("nccl")).sort("start")
    said = rows.join(found.tables.collectives, on="gpu", how="left", maintain_order="left")
    true = [size for _, size in sorted(json.loads((path.parent / "truth.json").read_text()))]
    pairs = list(zip(said["bytes"].to_list(), true, strict=True))
    assert set(said.filter(pl.col("bytes").is_not_null())["group_size"]) <= {2}
    return sum(a == b for a, b in pairs), sum(a not in (None, b) for a, b in pairs)


@pytest.mark.parametrize(("name", "rank", "least"), [("eager", 0, 30), ("replay", 1, 10)])
def test_kernels_have_the_sizes_that_the_program_moved(tmp_path: Path, name: str, rank: int, least: int) -> None:
    path = trace(tmp_path, name, rank)
    assert thence.open(path).tables.collectives.is_empty()
    shutil.copy(FOLDER / LOGS[rank], tmp_path)
    right, wrong = known(path)
    assert right >= least
    assert wrong == 0


def test_what_the_trace_says_itself_stays() -> None:
    alone = thence.open(FOLDER / "eager_rank0.json.gz").tables.collectives
    assert alone["bytes"].to_list() == TRUTH["eager"]  # found beside it, or not
    both = thence.open([FOLDER / "eager_rank0.json.gz", FOLDER / LOGS[0]]).tables.collectives
    assert both.equals(alone)


def test_a_file_of_another_process_says_nothing(tmp_path: Path) -> None:
    path = trace(tmp_path, "eager", 0)
    shutil.copy(FOLDER / LOGS[1], tmp_path)
    assert known(path) == (0, 0)
    assert thence.open([path, tmp_path / LOGS[1]]).tables.collectives.is_empty()


def test_files_are_found_beside_or_given_as_inputs_and_a_note_says_what_they_gave(tmp_path: Path) -> None:
    path = trace(tmp_path, "replay", 1)
    given = thence.open([path, FOLDER / LOGS[1]])
    shutil.copy(FOLDER / LOGS[1], tmp_path)
    beside = thence.open(path)
    assert given.tables.collectives.equals(beside.tables.collectives)
    (note,) = (note for note in beside.tables.meta.notes if "Inspector" in note)
    count = beside.tables.collectives["bytes"].count()
    assert note == (
        f"NCCL's Inspector (vm-pid785.log.gz) gives facts of {count} of 24 collective kernels of its processes"
    )


def test_without_times_a_note_says_what_to_set(tmp_path: Path) -> None:
    path = trace(tmp_path, "eager", 0)
    text = (FOLDER / "short" / "vm-pid921.log").read_text().replace('"pid":921', '"pid":784')
    (tmp_path / "vm-pid784.log").write_text(text)
    assert known(path) == (0, 0)
    (note,) = (note for note in thence.open(path).tables.meta.notes if "Inspector" in note)
    assert "gives facts of 0 of 30" in note
    assert note.endswith(
        "without NCCL_INSPECTOR_DUMP_VERBOSE=1 the plugin writes no times, so that no kernel can be found"
    )


def moved(kernels: list[Event], at: int, us: float) -> list[Event]:
    kernels[at]["ts"] = float(kernels[at]["ts"]) + us
    return kernels


def renamed(kernels: list[Event], at: int, name: str) -> list[Event]:
    kernels[at]["name"] = name
    return kernels


def twice(kernels: list[Event], at: int) -> list[Event]:
    other = json.loads(json.dumps(kernels[at]))
    other["args"]["true"] = None
    other["ts"] = float(other["ts"]) + 30
    return [*kernels, other]


GENERIC = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
DAMAGES: dict[str, Callable[[list[Event], int], list[Event]]] = {
    "lost": lambda kernels, at: kernels[:at] + kernels[at + 1 :],
    "two lost": lambda kernels, at: kernels[:at] + kernels[at + 2 :],
    "cut": lambda kernels, at: kernels[:at],
    "cut at the beginning": lambda kernels, at: kernels[at:],
    "twice": twice,
    "later": lambda kernels, at: moved(kernels, at, 900.0),
    "earlier": lambda kernels, at: moved(kernels, at, -900.0),
    "much later": lambda kernels, at: moved(kernels, at, 30_000.0),
    "all later": lambda kernels, _: [moved([kernel], 0, 4_500.0)[0] for kernel in kernels],
    "all earlier": lambda kernels, _: [moved([kernel], 0, -4_500.0)[0] for kernel in kernels],
    "renamed": lambda kernels, at: renamed(kernels, at, "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"),
    "without a kind": lambda kernels, at: renamed(kernels, at, GENERIC),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_trace_gets_no_false_size(tmp_path: Path, how: str) -> None:
    shutil.copy(FOLDER / LOGS[0], tmp_path)
    name, at = (("eager", 9), ("replay", 1), ("replay", 17))[[*DAMAGES].index(how) % 3]
    path = trace(tmp_path, name, 0, lambda kernels: DAMAGES[how](kernels, at))
    assert known(path)[1] == 0, (how, at)


LINES: dict[str, Callable[[list[Event]], list[Event]]] = {
    "every second line lost": lambda lines: lines[::2],
    "cut": lambda lines: lines[:60],
    "doubled": lambda lines: [line for line in lines for _ in range(2)],
    "backwards": lambda lines: lines[::-1],
    "without channels": lambda lines: [each(line, "event_trace_ts", kernel_events=[]) for line in lines],
    "without times": lambda lines: [each(line, event_trace_ts=None) for line in lines],
    "of a second later": lambda lines: [shifted(line, 1_000_000) for line in lines],
    "of a second earlier": lambda lines: [shifted(line, -1_000_000) for line in lines],
    "of longer kernels": lambda lines: [each(line, coll_exec_time_us=10**7) for line in lines],
    "of another kind": lambda lines: [each(line, coll="SendRecv") for line in lines],
    "contradicting itself": lambda lines: [
        each(json.loads(json.dumps(line)), coll_msg_size_bytes=size) for line in lines for size in (1, 2)
    ],
}


def each(line: Event, inside: str = "", **values: object) -> Event:
    (line["coll_perf"][inside] if inside else line["coll_perf"]).update(values)
    return line


def shifted(line: Event, us: int) -> Event:
    times = line["coll_perf"]["event_trace_ts"]
    times["coll_start_ts"] += us
    for kernel in times["kernel_events"]:
        kernel["kernel_start_ts"] += us
    return line


@pytest.mark.parametrize("how", LINES)
def test_a_damaged_file_gives_no_false_size(tmp_path: Path, how: str) -> None:
    path = trace(tmp_path, "eager", 0)
    lines = [json.loads(line) for line in unzipped(FOLDER / LOGS[0]).splitlines()]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in LINES[how](lines))
    (tmp_path / "vm-pid784.log").write_text(text)
    right, wrong = known(path)
    assert wrong == 0
    kept = {"every second line lost": 12, "doubled": 30, "backwards": 30}
    assert right >= kept.get(how, 0)
