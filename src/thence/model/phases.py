"""The values of the kinds ``phase`` and ``serving``, and what the position of a ``source`` place is."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["POSITIONS", "Phase", "Position", "Serving"]


class Phase(StrEnum):
    """Which part of a training step an activity belongs to."""

    FORWARD = "forward"
    """Inside what is differentiated."""
    BACKWARD = "backward"
    """Inside the reverse differentiation of it."""
    RECOMPUTE = "recompute"
    """The forward pass of a checkpoint, run again during the backward pass."""
    GRADIENT = "gradient"
    """What is done with gradients between backward and optimizer: summed, scaled, clipped."""
    OPTIMIZER = "optimizer"
    """The update of the parameters."""
    INPUT = "input"
    """Loading a batch, and copying it to the device."""
    OTHER = "other"
    """None of these: inference, metrics."""
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
    """What the line number of a ``source`` place is."""

    FUNCTION = "function"
    """Of the function: its ``def``, or wherever the profiler saw it being entered."""
    LINE = "line"
    """Of the line that was being executed or traced."""


POSITIONS = tuple(position.value for position in Position)
