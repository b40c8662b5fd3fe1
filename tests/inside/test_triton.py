"""The Triton side of in-kernel profiles: compiled to PTX without a GPU, where Triton is installed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from thence.inside import launches
from thence.inside.description import Limits

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from thence.inside import triton as inside  # noqa: E402

LOAD, STORE = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def copy(x, y, events, blocks, CAPACITY: tl.constexpr):  # noqa: N803
    trace = inside.begin(events, blocks, CAPACITY)
    at = 0
    i = tl.arange(0, 128)
    at = inside.enter(trace, at, LOAD, CAPACITY)
    value = tl.load(x + i)
    at = inside.exit_after(trace, at, LOAD, value, CAPACITY)
    at = inside.enter(trace, at, STORE, CAPACITY)
    tl.store(y + i, value)
    at = inside.exit(trace, at, STORE, CAPACITY)
    at = inside.instant(trace, at, STORE, CAPACITY)
    inside.end(trace, at, CAPACITY)


def ptx(element: str) -> str:
    pointers = {"x": f"*{element}", "y": f"*{element}", "events": "*i32"}
    source = triton.compiler.ASTSource(
        copy, signature={**pointers, "blocks": "i32", "CAPACITY": "constexpr"}, constexprs={"CAPACITY": 8}
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.parametrize("element", ["fp32", "fp16", "bf16", "i32", "i64", "i8"])
def test_a_kernel_of_any_element_compiles(element: str) -> None:
    text = ptx(element)
    assert len(re.findall(r"mov\.u64 \S+ %globaltimer;", text)) == 2
    assert len(re.findall(r"mov\.u64 \S+ %clock64;", text)) == 2
    assert "%smid" in text
    # the load's end is read by each thread once its element is there, and stored as the greatest
    assert "setp.ne.b32" in text
    assert "max.u32" in text or "redux.sync.max.u32" in text
    assert str(0x7E4CE001) in text


class FakeArrays:
    def zeros(self, words: int) -> np.ndarray:
        return np.zeros(words, dtype=np.uint32)

    def words(self, array: np.ndarray) -> np.ndarray:
        return array

    def limits(self) -> Limits:
        return Limits(0, 1 << 30)

    def device(self) -> int:
        return 0

    def scalar(self, value: int) -> int:
        return value


def test_the_record_for_programs_without_room_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launches._LIBRARIES, "torch", FakeArrays)
    profile = inside.Profile(["load"], capacity=3, num_warps=2, overhead_cycles=0.0)
    launch = profile.launch((2, 2))
    buffer, blocks = launch.arguments
    assert (len(buffer), blocks) == (5 * 22, 4)
    buffer[4 * 22 :] = 9
    assert len(launch.words()) == 4 * 22
    assert launch.words().max() == 0
    assert launch.description.block == (64, 1, 1)
    assert launch.description.traces_per_block == 1
