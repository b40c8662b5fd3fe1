"""Why a warp issued no instruction, in a sample of its program counter.

Codes are those of CUPTI and Nsight Compute without their prefix; they stay, and texts may improve. This module imports
only the standard library, because recorded processes import it.
"""

from __future__ import annotations

_PREFIX = "smsp__pcsamp_warps_issue_stalled_"
_AGAIN = "_not_issued"
"""CUPTI counts the samples in which nothing at all was issued a second time, under names with this ending."""

STALL_REASONS = {
    "barrier": "waits for other warps of its block at a barrier",
    "branch_resolving": "waits for the target of a branch",
    "dispatch_stall": "chosen, but the dispatcher held the instruction back",
    "drain": "has ended, and its stores to memory are not done",
    "gmma": "waits for a matrix product of its warpgroup",
    "imc_miss": "waits for constants that are not in the cache",
    "lg_throttle": "the queue to global and local memory is full",
    "long_scoreboard": "waits for data from global or local memory",
    "math_pipe_throttle": "waits for the unit that computes, which is busy",
    "membar": "waits for a memory barrier",
    "mio_throttle": "the queue to shared memory and special functions is full",
    "misc": "another reason",
    "no_instructions": "waits for its next instruction: a jump, or the cache of instructions",
    "not_selected": "ready, but another warp was chosen",
    "selected": "issued an instruction",
    "short_scoreboard": "waits for data from shared memory or a special function",
    "sleeping": "sleeps, as the program asks",
    "tex_throttle": "the queue to the texture unit is full",
    "wait": "waits a fixed number of cycles for its last instruction",
    "warpgroup_arrive": "waits for the other warps of its warpgroup",
}
"""By code."""


def reason_of(name: str) -> str | None:
    """The code of CUPTI's name of a reason; None if it counts samples a second time."""
    return None if name.endswith(_AGAIN) else name.removeprefix(_PREFIX)


STALLS_TABLE = "stalls"
"""The table of a recording that holds samples."""
