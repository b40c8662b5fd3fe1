"""GPU time of a PyTorch function, measured with CUDA events on the stream that it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thence.cuda.cuda_events import load_driver
from thence.errors import MissingRequirement, WrongArgument
from thence.timing.spin_kernel import HeadStart

if TYPE_CHECKING:
    import functools
    from collections.abc import Iterable

__all__ = ["check_cuda", "devices_of", "time_calls", "wait"]

_EAGER_HEAD_START_NS = 50_000
"""Launching one operation, or one CUDA graph. More would hide gaps that the host makes."""
_COMPILED_HEAD_START_NS = 1_000_000
"""Checking the guards of a compiled function, and launching some hundred kernels: it is one program."""
_MADE_BY_COMPILE = ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")
"""Attributes set by torch.compile on functions and on modules, and by Module.compile on the module."""


def _head_start_ns(f: Any) -> int:
    """Nanoseconds for which the spin kernel runs before the first event, so that the host gets ahead."""
    compiled = any(getattr(f, name, None) is not None for name in _MADE_BY_COMPILE)
    return _COMPILED_HEAD_START_NS if compiled else _EAGER_HEAD_START_NS


def check_cuda() -> None:
    """Refuses a PyTorch that has no GPU.

    Raises:
        MissingRequirement: no CUDA device can be used.
    """
    import torch  # type: ignore[import-not-found,unused-ignore]  # needed by those who use it

    if not torch.cuda.is_available():
        raise MissingRequirement(
            "torch finds no CUDA device, and measure times NVIDIA GPUs only: `thence doctor` says what "
            "is missing here"
        )


def devices_of(leaves: Iterable[Any]) -> set[int]:
    """Numbers of the CUDA devices that hold these tensors; the current one where none does."""
    import torch

    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    devices = {leaf.device.index for leaf in tensors if leaf.device.type == "cuda"}
    return devices or {torch.cuda.current_device()}


def wait(devices: Iterable[int]) -> None:
    """Returns when the devices have done everything that they were given."""
    import torch

    for device in devices:
        torch.cuda.synchronize(device)


def time_calls(
    call: functools.partial[Any], devices: set[int], iterations: int
) -> tuple[Any, list[float]]:
    """Calls again and again, between two events on the current stream of the device.

    Args:
        call: a function with its arguments, warmed up already.
        devices: those that it works on.
        iterations: how often to call.

    Returns:
        What the last call returned, and the milliseconds from before the first to after the last
        operation of each, the GPU's waiting for the host included.

    Raises:
        WrongArgument: it works on several devices.
    """
    import torch

    if len(devices) > 1:
        raise WrongArgument(
            f"mode='events' times one device, and the tensors are on {len(devices)}: use mode='cupti', "
            "which adds up the kernels of all"
        )
    device = next(iter(devices))
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    head_start = HeadStart(load_driver())

    def hold(nanoseconds: int) -> None:
        with torch.cuda.device(device):  # "default stream" means that of the current device
            head_start.hold(stream.cuda_stream, nanoseconds)

    busy_ns = _head_start_ns(call.func)
    # The first time, the driver translates the kernel, and torch makes the events.
    hold(0)
    start.record(stream)
    end.record(stream)
    times = []
    for _ in range(iterations):
        stream.synchronize()
        hold(busy_ns)
        start.record(stream)
        outputs = call()
        end.record(stream)
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return outputs, times
