"""Which other profiler uses CUPTI if a recording cannot, and what the user can do about it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from thence.capture.cuda.libraries import mapped_files

_LIBRARIES = (
    # part of the file name, the tool that loads the library, the advice
    ("libToolsInjection", "Nsight Systems (nsys)", "run the program without nsys"),
    ("libInterceptorInjection", "Nsight Compute (ncu)", "run the program without ncu"),
    ("libcuda-injection", "Nsight Compute (ncu)", "run the program without ncu"),
    ("libsanitizer", "compute-sanitizer", "run the program without compute-sanitizer"),
    ("libdcgm", "DCGM's profiling in this process", "switch it off"),
)


def holder() -> tuple[str, str] | None:
    """The tool that probably uses CUPTI in this process, and advice to the user; None if no tool is found."""
    for profiler, runs in (("torch.profiler", _torch_profiles), ("jax.profiler", _jax_profiles)):
        if runs():
            return profiler, f"end that profile first, or leave {profiler} out of this run"
    return _by_library() or _by_environment() or _earlier()


def _by_library() -> tuple[str, str] | None:
    files = {Path(path).name for path in mapped_files()}
    profilers = ((name, out) for part, name, out in _LIBRARIES if any(part in f for f in files))
    return next(profilers, None)


def _by_environment() -> tuple[str, str] | None:
    if any(name.startswith("NSYS_") for name in os.environ):
        return "Nsight Systems (nsys)", "run the program without nsys"
    path = os.environ.get("CUDA_INJECTION64_PATH")
    return (f"{path} (CUDA_INJECTION64_PATH)", "unset that variable") if path else None


def _earlier() -> tuple[str, str] | None:
    """The framework that may still hold CUPTI: frameworks keep it after their profile has ended."""
    if "torch" in sys.modules:
        return (
            "torch.profiler, probably, which keeps it after its first profile,",
            "record before that, or set TEARDOWN_CUPTI=1 in the program's environment",
        )
    if "jax" in sys.modules:
        return "jax.profiler, probably,", "record in a process that has not used it"
    return None


def taken() -> str:
    """The message for CUPTI's error 39, with the tool that probably uses CUPTI."""
    owner = holder()
    if owner is None:
        return (
            "another profiler in this process uses CUPTI, which serves one at a time (error 39), "
            "and thence cannot identify it; run the program without it"
        )
    profiler, advice = owner
    return f"CUPTI serves one profiler at a time (error 39), and {profiler} has it: {advice}"


def _torch_profiles() -> bool:
    torch = sys.modules.get("torch")
    try:
        return bool(torch and torch.autograd._profiler_enabled())  # noqa: SLF001 - the only answer
    except AttributeError:
        return False


def _jax_profiles() -> bool:
    profiler = sys.modules.get("jax._src.profiler")
    state = getattr(profiler, "_profile_state", None)
    return getattr(state, "profile_session", None) is not None
