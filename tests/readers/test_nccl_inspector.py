"""Files of NCCL's Inspector plugin, as the plugin of NCCL 2.28 wrote them of two ranks on two GPUs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import TORCH, unzipped
from thence.errors import DamagedInput
from thence.readers.nccl_inspector import read_record, sniff
from thence.readers.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Change = Callable[[dict[str, Any]], object]

FOLDER = TORCH / "nccl_inspector"
LINES = unzipped(FOLDER / "vm-pid784.log.gz").decode().splitlines()


def read(path: Path) -> Any:
    with Source.open(str(path)) as source:
        assert sniff(source.head())
        return read_record(source)


def test_every_collective_is_read_as_the_plugin_wrote_it() -> None:
    record, warnings = read(FOLDER / "vm-pid784.log.gz")
    documents = [json.loads(line) for line in LINES]
    assert (record.process, record.untimed, warnings) == (784, 0, [])
    assert record.rows["collective"].to_list() == [d["coll_perf"]["coll"] for d in documents]
    assert record.rows["bytes"].to_list() == [d["coll_perf"]["coll_msg_size_bytes"] for d in documents]
    assert record.rows["group_size"].unique().to_list() == [2]
    times = [d["coll_perf"]["event_trace_ts"] for d in documents]
    assert record.rows["called"].to_list() == [1000 * t["coll_start_ts"] for t in times]
    seen = [min(k["kernel_start_ts"] for k in t["kernel_events"] if k["kernel_start_ts"]) for t in times]
    assert record.rows["seen"].to_list() == [1000 * t for t in seen]
    by_gpu = [d["coll_perf"]["coll_timing_source"] == "kernel_gpu" for d in documents]
    assert record.rows["executed"].is_not_null().to_list() == by_gpu


def test_without_verbose_output_there_are_no_times() -> None:
    record, warnings = read(FOLDER / "short" / "vm-pid921.log")
    assert (record.process, record.untimed, record.rows.height, warnings) == (921, 8, 0, [])


def test_a_cut_last_line_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "vm-pid784.log"
    path.write_text("\n".join(LINES[:5])[:-40])
    record, warnings = read(path)
    assert record.rows.height == 4
    assert warnings == [f"{path}: its last line is cut"]


def changed(change: Change) -> str:
    documents = [json.loads(line) for line in LINES[:3]]
    change(documents[1])
    return "".join(json.dumps(document, separators=(",", ":")) + "\n" for document in documents)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("header"),
        lambda d: d["header"].update(n_ranks="2"),
        lambda d: d["metadata"].update(pid=-1),
        lambda d: d["metadata"].update(pid=785),
        lambda d: d["coll_perf"].update(coll=None),
        lambda d: d["coll_perf"].update(coll_msg_size_bytes=1.5),
        lambda d: d["coll_perf"].update(coll_msg_size_bytes=-1),
        lambda d: d["coll_perf"].update(coll_msg_size_bytes=1 << 70),
        lambda d: d["coll_perf"]["event_trace_ts"].update(coll_start_ts=[]),
        lambda d: d["coll_perf"]["event_trace_ts"].update(kernel_events={}),
    ],
)
def test_what_the_plugin_does_not_write_is_refused(tmp_path: Path, change: Change) -> None:
    path = tmp_path / "vm-pid784.log"
    path.write_text(changed(change))
    with pytest.raises(DamagedInput):
        read(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["coll_perf"]["event_trace_ts"].update(coll_start_ts=0),
        lambda d: d["coll_perf"]["event_trace_ts"].update(coll_start_ts=1 << 62),
        lambda d: d["coll_perf"]["event_trace_ts"].update(kernel_events=[]),
        lambda d: d["coll_perf"]["event_trace_ts"].update(kernel_events=[{"kernel_start_ts": 0}]),
        lambda d: d["coll_perf"].pop("event_trace_ts"),
        lambda d: d["header"].update(n_ranks=1 << 40),
    ],
)
def test_a_collective_without_possible_times_is_counted_and_not_used(tmp_path: Path, change: Change) -> None:
    path = tmp_path / "vm-pid784.log"
    path.write_text(changed(change))
    record, _ = read(path)
    assert (record.rows.height, record.untimed) == (2, 1)


def test_other_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "vm-pid784.log"
    path.write_text(changed(lambda d: d.update(p2p_perf=d.pop("coll_perf"))))
    record, _ = read(path)
    assert (record.rows.height, record.untimed) == (2, 0)


def test_a_file_alone_is_no_trace() -> None:
    with pytest.raises(thence.ThenceError):
        thence.open(FOLDER / "short" / "vm-pid921.log").report()
