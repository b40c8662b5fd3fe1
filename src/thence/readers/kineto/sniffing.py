"""Recognises a Kineto file by its name in a directory and by its first bytes."""

from __future__ import annotations

import re

from thence.model.formats import KINETO_TRACE

NAME = KINETO_TRACE
PATTERNS = ("*.json", "*.json.gz")
"""Globs of the files of a directory that may be Kineto traces."""

_FIRST_KEYS = re.compile(rb'"(?:traceEvents|schemaVersion|deviceProperties|displayTimeUnit|ph)"\s*:')
# jax.profiler writes, next to its xplane.pb, a JSON for viewers that lacks most of the data.
_OF_JAX, _OF_JAX_WITHIN = b'"highres-ticks"', 1000


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this may be a Kineto trace."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] not in (b"{", b"[") or _FIRST_KEYS.search(head) is None:
        return False
    return _OF_JAX not in head[:_OF_JAX_WITHIN]
