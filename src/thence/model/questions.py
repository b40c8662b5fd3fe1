"""Values of the options of idle time and what-if, in a module that the command line imports without larger ones."""

from __future__ import annotations

from thence.model.places import PLACES

IDLE_BY = (
    *("place", "source", "module", "op"),
    *("label", "step", "call", "kernel"),
    *("wait", "rank", "device", "reason"),
)
"""What the idle time of a cause can be grouped by. place: the first of source, label, module, op and call that exists.
source: the function or line of the user's own code. call: the innermost host row. kernel: the activity that ended the
idle time. wait: the last call that waited, if it emptied the queue. reason: why a cause is unknown."""

FREE_BY = (*PLACES, "kernel", "collective", "cause")
"""Kinds of names by which a change selects work, as in ``--free label:attention``."""
