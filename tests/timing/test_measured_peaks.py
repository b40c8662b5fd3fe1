"""Measured peaks, with a torch made of Python whose work takes a known time."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import thence
from helpers import run_thence
from thence.timing.measured_peaks import measured_peaks

PRODUCT_MS, COPY_MS = 2.0, 0.5


class Clock:
    """The time of the fake GPU."""

    ms = 0.0


class Tensor:
    """A matrix whose product takes `PRODUCT_MS`, and whose copy takes `COPY_MS`."""

    def to(self, _dtype: object) -> Tensor:
        return self

    def t(self) -> Tensor:
        return self

    def __matmul__(self, _other: object) -> None:
        Clock.ms += PRODUCT_MS

    def copy_(self, _other: object) -> None:
        Clock.ms += COPY_MS


class Event:
    """A CUDA event."""

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = Clock.ms

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def made(*_: object, **__: object) -> Tensor:
    return Tensor()


def product(*_: object, **__: object) -> None:
    Clock.ms += PRODUCT_MS / 2


def refused(*_: object, **__: object) -> None:
    raise RuntimeError("not on this GPU")


def fake_torch() -> Any:
    """A torch without a product of float8."""
    torch: Any = ModuleType("torch")
    for dtype in ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8"):
        setattr(torch, dtype, dtype)
    torch.randn = torch.empty = torch.empty_like = torch.ones = made
    torch._int_mm, torch._scaled_mm = product, refused
    torch.backends = SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False)))
    torch.cuda = SimpleNamespace(
        is_available=lambda: True, Event=Event, synchronize=lambda: None, get_device_name=lambda: "GPU"
    )
    return torch


def test_rates_are_those_of_the_fastest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = measured_peaks(0.01)
    assert found.tflops["bfloat16"] == pytest.approx(2 * 8192**3 / (PRODUCT_MS / 1e3) / 1e12)
    assert found.tflops["float64"] == pytest.approx(2 * 4096**3 / (PRODUCT_MS / 1e3) / 1e12)
    assert found.tflops["int8"] == pytest.approx(2 * found.tflops["bfloat16"])
    assert "float8" not in found.tflops, "this GPU has no such product"
    assert found.gbps == pytest.approx(2 * 2**30 / (COPY_MS / 1e3) / 1e9)


def test_without_pytorch_or_a_gpu_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(thence.MissingRequirement, match="pip install torch"):
        measured_peaks()
    torch = fake_torch()
    torch.cuda.is_available = lambda: False
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(thence.MissingRequirement, match="it sees none"):
        measured_peaks()


def test_the_option_needs_no_trace() -> None:
    done = run_thence("roofline", "--measure-peaks")
    assert done.returncode in {0, 2}
    assert b"PyTorch" in done.stderr or b"--peak bfloat16=" in done.stdout
