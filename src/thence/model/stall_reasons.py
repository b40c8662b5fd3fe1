"""Why a warp issued no instruction, in a sample of its program counter.

Codes are those of CUPTI and Nsight Compute without their prefix; they stay, and texts may improve. This module imports
only the standard library, because recorded processes import it.
"""

from __future__ import annotations

_PREFIX = "smsp__pcsamp_warps_issue_stalled_"
_AGAIN = "_not_issued"
"""CUPTI counts the samples in which nothing at all was issued a second time, under names with this ending."""

STALL_REASONS = {
    "barrier": "barrier of the block",
    "branch_resolving": "target of a branch",
    "dispatch_stall": "dispatcher",
    "drain": "stores at the end",
    "gmma": "matrix product of the warpgroup",
    "imc_miss": "constants",
    "lg_throttle": "full queue to global memory",
    "long_scoreboard": "data from global memory",
    "math_pipe_throttle": "busy arithmetic unit",
    "membar": "memory barrier",
    "mio_throttle": "full queue to shared memory",
    "misc": "something else",
    "no_instructions": "instructions",
    "not_selected": "another warp, which was chosen",
    "selected": "nothing: it issued",
    "short_scoreboard": "data from shared memory",
    "sleeping": "end of its sleep",
    "tex_throttle": "full queue to textures",
    "wait": "fixed latency",
    "warpgroup_arrive": "warps of its warpgroup",
}
"""What the warp waited for, by code; docs/inside.md says more."""


def reason_of(name: str) -> str | None:
    """The code of CUPTI's name of a reason; None if it counts samples a second time."""
    return None if name.endswith(_AGAIN) else name.removeprefix(_PREFIX)


STALLS_TABLE = "stalls"
"""The table of a recording that holds samples."""
