"""Prefill or decode, by the name of a range: of servers (`thence.model.server_steps`), or of the user.

A user's range says it with the word ``prefill`` or ``decode`` alone, also followed by a number or bracket.
"""

from __future__ import annotations

import re

from thence.model.phases import Serving
from thence.model.server_steps import server_step

__all__ = ["serving_of"]

_USERS = re.compile(r"(prefill|decode)(?:[\s:#_]*\d+|\s*[(\[].*)?", re.IGNORECASE)


def serving_of(name: str) -> Serving | None:
    """What the name of a range says, None if nothing."""
    step = server_step(name)
    if step is not None:
        return step.serving
    user = _USERS.fullmatch(name)
    return Serving(user[1].lower()) if user else None
