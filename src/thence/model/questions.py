"""Words of questions about idle time and changes, for the command line, which reads them before anything heavy."""

from __future__ import annotations

from thence.model.places import PLACES

__all__ = ["FREE_BY", "IDLE_BY"]

IDLE_BY = (
    *("place", "line", "module", "op"),
    *("label", "step", "call", "kernel"),
    *("wait", "rank", "device", "reason"),
)
"""What idle time of a cause can be by. place: the first of line, label, module, op and call that there is. line: the
function or line of the user's own code. call: the innermost host row. kernel: the activity that ended the wait.
wait: the last call that waited, where it emptied the queue. reason: why a cause is unknown."""

FREE_BY = (*PLACES, "kernel", "collective", "cause")
"""What changes of a program take names of."""
