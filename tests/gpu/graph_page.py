"""The page of a captured CUDA graph on a real GPU: are its nodes, edges and critical path right?

Recording and checking are apart, because the recording machine needs torch, jax and NumPy alone::

    python tests/gpu/graph_page.py record OUT    # on an NVIDIA GPU; two minutes
    python tests/gpu/graph_page.py check OUT     # anywhere, with thence

Three programs run under ``thence record``: a training step captured with two streams, a decoding step with a static
cache, and a JAX program. ``check`` writes the page of each into OUT with ``thence label RECORDING --graph``, and
compares it with:

- torch's own dump of the graph (``CUDAGraph.debug_dump``, DOT): its edges, led past nodes without activities by
  searching from each node, must be the page's;
- the activities of each launch of the graph in the recording: as many as the page has nodes;
- the longest path over the dump's edges, computed here: the page's critical path, and at most the time of a replay.

XLA's command buffers have no edges in a recording: the command must say so in one sentence and exit with 2.
Exits with 1 if anything differs.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from support import documented_parser

OPTIONS = documented_parser(__doc__)
OPTIONS.add_argument("verb", choices=("record", "check", "train", "decode", "jax"), help="a program runs here, alone")
OPTIONS.add_argument("out", type=Path, metavar="OUT", help="folder with the recordings and pages")

REPLAYS = 20
BATCH, LENGTH, WIDTH, HEADS, LAYERS = 4, 256, 512, 8, 4
ACTIVITY = re.compile(r"\b(KERNEL|MEMCPY|MEMSET)\b|<<<")
"""What the dump says of nodes that leave activities; the short form of a kernel has only its launch shape."""
STATEMENT = re.compile(r'\n\s*(?="?graph_\d+_node_)')
NODE = re.compile(r'"?graph_\d+_node_(\d+)')
EDGE = re.compile(r'"?graph_\d+_node_(\d+)"?\s*->\s*"?graph_\d+_node_(\d+)"?')


# The programs that are recorded.


def captured(function: Any, dump: Path) -> None:
    """Captures a function, dumps the graph, and replays it."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        function()
    graph.debug_dump(str(dump))
    graph.instantiate()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()


def train(dump: Path) -> None:
    """A training step of a few blocks, each of which normalises on a second stream."""
    import torch

    import thence

    class Block(torch.nn.Module):
        def __init__(self, side: Any) -> None:
            super().__init__()
            self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
            self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
            self.norm = torch.nn.LayerNorm(WIDTH)
            self.side = side

        def forward(self, x: Any) -> Any:
            main = torch.cuda.current_stream()
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                normed = self.norm(x)
            y = self.down(torch.nn.functional.gelu(self.up(x)))
            main.wait_stream(self.side)
            return y + normed

    torch.manual_seed(0)
    side = torch.cuda.Stream()
    model = torch.nn.Sequential(*(Block(side) for _ in range(LAYERS))).cuda()
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")

    def step() -> None:
        with thence.mark("step"):
            loss = model(x).float().square().mean()
            loss.backward()
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-1e-3)
                parameter.grad.zero_()

    captured(step, dump)


def decode(dump: Path) -> None:
    """One token through a few layers of attention whose keys and values are in a static cache."""
    import torch

    import thence

    torch.manual_seed(0)
    size = WIDTH // HEADS
    weights = [
        {name: torch.randn(WIDTH, WIDTH, device="cuda") / math.sqrt(WIDTH) for name in "qkvo"} for _ in range(LAYERS)
    ]
    caches = [torch.zeros(2, BATCH, HEADS, LENGTH, size, device="cuda") for _ in range(LAYERS)]
    x = torch.randn(BATCH, 1, WIDTH, device="cuda")
    position = torch.zeros(1, dtype=torch.long, device="cuda")

    def heads(y: Any) -> Any:
        return y.view(BATCH, 1, HEADS, size).transpose(1, 2)

    def step() -> None:
        y = x
        with torch.no_grad():
            for layer, (weight, cache) in enumerate(zip(weights, caches, strict=True)):
                with thence.mark("layer", layer=layer):
                    for which, name in enumerate("kv"):
                        cache[which].index_copy_(2, position, heads(y @ weight[name]))
                    scores = heads(y @ weight["q"]) @ cache[0].transpose(-1, -2) / math.sqrt(size)
                    out = torch.softmax(scores, -1) @ cache[1]
                    y = y + out.transpose(1, 2).reshape(BATCH, 1, WIDTH) @ weight["o"]
            x.copy_(torch.nn.functional.layer_norm(y, (WIDTH,)))
            position.add_(1).remainder_(LENGTH)

    captured(step, dump)


def jax_program(_dump: Path) -> None:
    """A few layers with their gradient, in a command buffer."""
    import jax
    import jax.numpy as jnp

    def layers(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.square(x).mean()

    weights = [jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) for i in range(LAYERS)]
    x = jax.random.normal(jax.random.key(9), (BATCH * LENGTH, WIDTH))
    step = jax.jit(jax.value_and_grad(layers))
    for _ in range(REPLAYS):
        jax.block_until_ready(step(weights, x))


PROGRAMS = {"train": train, "decode": decode, "jax": jax_program}


# The comparison.


