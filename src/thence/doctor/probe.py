"""Tests the driver and CUPTI of this machine in a separate process.

``python -m thence.doctor.probe`` prints one JSON object per line, each as soon as it is known, so that a
crash loses only what comes after. `probe` runs it and collects the lines:

    driver    version (13000: CUDA 13.0), devices [{name, capability}]
    libcupti  path, version, functions that newer versions have, error (None if its version is known), and why it
              cannot sample hardware counters or stalls (None if it can)
    recording name of the kernel that was launched and recorded, and its duration
    graphs    id that CUPTI gives a node of a CUDA graph
    counters  hardware counters that the first device sampled for a moment
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from typing import TYPE_CHECKING, Any

from thence import child_python
from thence.capture.cuda import cuda_events, cupti
from thence.capture.cuda.cuda_events import call
from thence.capture.cuda.layouts import require_known
from thence.errors import MissingRequirement, ThenceError
from thence.timing.spin_kernel import KERNEL_NAME, HeadStart, capability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Finding = dict[str, Any]
"""Results of a step, or {"error": a sentence}."""

STEPS = ("driver", "libcupti", "recording", "graphs", "counters")
_PATIENCE_S = 90


def probe(command: tuple[str, ...] | None = None) -> dict[str, Finding]:
    """Findings of every step; a step that ended the process, and the steps after it, have an error.

    Args:
        command: to run in place of the probe.
    """
    arguments = command or child_python.command("-m", "thence.doctor.probe")
    try:
        run = subprocess.run(  # noqa: S603 - our own module in our own interpreter
            arguments,
            env=child_python.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
        output, ending = run.stdout, _ending(run.returncode, run.stderr)
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"the check took longer than {_PATIENCE_S} s"
    except OSError as error:
        output, ending = b"", f"the check could not be started: {error}"
    findings = dict(_lines(output))
    for step in STEPS:
        if step not in findings:
            findings[step] = {"error": ending or "the step printed no result"}
            ending = "not tried, because an earlier check failed"
    return findings


def _ending(code: int, errors: bytes) -> str:
    if code == 0:
        return ""
    if code > 0:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the check ended with exit code {code}: {last[:200]}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"the check was ended by {name}"


def _lines(output: bytes) -> Iterator[tuple[str, Finding]]:
    """Step and finding of each line; lines that libraries print to standard output are skipped."""
    for line in output.decode(errors="replace").splitlines():
        try:
            finding = json.loads(line)
        except ValueError:
            continue
        if isinstance(finding, dict) and finding.get("step") in STEPS:
            yield finding.pop("step"), finding


def main() -> None:
    """Runs every step, and prints its finding."""
    steps: dict[str, Callable[[], Finding]] = {
        "driver": _driver,
        "libcupti": _libcupti,
        "recording": _recording,
        "graphs": _graphs,
        "counters": _counters,
    }
    for step in STEPS:
        try:
            finding = steps[step]()
        except ThenceError as error:
            finding = {"error": str(error), "code": getattr(error, "code", None)}
        sys.stdout.write(json.dumps({"step": step, **finding}) + "\n")
        sys.stdout.flush()


def _driver() -> Finding:
    driver = cuda_events.load_driver()
    version, count = c_int(), c_int()
    call(driver, "cuDriverGetVersion", byref(version))
    call(driver, "cuInit", c_uint(0))
    call(driver, "cuDeviceGetCount", byref(count))
    devices = []
    for i in range(count.value):
        name = ctypes.create_string_buffer(256)
        call(driver, "cuDeviceGetName", name, c_int(len(name)), c_int(i))
        text = name.value.decode(errors="replace")
        devices.append({"name": text, "capability": capability(driver, i)})
    return {"version": version.value, "devices": devices}


def _libcupti() -> Finding:
    from thence.capture.cuda import pc_sampling, pm_sampling  # need NumPy

    library = cupti.load()
    finding: Finding = {"path": library.path, "version": library.version(), "error": None}
    finding["why_no_counters"] = pm_sampling.why_not_sampled(library)
    finding["why_no_stalls"] = pc_sampling.why_not_sampled(library)
    functions = ("cuptiGetGraphNodeId", "cuptiGetGraphExecId", "InitializeInjectionNvtx2")
    finding["functions"] = [name for name in functions if library.has(name)]
    try:
        require_known(finding["version"])
    except MissingRequirement as error:
        finding["error"] = str(error)
    return finding


def _recording() -> Finding:
    """Launches a kernel, and checks whether CUPTI records it."""
    from thence.timing.kernel_times import KernelTimes  # needs NumPy, which `probe` does not

    driver, context = cuda_events.load_driver(), c_void_p()
    with KernelTimes() as recorded:
        call(driver, "cuInit", c_uint(0))
        call(driver, "cuDevicePrimaryCtxRetain", byref(context), c_int(0))
        call(driver, "cuCtxSetCurrent", context)
        HeadStart(driver).hold(0, 0)
        call(driver, "cuCtxSynchronize")
        kernels = recorded.take()
    names = kernels.names
    if names != [KERNEL_NAME]:
        raise MissingRequirement(f"one kernel ran, but CUPTI recorded {len(names)}: {names[:3]}")
    return {"kernel": names[0], "microseconds": kernels.ms[0] * 1e3}


def _graphs() -> Finding:
    """Creates a CUDA graph of one empty node, and gets the node's id from CUPTI."""
    driver = cuda_events.load_driver()
    graph, node = c_void_p(), c_void_p()
    call(driver, "cuGraphCreate", byref(graph), c_uint(0))
    call(driver, "cuGraphAddEmptyNode", byref(node), graph, None, c_size_t(0))
    return {"node": cupti.load().graph_node_id(node.value or 0)}


def _counters() -> Finding:
    """Samples hardware counters for a moment, as a recording would. The device has the context of `_recording`."""
    from thence.capture.cuda.pm_sampling import PmSampler, Room  # need NumPy
    from thence.capture.recorder.options import HARDWARE_BYTES, MAX_COUNTER_BYTES
    from thence.model.counter_names import BY_NAME, DEFAULT
    from thence.timing.kernel_times import KernelTimes

    wanted = {name: metric for name in DEFAULT if (metric := BY_NAME[name].metric)}
    with KernelTimes():
        sampler = PmSampler(cupti.load(), 0, wanted, 1_000_000, Room(100, HARDWARE_BYTES, MAX_COUNTER_BYTES))
        try:
            sampler.start()
            sampler.stop()
        finally:
            sampler.close()
    return {"sampled": list(sampler.metrics)}


if __name__ == "__main__":
    main()
