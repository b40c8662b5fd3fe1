"""Labels of CUDA-graph nodes at capture, on a real GPU: are they right, and what do they cost?

    python tests/gpu/graph_labels.py OUT              # one GPU
    python tests/gpu/graph_labels.py OUT cost         # time of a capture and of a replay
    torchrun --nproc-per-node 2 tests/gpu/graph_labels.py OUT collectives

Truth is an eager run of the same code under torch.profiler: kernel by kernel, in the order of their
launch, what thence's attribution says of the eager kernel (from Kineto's ranges and sequence numbers)
must be what the label of the captured node says. For the forward there is a second truth, the sets of
nodes before and after each stretch of code (cudaGraphGetNodes), which needs no mark at all.
Writes labels and Kineto traces of replays, for joining, to OUT.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from support import documented_parser, end, judge

if __name__ == "__main__":
    OPTIONS = documented_parser(__doc__)
    OPTIONS.add_argument("out", type=Path, metavar="OUT", help="folder that it writes to")
    OPTIONS.add_argument("part", nargs="?", choices=("cost", "collectives"))
    GIVEN = OPTIONS.parse_args()

import torch
from torch.profiler import ProfilerActivity, profile

BATCH, TIME, WIDTH, HEADS = 4, 256, 512, 8
ACTIVITIES = [ProfilerActivity.CPU, ProfilerActivity.CUDA]


def plain(_name: str, **_metadata: object) -> Any:
    return nullcontext()


class Block(torch.nn.Module):
    """A transformer block that normalises on a second stream."""

    def __init__(self, side: torch.cuda.Stream | None) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.side = side
        self.mark: Any = plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mark = self.mark
        with mark("qkv"):
            q, k, v = (t.view(BATCH, TIME, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        with mark("attention"):
            scores = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(WIDTH / HEADS), -1)
            context = (scores @ v).transpose(1, 2).reshape(BATCH, TIME, WIDTH)
        if self.side is None:
            with mark("norm"):
                n = torch.nn.functional.layer_norm(x, (WIDTH,))
        else:
            current = torch.cuda.current_stream()
            self.side.wait_stream(current)
            with torch.cuda.stream(self.side), mark("norm"):
                n = torch.nn.functional.layer_norm(x, (WIDTH,))
        with mark("out"):
            o = self.out(context)
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
        with mark("mlp", width=4 * WIDTH):
            return self.down(torch.nn.functional.gelu(self.up(o + n)))


class Model(torch.nn.Module):
    """Some blocks, one inside the other's label."""

    def __init__(self, layers: int, side: torch.cuda.Stream | None) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(side) for _ in range(layers))
        self.mark: Any = plain

    def use(self, mark: Any) -> Model:
        for module in (self, *self.blocks):
            module.mark = mark
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            with self.mark(f"layer{i}"):
                x = block(x)
        return x


def step(model: Model, x: torch.Tensor) -> torch.Tensor:
    with model.mark("step"):
        y = model(x)
        with model.mark("loss"):
            loss = y.float().square().mean()
        loss.backward()
    return loss


def warm_up(function: Any) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def capture(function: Any, *, keep: bool = True) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    with torch.cuda.graph(graph):
        function()
    if keep:
        graph.instantiate()
    return graph


def profiled(function: Any, path: Path) -> Path:
    with profile(activities=ACTIVITIES, record_shapes=True) as profiler:
        function()
        torch.cuda.synchronize()
    text = path.with_suffix("")
    profiler.export_chrome_trace(str(text))
    path.write_bytes(gzip.compress(text.read_bytes(), 6))
    text.unlink()
    return path


def captured_kernels(document: dict[str, Any], graph: int) -> list[tuple[str, str | None, str]]:
    """(kernel, label path, phase) of a graph's kernel nodes, in the order of their creation."""
    nodes = document["graphs"][graph]["nodes"]
    found = []
    for kind, label, kernel in zip(nodes["type"], nodes["label"], nodes["kernel"], strict=True):
        if kind == "kernel":
            name = document["kernels"][kernel]["demangled"]
            one = document["labels"][label] if label >= 0 else {"path": [], "phase": "forward"}
            found.append((name, "/".join(one["path"]) or None, one["phase"]))
    return found


