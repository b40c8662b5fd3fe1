"""Plants in a sound trace what profilers do to traces, and says what was planted.

Faults of Kineto files change their events, those of any format change the tables that a reader returned. What
is planted is told from the raw records alone.
"""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from thence.model.tables import Tables

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
LAUNCHES = r"^(cuda|cu)(LaunchKernel|GraphLaunch)"


@dataclass(frozen=True)
class Planted:
    """A fault: the code of the rule that must find it, how many records it is about, and where.

    ``share`` is the part of the span that it touches, where that can be told from the raw times.
    """

    code: str
    count: int
    rank: int = 0
    device: int | None = 0
    words: tuple[str, ...] = field(default=())
    share: float | None = None


@dataclass
class KinetoFile:
    """A Kineto trace, its events changed by the faults."""

    document: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> KinetoFile:
        return cls(json.loads(gzip.decompress(path.read_bytes())))

    def copy(self) -> KinetoFile:
        return KinetoFile(copy.deepcopy(self.document))

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.document["traceEvents"]

    def of_category(self, *categories: str) -> list[dict[str, Any]]:
        """Events of these categories in order of time."""
        return sorted((e for e in self.events if e.get("cat") in categories), key=lambda e: e["ts"])

    @property
    def span_us(self) -> float:
        work = self.of_category(*DEVICE)
        return max(e["ts"] + e["dur"] for e in work) - work[0]["ts"]

    def calls(self, *names: str) -> list[int]:
        """Correlation ids of the calls with these names, in order of time."""
        return [e["args"]["correlation"] for e in self.of_category(*CALLS) if e["name"] in names]

    def work_of(self, correlations: Iterable[int]) -> list[dict[str, Any]]:
        wanted = set(correlations)
        return [e for e in self.of_category(*DEVICE) if e["args"].get("correlation") in wanted]

    def drop(self, dropped: Iterable[dict[str, Any]]) -> None:
        gone = {id(e) for e in dropped}
        self.document["traceEvents"] = [e for e in self.events if id(e) not in gone]

    def written(self, path: Path) -> Path:
        path.write_text(json.dumps(self.document))
        return path


def drop_every_second_graph(trace: KinetoFile) -> Planted:
    """As profilers do when buffers run out: all kernels of every second launch of a CUDA graph."""
    launches = trace.calls("cudaGraphLaunch")
    lost = launches[1::2]
    work = trace.work_of(launches)
    ends = {c: max(e["ts"] + e["dur"] for e in trace.work_of([c])) for c in launches}
    starts = {c: trace.work_of([c])[0]["ts"] for c in launches}
    empty = sum(starts[launches[i + 1]] - ends[launches[i - 1]] for i in range(1, len(launches) - 1, 2))
    span = max(e["ts"] + e["dur"] for e in work) - work[0]["ts"]
    trace.drop(trace.work_of(lost))
    words = (f"{len(lost)} of {len(launches)} launches of CUDA graphs",)
    return Planted("launch_without_work", len(lost), words=words, share=empty / span)


def drop_last_graphs(trace: KinetoFile) -> Planted:
    """The recording of device work stops early; the host waits for the device afterwards."""
    launches = trace.calls("cudaGraphLaunch")
    trace.drop(trace.work_of(launches[-2:]))
    return Planted("launch_without_work", 2)


def drop_every_tenth_kernel(trace: KinetoFile) -> Planted:
    kernels = trace.of_category("kernel")
    trace.drop(kernels[3::10])
    words = (f"{len(kernels[3::10])} of {len(kernels)} launches of kernels",)
    return Planted("launch_without_work", len(kernels[3::10]), words=words)


def drop_window(trace: KinetoFile) -> Planted:
    """All device work between two moments."""
    work = trace.of_category(*DEVICE)
    lost = work[300:400]
    kernels = sum(e["cat"] == "kernel" for e in lost)
    trace.drop(lost)
    return Planted("launch_without_work", kernels)


def drop_all_work(trace: KinetoFile) -> Planted:
    launches = trace.calls("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC")
    trace.drop(trace.of_category(*DEVICE))
    return Planted("no_device_work", len(launches), device=None)


def drop_launches(trace: KinetoFile) -> Planted:
    """Every tenth launch of kernels that are launched often."""
    names = [e["args"]["correlation"] for e in trace.of_category(*CALLS) if "LaunchKernel" in e["name"]]
    name_of = {e["args"]["correlation"]: e["name"] for e in trace.of_category("kernel")}
    often = [c for c in names if list(name_of.values()).count(name_of[c]) > 20][::10]
    lost = set(often)
    trace.drop([e for e in trace.of_category(*CALLS) if e["args"]["correlation"] in lost])
    return Planted("work_without_launch", len(lost))


def empty_step(trace: KinetoFile) -> Planted:
    """Neither launches nor device work of the second step."""
    steps = [e for e in trace.of_category("user_annotation") if e["name"].startswith("ProfilerStep")]
    step = steps[1]
    end = step["ts"] + step["dur"]
    calls = [e for e in trace.of_category(*CALLS) if step["ts"] <= e["ts"] < end]
    lost = trace.work_of(e["args"]["correlation"] for e in calls)
    trace.drop([*calls, *lost])
    return Planted("empty_steps", 1, words=(step["name"], f"1 of {len(steps)} steps"))


