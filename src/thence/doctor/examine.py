"""Checks what thence can do on this machine: for each capability whether it works, why not, and a remedy.

Frameworks are looked up among the installed packages and never imported. Checks that could crash run in
another process (`thence.doctor.probe`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thence.capture.cuda.cupti import BUSY, RIGHTS_CURE, TAKEN
from thence.capture.cuda.cupti_owner import holder
from thence.capture.launcher.first_use import SETTINGS, settings_of
from thence.capture.recorder.options import options_of
from thence.doctor.probe import Finding, probe
from thence.doctor.versions import (
    AS_ASKED,
    COMPILED,
    IN_PYTHON,
    PROC,
    driver_release,
    installed_version,
    probe_kind,
    scanner_kind,
    unpickler_kind,
    why_no_samples,
    why_no_stacks,
)
from thence.errors import UsageError
from thence.readers.compiled import SCANNER, UNPICKLER

_PROC = PROC
_PROFILING_CAPABILITIES = (1 << 21) | (1 << 38)  # CAP_SYS_ADMIN, CAP_PERFMON
_WITH = {"driver": "an NVIDIA GPU", "libcupti": "libcupti"}
_NO_PRIVILEGE = 35
"""CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"""
_NO_PROFILING = {33, 38, 40, 41, 42, 43, 44, 45}
"""CUPTI's errors for devices that cannot be profiled at all: virtual ones, MIG, SLI and others."""
_ROOM_BYTES = 2 << 30
_OLDEST_JAX = (0, 6)
_WITH_NODE_IDS = (2, 12)
"""First version of torch whose profiler writes the id of the CUDA graph node with each kernel."""
_MARK_KERNELS_DRIVER = 13010
"""CUDA version of the driver that torch.cuda.graphs' own mark_kernels needs."""


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing that thence can do, or cannot, here.

    Attributes:
        name: as ``thence doctor --need`` takes it.
        works: whether it can be used.
        found: what there is, or why it cannot be used; a sentence without its full stop.
        cure: what to do about it; "" where nothing is to be done.
    """

    name: str
    works: bool
    found: str
    cure: str = ""

    def to_json(self) -> dict[str, Any]:
        """As ``thence doctor --format json`` shows it."""
        return {"name": self.name, "works": self.works, "found": self.found, "cure": self.cure}


_Answer = tuple[bool, str, str]
"""The last three attributes of a capability."""


def _yes(text: str) -> _Answer:
    return True, text, ""


def _no(text: str, cure: str) -> _Answer:
    return False, text, cure


Versions = Callable[[str], str | None]
"""Version of an installed distribution; None where it is not installed."""


@dataclass(frozen=True, slots=True)
class _Machine:
    findings: Mapping[str, Finding]
    version: Versions

    def first(self, *names: str) -> tuple[str, str] | None:
        """Name and version of the first of these distributions that is installed."""
        return next(((n, v) for n in names if (v := self.version(n)) is not None), None)

    def missing(self, *steps: str) -> str | None:
        """The first of these steps that failed; None if none did."""
        return next((step for step in steps if self.error(step)), None)

    def error(self, step: str) -> str | None:
        return self.findings[step].get("error")

    def code(self, step: str) -> int | None:
        """CUptiResult of a step that failed; None if CUPTI said none."""
        return self.findings[step].get("code")


def examine(findings: Mapping[str, Finding] | None = None, version: Versions | None = None) -> tuple[Capability, ...]:
    """Every capability, in the order of `CHECKS`.

    Args:
        findings: from `thence.doctor.probe.probe`; by default, it is called.
        version: looks up a distribution; by default, among those that Python finds.
    """
    machine = _Machine(probe() if findings is None else findings, version or installed_version)
    return tuple(Capability(name, *check(machine)) for name, check in CHECKS.items())


def _driver(machine: _Machine) -> _Answer:
    error = machine.error("driver")
    release = driver_release(_PROC)
    if error:
        return _no(error, _driver_cure(release))
    finding = machine.findings["driver"]
    devices = [device["name"] for device in finding["devices"]]
    named = f"NVIDIA driver {release}" if release else "an NVIDIA driver"
    return _yes(f"{named} for {_cuda(finding['version'])}; {_device_counts(devices)}")


def _driver_cure(release: str | None) -> str:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return "CUDA_VISIBLE_DEVICES hides every GPU: unset it"
    if release:
        return (
            f"driver {release} is loaded, but this process cannot use it: start the container with the "
            "NVIDIA runtime (docker run --gpus all), and see what nvidia-smi says"
        )
    return (
        "reading and analysing traces needs no GPU; to record or measure, run on a machine with an "
        "NVIDIA GPU and its driver"
    )


def _libcupti(machine: _Machine) -> _Answer:
    finding, error = machine.findings["libcupti"], machine.error("libcupti")
    if "path" not in finding:
        cure = "see driver" if machine.missing("driver") else _CUPTI_CURE
        return _no(error or "the check returned no result", cure)
    where = f"{finding['path']}, version {finding['version']}"
    if error:
        return _no(f"{where}: {error}", _CUPTI_CURE)
    return _yes(f"{where}; thence knows the layouts of its records")


_CUPTI_CURE = "pip install nvidia-cuda-cupti (CUDA 12: nvidia-cuda-cupti-cu12); PyTorch and JAX install it"


def _recording(machine: _Machine) -> _Answer:
    missing = machine.missing("driver", "libcupti")
    if missing:
        also = "" if hasattr(sys, "monitoring") else f"; {_lines_text()}"
        return _no(f"nothing can be recorded without {_WITH[missing]}{also}", f"see {missing}")
    error = machine.error("recording")
    if error:
        return _no(error, _recording_cure(machine))
    finding = machine.findings["recording"]
    return _yes(
        f"a kernel was launched and recorded ({finding['microseconds']:.1f} us); {_probe_text()}; "
        f"{_lines_text()}; {_samples_text()}"
    )


def _counters(machine: _Machine) -> _Answer:
    refused = _not_sampled(machine, "hardware counters", "why_no_counters")
    error = machine.error("counters")
    if refused is None and error:
        return _no(f"hardware counters cannot be sampled: {error}", _SAMPLING_CURES[machine.code("counters") == BUSY])
    works = "thence record --counters samples hardware counters, if no other tool samples the same GPU"
    return refused or _yes(works)


_SAMPLING_CURES = {
    True: "end the other one, or record: each window is tried again",
    False: "record without --counters and --stalls; kernels, places and times are recorded all the same",
}
"""By whether another process samples the device."""


def _stalls(machine: _Machine) -> _Answer:
    refused = _not_sampled(machine, "stalls", "why_no_stalls")
    if refused is None and probe_kind() != COMPILED:
        return _no("stalls cannot be sampled without the compiled probe", "see recording")
    return refused or _yes("thence record --stalls samples where inside kernels warps wait")


def _not_sampled(machine: _Machine, what: str, why_not: str) -> _Answer | None:
    """Why the hardware cannot be sampled; None if it can, as far as is known."""
    missing = machine.missing("driver", "libcupti")
    if missing:
        return _no(f"{what} cannot be sampled without {_WITH[missing]}", f"see {missing}")
    why = machine.findings["libcupti"].get(why_not)
    if why:
        return _no(f"{what} cannot be sampled: {why}", _CUPTI_CURE)
    code = machine.code("counters")
    if code == _NO_PRIVILEGE or (_admins_only() and not _may_profile()):
        return _no(f"{what} are for administrators only here", RIGHTS_CURE)
    if code in _NO_PROFILING:
        return _no(f"{what} cannot be sampled: {machine.error('counters')}", _SAMPLING_CURES[False])
    return None


def _probe_text() -> str:
    """Which probe counts launches here, and what it costs."""
    kind = probe_kind()
    if kind == IN_PYTHON:
        return (
            "launches are counted in Python, which takes about 1 us at each place of the program; the compiled probe, "
            "ten times as fast, is in the wheels for Linux and is built where there is a C compiler"
        )
    return f"launches are counted {kind}" if kind == AS_ASKED else "launches are counted by the compiled probe"


def _lines_text() -> str:
    """How the recorder finds modules and lines of a PyTorch program here."""
    if not hasattr(sys, "monitoring"):
        return "modules and lines of programs without annotations need Python 3.12 or newer"
    why = why_no_stacks()
    if why is None:
        return "modules and lines are read from the program's stack at each launch"
    return f"modules and lines are followed through Python's monitoring events, which cost more: {why}"


def _samples_text() -> str:
    """Whether the recorder can see what the host does while it launches nothing."""
    why = why_no_samples()
    if why is None:
        return "threads are sampled while they launch nothing"
    return f"what the host does while it launches nothing is not sampled: {why}"


def _recording_cure(machine: _Machine) -> str:
    code = machine.code("recording")
    owner = holder() if code == TAKEN else None
    if owner:
        return f"{owner[0]} uses CUPTI: {owner[1]}"
    if code == _NO_PRIVILEGE or (_admins_only() and not _may_profile()):
        return RIGHTS_CURE
    return "thence.measure(f, mode='events') works without CUPTI"


def _variable(_machine: _Machine) -> _Answer:
    """What the variable that records any process asks for, with all of its options."""
    value = os.environ.get(SETTINGS)
    if value is None:
        return _yes(f"{SETTINGS} is not set: processes record themselves only under thence record")
    try:
        directory, options = settings_of(value)
        options_of(options)
    except UsageError as error:
        return _no(str(error), f"correct or unset {SETTINGS}; until then, processes run without being recorded")
    return _yes(f"{SETTINGS}: every process that uses a GPU is recorded to {directory}")


def _nvtx(machine: _Machine) -> _Answer:
    missing = machine.missing("driver", "libcupti")
    if missing:
        return _no(f"NVTX ranges cannot be recorded without {_WITH[missing]}", f"see {missing}")
    finding = machine.findings["libcupti"]
    if "InitializeInjectionNvtx2" not in finding["functions"]:
        return _no("this libcupti does not accept NVTX ranges", "use a newer one: see libcupti")
    set_to = os.environ.get("NVTX_INJECTION64_PATH")
    if set_to and Path(set_to).name != Path(finding["path"]).name:
        return _no(
            f"NVTX ranges go to {Path(set_to).name}, not to libcupti",
            "unset NVTX_INJECTION64_PATH, or run without the tool that set it",
        )
    return _yes("NVTX ranges, including those of XLA, reach the recorder")


def _graphs(machine: _Machine) -> _Answer:
    missing = machine.missing("driver", "libcupti")
    if missing:
        return _no(f"CUDA graphs cannot be labelled without {_WITH[missing]}", f"see {missing}")
    error = machine.error("graphs")
    if error:
        return _no(error, "libcupti of CUDA 12 or newer is needed: see libcupti")
    text = "kernels of CUDA graphs get the labels that were open at capture"
    version = machine.findings["driver"]["version"]
    if version < _MARK_KERNELS_DRIVER:
        text += f" (torch's own mark_kernels would need a driver for CUDA 13.1; this one is for {_cuda(version)})"
    return _yes(text)


def _measure(machine: _Machine) -> _Answer:
    if machine.error("driver"):
        return _no("nothing can be measured without an NVIDIA GPU", "see driver")
    if not (_torch(machine)[0] or _jax(machine)[0]):
        return _no("neither torch nor jax with CUDA is installed", "see torch and jax")
    if machine.error("recording"):
        return _yes("mode='events'; mode='cupti' needs recording")
    return _yes("mode='cupti' and mode='events'")


def _torch(machine: _Machine) -> _Answer:
    version = machine.version("torch")
    if version is None:
        return _no("torch is not installed", "pip install torch, if wanted")
    if "+cpu" in version:
        return _no(f"torch {version} is built for the CPU only", "install a CUDA build of it")
    nodes = (
        "its profiler names the nodes of CUDA graphs"
        if _numbers(version) >= _WITH_NODE_IDS
        else "its profiler does not name the nodes of CUDA graphs (2.12 does): the recorder of thence does, "
        "and `thence label` adds labels to its traces"
    )
    return _yes(f"torch {version}; {nodes}")


def _jax(machine: _Machine) -> _Answer:
    version = machine.version("jax")
    if version is None:
        return _no("jax is not installed", "pip install 'jax[cuda13]', if wanted")
    if _numbers(version) < _OLDEST_JAX:
        return _no(f"jax {version} is too old", "0.6 and newer are supported")
    plugin = machine.first("jax-cuda13-plugin", "jax-cuda12-plugin")
    if plugin is None:
        return _no(
            f"jax {version} has no CUDA plugin, so it runs on the CPU",
            "pip install 'jax[cuda13]' (CUDA 12: 'jax[cuda12]')",
        )
    text = f"jax {version} with {plugin[0]} {plugin[1]}; on_stream, measure and xplane files work"
    return _yes(text)


def _nsys(_machine: _Machine) -> _Answer:
    path = shutil.which("nsys")
    if path:
        return _yes(f"{path}: .nsys-rep reports can be read")
    return _no(
        "nsys is not on PATH, so .nsys-rep reports cannot be read; their exports can",
        "where nsys is installed, run: nsys export --type sqlite report.nsys-rep",
    )


def _inside(machine: _Machine) -> _Answer:
    ways = []
    cupy = machine.first("cupy-cuda13x", "cupy-cuda12x", "cupy")
    if cupy:
        ways.append(f"CUDA C++ (CuPy {cupy[1]})")
    triton = machine.version("triton")
    if triton:
        ways.append(f"Triton {triton}")
    if _jax(machine)[0]:
        ways.append(f"Pallas and Mosaic GPU (jax {machine.version('jax')})")
    if not ways:
        return _no(
            "neither CuPy nor Triton nor jax with CUDA is installed; buffers made elsewhere can be decoded",
            "pip install cupy-cuda13x, triton or 'jax[cuda13]', whichever the kernels are written in",
        )
    if machine.error("driver"):
        return _no(f"{', '.join(ways)}, but no GPU", "needs the GPU and its driver (see driver)")
    return _yes(f"kernels written in {', '.join(ways)}")


def _scanner(_machine: _Machine) -> _Answer:
    slower = "which takes some six times as much CPU time as the compiled scanner"
    return _reader("Kineto traces are read", "scanner", scanner_kind(), slower, SCANNER.variable)


def _unpickler(_machine: _Machine) -> _Answer:
    slower = "up to 64 MB, which takes a hundred times as much CPU time as with the compiled unpickler"
    return _reader("snapshots of PyTorch's memory are read", "unpickler", unpickler_kind(), slower, UNPICKLER.variable)


def _reader(read: str, part: str, kind: str, slower: str, variable: str) -> _Answer:
    """Whether a part of a reader is compiled; ``read`` says what it reads, ``slower`` what it costs without."""
    if kind == COMPILED:
        return _yes(f"{read} by the compiled {part}")
    built = f"the {part} is in the wheels for Linux and is built where there is a C compiler"
    return _no(f"{read} {kind}, {slower}", built if kind == IN_PYTHON else f"unset {variable}")


def _disk(_machine: _Machine) -> _Answer:
    folder = Path.cwd()
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free in {folder}"
    if not os.access(folder, os.W_OK):
        return _no(f"{folder} cannot be written to", "record with -o DIR elsewhere")
    if free < _ROOM_BYTES:
        return _no(text, "a recording of 10 million kernels needs about 1 GB")
    return _yes(text)


CHECKS: dict[str, Callable[[_Machine], _Answer]] = {
    "driver": _driver,
    "libcupti": _libcupti,
    "recording": _recording,
    "counters": _counters,
    "stalls": _stalls,
    "variable": _variable,
    "nvtx": _nvtx,
    "graphs": _graphs,
    "measure": _measure,
    "torch": _torch,
    "jax": _jax,
    "nsys": _nsys,
    "inside": _inside,
    "scanner": _scanner,
    "unpickler": _unpickler,
    "disk": _disk,
}
"""The checks, in the order of the output."""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _cuda(version: int) -> str:
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _device_counts(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _admins_only() -> bool:
    """Whether the driver was loaded with NVreg_RestrictProfilingToAdminUsers=1, its default."""
    try:
        text = (_PROC / "params").read_text(errors="replace")
    except OSError:
        return False
    return "RmProfilingAdminOnly: 1" in text


def _may_profile() -> bool:
    """Whether this process has a capability (CAP_SYS_ADMIN, CAP_PERFMON) that the driver accepts for profiling."""
    try:
        status = Path("/proc/self/status").read_text(errors="replace")
    except OSError:
        return False
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(match and int(match[1], 16) & _PROFILING_CAPABILITIES)
