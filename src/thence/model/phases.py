"""The values of the kinds ``phase`` and ``serving``, of the position of a ``source`` place, and of host states."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Which part of a training step, or of a program around it, an activity belongs to."""

    FORWARD = "forward"
    """The forward pass of code that is differentiated."""
    BACKWARD = "backward"
    """The backward pass: the reverse-mode differentiation of that code."""
    RECOMPUTE = "recompute"
    """The forward pass of a checkpoint, run again during the backward pass."""
    GRADIENT = "gradient"
    """Work on gradients between backward and optimizer: summing, scaling, clipping."""
    OPTIMIZER = "optimizer"
    """The update of the parameters."""
    INPUT = "input"
    """Loading a batch, and copying it to the device."""
    GENERATION = "generation"
    """Generating tokens or completions inside a training step: the rollout of reinforcement learning."""
    REWARD = "reward"
    """Scoring of what was generated."""
    OTHER = "other"
    """None of the other phases: inference, metrics."""
    MIXED = "mixed"
    """Instructions of several phases in one kernel."""


class Serving(StrEnum):
    """Which part of serving a language model an activity belongs to."""

    PREFILL = "prefill"
    """The prompt of a request (context, extend)."""
    DECODE = "decode"
    """Further tokens of a request (generation)."""
    MIXED = "mixed"
    """A batch of both."""


class Position(StrEnum):
    """What the line number of a ``source`` place refers to."""

    FUNCTION = "function"
    """The function: the line of its ``def``, or the line at which the profiler saw it being entered."""
    LINE = "line"
    """The line that was being executed or traced."""


POSITIONS = tuple(position.value for position in Position)


class HostState(StrEnum):
    """What a thread did in a sample. Recordings hold the number of a state in this order, from 1 on; 0: unknown."""

    PYTHON = "python"
    """It ran Python: instructions of Python changed while it was sampled."""
    C = "c"
    """It ran C code that held the GIL."""
    C_WITHOUT_GIL = "c_without_gil"
    """It ran C code that did not hold the GIL."""
    GIL = "gil"
    """It waited for the GIL."""
    LOCK = "lock"
    """It waited for a lock, a condition or a queue, that is for another thread."""
    SLEEP = "sleep"
    """It slept."""
    SYSTEM_CALL = "system_call"
    """It was in another system call: it read, wrote, polled, or waited for a process or a driver."""


HOST_STATES = tuple(state.value for state in HostState)
