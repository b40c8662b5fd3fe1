"""One training step of a small compiled program on the CPU, in a process of its own; prints what came of it as JSON.

python compiled_step.py CACHE [thence]
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]
sys.path.insert(0, str(Path(__file__).parent))

import torch

WATCHED = "thence" in sys.argv
UP, HEAD = 24, 5
"""Widths of the layers, by which a matrix multiplication tells whose it is."""
if WATCHED:
    from thence.marks.captured_places import module_of_part
    from thence.marks.generated_lines import generated
    from thence.marks.launch_facts import main_part


class Net(torch.nn.Module):
    """Matrix multiplications alone: they are called from libraries, so that no compiler is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, UP, bias=False)
        self.head = torch.nn.Linear(UP, HEAD, bias=False)

    def forward(self, x: Any) -> Any:
        y = self.up(x)
        return self.head(y)


def files(folder: str) -> list[str]:
    """Keys of the FX graph cache: names of its folders."""
    return sorted(path.parent.name for path in Path(folder).glob("fxgraph/*/*/*"))


def step(net: Any, compiled: Any, x: Any) -> str:
    """A digest of the loss and of all gradients, to the bit."""
    net.zero_grad()
    loss = compiled(x).square().sum()
    loss.backward()
    digest = hashlib.sha256(loss.detach().numpy().tobytes())
    for parameter in net.parameters():
        digest.update(parameter.grad.numpy().tobytes())
    return digest.hexdigest()


def launched(net: Any, compiled: Any, x: Any) -> list[tuple[str, str | None, str, str]]:
    """(layer by the shape of the result, module told, operator, phase) of every matrix multiplication."""
    now: list[Any] = [None]
    found = []

    def changed(run: Any, facts: Any) -> None:
        now[0] = (run, facts)

    class Calls:
        def __getattr__(self, name: str) -> Any:
            call = getattr(torch._inductor.select_algorithm.extern_kernels, name)

            def calls(*args: Any, out: Any, **kwargs: Any) -> Any:
                run, facts = now[0]
                part = main_part(facts.parts)
                # (batch, UP) is the output of up, or in the backward the gradient of head's input.
                layer = {UP, HEAD} & {*out.shape, *args[0].shape, *args[1].shape}
                truth = "head" if HEAD in layer else "up"
                module = module_of_part(run, part, facts)
                found.append((truth, module, part.op, part.phase, part.stack[-1].split(":")[1]))
                return call(*args, out=out, **kwargs)

            return calls

    modules = torch._inductor.codecache.PyCodeCache.modules
    original = [(one, one.extern_kernels) for one in modules if hasattr(one, "extern_kernels")]
    for module, _ in original:
        module.extern_kernels = Calls()
    follows = generated.follow(changed) or generated.trace(changed)
    assert follows
    step(net, compiled, x)
    generated.unfollow(changed)
    generated.untrace(changed)
    for module, kernels in original:
        module.extern_kernels = kernels
    return found


def main() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 8)
    compiled = torch.compile(net)
    digest = step(net, compiled, x)
    counters = torch._dynamo.utils.counters
    result = {
        "digest": digest,
        "breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "keys": files(sys.argv[1]),
        "line": Net.forward.__code__.co_firstlineno + 1,
    }
    if WATCHED:
        result |= {"launches": launched(net, compiled, x), "notes": list(generated.notes)}
        result["again"] = step(net, compiled, x)
        result["recompiled"] = counters["stats"]["unique_graphs"]
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