def dumped(path: Path) -> tuple[set[int], set[tuple[int, int]], int]:
    """Nodes with activities of a dump, the edges between them led past all others, and the number of its edges."""
    text = path.read_text(errors="replace")
    edges, shown = set(), set()
    for statement in STATEMENT.split(text)[1:]:
        if edge := EDGE.match(statement):
            edges.add((int(edge[1]), int(edge[2])))
        elif (node := NODE.match(statement)) and ACTIVITY.search(statement.replace("\\", "")):
            shown.add(int(node[1]))
    after = defaultdict(set)
    for a, b in edges:
        after[a].add(b)
    if not shown:
        sys.exit(f"{path}: no nodes are recognised in the dump; it begins: {text[:600]}")
    found = set()
    for begin in shown:
        waiting, seen = list(after[begin]), set()
        while waiting:
            node = waiting.pop()
            if node in shown:
                found.add((begin, node))
            elif node not in seen:
                seen.add(node)
                waiting.extend(after[node])
    return shown, found, len(edges)


def longest(edges: set[tuple[int, int]], took: dict[int, float]) -> float:
    """The largest sum of durations along the edges, by relaxing all edges until nothing changes."""
    ends = dict(took)
    changed = True
    while changed:
        changed = False
        for a, b in edges:
            if ends[a] + took[b] > ends[b] + 1e-6:
                ends[b], changed = ends[a] + took[b], True
    return max(ends.values())


def label(out: Path, name: str) -> subprocess.CompletedProcess[str]:
    page = out / f"{name}.html"
    command = [sys.executable, "-m", "thence", "label", str(out / name), "--graph", str(page)]
    return subprocess.run([*command, "--force", "--format", "json"], capture_output=True, text=True, check=False)


def compared(out: Path, name: str) -> list[str]:
    """Prints the figures of a captured graph; returns what differs."""
    import polars as pl

    import thence

    done = label(out, name)
    if done.returncode:
        return [f"{name}: {done.stderr.strip()}"]
    graph = json.loads(done.stdout)["graph"]
    shown, edges, all_edges = dumped(out / f"{name}.dot")
    numbers = {node["number"] for node in graph["nodes"]}
    pairs = {tuple(edge) for edge in graph["edges"]}
    gpu = thence.open(out / name).tables.gpu.filter(pl.col("graph").is_in(graph["executables"]))
    activities = gpu.group_by("correlation").len()["len"].unique().to_list()
    means = gpu.group_by(number=pl.col("node") & 0xFFFFFFFF).agg(pl.col("duration").mean())
    took = dict(means.iter_rows())
    size = (out / f"{name}.html").stat().st_size
    path = longest(edges, took) if took.keys() == shown else math.nan
    print(
        f"{name}: {len(numbers)} nodes, {activities} activities of a launch, {len(shown)} in the dump; {len(pairs)} "
        f"edges, {len(edges)} in the dump ({all_edges} with silent nodes); critical path {graph['path_ns'] / 1e3:.1f} "
        f"us, {path / 1e3:.1f} by the dump, of {graph['replay_ns'] / 1e3:.1f} us in {graph['replays']} replays; page "
        f"of {size / 1e3:.0f} kB",
        flush=True,
    )
    checks = {
        "nodes and activities": activities == [len(numbers)],
        "nodes and the dump": numbers == shown,
        "edges and the dump": pairs == edges,
        "critical path by the dump": math.isclose(graph["path_ns"], path, rel_tol=1e-3),
        "critical path within the replay": graph["path_ns"] <= graph["replay_ns"],
        "replays": graph["replays"] == REPLAYS,
    }
    differing = [f"{name}: {what} differ" for what, same in checks.items() if not same]
    if pairs != edges:
        differing.append(
            f"{name}: only on the page {sorted(pairs - edges)[:8]}, only in the dump {sorted(edges - pairs)[:8]}"
        )
    return differing


def record(out: Path) -> list[str]:
    """Records the programs, each in a process of its own; returns what failed."""
    failed = []
    for name in PROGRAMS:
        begun = time.monotonic()
        program = [sys.executable, __file__, name, str(out)]
        recording = [sys.executable, "-m", "thence", "record", "-o", str(out / name), "--", *program]
        done = subprocess.run(recording, capture_output=True, text=True, check=False)
        if done.returncode:
            failed.append(f"{name}: {done.stderr.strip()[-1500:]}")
        print(f"{name}: exit code {done.returncode}, {time.monotonic() - begun:.0f} s", flush=True)
    return failed


def check(out: Path) -> list[str]:
    """Writes the pages and prints their figures; returns what differs."""
    wrong = []
    for name in PROGRAMS:
        if not (out / name).exists():
            wrong.append(f"{name}: was not recorded")
        elif name == "jax":
            refused = label(out, name)
            print(f"jax: exit code {refused.returncode}: {refused.stderr.strip()}")
            if refused.returncode != 2 or "command buffers of XLA" not in refused.stderr:
                wrong.append("jax: the refusal is another")
        else:
            wrong += compared(out, name)
    return wrong


def main() -> None:
    given = OPTIONS.parse_args()
    out: Path = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if given.verb in PROGRAMS:
        PROGRAMS[given.verb](out / f"{given.verb}.dot")
        return
    wrong = record(out) if given.verb == "record" else check(out)
    print("\n".join(wrong) or ("all recorded" if given.verb == "record" else "all the same"))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