def eager_kernels(path: Path) -> list[tuple[str, str | None, str]]:
    """The same of an eager run, by thence's attribution."""
    import thence

    frame = thence.open(path).activities.filter(kind="kernel").sort("correlation")
    return list(zip(frame["name"], frame["label"], frame["phase"], strict=True))


def compare(what: str, captured: list[Any], eager: list[Any]) -> None:
    """Prints how far the two agree.

    An eager kernel without a label is autograd's own: it adds up or accumulates gradients, between
    two nodes. Captured ones carry the label of the node that caused them, and graphed callables do
    not accumulate, so these are counted apart. Work that needs no gradient has no phase in a trace.
    """
    own = sum(e[1] is None for e in eager)
    if len(captured) == len(eager):
        captured = [c for c, e in zip(captured, eager, strict=True) if e[1] is not None]
    eager = [e for e in eager if e[1] is not None]
    names = [c[0] for c in captured] == [e[0] for e in eager]
    pairs = list(zip(captured, eager, strict=False))
    wrong = [(c, e) for c, e in pairs if c[1:] != (e[1], e[2] or "forward")]
    phases = Counter(c[2] for c in captured if c[1])
    judge(
        names and not wrong,
        f"{what}: {len(captured)} kernels captured, {len(eager)} eager (and {own} of autograd's own), "
        f"same names in order: {names}; labelled {sum(c[1] is not None for c in captured)} "
        f"{dict(phases)}; unlike the eager run: {len(wrong)}",
    )
    for one, other in wrong[:6]:
        print("   captured", one[1:], "eager", other[1:], one[0][:70])


def forward_truth(model: Model, x: torch.Tensor) -> dict[int, str]:
    """Node number to label of the forward, from the sets of nodes before and after."""
    from cuda.bindings import runtime

    import thence.capture.cuda.cupti

    cupti = thence.capture.cuda.cupti.load()
    truth: dict[int, str] = {}
    path: list[str] = []
    live = False

    def nodes() -> set[int]:
        if not live:
            return set()
        info = runtime.cudaStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)
        graph = next((one for one in info if isinstance(one, runtime.cudaGraph_t)), None)
        if graph is None or int(graph) == 0:  # a stream that has not joined the capture yet
            return set()
        count = runtime.cudaGraphGetNodes(graph)[-1]
        return {int(n) for n in runtime.cudaGraphGetNodes(graph, count)[1]} if count else set()

    @contextmanager
    def diffed(name: str, **_metadata: object) -> Any:
        path.append(name)
        before = nodes()
        yield
        for node in nodes() - before:
            truth.setdefault(cupti.graph_node_id(node) & 0xFFFFFFFF, "/".join(path))
        path.pop()

    model.use(diffed)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph), torch.no_grad():
        live = True
        model(x)
        live = False
    return truth


def block(out: Path) -> None:
    """The block on two streams, forward and backward in one graph."""
    import thence

    torch.manual_seed(0)
    model = Model(3, torch.cuda.Stream()).cuda().use(thence.mark)
    x = torch.randn(BATCH, TIME, WIDTH, device="cuda")
    warm_up(lambda: step(model, x))
    eager = profiled(lambda: step(model, x), out / "block_eager.json.gz")
    graph = capture(lambda: step(model, x))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    profiled(lambda: [graph.replay() for _ in range(5)], out / "block_replay.json.gz")
    thence.save_labels(out / "block_labels.json")
    document = json.loads((out / "block_labels.json").read_text())
    compare("block, forward and backward", captured_kernels(document, -1), eager_kernels(eager))
    kinds = Counter(document["graphs"][-1]["nodes"]["type"])
    print("   nodes", dict(kinds), "edges", len(document["graphs"][-1]["edges"]), document["notes"])

    with torch.no_grad():
        warm_up(lambda: model(x))
        capture(lambda: model(x))
    thence.save_labels(out / "forward_labels.json")
    document = json.loads((out / "forward_labels.json").read_text())
    nodes = document["graphs"][-1]["nodes"]
    labels = ["/".join(one["path"]) for one in document["labels"]]
    mine = {n: labels[label] for n, label in zip(nodes["number"], nodes["label"], strict=True) if label >= 0}
    truth = forward_truth(model, x)
    model.use(thence.mark)
    same = sum(mine.get(n) == label for n, label in truth.items())
    judge(
        same == len(truth) > 0,
        f"forward against sets of nodes: {same} of {len(truth)} the same; labelled beyond: "
        f"{[nodes['type'][nodes['number'].index(n)] for n in mine if n not in truth]}",
    )
    (out / "forward_labels.json").unlink()


