"""Recognizes files of ``jax.profiler`` by their name in a directory and by their first bytes."""

from __future__ import annotations

import re

from thence.model.formats import XSPACE_TRACE

NAME = XSPACE_TRACE
PATTERNS = ("*.xplane.pb", "*.xplane.pb.gz")
"""Files of a directory that may be XSpaces."""
_PLANE_NAMES = (b"/host:", b"/device:", b"Task Environment")


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this may be an XSpace: field 1, a plane with a known name."""
    # XSpace.planes = 1; XPlane.id = 1 (absent when 0), XPlane.name = 2.
    match = re.match(rb"\x0a[\x80-\xff]{0,9}[\x00-\x7f](?:\x08[\x80-\xff]{0,9}[\x00-\x7f])?\x12[\x01-\x7f]", head)
    return match is not None and head[match.end() :].startswith(_PLANE_NAMES)
