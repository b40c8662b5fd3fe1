"""Where the time of a Triton kernel goes: load, compute and store of every program.

Needs an NVIDIA GPU, PyTorch and Triton. Writes inside_triton.npz; then

    thence inside inside_triton.npz
"""

import torch
import triton
import triton.language as tl

from thence.inside import triton as inside

NAMES = ["load", "compute", "store"]
LOAD, COMPUTE, STORE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SIZE = 1024


@triton.jit
def smooth(x, y, events, blocks, rounds, CAPACITY: tl.constexpr, SIZE: tl.constexpr):  # noqa: ANN001, ANN201, D103, N803
    trace = inside.begin(events, blocks, CAPACITY)
    at = 0
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    at = inside.enter(trace, at, LOAD, CAPACITY)
    value = tl.load(x + i)
    at = inside.exit_after(trace, at, LOAD, value, CAPACITY)  # when all of it is there
    at = inside.enter(trace, at, COMPUTE, CAPACITY)
    for _ in range(rounds):
        value = tl.exp(-value * value)
    at = inside.exit_after(trace, at, COMPUTE, value, CAPACITY)
    at = inside.enter(trace, at, STORE, CAPACITY)
    tl.store(y + i, value)
    at = inside.exit(trace, at, STORE, CAPACITY)
    inside.end(trace, at, CAPACITY)


def run(blocks: int = 264, rounds: int = 200, repeats: int = 1, capacity: int = 8) -> inside.Profile:
    """Launch the kernel ``repeats`` times; every launch has a buffer of its own."""
    profile = inside.Profile(NAMES, capacity=capacity, num_warps=4, kernel="smooth")
    x = torch.rand(blocks * SIZE, device="cuda")
    y = torch.empty_like(x)
    for _ in range(repeats):
        launch = profile.launch(blocks)
        smooth[(blocks,)](x, y, *launch.arguments, rounds, CAPACITY=capacity, SIZE=SIZE, num_warps=4)
    return profile


if __name__ == "__main__":
    print(*run().save("inside_triton.npz"))
