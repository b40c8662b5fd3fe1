"""What a GPU attains: FLOP/s of large matrix products by data type and bytes/s of copies, measured in ten seconds.

Data sheets state what no program reaches: power limits lower the clock under tensor cores, and no copy uses every
cycle of the memory. The best rate of several hundred milliseconds is what a program can hope for on this GPU, now.
"""

from __future__ import annotations

import json
import subprocess
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from thence import child_python
from thence.errors import MissingRequirement, UsageError
from thence.model.peaks import Peaks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECONDS_EACH = 0.8
"""How long each data type, and the copy, is repeated."""
_SIZES = {
    "float64": 4096,
    "float32": 8192,
    "tf32": 8192,
    "bfloat16": 8192,
    "float16": 8192,
    "float8": 8192,
    "int8": 8192,
}
_COPIED_BYTES = 1 << 30  # many times what the caches hold
_BATCH_SECONDS = 0.05


def measured_peaks(seconds: float = SECONDS_EACH) -> Peaks:
    """The attainable peaks of the current CUDA device; its memory must have 4 GB free.

    Args:
        seconds: for each data type, and for copies.

    Raises:
        MissingRequirement: PyTorch is not installed, or sees no GPU.
    """
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingRequirement("measuring peaks needs PyTorch, which is not installed: pip install torch") from error
    if not torch.cuda.is_available():
        raise MissingRequirement("measuring peaks needs a GPU that PyTorch can use, and it sees none")
    tflops = {}
    for dtype, size in _SIZES.items():
        product = _product(torch, dtype, size)
        if product is not None:
            # A multiplication and an addition for each element of the sum.
            tflops[dtype] = 2 * size**3 / _fastest(torch, product, seconds) / 1e12
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # Each byte is read and written.
    gbps = 2 * _COPIED_BYTES / _fastest(torch, lambda: target.copy_(source), seconds) / 1e9
    device = str(torch.cuda.get_device_name())
    return Peaks(device, MappingProxyType(tflops), gbps, "measured on this GPU: products of large matrices, and copies")


def measure_into(path: Path) -> None:
    """Measures in a process of its own, which frees the GPU's memory, and writes a file that recordings keep.

    Raises:
        MissingRequirement: PyTorch is not installed, or sees no GPU.
        UsageError: the file cannot be written.
    """
    code = "from thence.timing.measured_peaks import as_text; print(as_text())"
    command, environment = child_python.command("-c", code), child_python.environment()
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2] or f"Python ended with {done.returncode}"
        raise MissingRequirement(f"peaks could not be measured: {why.partition(': ')[2] or why}")
    try:
        path.write_text(done.stdout)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def as_text() -> str:
    """`measured_peaks` as `thence.model.peaks.measured_peaks_of` takes them, in JSON."""
    peaks = measured_peaks()
    return json.dumps({"device": peaks.device, "gbps": peaks.gbps, **peaks.tflops})


def _product(torch: Any, dtype: str, size: int) -> Callable[[], Any] | None:
    """A function that multiplies two matrices; None where this GPU or this PyTorch cannot."""

    def multiply() -> Any:
        return left @ right

    exact = torch.float32 if dtype == "tf32" else getattr(torch, dtype, None)
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    if dtype == "float8":
        exact = getattr(torch, "float8_e4m3fn", None)
    if exact is None:
        return None
    left = torch.randn(size, size, device="cuda").to(exact)
    right = left.t()
    unit = torch.ones((), device="cuda")
    special: dict[str, Callable[[], Any]] = {
        "int8": lambda: torch._int_mm(left, right),  # noqa: SLF001 - the only product of its type
        "float8": lambda: torch._scaled_mm(left, right, unit, unit, out_dtype=torch.bfloat16),  # noqa: SLF001
    }
    product = special.get(dtype, multiply)
    try:
        product()
        torch.cuda.synchronize()
    except (RuntimeError, AttributeError, ValueError):
        return None
    return product


def _fastest(torch: Any, work: Callable[[], Any], seconds: float) -> float:
    """Seconds of one call in the fastest batch of calls."""
    per_call = _batch(torch, work, 3)
    count = max(1, round(_BATCH_SECONDS / per_call))
    best, until = per_call, time.monotonic() + seconds
    while time.monotonic() < until:
        best = min(best, _batch(torch, work, count))
    return best


def _batch(torch: Any, work: Callable[[], Any], count: int) -> float:
    """Seconds of a call, from the time between two CUDA events."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(count):
        work()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / 1e3 / count
