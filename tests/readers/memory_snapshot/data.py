"""Programs for the model of PyTorch's allocator, whose peak and blocks are known."""

from __future__ import annotations

import random
from typing import Any

from torch_allocator import MIB, Allocator, Block


def stack(line: int, depth: int = 3) -> list[dict[str, Any]]:
    """A stack, innermost frame first: torch's own, a model's, the script's."""
    outer = [
        {"filename": "/home/user/model.py", "line": line, "name": "forward"},
        {"filename": "/home/user/train.py", "line": 7, "name": "<module>"},
    ]
    torch = "/venv/lib/python3.12/site-packages/torch/nn/functional.py"
    inner = [{"filename": torch, "line": 100 + n, "name": "linear"} for n in range(depth - 2)]
    return [{"filename": "??", "line": 0, "name": "at::empty"}, *inner, *outer]


def busy(seed: int, steps: int, *, before: int = 0, capacity: int = 80 << 30) -> Allocator:
    """A program that allocates and frees at random: small and large blocks, streams, private pools, awaited frees.

    Args:
        seed: of the choices.
        steps: number of choices.
        before: number of choices before the history is recorded; the peak counts from then on.
        capacity: bytes of the device; half of what is live is freed when it is exceeded.
    """
    dice = random.Random(seed)
    allocator = Allocator(capacity)
    allocator.recording = before == 0
    stacks = [stack(line) for line in range(10, 30)]
    live: list[Block] = []
    awaited: list[Block] = []
    for step in range(steps):
        if step == before and before:
            allocator.recording, allocator.peak = True, allocator.allocated
        choice = dice.random()
        if live and choice < 0.45:
            block, waits = live.pop(dice.randrange(len(live))), dice.random() < 0.1
            allocator.free(block, awaiting=waits)
            awaited += [block] if waits else []
        elif awaited and choice < 0.48:
            allocator.complete(awaited.pop())
        elif choice < 0.49:
            allocator.empty_cache()
        else:
            size = int(2 ** dice.uniform(2, 26))
            stream, pool = dice.choice([(0, (0, 0)), (0, (0, 0)), (7, (0, 0)), (0, (0, 3))])
            made = allocator.malloc(size, dice.choice(stacks), stream, pool)
            if made is not None:
                live.append(made)
            else:
                while len(live) > 5:
                    allocator.free(live.pop())
    return allocator


def fragmented() -> Allocator:
    """A device of 112 MiB on which 60 MiB are free in parts of 12 MiB, and 40 MiB are asked for."""
    allocator = Allocator(112 * MIB)
    blocks = [allocator.malloc(size * MIB, stack(40)) for size in (12, 10) * 5]
    for block in blocks[::2]:
        assert block is not None
        allocator.free(block)
    assert allocator.malloc(40 * MIB, stack(41)) is None
    return allocator
