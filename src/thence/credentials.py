"""Removes credentials from URLs, so that no message, table or file of thence holds them.

An input may be named ``https://user:password@host/trace.json``, or by a pre-signed URL of an object store. thence
needs the credentials to read the input, but readers of a report or a store must not see them.
"""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/?#\s]*@")
"""User and password before the host. They end at the last ``@``, because a password may contain ``@``."""
_SECRET = re.compile(r"([?&][^=&\s]*(?:credential|key|passw|secret|sig|token)[^=&\s]*=)[^&#\s'\")]+", re.IGNORECASE)
"""Values of query parameters such as ``X-Amz-Signature=``, ``sig=`` or ``access_token=``."""


def without_credentials(text: str) -> str:
    """A URL, or a text that may quote URLs, without user names, passwords, signatures and tokens.

    Other text is returned as it is.
    """
    if "://" not in text:
        return text
    return _SECRET.sub(r"\1...", _USER.sub("", text))
