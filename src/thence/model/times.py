"""Bounds of times: sums and differences of two times within these bounds fit int64."""

from __future__ import annotations

LATEST_NS = 4 * 10**18
"""Furthest time from the zero of a clock, in either direction, ns. With the epoch 1970 it is in the year 2096."""
LONGEST_NS = 100 * 86_400 * 10**9
"""Longest that one device activity or host range can last, ns: 100 days."""
