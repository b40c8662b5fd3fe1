"""On a GPU: what thence says of a fresh torch.profiler trace against what torch itself holds in memory.

Profiles a small transformer (labelled, two streams, Python stacks; then a CUDA graph replay), writes
the trace, and compares thence's numbers with those computed from the profiler's own event objects,
which never went through JSON: kernel count, sum and busy time to the nanosecond, GPU time below each
label of the forward pass, and the backward pass as a whole.

    python tests/gpu/read_torch.py [FOLDER for the traces]

Prints one line per comparison and exits with 1 if any differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from support import documented_parser, folder_argument

if __name__ == "__main__":
    OPTIONS = documented_parser(__doc__)
    folder_argument(OPTIONS, "for the traces; a temporary one without it")
    GIVEN = OPTIONS.parse_args()

import polars as pl
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import thence
from thence.model.reasons import text_of

failures = 0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with record_function("attention"):
            y = self.norm(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
        with record_function("mlp"):
            return x + self.mlp(x)


def compare(what: str, ours: object, theirs: object) -> None:
    global failures  # noqa: PLW0603 - a script's exit code
    same = ours == theirs
    failures += not same
    print(f"{'agree ' if same else 'DIFFER'} {what}: thence {ours}, torch {theirs}", flush=True)


def gpu_events(prof: Any) -> list[tuple[int, int, str]]:
    """(start, end, name) in ns of every device activity, from the profiler's memory."""
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in prof.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]


def union(intervals: list[tuple[int, int]]) -> int:
    total, reach = 0, -1
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


def forward_ns_below(prof: Any, name: str) -> int:
    """Device time of what was launched inside ranges of a name, on their own thread.

    Goes from each device activity to the op that the profiler linked with it, and asks whether that
    op began inside such a range. (`FunctionEvent.kernels` is no help here: torch 2.11 lists the
    first kernel of a trace twice.)
    """
    ranges, linked, device = [], {}, []
    for event in prof.profiler.kineto_results.events():
        start, end = event.start_ns(), event.start_ns() + event.duration_ns()
        if event.device_type() == DeviceType.CUDA:
            if not event.is_user_annotation():
                device.append((event.linked_correlation_id(), end - start))
            continue
        linked[event.correlation_id()] = (event.start_thread_id(), start)
        if event.name() == name:
            ranges.append((event.start_thread_id(), start, end))

    def inside(correlation: int) -> bool:
        thread, at = linked.get(correlation, (None, 0))
        return any(t == thread and start <= at < end for t, start, end in ranges)

    return sum(duration for correlation, duration in device if inside(correlation))


def check_totals(title: str, prof: Any, path: Path) -> thence.Trace:
    prof.export_chrome_trace(str(path))
    trace = thence.open(path)
    trace.self_check()
    summary = trace.report()
    events = gpu_events(prof)
    compare(f"{title}: activities", trace.tables.gpu.height, len(events))
    compare(f"{title}: sum ns", summary.sum_ns, sum(end - start for start, end, _ in events))
    compare(f"{title}: busy ns", summary.busy_ns, union([(start, end) for start, end, _ in events]))
    compare(
        f"{title}: starts ns",
        sorted((trace.tables.gpu["start"] + trace.meta.epoch_ns).to_list()) == sorted(s for s, _, _ in events),
        True,
    )
    return trace


def training(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(512) for _ in range(3))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randn(8, 256, 512, device="cuda")
    side = torch.cuda.Stream()

    def step() -> None:
        with record_function("forward"):
            loss = model(data).square().mean()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), record_function("statistics"):
            data.float().std(dim=-1).mean()
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True, with_stack=True) as prof:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    trace = check_totals("training", prof, folder / "training.json")
    rows = trace.activities
    for label in ("attention", "mlp", "statistics", "optimizer"):
        path = label if label in ("statistics", "optimizer") else f"forward/{label}"
        own = rows.filter(
            (pl.col("label").cast(pl.String) == path) & (pl.col("phase").cast(pl.String).fill_null("") != "backward")
        )
        compare(f"training: {label} ns", own["duration"].sum(), forward_ns_below(prof, label))
    backward = rows.filter(pl.col("phase").cast(pl.String) == "backward")
    labels = backward["label"].cast(pl.String).value_counts(sort=True)
    print("backward work by forward label:", labels.to_dicts())
    compare("training: backward work without a label", backward["label"].null_count(), 0)
    compare("training: streams", rows["stream"].n_unique(), 2)
    modules = rows.filter(pl.col("module").is_not_null())["duration"].sum() / rows["duration"].sum()
    sources = rows.filter(pl.col("source").is_not_null())["duration"].sum() / rows["duration"].sum()
    print(f"share with a module {modules:.3f}, with a source line {sources:.3f}")


def graph(folder: Path) -> None:
    model = Block(512).cuda().eval()
    data = torch.randn(8, 256, 512, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            model(data)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            model(data)
        captured.replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            for _ in range(5):
                captured.replay()
            torch.cuda.synchronize()
    trace = check_totals("graph", prof, folder / "graph.json")
    reasons = trace.tables.places["op_rule"].cast(pl.String).unique().to_list()
    print("why the replayed kernels have no op:", [text_of(code) for code in reasons])


def main() -> None:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, thence {thence.__version__}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = GIVEN.folder or Path(temporary)
        training(folder)
        graph(folder)
    print(f"{failures} differences")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
