"""The versions that a report of a defect needs, found quickly: no package is imported, no library is loaded."""

from __future__ import annotations

import platform
import re
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from thence.capture.boundaries.stacks import why_unreadable
from thence.readers.compiled import SCANNER, UNPICKLER, CompiledPart
from thence.version import __version__

if TYPE_CHECKING:
    from types import ModuleType

_LIBRARIES = ("polars", "numpy", "torch", "jax", "triton")
_CUPTI = ("nvidia-cuda-cupti", "nvidia-cuda-cupti-cu13", "nvidia-cuda-cupti-cu12", "nvidia-cuda-cupti-cu11")
PROC = Path("/proc/driver/nvidia")
"""Folder of files that a loaded NVIDIA driver provides about itself."""
IN_PYTHON = "in Python"
COMPILED = "compiled"
_PROBE = CompiledPart("thence.capture.boundaries._probe", "THENCE_PROBE")
_AS_SET = "in Python, as set by {}"
AS_ASKED, SCANNER_AS_ASKED, UNPICKLER_AS_ASKED = (_AS_SET.format(p.variable) for p in (_PROBE, SCANNER, UNPICKLER))


def versions() -> dict[str, str]:
    """Names and versions: thence, Python and the system, compiled modules, libraries, NVIDIA's libraries and driver.

    Packages that are not installed are left out; for CUPTI and the driver, the value says that they are missing.
    """
    python = f"{platform.python_version()} ({platform.python_implementation()}, {platform.platform(terse=True)})"
    known = {"thence": __version__, "python": python}
    known |= {"probe": probe_kind(), "scanner": scanner_kind(), "unpickler": unpickler_kind()}
    libraries = {name: installed_version(name) for name in _LIBRARIES}
    known |= {name: version for name, version in libraries.items() if version is not None}
    cupti = (f"{name} {v}" for name in _CUPTI if (v := installed_version(name)) is not None)
    known["libcupti"] = ", ".join(cupti) or "not in the packages of this Python (thence doctor searches further)"
    known["NVIDIA driver"] = driver_release() or "none loaded"
    return known


def installed_version(name: str) -> str | None:
    """Version of an installed distribution; None if it is not installed, or damaged."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError):  # KeyError: a broken installation
        return None


def probe_kind() -> str:
    """Which probe counts launches here, by the rules of `thence.capture.boundaries.probe.choose_probe`."""
    return _kind(_PROBE)


def scanner_kind() -> str:
    """Which scanner reads Kineto traces here, by the rules of `thence.readers.compiled`."""
    return _kind(SCANNER)


def unpickler_kind() -> str:
    """What reads snapshots of PyTorch's memory here, by the rules of `thence.readers.compiled`."""
    return _kind(UNPICKLER)


def _kind(part: CompiledPart) -> str:
    if part.switched_off:
        return _AS_SET.format(part.variable)
    return COMPILED if part.built else IN_PYTHON


def why_no_stacks() -> str | None:
    """Why modules and lines are not read from the program's stack here; None if they are."""
    return why_unreadable(_compiled())


def why_no_samples() -> str | None:
    """Why threads are not sampled while they launch nothing here; None if they are."""
    from thence.capture.boundaries.samples import why_not_sampled  # NumPy, which versions do not need

    return why_not_sampled(_compiled())


def _compiled() -> ModuleType | None:
    return import_module(_PROBE.module) if probe_kind() == COMPILED else None


def driver_release(proc: Path = PROC) -> str | None:
    """Release of the loaded NVIDIA driver, such as 580.95.05; None if no driver is loaded.

    Args:
        proc: folder of the driver's files about itself.
    """
    try:
        text = (proc / "version").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else None
