"""Compares `thence memory` with what PyTorch and XLA say of the programs of `memory_peaks.py`."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import polars as pl

import thence

_NEAR = 0.01
"""Share of the peak by which a prediction may be wrong."""


class Checks:
    """Prints a table of what agrees and what does not.

    Attributes:
        made: how many comparisons there were.
        wrong: how many do not agree.
    """

    def __init__(self) -> None:
        self.made = self.wrong = 0

    def equal(self, what: str, found: object, said: object) -> None:
        """Both must be equal; ``what`` is the program and the figure, separated by a colon."""
        agrees = found == said
        self.made += 1
        self.wrong += not agrees
        program, _, figure = what.partition(": ")
        shown = [f"{value:,}" if type(value) is int else str(value) for value in (found, said)]
        print(
            f"{'ok' if agrees else 'WRONG':5} {program:16} {figure:32} {shown[0]:>30} {shown[1] if not agrees else ''}"
        )

    def note(self, what: str, text: str) -> None:
        """A figure that is compared with nothing."""
        print(f"{'':5} {what:16} {text}")


def check(out: Path) -> int:
    """Compares all traces of a folder; returns the exit code."""
    checks = Checks()
    print(f"{'':5} {'program':16} {'figure':32} {'thence':>30} said, where it differs")
    for path in sorted(out.glob("*.truth.json")):
        name, said = path.name.removesuffix(".truth.json"), json.loads(path.read_text())
        if (out / f"{name}.json.gz").exists():
            _torch(checks, name, thence.open(out / f"{name}.json.gz"), said)
        if (out / f"{name}.xplane.pb.gz").exists():
            _jax(checks, name, out / f"{name}.xplane.pb.gz", said)
        if (out / f"{name}.pickle.gz").exists():
            _snapshot(checks, f"{name} snapshot", thence.open(out / f"{name}.pickle.gz"), said)
    if len(list(out.glob("fsdp_rank*.json.gz"))) > 1:
        _job(checks, out)
    print(f"{checks.wrong} of {checks.made} WRONG")
    return int(checks.wrong > 0 or not checks.made)


def _torch(checks: Checks, name: str, trace: thence.Trace, said: dict[str, Any]) -> None:
    answer = trace.memory("kind")
    device = answer.devices.row(0, named=True)
    checks.equal(f"{name}: peak", device["peak_bytes"], said["max_memory_allocated"])
    checks.equal(f"{name}: before the trace", device["before_bytes"], said["allocated_at_begin"])
    totals = trace.tables.memory_totals.drop_nulls("device")
    checks.equal(f"{name}: allocated at the end", totals["allocated"][-1], said["allocated_at_end"])
    checks.equal(f"{name}: most reserved", totals["reserved"].max(), said["max_memory_reserved"])
    stats = said["memory_stats"]
    checks.equal(f"{name}: peak of memory_stats", device["peak_bytes"], stats["allocated_bytes.all.peak"])
    if "asked" not in said:  # what the allocator returns when an allocation fails has no event
        checks.equal(f"{name}: reserved at the end", totals["reserved"][-1], stats["reserved_bytes.all.current"])
    known = answer.rows.filter(pl.col("name").is_not_null())["bytes"].sum() / max(int(answer.rows["bytes"].sum()), 1)
    checks.note(name, f"{known:.1%} of the rows are of a known kind")
    if said.get("held_by_blocks") and name not in ("plain", "compiled"):  # without modules
        checks.equal(f"{name}: held by the blocks", _held(trace), list(said["held_by_blocks"].values()))
    if "leaked_per_step" in said:
        grown = answer.growth.row(0, named=True)
        checks.equal(f"{name}: function that leaks", "remember" in str(grown["source"]), True)
        checks.equal(f"{name}: bytes a step", grown["bytes_per_step"], -(-4 * 777_777 // 512) * 512)
    if "asked" in said:
        failed = answer.failures.row(0, named=True)
        checks.equal(f"{name}: asked for", failed["bytes"], -(-said["asked"] // 512) * 512)
        checks.equal(f"{name}: who asked", "ask" in str(failed["source"]), True)
    if "inactive_split" in said:
        checks.equal(f"{name}: fragments", said["inactive_split"] in totals["inactive"].to_list(), True)
    if "recomputed" in said:
        _recomputed(checks, name, answer.recomputed, said)


def _snapshot(checks: Checks, name: str, trace: thence.Trace, said: dict[str, Any]) -> None:
    totals = trace.tables.memory_totals.drop_nulls("device")
    checks.equal(f"{name}: peak", totals["allocated"].max(), said["max_memory_allocated"])
    checks.equal(f"{name}: allocated at the end", totals["allocated"][-1], said["allocated_at_end"])
    checks.equal(f"{name}: reserved at the end", totals["reserved"][-1], said["reserved_at_end"])


def _job(checks: Checks, out: Path) -> None:
    """Both ranks of FSDP2 together: rank 1 keeps one tensor more in each step."""
    found = thence.open(*sorted(out.glob("fsdp_rank*.json.gz"))).memory("source").highest
    assert found is not None
    checks.equal("fsdp: rank with the highest peak", found["rank"], 1)
    checks.equal("fsdp: where it holds more", "fsdp_rank" in str(found["rows"][0]["name"]), True)
    checks.note("fsdp", f"{found['more_bytes']:,} bytes more; {found['rows'][:2]}")


def _held(trace: thence.Trace) -> list[int]:
    """What each block holds when the last forward pass through all of them has ended."""
    ends = trace.tables.host.filter(pl.col("name").cast(pl.String) == "after the blocks")["start"]
    first = trace.tables.gpu["start"].min()
    rows = trace.memory("module", at=f"{ends[-1] - first}ns").rows
    blocks = rows.with_columns(block=pl.col("name").str.extract(r"Block_(\d+)").cast(pl.Int64)).drop_nulls("block")
    return blocks.group_by("block").agg(pl.col("bytes").sum()).sort("block")["bytes"].to_list()


def _recomputed(checks: Checks, name: str, predicted: pl.DataFrame, said: dict[str, Any]) -> None:
    above = {run: said[run]["peak"] - said[run]["before"] for run in ("plain", "recomputed")}
    saved = above["plain"] - above["recomputed"]
    number = said["module"].rpartition(".")[2]
    rows = predicted.filter(pl.col("module").str.contains(rf"^[^/]*/(?:Block|Sequential)_{number}$"))
    found = rows["saved_bytes"].sum()
    checks.note(name, f"{said['module']} saves {saved:,} bytes, predicted {found:,}")
    checks.note(name, f"step {said['plain']['step_ms']:.2f} ms, recomputed {said['recomputed']['step_ms']:.2f} ms")
    near = abs(found - saved) <= _NEAR * said["plain"]["peak"]
    checks.equal(f"{name}: within {_NEAR:.0%} of the peak", near, True)


def _jax(checks: Checks, name: str, path: Path, said: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / "profile.xplane.pb"
        unpacked.write_bytes(gzip.decompress(path.read_bytes()))
        trace = thence.open(unpacked)
        answer = trace.memory("kind")
        device = answer.devices.drop_nulls("program").sort("peak_bytes").row(-1, named=True)
        rows = answer.rows.filter(pl.col("program") == device["program"])
        kinds = dict(rows.select("name", "bytes").iter_rows())
    checks.equal(f"{name}: peak", device["peak_bytes"], said["peak_memory_in_bytes"])
    checks.equal(f"{name}: all allocations", device["reserved_bytes"], said["total_allocation_bytes"])
    checks.equal(f"{name}: arguments", kinds["argument"], said["argument_size_in_bytes"])
    checks.equal(f"{name}: results", kinds["output"], said["output_size_in_bytes"])
