"""What the parts of inside.py share: kernels' times by CUPTI, and ranges inside compared with them."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import polars as pl

from support import EXAMPLES, judge
from thence.capture.cuda import cupti
from thence.capture.cuda.layouts import KERNEL
from thence.capture.recorder.activity_parser import ActivityParser
from thence.inside.decoding import decode
from thence.inside.files import save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from thence.inside.decoding import Decoded
    from thence.inside.description import Description

MAX_ERROR, MAX_ERROR_NS = 0.05, 2_000
"""How far ranges inside may be from CUPTI's time: a share of it, or ns for short kernels."""
RESULTS: list[str] = []
Run = tuple[np.ndarray[Any, Any], "Description"]


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Spans:
    """Start and end of kernels by CUPTI, in ns of the system clock."""

    def __enter__(self) -> Self:
        self._cupti = cupti.load()
        self._memory: list[Any] = []
        self._full: list[tuple[int, int]] = []
        self._subscriber = self._cupti.subscribe()
        self._cupti.register(self._requested, self._completed)
        self._cupti.enable(KERNEL)
        return self

    def __exit__(self, *_: object) -> None:
        self._cupti.disable(KERNEL)
        self._cupti.unsubscribe(self._subscriber)
        self._cupti.finalize()

    def _requested(self, buffer: Any, size: Any, most: Any) -> None:
        self._memory.append((ctypes.c_uint64 * (1 << 17))())
        buffer[0], size[0], most[0] = ctypes.addressof(self._memory[-1]), 1 << 20, 0

    def _completed(self, _c: Any, _s: int, buffer: int | None, _size: int, valid: int) -> None:
        if buffer is not None:
            self._full.append((buffer, valid))

    def spans(self, count: int) -> list[tuple[int, int]]:
        """(start, end) in ns of the one kernel that ran ``count`` times, in order."""
        self._cupti.flush(unfinished=True)
        found: dict[str, list[tuple[int, int]]] = {}
        parser = ActivityParser(self._cupti)
        for address, valid in self._full:
            for kind, columns in parser.read(address, valid):
                if kind != KERNEL:
                    continue
                for pointer, start, end in zip(columns["name"], columns["start"], columns["end"], strict=True):
                    name = ctypes.string_at(int(pointer)).decode(errors="replace")
                    found.setdefault(name, []).append((int(start), int(end)))
        self._full.clear()
        fitting = [name for name, spans in found.items() if len(spans) == count]
        for hint in ("smooth", "gemm", "mosaic", "body", "kernel", ""):
            named = [name for name in fitting if hint in name]
            if len(named) == 1:
                return sorted(found[named[0]])
        said(f"no one kernel ran {count} times: { {n: len(s) for n, s in found.items()} }")
        return []


def said(text: str) -> None:
    RESULTS.append(text)
    print(text, flush=True)


def against_cupti(label: str, words: np.ndarray[Any, Any], description: Description, span: tuple[int, int]) -> Decoded:
    """Whether first start to last end is what CUPTI says, within 5 % or 2 us.

    JAX's own layout has no clock rate: there the rate at which the ranges fill CUPTI's time is stated, and used.
    """
    start, end = span
    decoded = decode(words, description)
    if decoded.unit == "cycles":
        found = decoded.rate_in_slice(end - start)
        if found is None:
            said(f"{label}: no rate makes its ranges fill the {end - start:,} ns of CUPTI")
            return decode(words, description, 1.98)
        ghz, uncertainty = found
        said(f"{label}: its ranges fill CUPTI's time at {ghz:.3f} GHz, +-{100 * uncertainty:.1f} %")
        decoded = decoded.at_rate(ghz, "by CUPTI's time of the kernel")
    ranges = decoded.ranges
    first = int(ranges["start_ns"].min())
    last = int((ranges["start_ns"] + ranges["duration_ns"]).max())
    begun, ended = int(decoded.traces["start_ns"].min()), int(decoded.traces["end_ns"].max())
    took, inside = end - start, last - first
    off = abs(inside - took)
    shift = (
        f"; globaltimer - CUPTI: start {begun - start:+,} ns, end {ended - end:+,} ns"
        if decoded.timer_bits == 64
        else ""
    )
    text = (
        f"{label}: CUPTI {took:,} ns, inside {inside:,} ns, off {off:,} ns"
        f" ({100 * off / took:.1f} %); traces {ended - begun:,} ns{shift}"
    )
    RESULTS.append(text)
    judge(off <= max(MAX_ERROR * took, MAX_ERROR_NS), text)
    return decoded


def compare(label: str, work: Callable[[], list[Run]], folder: Path | None, kept: str = "") -> None:
    work()  # compiled, warm
    with Spans() as kernels:
        runs = work()
        spans = kernels.spans(len(runs))
    said(f"{label}: {len(runs)} buffers, {len(spans)} kernels in CUPTI")
    for i, ((words, description), span) in enumerate(zip(runs, spans, strict=False)):
        if folder is not None and kept and i == len(runs) - 1:
            save(folder / kept, words, description)
        decoded = against_cupti(f"{label} run {i}", words, description, span)
        ranges = decoded.ranges
        if i == 0:
            means = ranges.group_by("name").agg(pl.col("duration_ns").mean()).sort("name")
            said(
                f"    {decoded.traces.height} traces, {ranges.height} ranges, mean ns: "
                + ", ".join(f"{n} {t:.0f}" for n, t in zip(means["name"], means["duration_ns"], strict=True))
                + f"; overhead {decoded.overhead_cycles} cycles"
                + "".join(f"; {w}" for w in decoded.warnings)
            )


def of_launches(profile: Any) -> list[Run]:
    return [(launch.words(), launch.description) for launch in profile.launches]
