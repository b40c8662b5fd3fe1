"""The part of serving that the name of a range states: names of servers (`thence.model.server_steps`) or users.

The name of a user's range must be ``prefill`` or ``decode``, optionally followed by a number or by brackets.
"""

from __future__ import annotations

import re

from thence.model.phases import Serving
from thence.model.server_steps import server_step

_USERS = re.compile(r"(prefill|decode)(?:[\s:#_]*\d+|\s*[(\[].*)?", re.IGNORECASE)


def serving_of(name: str) -> Serving | None:
    """The part of serving that the name of a range states, None if it states none."""
    step = server_step(name)
    if step is not None:
        return step.serving
    user = _USERS.fullmatch(name)
    return Serving(user[1].lower()) if user else None
