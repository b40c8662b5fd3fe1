"""A part of inside.py: buffers of in-kernel events put under the kernels of a recording."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import polars as pl

from inside_measuring import Run, example, of_launches, said
from thence.errors import ThenceError
from thence.inside.decoding import decode
from thence.inside.files import save


def merging(folder: Path | None) -> None:
    """Records and profiles inside at the same time; every range must lie in its kernel's slice."""
    import thence

    modules = {name: example(f"inside_{name}") for name in ("cupy", "triton", "pallas")}
    for label, blocks, repeats in (("small", (4, 16, 16), 3), ("large", (264, 264, 264), 8)):

        def work(blocks: Any = blocks, repeats: int = repeats) -> dict[str, list[Run]]:
            return {
                "cupy": of_launches(modules["cupy"].run(blocks[0], 50, repeats=repeats)),
                "triton": of_launches(modules["triton"].run(blocks[1], 50, repeats=repeats)),
                "pallas": [
                    (e.words, e.description) for e in modules["pallas"].run(blocks[2], repeats=repeats).executions
                ],
            }

        work()
        with tempfile.TemporaryDirectory() as directory:
            with thence.record(directory) as recording:
                runs = work()
            trace = recording.open()
            kept = None if folder is None or label != "small" else folder / "merge"
            parts = []
            for name, of_kernel in runs.items():
                for i, (words, description) in enumerate(of_kernel):
                    parts.append((f"{name}-{i}.npz", decode(words, description)))
                    if kept is not None:
                        kept.mkdir(exist_ok=True)
                        save(kept / f"{name}-{i}.npz", words, description)
            if kept is not None:
                scrubbed(trace.timeline(), kept / "trace.json.gz")
            said(f"merging {label}: {trace.tables.gpu.height} activities; {trace.meta.warnings}")
            check_merged(trace, parts, label, Path(directory))


def check_merged(trace: Any, parts: list[Any], label: str, directory: Path) -> None:
    """Launches found for all buffers and for each alone, and the ranges of the files that are written."""
    from thence.inside.launch_matching import find_launches, span, with_rates
    from thence.inside.timeline import merged
    from thence.writers.timelines.write import write_timeline

    recorded = trace.timeline()
    right = 0
    for name, decoded in parts:
        try:
            (place,) = find_launches(recorded, [(name, decoded)])
        except ThenceError as error:
            said(f"merging {label}: {name} alone: {error}; {decoded.description.launch}")
            continue
        right += place.number == number_of(name)
        if number_of(name) == 1:
            said(f"merging {label}, alone: {place.sentence(name)}")
    said(f"merging {label}: {right} of {len(parts)} buffers alone find their launch")
    timeline = merged(recorded, parts)
    for ending in ("json", "pftrace"):
        write_timeline(timeline, directory / f"all.{ending}")
    if len(sys.argv) > 1 and label == "small":
        write_timeline(timeline, Path(sys.argv[1]) / "all.pftrace")
    events = json.loads((directory / "all.json").read_bytes())["traceEvents"]
    ranges = [e for e in events if e.get("cat") == "in_kernel"]
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    outside = sum(
        not any(start - 1 <= e["ts"] and e["ts"] + e["dur"] <= end + 1 for start, end in kernels) for e in ranges
    )
    said(f"merging {label}: {len(ranges)} ranges in Chrome JSON, {outside} outside of any slice")
    worst = 0
    parts = with_rates(recorded, parts)
    places = find_launches(recorded, parts)
    for (name, decoded), place, phases in zip(parts, places, timeline.inside, strict=True):
        if place.number != number_of(name):
            said(f"merging {label}, together: {name} is WRONG: {place.number}")
        both = sum(span(decoded)) + 2 * place.moved_ns  # start and end of the slice
        ranges_end = (phases.ranges["start_ns"] + phases.ranges["duration_ns"]).max()
        before = (both - place.slice_ns) // 2 - int(phases.ranges["start_ns"].min())
        after = int(ranges_end) - (both + place.slice_ns) // 2
        worst = max(worst, before, after)
    said(f"merging {label}: ranges are outside of their kernel's slice by {worst} ns at most")


def number_of(name: str) -> int:
    return int(name.removesuffix(".npz").split("-")[1])


def scrubbed(recorded: Any, path: Path) -> None:
    """Kernels and the calls that launched them, as the Kineto JSON of a small test."""
    tables = recorded.trace
    calls = tables.host.filter(pl.col("category").is_in(["runtime", "driver"]))
    gpu = tables.gpu.filter(pl.col("kind") == "kernel")
    calls = calls.filter(pl.col("correlation").is_in(gpu["correlation"].implode()))
    events: list[dict[str, Any]] = [
        {
            "ph": "X", "cat": "cuda_runtime", "name": row["name"], "pid": 1, "tid": 1,
            "ts": row["start"] / 1000, "dur": row["duration"] / 1000,
            "args": {"correlation": row["correlation"]},
        }
        for row in calls.iter_rows(named=True)
    ] + [
        {
            "ph": "X", "cat": "kernel", "name": row["name"], "pid": row["device"], "tid": row["stream"],
            "ts": row["start"] / 1000, "dur": row["duration"] / 1000,
            "args": {
                "device": row["device"], "stream": row["stream"], "correlation": row["correlation"],
                "grid": row["grid"], "block": row["block"],
            },
        }
        for row in gpu.iter_rows(named=True)
    ]  # fmt: skip
    document = {"schemaVersion": 1, "baseTimeNanoseconds": tables.meta.epoch_ns, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