def cut_a_replay(trace: KinetoFile) -> Planted:
    """The first 20 activities of the third launch of a graph."""
    launches = trace.calls("cudaGraphLaunch")
    work = trace.work_of([launches[2]])
    trace.drop(work[:20])
    words = (f"{len(work) - 20} of the {len(work)} activities",)
    return Planted("partial_replay", 1, words=words)


def _times(name: str, code: str) -> Callable[[Callable[[list[Any]], int]], Any]:
    def decorated(change: Callable[[list[Any]], int]) -> Callable[[KinetoFile], Planted]:
        def plant(trace: KinetoFile) -> Planted:
            return Planted(code, change(trace.of_category("kernel")))

        plant.__name__ = name
        return plant

    return decorated


@_times("start_of_zero", "impossible_time")
def start_of_zero(kernels: list[Any]) -> int:
    kernels[5]["ts"] = 0
    return 1


@_times("negative_start", "impossible_time")
def negative_start(kernels: list[Any]) -> int:
    kernels[5]["ts"], kernels[9]["ts"] = -12.5, -3
    return 2


@_times("far_future", "impossible_time")
def far_future(kernels: list[Any]) -> int:
    kernels[7]["ts"] += 1e13
    return 1


@_times("negative_durations", "damaged_input")
def negative_durations(kernels: list[Any]) -> int:
    kernels[3]["dur"], kernels[8]["dur"] = -3, -0.5
    return 2


@_times("swapped", "broken_order")
def swapped(kernels: list[Any]) -> int:
    kernels[10]["ts"], kernels[11]["ts"] = kernels[11]["ts"], kernels[10]["ts"]
    return 1


@_times("clock_of_the_device", "work_before_launch")
def clock_of_the_device(kernels: list[Any]) -> int:
    for event in kernels:
        event["ts"] -= 2000
    return len(kernels)


@_times("one_long_execution", "outlier")
def one_long_execution(kernels: list[Any]) -> int:
    names = [e["name"] for e in kernels]
    common = max(set(names), key=names.count)
    same = sorted(e["dur"] for e in kernels if e["name"] == common)
    last = [e for e in kernels if e["name"] == common][-1]
    last["dur"] = 5000 * same[len(same) // 2]
    return 1


def profiler_in_the_way(trace: KinetoFile) -> Planted:
    """The profiler works through most of the time."""
    work = trace.of_category(*DEVICE)
    event = next(e for e in trace.events if e.get("cat") == "overhead")
    event["ts"], event["dur"] = work[0]["ts"], trace.span_us
    count = len(trace.of_category("overhead"))
    return Planted("profiler_overhead", count, words=(event["name"],))


def logged_loss(trace: KinetoFile) -> Planted:
    trace.document["WARNING"] = ["Exceeded max GPU buffer size (128 > 96 MB) - terminating tracing"]
    return Planted("lost_records", 1, device=None, words=("terminating tracing",))


def unreadable_events(trace: KinetoFile) -> Planted:
    trace.events[100] = "no event"  # type: ignore[call-overload]
    return Planted("damaged_input", 1, device=None)


EAGER_FAULTS = (
    drop_every_tenth_kernel, drop_window, drop_all_work, drop_launches, empty_step, start_of_zero, negative_start,
    far_future, negative_durations, swapped, clock_of_the_device, one_long_execution, profiler_in_the_way, logged_loss,
)  # fmt: skip
"""For an eager trace with steps and with more than 400 activities."""
GRAPH_FAULTS = (drop_every_second_graph, drop_last_graphs, cut_a_replay)
"""For a trace of five launches of one CUDA graph."""


# ---- Of any format


def launch_ids(tables: Tables, pattern: str = LAUNCHES) -> pl.DataFrame:
    """Rank, correlation and start of the launches that have device work, in order of time."""
    host = tables.host.filter(
        pl.col("category").is_in(["runtime", "driver"]),
        pl.col("name").cast(pl.String).str.contains(pattern),
        pl.col("correlation") > 0,
    )
    working = tables.gpu.select("rank", "correlation").unique()
    found = host.join(working, on=["rank", "correlation"], how="semi").sort("rank", "start")
    return found.select("rank", "correlation", "start")


def without_work(tables: Tables, lost: pl.DataFrame) -> Tables:
    """Without the device work of some launches."""
    kept = tables.gpu.join(lost, on=["rank", "correlation"], how="anti", maintain_order="left")
    return changed(tables, gpu=kept)


def changed(tables: Tables, **frames: pl.DataFrame) -> Tables:
    """With other tables; what refers to their rows is dropped."""
    if "gpu" in frames:
        frames.setdefault("collectives", tables.collectives.clear())
        frames.setdefault("graph_places", tables.graph_places.clear())
    return dataclasses.replace(tables, **frames)
