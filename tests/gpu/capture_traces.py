"""Traces of the capture of CUDA graphs beside replays: does thence give every replayed kernel its launch?

    python tests/gpu/capture_traces.py record DIR     # on an NVIDIA GPU: needs torch alone
    python tests/gpu/capture_traces.py check DIR      # anywhere: needs thence

As an inference server does, `record` captures a graph for every batch size under torch.profiler, so that the trace
holds launches without device work, and replays the graphs in another profile. Batch sizes differ in their
number of layers, but two do not, so that their captures are equally long. Everything is recorded three times:
on one stream; with a part of each layer on a side stream; and with captures and replays in one trace.

The truth is a further profile, of the same functions run without a graph, read from raw JSON here: the k-th launch
to begin is node k of the graph, and what was open around it is its label. That holds where its kernels are those
of the replay, node by node, which is asserted for traces with node ids (torch 2.12 and newer), and for one stream.

`check` counts how many replayed activities get the right operator and label, how many a wrong one, and how many
none. Then it damages the captures: a launch left out, one doubled, one moved, one of another kind. None may be
labelled by what is damaged.
"""

from __future__ import annotations

import gzip
import json
import sys
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

from support import documented_parser

LAYERS = {1: 2, 4: 3, 16: 3, 64: 5}
"""Layers by batch size; two have the same number, so that nothing tells their captures apart but kernels."""
WIDTH, HEADS, TIME, WORDS, REPLAYS = 256, 4, 64, 1000, 3
WAYS = ("one_stream", "side_stream", "together")


# The recording.


def model(side: Any) -> Any:
    """A small decoder; with a side stream, the norm of what the second half of a layer reads runs there."""
    import torch
    from torch.profiler import record_function

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
            self.out = torch.nn.Linear(WIDTH, WIDTH)
            self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
            self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with record_function("attention"):
                q, k, v = (t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
                weights = torch.softmax(q @ k.transpose(-1, -2) * 0.1, -1)
                attended = self.out((weights @ v).transpose(1, 2).reshape(x.shape))
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side), record_function("statistics"):
                    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
            with record_function("mlp"):
                hidden = self.down(torch.nn.functional.gelu(self.up(attended)))
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
                hidden = hidden * scale
            return x + hidden

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(WORDS, WIDTH)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(max(LAYERS.values())))
            self.head = torch.nn.Linear(WIDTH, WORDS)

        def forward(self, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            with record_function("embedding"):
                x = self.embedding(tokens)
            for number in range(LAYERS[tokens.shape[0]]):
                with record_function(f"layer{number}"):
                    x = self.layers[number](x)
            with record_function("sample"):
                kept.copy_(x[:, -1])
                return self.head(x[:, -1]).argmax(-1)

    return Decoder().cuda().to(torch.bfloat16).eval()


def record(folder: Path) -> None:
    """Writes the traces of all ways."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name()}
    print(facts)
    (folder / "facts.json").write_text(json.dumps(facts))
    for way in WAYS:
        with torch.no_grad():
            record_way(folder, way)
        print(way, "recorded")


def profiled(path: Path, *work: Any) -> None:
    """Writes what torch.profiler records of some functions."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for function in work:
            function()
        torch.cuda.synchronize()
    plain = path.with_suffix("")  # without .gz
    trace.export_chrome_trace(str(plain))
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()


def record_way(folder: Path, way: str) -> None:
    """Writes the traces of one way: captures, replays, and an eager run of every batch size."""
    import torch

    decoder = model(torch.cuda.Stream() if way == "side_stream" else None)
    inputs = {
        size: (
            torch.randint(0, WORDS, (size, TIME), device="cuda"),
            torch.empty(size, WIDTH, device="cuda", dtype=torch.bfloat16),
        )
        for size in LAYERS
    }
    graphs: dict[int, Any] = {}

    def captured() -> None:
        for size in reversed(LAYERS):  # the largest first, as servers do
            graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[size]):
                decoder(*inputs[size])

    def replayed() -> None:
        for size in REPLAYS * list(LAYERS):
            graphs[size].replay()
        torch.cuda.synchronize()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the warm-up
        for size in 3 * list(LAYERS):
            decoder(*inputs[size])
    torch.cuda.synchronize()
    capture, replay = (folder / f"{way}_{name}.json.gz" for name in ("capture", "replay"))
    if way == "together":
        profiled(capture, captured, replayed)
        replay.write_bytes(capture.read_bytes())
    else:
        profiled(capture, captured)
        replayed()
        profiled(replay, replayed)
    for size in LAYERS:
        profiled(folder / f"{way}_eager_{size}.json.gz", lambda size=size: decoder(*inputs[size]))


