"""GPU time of a PyTorch function, measured with CUDA events on the stream that it runs on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from thence.capture.cuda.cuda_events import load_driver
from thence.errors import MissingRequirement, WrongArgument
from thence.timing.gpu_time import GpuTime
from thence.timing.spin_kernel import HeadStart

if TYPE_CHECKING:
    import functools
    from collections.abc import Iterable

_EAGER_HEAD_START_NS = 50_000
"""Time in ns in which the host launches one operation or one CUDA graph.

A longer time would hide gaps in which the GPU waits for the host."""
_COMPILED_HEAD_START_NS = 1_000_000
"""Time in ns in which the host checks the guards of a compiled function and launches some hundred kernels.

A compiled function counts as one program, so its launch is not part of the measured time."""
_MADE_BY_COMPILE = ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")
"""Attributes set by torch.compile on functions and on modules, and by Module.compile on the module."""


def _head_start_ns(f: Any) -> int:
    """Nanoseconds for which the spin kernel runs before the first event, so that the host gets ahead."""
    compiled = any(getattr(f, name, None) is not None for name in _MADE_BY_COMPILE)
    return _COMPILED_HEAD_START_NS if compiled else _EAGER_HEAD_START_NS


def check_cuda() -> None:
    """Checks that PyTorch has a GPU.

    Raises:
        MissingRequirement: no CUDA device can be used.
    """
    import torch  # type: ignore[import-not-found,unused-ignore]  # optional dependency

    if not torch.cuda.is_available():
        raise MissingRequirement(
            "torch finds no CUDA device, but measure times NVIDIA GPUs only: `thence doctor` says what is missing here"
        )


def devices_of(leaves: Iterable[Any]) -> set[int]:
    """Indices of the CUDA devices of the tensors in ``leaves``; the current device if there is none."""
    import torch

    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    devices = {leaf.device.index for leaf in tensors if leaf.device.type == "cuda"}
    return devices or {torch.cuda.current_device()}


def wait(devices: Iterable[int]) -> None:
    """Waits until the devices have finished all queued work."""
    import torch

    for device in devices:
        torch.cuda.synchronize(device)


def time_calls(call: functools.partial[Any], devices: set[int], iterations: int) -> tuple[Any, list[GpuTime]]:
    """Times each of several calls with two events on the current stream of the device.

    Args:
        call: a function with its arguments, warmed up already.
        devices: the devices that the function uses.

    Returns:
        The return value of the last call, and the milliseconds of each call, from before its first to
        after its last operation, including time in which the GPU waits for the host.

    Raises:
        WrongArgument: the function uses several devices.
    """
    import torch

    if len(devices) > 1:
        raise WrongArgument(
            f"mode='events' times one device, but the tensors are on {len(devices)}: use "
            "mode='cupti', which adds up the kernels of all devices"
        )
    device = next(iter(devices))
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    head_start = HeadStart(load_driver())

    def hold(nanoseconds: int) -> None:
        with torch.cuda.device(device):  # handle 0 is the default stream of the current device
            head_start.hold(stream.cuda_stream, nanoseconds)

    busy_ns = _head_start_ns(call.func)
    # The first use makes the driver compile the spin kernel, and torch create the events.
    hold(0)
    start.record(stream)
    end.record(stream)
    times = []
    for _ in range(iterations):
        stream.synchronize()
        hold(busy_ns)
        begun_ns = time.perf_counter_ns()
        start.record(stream)
        outputs = call()
        end.record(stream)
        launch_ms = (time.perf_counter_ns() - begun_ns) / 1e6
        end.synchronize()
        times.append(GpuTime.of_events(start.elapsed_time(end), busy_ns / 1e6, launch_ms))
    return outputs, times
