# ruff: noqa: ANN001, ANN201, N803 - code of Triton, with compile-time arguments in capitals
"""A Triton kernel of three phases: loads, arithmetic, and gathered loads; as it is, and with thence.inside's ranges."""

import triton
import triton.language as tl

from thence.inside import triton as inside

NAMES = ["load", "math", "gather"]
LOAD, MATH, GATHER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def phased(x, out, n, LOADS: tl.constexpr, STEPS: tl.constexpr, GATHERS: tl.constexpr, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.zeros((SIZE,), tl.float32)
    for r in range(LOADS):
        value = value * 0.5 + tl.load(x + (i + r * 7919 * SIZE) % n)  # load
    tl.debug_barrier()
    for _ in range(STEPS):
        value = tl.exp(value * 0.5) - value * value  # math
    tl.debug_barrier()
    for r in range(GATHERS):
        value = value * 0.5 + tl.load(x + (i * 31 + r * 1237) % n)  # gather
    tl.store(out + i % 1024, value)


@triton.jit
def ranged(
    x, out, n, events, blocks, CAPACITY: tl.constexpr, LOADS: tl.constexpr, STEPS: tl.constexpr, GATHERS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    trace = inside.begin(events, blocks, CAPACITY)
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.zeros((SIZE,), tl.float32)
    at = inside.enter(trace, 0, LOAD, CAPACITY)
    for r in range(LOADS):
        value = value * 0.5 + tl.load(x + (i + r * 7919 * SIZE) % n)
    at = inside.exit_after(trace, at, LOAD, value, CAPACITY)
    at = inside.enter(trace, at, MATH, CAPACITY)
    for _ in range(STEPS):
        value = tl.exp(value * 0.5) - value * value
    at = inside.exit_after(trace, at, MATH, value, CAPACITY)
    at = inside.enter(trace, at, GATHER, CAPACITY)
    for r in range(GATHERS):
        value = value * 0.5 + tl.load(x + (i * 31 + r * 1237) % n)
    at = inside.exit_after(trace, at, GATHER, value, CAPACITY)
    inside.end(trace, at, CAPACITY)
    tl.store(out + i % 1024, value)
