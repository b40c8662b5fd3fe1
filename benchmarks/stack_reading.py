"""What knowing lines and modules costs the program: ns of CPU time per launch, by events and by reading the stack.

    python benchmarks/stack_reading.py [--rounds 15] [--layers 8]

No GPU and no PyTorch: a program shaped like a small transformer calls its modules through a function of
``nn.Module``'s shape, on lines of which half launch, by the libcupti of the tests. In one process by turns: without
any knowledge, by an event of every line and call (``THENCE_LINES=events``), and by the stack. Each figure is
the median of what a way adds to the rounds without beside it, with quartiles. Then the same for deeper stacks,
with calls of library code between the program's own and the launch. Needs a C compiler and Python 3.12 or 3.13.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from command_line import documented_parser

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
INFERENCE, TRAINING = "stack", "stack, training"
"""In training the lines at which autograd nodes are made are followed besides, by compiled callbacks."""
STACK = (INFERENCE, TRAINING)
WAYS = ("events", *STACK)
DEPTHS = (0, 20, 60)
SETTLING = 60
"""Rounds before any is timed: lines that never launch are switched off after 32."""

LIBRARY = """
class Module:
    @property
    def _modules(self):
        return {
            f"{name}.{at}": one
            for name, value in vars(self).items()
            for at, one in enumerate(value if isinstance(value, list) else [value])
        }

    def __call__(self, *args, **kwargs):
        return self._wrapped_call_impl(*args, **kwargs)

    def _wrapped_call_impl(self, *args, **kwargs):
        return self._call_impl(*args, **kwargs)

    def _call_impl(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

def deep(depth, function):
    return deep(depth - 1, function) if depth else function()
"""
PROGRAM = """
class Linear(Module):
    def forward(self, x):
        return launch() + x

class Norm(Module):
    def forward(self, x):
        y = launch()
        z = y * 2
        y = launch() + z
        return x

class Attention(Module):
    def __init__(self):
        self.q, self.k, self.o = Linear(), Linear(), Linear()

    def forward(self, x):
        q = self.q(x)
        k = self.k(x)
        shape = (1, 2, 3)
        rotated = rotate(q, k)
        if len(shape) > 2:
            scores = launch()
        scores = launch() + rotated
        return self.o(scores)

def rotate(q, k):
    half = q // 2
    first = launch()
    second = half + 1
    return first + second

class Block(Module):
    def __init__(self):
        self.norm, self.attention, self.up, self.down = Norm(), Attention(), Linear(), Linear()

    def forward(self, x):
        residual = x
        x = self.norm(x)
        x = self.attention(x)
        x = residual + launch()
        residual = x
        x = self.up(x)
        x = self.down(x)
        return x + launch()

class Model(Module):
    def __init__(self, layers):
        self.blocks = [Block() for _ in range(layers)]

    def forward(self, x):
        for block in self.blocks:
            x = block(0)
        return x

def run(depth):
    return deep(depth, lambda: model(0))
"""


class Bench:
    """The program, and the fake CUPTI that it launches on."""

    def __init__(self, layers: int) -> None:
        from fake_cupti import library_path
        from thence.capture.boundaries.probe import choose_probe

        self.probe = choose_probe()
        if self.probe.compiled is None:
            sys.exit("the compiled probe is not built: pip install -e . with a C compiler")
        self.cupti = ctypes.PyDLL(library_path())
        handle = ctypes.c_void_p()
        callback = ctypes.c_void_p(self.probe.callback)
        self.cupti.cuptiSubscribe(ctypes.byref(handle), callback, None)
        for domain, function in ((2, 1), (2, 2), (1, 2)):
            self.cupti.cuptiEnableCallback(1, handle, domain, function)
        address = ctypes.cast(self.cupti.cudaDriverGetVersion, ctypes.c_void_p).value or 0
        self.log = self.probe.log(address)
        library: dict[str, Any] = {}
        exec(compile(LIBRARY, "/lib/site-packages/library.py", "exec"), library)
        self.program = {**library, "launch": self.cupti.fake_launch}
        exec(compile(PROGRAM, "/home/user/program.py", "exec"), self.program)
        self.program["model"] = self.program["Model"](layers)
        self.code = vars(library["Module"])["_wrapped_call_impl"].__code__

    def hooks(self, way: str) -> Any:
        """Hooks that know of the library's modules as of PyTorch's."""
        from thence.capture.boundaries.places import Places
        from thence.capture.torch.hooks import Hooks

        self.log.stack_reader = self.probe.compiled if way in STACK else None
        options = SimpleNamespace(modules=True, lines=True, own=("!stack_reading",))
        hooks = Hooks(self.log, Places(), options)
        found = hooks.way()
        if (found["by"] == "stack") != (way in STACK):
            sys.exit(f"stacks cannot be read here: {found['trouble']}")
        hooks.start()
        known = hooks._way  # noqa: SLF001 - what follows the modules of a program without PyTorch
        known.watch_modules(self.code)
        if way == TRAINING:
            known.called_without_gradients = lambda: None
        return hooks

    def timed(self, depth: int, times: int = 20) -> float:
        """Thread CPU time of one run, in ns."""
        run = self.program["run"]
        begin = time.thread_time_ns()
        for _ in range(times):
            run(depth)
        used = (time.thread_time_ns() - begin) / times
        self.log.take()
        self.probe.take_calls()
        return used

    def launches(self) -> int:
        """Of one run."""
        self.probe.take_calls()
        self.program["run"](0)
        return len(self.probe.take_calls()["number"])


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    sys.path.insert(0, str(SUPPORT))
    bench = Bench(given.layers)
    launches = bench.launches()
    print(f"{launches} launches a run, {given.rounds} rounds, ns of CPU time per launch")
    for depth in DEPTHS:
        added: dict[str, list[float]] = {way: [] for way in WAYS}
        plain = []
        for _ in range(given.rounds):
            for way in WAYS:
                without = bench.timed(depth)
                hooks = bench.hooks(way)
                bench.timed(depth, SETTLING)
                during = bench.timed(depth)
                hooks.stop()
                bench.timed(depth, 5)
                without = (without + bench.timed(depth)) / 2
                plain.append(without / launches)
                added[way].append((during - without) / launches)
        print(f"{depth} frames of a library around the program: {statistics.median(plain):.0f} without")
        for way, values in added.items():
            low, median, high = statistics.quantiles(values, n=4)
            print(f"  by {way:16} +{median:6.0f} ({low:.0f} {high:.0f})", flush=True)
        for way in STACK:
            ratio = statistics.median(added[way]) / statistics.median(added["events"])
            print(f"  {way} / events: {ratio:.2f}")


if __name__ == "__main__":
    main()