def graphed_callables(out: Path) -> None:
    """torch.cuda.make_graphed_callables: forward and backward in graphs of their own."""
    import thence

    torch.manual_seed(0)
    model = Model(2, None).cuda().use(thence.mark)
    x = torch.randn(BATCH, TIME, WIDTH, device="cuda", requires_grad=True)
    gradient = torch.randn_like(x)
    warm_up(lambda: model(x).backward(gradient))
    eager = profiled(lambda: model(x).backward(gradient), out / "callables_eager.json.gz")
    thence.save_labels(out / "callables_labels.json")
    before = len(json.loads((out / "callables_labels.json").read_text())["graphs"])
    with thence.mark("outside"):
        graphed = torch.cuda.make_graphed_callables(model, (x,))
    thence.save_labels(out / "callables_labels.json")
    document = json.loads((out / "callables_labels.json").read_text())
    made = range(before, len(document["graphs"]))
    print("make_graphed_callables:", len(made), "graphs", [document["graphs"][i]["id"] for i in made])
    captured = [
        (name, (label or "").removeprefix("outside").lstrip("/") or None, phase)
        for i in made
        for name, label, phase in captured_kernels(document, i)
    ]
    compare("make_graphed_callables", captured, eager_kernels(eager))
    graphed(x).backward(gradient)
    torch.cuda.synchronize()
    (out / "callables_labels.json").unlink()
    eager.unlink()


