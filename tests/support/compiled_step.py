"""Training steps of a small compiled program on the CPU, each in its own process; prints as JSON what came of them.

    python compiled_step.py CACHE[+thence]...

Each names the cache that Inductor has, and whether thence is there. They run one after the other, as copies of a
process that has imported PyTorch and its compiler, which takes longer than a step; of Inductor only what the compiler
itself imports, so that thence sees the rest of it come.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

UP, HEAD = 24, 5
"""Widths of the layers, by which a matrix multiplication tells whose it is."""
THENCE = "+thence"


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
    from thence.capture.marks.captured_places import module_of_part
    from thence.capture.marks.generated_lines import generated
    from thence.capture.marks.launch_facts import main_part

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


def trained(cache: str, *, watched: bool) -> dict[str, Any]:
    """What comes of the step with a cache, in this process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    if watched:
        from thence.capture.marks.generated_lines import generated
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
        "keys": files(cache),
        "line": Net.forward.__code__.co_firstlineno + 1,
    }
    if watched:
        result |= {"launches": launched(net, compiled, x), "notes": list(generated.notes)}
        result["again"] = step(net, compiled, x)
        result["recompiled"] = counters["stats"]["unique_graphs"]
    return result


def copied(cache: str, *, watched: bool) -> None:
    """Runs the step in a copy of this process, which prints a line.

    Raises:
        SystemExit: it failed.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.stdout.write(json.dumps(trained(cache, watched=watched)) + "\n")
            sys.stdout.flush()
            code = 0
        finally:  # whatever happened, the copy must not go on as its parent
            if code:
                traceback.print_exc()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"{cache}: ended with {os.waitstatus_to_exitcode(status)}")


def main() -> None:
    assert "torch._inductor.compile_fx" not in sys.modules
    for name in sys.argv[1:]:
        copied(name.removesuffix(THENCE), watched=name.endswith(THENCE))


if __name__ == "__main__":
    main()
