"""Buffers and a recording of the same launches on an H200: every range lies in its kernel's slice."""

from __future__ import annotations

import gzip
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import DATA
from perfetto_reading import decoded as perfetto
from thence.inside.decoding import Decoded, decode
from thence.inside.files import load
from thence.inside.launch_matching import find_launches
from thence.inside.timeline import merged
from thence.writers.timelines.write import write_timeline

if TYPE_CHECKING:
    from pathlib import Path

MERGE = DATA / "inside" / "merge"
BLOCKS = {"cupy": 4, "triton": 16, "pallas": 16}
THREADS = {"cupy": 256, "triton": 128, "pallas": 128}
RANGES = {"cupy": 4 * 8 * 3, "triton": 16 * 3, "pallas": 16 * 4}
TOLERANCE_NS = 1000


def parts(*names: str) -> list[tuple[str, Decoded]]:
    chosen = names or tuple(f"{name}-{i}" for name in BLOCKS for i in range(3))
    return [(name, decode(*load(MERGE / f"{name}.npz"))) for name in chosen]


def slices(kernel: str) -> list[tuple[float, float]]:
    """Start and end in us of the launches of an example's kernel, from the JSON itself."""
    events = json.loads(gzip.decompress((MERGE / "trace.json.gz").read_bytes()))["traceEvents"]
    name = "body_mosaic_gpu_kernel" if kernel == "pallas" else "smooth"
    size = [[BLOCKS[kernel], 1, 1], [THREADS[kernel], 1, 1]]
    return sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["cat"] == "kernel" and e["name"] == name and [e["args"][k] for k in ("grid", "block")] == size
    )


@pytest.mark.parametrize("name", [f"{name}-{i}" for name in BLOCKS for i in range(3)])
def test_each_buffer_alone_finds_its_launch(name: str) -> None:
    recorded = thence.open(MERGE / "trace.json.gz").timeline()
    (place,) = find_launches(recorded, parts(name))
    assert place.number == int(name[-1])
    assert place.of == 3
    start, end = slices(name[:-2])[place.number]
    assert place.slice_ns == round(1000 * (end - start))
    assert place.slice_ns - 2000 <= place.span_ns <= place.slice_ns


def test_all_ranges_lie_in_their_kernels_slice_in_perfetto(tmp_path: Path) -> None:
    timeline = merged(thence.open(MERGE / "trace.json.gz").timeline(), parts())
    write_timeline(timeline, tmp_path / "all.pftrace")
    result = perfetto((tmp_path / "all.pftrace").read_bytes())
    found: dict[tuple[str, int], list[Any]] = {}
    for each in result.slices:
        match = re.match(r"GPU 0 > inside (\w+) #(\d+) > SM \d+ > block \d+ > (\w+) \d+", result.path(each.track))
        if match:
            found.setdefault((match[1], int(match[2])), []).append(each)
    # smooth is the name of two kernels: launches 1 to 3 were given first, of CuPy.
    expected = {("smooth", 3 * n + i + 1): (k, i) for n, k in enumerate(("cupy", "triton")) for i in range(3)}
    expected |= {("body", i + 1): ("pallas", i) for i in range(3)}
    assert found.keys() == expected.keys()
    for key, (kernel, i) in expected.items():
        start, end = (round(1000 * us) for us in slices(kernel)[i])
        assert len(found[key]) == RANGES[kernel]
        assert min(s.start for s in found[key]) >= start - TOLERANCE_NS
        assert max(s.end for s in found[key]) <= end + TOLERANCE_NS


def test_all_ranges_lie_in_their_kernels_slice_in_chrome_json(tmp_path: Path) -> None:
    timeline = merged(thence.open(MERGE / "trace.json.gz").timeline(), parts())
    write_timeline(timeline, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_bytes())["traceEvents"]
    inside = [e for e in events if e.get("cat") == "in_kernel"]
    assert len(inside) == 3 * sum(RANGES.values())
    spans = [span for kernel in BLOCKS for span in slices(kernel)]
    for e in inside:
        assert any(start - 1 <= e["ts"] and e["ts"] + e["dur"] <= end + 1 for start, end in spans), e


def test_a_rate_that_a_buffer_lacks_comes_from_the_run() -> None:
    recorded = thence.open(MERGE / "trace.json.gz").timeline()
    assert {decoded.unit for _, decoded in parts("pallas-0")} == {"cycles"}
    alone = merged(recorded, parts("pallas-0", "pallas-1", "pallas-2"))
    (note,) = {text.split(": ", 1)[1] for text in alone.notes if "cycles are converted" in text}
    found = re.search(r"with ([\d.]+) GHz, \+-([\d.]+) %.*in the trace \(3 launches\)", note)
    assert found
    known = 1.98  # what the other kernels of the run measured
    assert abs(float(found[1]) - known) < float(found[2]) / 100 * known
    beside = merged(recorded, parts("pallas-0", "cupy-0", "triton-1"))
    measured = [decode(*load(MERGE / f"{name}.npz")).traces["clock_ghz"].median() for name in ("cupy-0", "triton-1")]
    expected = f"{sum(measured) / 2:.3f} GHz for the SM clock of all traces, the median of 2 other buffers"
    assert any(expected in text for text in beside.notes)


def test_without_moments_several_launches_are_left_and_all_buffers_find_theirs() -> None:
    recorded = thence.open(MERGE / "trace.json.gz").timeline()
    bare = []
    for name in [f"{name}-{i}" for name in BLOCKS for i in range(3)]:
        words, description = load(MERGE / f"{name}.npz")
        facts = {k: v for k, v in description.to_json().items() if k != "launch"}
        bare.append((name, decode(words, type(description).from_json(facts))))
    with pytest.raises(thence.MissingData, match="could be any of 3 launches"):
        find_launches(recorded, bare[:1])
    assert [p.number for p in find_launches(recorded, bare)] == [0, 1, 2] * 3
