"""Credentials in URLs, which no message, table or file of thence may hold.

An input may be named ``https://user:password@host/trace.json``, or by an address that a store has signed for
everyone who knows it. Reading needs these words; whoever sees a report or a store must not.
"""

from __future__ import annotations

import re

__all__ = ["without_credentials"]

_USER = re.compile(r"(?<=://)[^/?#\s]*@")
"""User and password before the host; the last ``@`` ends them, as a password may hold another."""
_SECRET = re.compile(
    r"([?&][^=&\s]*(?:credential|key|passw|secret|sig|token)[^=&\s]*=)[^&#\s'\")]+", re.IGNORECASE
)
"""Values of a query such as ``X-Amz-Signature=``, ``sig=`` or ``access_token=``."""


def without_credentials(text: str) -> str:
    """A URL, or a text that may quote URLs, without user names, passwords, signatures and tokens.

    Other text is returned as it is.
    """
    if "://" not in text:
        return text
    return _SECRET.sub(r"\1...", _USER.sub("", text))