# The truth, from raw JSON.

CALLS = {"Launch": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}


def events_of(path: Path) -> list[dict[str, Any]]:
    """The complete events of a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def is_call(event: dict[str, Any]) -> bool:
    """Whether it is an API call that launches, copies or sets, and no launch of a graph."""
    name = event["name"]
    return (
        event.get("cat") in ("cuda_runtime", "cuda_driver")
        and any(word in name for word in CALLS)
        and "Graph" not in name
        and "HostFunc" not in name
    )


def open_around(events: list[dict[str, Any]], category: str, thread: Any, at: float) -> list[str]:
    """Names of the events of a category that are open on a thread at a time, the outermost first."""
    found = [
        e for e in events if e.get("cat") == category and e["tid"] == thread and e["ts"] <= at < e["ts"] + e["dur"]
    ]
    return [e["name"] for e in sorted(found, key=lambda e: (e["ts"], -e["dur"]))]


def truth_of(path: Path) -> list[tuple[str, str | None, str]]:
    """Of each launch of an eager run, in order: kernel, innermost operator, and labels around it."""
    events = events_of(path)
    device = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    nested = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    result = []
    for call in sorted(filter(is_call, events), key=lambda e: float(e["ts"])):
        activity = device.get(call["args"].get("correlation"))
        if activity is None:
            continue
        operators = open_around(nested, "cpu_op", call["tid"], call["ts"])
        labels = open_around(nested, "user_annotation", call["tid"], call["ts"])
        result.append((activity["name"], operators[-1] if operators else None, "/".join(labels)))
    return result


def replays_of(path: Path) -> dict[int, list[dict[str, Any]]]:
    """The activities of each graph launch by its correlation id, by node where known, else by start."""
    events = events_of(path)
    launches = {e["args"]["correlation"] for e in events if "GraphLaunch" in e["name"] and "args" in e}
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            correlation = event["args"].get("correlation")
            if correlation in launches:
                found.setdefault(correlation, []).append(event)
    for rows in found.values():
        rows.sort(key=lambda e: (e["args"].get("graph node id", 0) & 0xFFFFFFFF, float(e["ts"])))
    return found


def wanted_of(folder: Path, way: str) -> dict[tuple[int, int], tuple[str | None, str]]:
    """By correlation id and start in ns, the true operator and labels of each replayed activity."""
    truths = {size: truth_of(folder / f"{way}_eager_{size}.json.gz") for size in LAYERS}
    wanted: dict[tuple[int, int], tuple[str | None, str]] = {}
    unlike: Counter[str] = Counter()
    for number, (correlation, rows) in enumerate(sorted(replays_of(folder / f"{way}_replay.json.gz").items())):
        size = list(LAYERS)[number % len(LAYERS)]  # the order in which they were replayed
        names, truth = [row["name"] for row in rows], truths[size]
        known = any(row["args"].get("graph node id") for row in rows)
        if names == [name for name, _, _ in truth]:
            for row, (_, operator, labels) in zip(rows, truth, strict=True):
                wanted[correlation, round(float(row["ts"]) * 1000)] = (operator, labels)
        else:
            unlike[f"batch size {size}: {len(rows)} activities, {len(truth)} eager launches, node ids {known}"] += 1
    for text, count in unlike.items():
        print(f"   {count} launches without a truth (kernels are not those of the eager run): {text}")
    return wanted


# The comparison.


def check(folder: Path) -> int:
    """Compares what thence says with the truth; returns the number of wrong places."""
    wrong = 0
    print((folder / "facts.json").read_text())
    for way in WAYS:
        print(f"=== {way}")
        wanted = wanted_of(folder, way)
        wrong += compare(folder / f"{way}_replay.json.gz", folder / f"{way}_capture.json.gz", wanted)
        wrong += damaged(folder, way, wanted)
    print(f"{wrong} wrong")
    return wrong


def compare(replay: Path, capture: Path, wanted: dict[tuple[int, int], tuple[str | None, str]]) -> int:
    """Prints how many activities got the right place, a wrong one and none; returns how many got a wrong one."""
    import polars as pl

    import thence

    trace = thence.open(str(replay))
    try:
        labelled = trace.label(eager=thence.open(str(capture)))
    except thence.MissingData as error:
        print(f"   refused: {str(error)[:300]}")
        return 0
    labelled.self_check()
    origin = min(float(e["ts"]) for e in events_of(replay) if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    first = labelled.tables.gpu["start"].min()
    rows = pl.DataFrame(
        {
            "correlation": labelled.tables.gpu["correlation"],
            "start": labelled.tables.gpu["start"] - first,
            "op": labelled.tables.places["op"].cast(pl.String),
            "label": labelled.tables.places["label"].cast(pl.String),
            "graphed": labelled.tables.places["launch"].is_not_null(),
        }
    )
    starts = sorted((c, at - round(origin * 1000)) for c, at in wanted)
    truth = {(c, at - round(origin * 1000)): value for (c, at), value in wanted.items()}
    counts: Counter[tuple[str, str]] = Counter()
    for correlation, start, op, label, _ in rows.iter_rows():
        place = bisect_right(starts, (correlation, start + 2)) - 1  # ns are rounded twice
        if place < 0 or starts[place][0] != correlation or start - starts[place][1] > 2:
            continue
        operator, labels = truth[starts[place]]
        for kind, ours, true in (("op", op, operator), ("label", label, labels or None)):
            verdict = "none" if ours is None else "right" if ours == true else "WRONG"
            counts[kind, verdict] += 1
    print("  ", {f"{kind} {verdict}": n for (kind, verdict), n in sorted(counts.items())})
    print("  ", dict(labelled.graph_coverage.rules), labelled.graph_coverage)
    for text in labelled.meta.warnings[:6]:
        print("     ", text[:400])
    return sum(n for (_, verdict), n in counts.items() if verdict == "WRONG")


def damaged(folder: Path, way: str, wanted: dict[tuple[int, int], tuple[str | None, str]]) -> int:
    """The same with captures that lack a launch, have one twice, in another place, or of another kind."""
    source = folder / f"{way}_capture.json.gz"
    document = json.loads(gzip.decompress(source.read_bytes()))
    events = document["traceEvents"]
    worked = {e["args"]["correlation"] for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    calls = [e for e in events if e.get("ph") == "X" and is_call(e) and e["args"]["correlation"] not in worked]
    calls.sort(key=lambda e: float(e["ts"]))
    victim = calls[len(calls) // 3]
    # Into the operator before, of another name: the order of the calls is then another.
    others = [e for e in calls if e["args"].get("External id") != victim["args"].get("External id")]
    before = others[len(others) // 3 - 2]
    last = max(e["args"]["correlation"] for e in calls)
    changes: dict[str, list[Any]] = {
        "a launch left out": [e for e in events if e is not victim],
        "a launch twice": [*events, {**victim, "args": {**victim["args"], "correlation": last + 10_000_000}}],
        "a launch of another kind": [{**e, "name": "cudaMemsetAsync"} if e is victim else e for e in events],
        "a launch moved": [{**e, "ts": before["ts"] - 0.002} if e is victim else e for e in events],
    }
    wrong = 0
    for what, changed in changes.items():
        print(f"   damaged: {what}")
        path = folder / "damaged.json.gz"
        path.write_bytes(gzip.compress(json.dumps({**document, "traceEvents": changed}).encode()))
        wrong += compare(folder / f"{way}_replay.json.gz", path, wanted)
        path.unlink()
    return wrong


if __name__ == "__main__":
    options = documented_parser(__doc__)
    options.add_argument("verb", choices=("record", "check"))
    options.add_argument("folder", type=Path, help="of the traces")
    given = options.parse_args()
    if given.verb == "record":
        record(given.folder)
    else:
        sys.exit(min(check(given.folder), 1))
