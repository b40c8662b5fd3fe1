"""Finds libcupti, and the libraries that this process has loaded."""

from __future__ import annotations

import ctypes
import os
import re
import site
import sys
from pathlib import Path

from thence.capture.cuda.cuda_events import served_cuda
from thence.errors import MissingRequirement

_WHEEL_PATTERNS = (
    "nvidia/cu*/lib/libcupti.so.*",  # nvidia-cuda-cupti, CUDA 13 and later
    "nvidia/cuda_cupti/lib/libcupti.so.*",  # nvidia-cuda-cupti-cu11 and -cu12
    "torch/lib/libcupti*.so*",  # wheels of PyTorch that bring their own
)
_TOOLKIT_FOLDERS = ("extras/CUPTI/lib64", "lib64", "lib", "targets/x86_64-linux/lib")
_NAMES = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")


def find_libcupti() -> str:
    """Path of the libcupti to use, or its name if only the dynamic linker knows the path.

    In this order: the file that the environment variable THENCE_LIBCUPTI names, the copy that this
    process has loaded, the copy in the NVIDIA wheels that PyTorch and JAX load, the CUDA toolkit's
    copy, and the copy that the dynamic linker finds.

    Raises:
        MissingRequirement: there is no libcupti.
    """
    named = os.environ.get("THENCE_LIBCUPTI")
    if named:
        if not Path(named).is_file():
            raise MissingRequirement(f"THENCE_LIBCUPTI names {named}, which is not a file")
        return named
    for copies in (mapped_copies(), _fitting(_in_wheels()), _fitting(_in_toolkits())):
        if copies:
            return copies[0]
    for name in _NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    raise MissingRequirement(
        "there is no libcupti: install it with `pip install nvidia-cuda-cupti` (for CUDA 12: "
        "nvidia-cuda-cupti-cu12), or name the file in THENCE_LIBCUPTI"
    )


def find_libcudart() -> str | None:
    """Path of the CUDA runtime that this process has loaded as a library file; None if there is none.

    The environment variable THENCE_LIBCUDART overrides it.
    """
    named = os.environ.get("THENCE_LIBCUDART")
    loaded = (path for path in mapped_files() if Path(path).name.startswith("libcudart"))
    return named or min(loaded, default=None)


def mapped_files() -> set[str]:
    """Paths of all files that are mapped into this process."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return set()
    return {line[line.index("/") :] for line in maps.splitlines() if "/" in line}


def mapped_copies() -> list[str]:
    """Paths of the copies of libcupti that this process has loaded."""
    return sorted(path for path in mapped_files() if Path(path).name.startswith("libcupti"))


def _in_wheels() -> list[Path]:
    folders = [*sys.path, *site.getsitepackages(), site.getusersitepackages()]
    roots = [Path(folder) for folder in dict.fromkeys(folders) if folder and _is_folder(Path(folder))]
    copies = [path for root in roots for p in _WHEEL_PATTERNS for path in sorted(root.glob(p))]
    conda = Path(sys.prefix, "lib")
    return [*copies, *sorted(conda.glob("libcupti.so.*"))]


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except PermissionError:  # in the home of the user as whom the program began
        return False


def _in_toolkits() -> list[Path]:
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots = [Path(name) for name in named]
    roots += sorted(Path("/usr/local").glob("cuda*"), key=lambda path: len(path.name))
    return [
        path for root in roots for folder in _TOOLKIT_FOLDERS for path in sorted((root / folder).glob("libcupti.so.*"))
    ]


def _fitting(paths: list[Path]) -> list[str]:
    """The copies that the driver supports, newest CUDA first; all copies if none is known to be supported."""
    served = served_cuda()
    fitting = [path for path in paths if served is None or _major(path) <= served[0]]
    newest_first = sorted(fitting or paths, key=lambda path: -_major(path))
    return [str(path) for path in newest_first]


def _major(path: Path) -> int:
    """CUDA's major version from a name such as ``libcupti.so.13``; 0 for names such as ``libcupti.so.2025.3.1``."""
    match = re.search(r"\.so\.(\d+)", path.name)
    number = int(match[1]) if match else 0
    return number if number < 1000 else 0  # a year, as in toolkits, which add links
