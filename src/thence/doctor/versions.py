"""The versions that a report of a defect needs, found quickly: no package is imported, no library is loaded."""

from __future__ import annotations

import os
import platform
import re
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from thence.capture.boundaries.stacks import why_unreadable
from thence.version import __version__

if TYPE_CHECKING:
    from types import ModuleType

_LIBRARIES = ("polars", "numpy", "torch", "jax", "triton")
_CUPTI = ("nvidia-cuda-cupti", "nvidia-cuda-cupti-cu13", "nvidia-cuda-cupti-cu12", "nvidia-cuda-cupti-cu11")
PROC = Path("/proc/driver/nvidia")
"""Folder of files that a loaded NVIDIA driver provides about itself."""
IN_PYTHON = "in Python"
AS_ASKED = "in Python, as set by THENCE_PROBE"
SCANNER_AS_ASKED = "in Python, as set by THENCE_SCANNER"
UNPICKLER_AS_ASKED = "in Python, as set by THENCE_UNPICKLER"
COMPILED = "compiled"


def versions() -> dict[str, str]:
    """Names and versions: thence, Python and the system, compiled modules, libraries, NVIDIA's libraries and driver.

    Packages that are not installed are left out; for CUPTI and the driver, the value says that they are missing.
    """
    python = f"{platform.python_version()} ({platform.python_implementation()}, {platform.platform(terse=True)})"
    found = {"thence": __version__, "python": python, "probe": probe_kind(), "scanner": scanner_kind()}
    found["unpickler"] = unpickler_kind()
    libraries = {name: installed_version(name) for name in _LIBRARIES}
    found |= {name: version for name, version in libraries.items() if version is not None}
    cupti = (f"{name} {v}" for name in _CUPTI if (v := installed_version(name)) is not None)
    found["libcupti"] = ", ".join(cupti) or "not in the packages of this Python (thence doctor searches further)"
    found["NVIDIA driver"] = driver_release() or "none loaded"
    return found


def installed_version(name: str) -> str | None:
    """Version of an installed distribution; None if it is not installed, or damaged."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError):  # KeyError: a broken installation
        return None


def probe_kind() -> str:
    """Which probe counts launches here, by the rules of `thence.capture.boundaries.probe.choose_probe`."""
    if os.environ.get("THENCE_PROBE") == "python":
        return AS_ASKED
    return IN_PYTHON if find_spec("thence.capture.boundaries._probe") is None else COMPILED


def scanner_kind() -> str:
    """Which scanner reads Kineto traces here, by the rules of `thence.readers.kineto.compiled`."""
    if os.environ.get("THENCE_SCANNER") == "python":
        return SCANNER_AS_ASKED
    return IN_PYTHON if find_spec("thence.readers.kineto._scanner") is None else COMPILED


def unpickler_kind() -> str:
    """What reads snapshots of PyTorch's memory here, by the rules of `thence.readers.memory_snapshot.compiled`."""
    if os.environ.get("THENCE_UNPICKLER") == "python":
        return UNPICKLER_AS_ASKED
    return IN_PYTHON if find_spec("thence.readers.memory_snapshot._unpickler") is None else COMPILED


def why_no_stacks() -> str | None:
    """Why modules and lines are not read from the program's stack here; None if they are."""
    return why_unreadable(_compiled())


def why_no_samples() -> str | None:
    """Why threads are not sampled while they launch nothing here; None if they are."""
    from thence.capture.boundaries.samples import why_not_sampled  # NumPy, which versions do not need

    return why_not_sampled(_compiled())


def _compiled() -> ModuleType | None:
    return import_module("thence.capture.boundaries._probe") if probe_kind() == COMPILED else None


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