def compiled(out: Path) -> None:
    """torch.compile(mode="reduce-overhead"): graph trees."""
    import thence

    torch.manual_seed(0)
    model = Model(2, None).cuda().use(thence.mark)
    fast = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(BATCH, TIME, WIDTH, device="cuda")

    def train() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with thence.mark("train"):
            fast(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    thence.save_labels(out / "compiled_labels.json")
    before = len(json.loads((out / "compiled_labels.json").read_text())["graphs"])
    for _ in range(4):
        train()
    torch.cuda.synchronize()
    profiled(lambda: [train() for _ in range(2)], out / "compiled_replay.json.gz")
    thence.save_labels(out / "compiled_labels.json")
    document = json.loads((out / "compiled_labels.json").read_text())
    for i in range(before, len(document["graphs"])):
        kernels = captured_kernels(document, i)
        print(
            f"reduce-overhead graph {document['graphs'][i]['id']} "
            f"executables {document['graphs'][i]['executables']}: {len(kernels)} kernels"
        )
        nodes = document["graphs"][i]["nodes"]
        for (name, label, phase), index in zip(kernels, nodes["label"], strict=False):
            facts = document["labels"][index]["metadata"] if index >= 0 else {}
            print(f"   {name[:44]:44} {label} ({phase}) {facts.get('Original ATen', '')[:60]}")
    print("   notes", document["notes"])


def captures_ms(function: Any, times: int) -> list[float]:
    """Milliseconds that captures take, instantiation included."""
    spent = []
    for _ in range(times):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.cuda.graph(graph):
            function()
        spent.append(1000 * (time.perf_counter() - start))
    return spent


def replays_us(graph: torch.cuda.CUDAGraph) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / 200


def graph_kernels(graph: torch.cuda.CUDAGraph) -> list[Any]:
    from thence.capture.cuda import cupti, driver

    d, c = driver.load(), cupti.load()
    nodes = sorted((c.graph_node_id(n), n) for n in d.nodes(graph.raw_cuda_graph()))
    return [d.kernel(n) if d.node_type(n) == "kernel" else d.node_type(n) for _, n in nodes]


def reading_timed() -> list[float]:
    """Milliseconds that each capture's end spends on its nodes, as they come."""
    from thence.capture.marks.captures import Captures

    spent: list[float] = []
    original = Captures.ending

    def ending(self: Captures) -> Any:
        start = time.perf_counter()
        result = original(self)
        spent.append(1000 * (time.perf_counter() - start))
        return result

    Captures.ending = ending  # type: ignore[method-assign]
    return spent


def cost() -> None:
    """Time of a capture and of a replay: without thence, watched, with marks."""
    torch.manual_seed(0)
    model = Model(16, torch.cuda.Stream()).cuda().use(plain)
    x = torch.randn(BATCH, TIME, WIDTH, device="cuda")
    work = lambda: step(model, x)  # noqa: E731
    warm_up(work)
    without = captures_ms(work, 8)[2:]
    bare = capture(work)
    import thence

    _ = thence.mark
    reading = reading_timed()
    watched = captures_ms(work, 8)[2:]
    model.use(thence.mark)
    marked = captures_ms(work, 8)[2:]
    labelled = capture(work)
    first, second = graph_kernels(bare), graph_kernels(labelled)
    judge(
        first == second,
        f"capture of {len(second)} nodes, ms (median): without thence {statistics.median(without):.1f}, "
        f"watched {statistics.median(watched):.1f}, with marks {statistics.median(marked):.1f}; "
        f"reading the nodes {statistics.median(reading):.1f} of these; the same nodes: {first == second}",
    )
    pairs = [(replays_us(bare), replays_us(labelled)) for _ in range(5)]
    print(
        f"replay, us (median of 5 x 200): without {statistics.median(a for a, _ in pairs):.1f}, "
        f"with labels {statistics.median(b for _, b in pairs):.1f}"
    )


def failure() -> None:
    """A capture that fails leaves no labels, and the next one works."""
    import thence
    import thence.capture.marks

    x = torch.randn(64, 64, device="cuda")
    known = len(thence.capture.marks._graphs)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()), thence.mark("fails"):
            y = x @ x
            y.sum().item()  # a synchronisation is not allowed
    except RuntimeError as error:
        print("failed as it should:", str(error).splitlines()[0])
    torch.cuda.synchronize()
    kept = len(thence.capture.marks._graphs) - known
    judge(kept == 0, f"graphs kept of the failed capture: {kept}")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), thence.mark("works"):
        y = x @ x
    kept = len(thence.capture.marks._graphs) - known
    judge(kept == 1, f"graphs kept of the next: {kept}")


def collectives(out: Path) -> None:
    """A graphed all-reduce between GPUs, labelled."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    import thence

    undo = thence.torch.label_collectives()
    x = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)
    gathered = torch.empty(dist.get_world_size() * x.numel(), device="cuda", dtype=x.dtype)

    def work() -> None:
        with thence.mark("sync"):
            dist.all_reduce(x)
            dist.all_gather_into_tensor(gathered, x)
            dist.reduce_scatter_tensor(x, gathered)

    warm_up(work)
    profiled(work, out / f"comm_eager_rank{rank}.json.gz")
    graph = capture(work)
    graph.replay()
    torch.cuda.synchronize()
    profiled(lambda: [graph.replay() for _ in range(3)], out / f"comm_replay_rank{rank}.json.gz")
    thence.save_labels(out / f"comm_labels_rank{rank}.json")
    document = json.loads((out / f"comm_labels_rank{rank}.json").read_text())
    if rank == 0:
        nodes = document["graphs"][-1]["nodes"]
        for number, kind, label in zip(nodes["number"], nodes["type"], nodes["label"], strict=True):
            print(number, kind, json.dumps(document["labels"][label]) if label >= 0 else None)
        print("notes", document["notes"])
    sys.stdout.flush()
    undo()
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # NCCL with captured graphs can hang at exit


def main() -> None:
    out = GIVEN.out
    out.mkdir(parents=True, exist_ok=True)
    if GIVEN.part == "collectives":
        collectives(out)
        return
    print("torch", torch.__version__, torch.cuda.get_device_name())
    if GIVEN.part == "cost":  # in a process that thence is not yet imported in
        cost()
        end()
    block(out)
    graphed_callables(out)
    compiled(out)
    failure()
    end()


if __name__ == "__main__":
    main()
