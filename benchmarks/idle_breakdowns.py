"""Idle time of traces of torch.profiler as thence and HTA's idle time breakdown say it, beside a count of the file.

HTA (pip install HolisticTraceAnalysis) wants other versions of libraries than thence does, so it runs in an
interpreter of its own::

    python benchmarks/idle_breakdowns.py TRACE... --hta PATH/TO/PYTHON

For each trace (one rank): idle time as the raw file has it (span less union of kernels, copies and sets, counted here),
as thence's causes add up, and as HTA's temporal breakdown states it; then thence's causes in three groups (the host:
what has not been launched yet, and launching; between queued kernels; behind events and unknown) beside HTA's host
wait, kernel wait and other, which are sums over streams: a stream that waits while another works counts.
nan is printed where HTA has no such row, or fails.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import polars as pl

import thence
from command_line import documented_parser
from thence.analysis.idle.causes import idle_causes

OF_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
GROUPS = {"queued": "queued", "event_wait": "other", "unknown": "other"}
HTA = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1], include_last_profiler_step=True)
rank = sorted(analysis.t.traces)[0]
streams = analysis.get_idle_time_breakdown(ranks=[rank], visualize=False)[0]
try:
    idle = analysis.get_temporal_breakdown(visualize=False)["idle_time(us)"].sum()
except AssertionError:  # it asserts that time of kernels that do not compute is not negative
    idle = float("nan")
found = {name: float(us) for name, us in streams.groupby("idle_category")["idle_time"].sum().items()}
print(json.dumps({"idle": float(idle), **found}))
"""


def of_file(path: Path) -> float:
    """Microseconds of idle time, counted in the raw file."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    times = sorted((each["ts"], each["ts"] + each["dur"]) for each in events if each.get("cat") in OF_DEVICE)
    idle, reached = 0.0, times[0][0]
    for begin, end in times:
        idle += max(begin - reached, 0)
        reached = max(reached, end)
    return idle


def of_thence(path: Path) -> dict[str, float]:
    """Microseconds of idle time by group of causes."""
    pieces = idle_causes(thence.open(path).whole)
    result = dict.fromkeys(("host", "queued", "other"), 0.0)
    for cause, ns in pieces.group_by("cause").agg(pl.col("duration").sum()).rows():
        result[GROUPS.get(cause, "host")] += ns / 1000
    return result


def of_hta(python: str, path: Path) -> dict[str, float]:
    """Microseconds of idle time, and of waiting summed over streams, as HTA says; empty where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, folder)
        ran = subprocess.run([python, "-c", HTA, folder], capture_output=True, text=True, check=False)
    if ran.returncode:
        print(f"{path.name}: HTA failed: {ran.stderr.strip().splitlines()[-1]}")
        return {}
    found: dict[str, float] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def main(traces: list[Path], python: str | None) -> None:
    """Prints a line for each trace."""
    print(
        f"{'us':36}{'file':>10}{'thence':>10}{'HTA':>10} |{'host':>9}{'queued':>9}{'other':>9} |"
        f"{'host wait':>10}{'kernel w.':>10}{'other':>9}"
    )
    for path in traces:
        counted, ours = of_file(path), of_thence(path)
        theirs = of_hta(python, path) if python else {}
        hta = "".join(
            f"{theirs.get(name, float('nan')):{width}.0f}"
            for name, width in (("host_wait", 10), ("kernel_wait", 10), ("other", 9))
        )
        print(
            f"{path.name[-36:]:36}{counted:10.0f}{sum(ours.values()):10.0f}{theirs.get('idle', float('nan')):10.0f} |"
            + "".join(f"{ours[name]:9.0f}" for name in ("host", "queued", "other"))
            + f" |{hta}",
            flush=True,
        )


if __name__ == "__main__":
    parser = documented_parser(__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--hta", help="an interpreter that has HolisticTraceAnalysis")
    given = parser.parse_args()
    main(given.traces, given.hta)
