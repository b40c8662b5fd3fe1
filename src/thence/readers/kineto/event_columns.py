"""Builds columns from fields of events.

Some facts about a kernel are recorded only with its launch: the kernel's name by AMD's profiler, and the source of
a Triton kernel by Inductor.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_SOURCE_FACTS = ("kernel_file", "kernel_hash", "kernel_kwargs")


def launch_facts(args: Sequence[Any], codes: Mapping[Any, int]) -> dict[str, Any]:
    """Columns ``kernel`` and ``metadata`` (a JSON object) of host events: numbers of texts, -1 for none.

    Args:
        args: arguments of each host event, as `thence.readers.kineto.events.Args`.
        codes: maps each text to its number.
    """
    columns = {name: np.full(len(args), -1, np.int32) for name in ("kernel", "metadata")}
    for row in given(args, "kernel"):
        if isinstance(args[row].kernel, str) and args[row].kernel:
            columns["kernel"][row] = codes[args[row].kernel]
    for row in given(args, "kernel_file"):
        if (facts := _source_facts(args[row])) is not None:
            columns["metadata"][row] = codes[facts]
    return columns


def given(rows: Sequence[Any], field: str) -> list[int]:
    """Numbers of the rows whose field is not None; fast if it is None in every row, as most fields are.

    Args:
        rows: events or their arguments.
        field: name of an attribute; a dotted name for an attribute of an attribute.
    """
    values = list(map(attrgetter(field), rows))
    if values.count(None) == len(values):
        return []
    return [row for row, value in enumerate(values) if value is not None]


def coded(values: Iterable[Any], code: Callable[[Any], int], count: int) -> np.ndarray[Any, Any]:
    """Array of the number (int32) of each value."""
    return np.fromiter(map(code, values), np.int32, count)


def triples(values: Iterable[tuple[int, int, int] | None], count: int) -> np.ndarray[Any, Any]:
    """The values as an int64 array of shape (count, 3), with -1 for None."""
    flat = chain.from_iterable(value or (-1, -1, -1) for value in values)
    return np.fromiter(flat, np.int64, 3 * count).reshape(count, 3)


def _source_facts(args: Any) -> str | None:
    """The facts about a Triton kernel's source in the arguments of its launch, as JSON; None if there are none."""
    facts = {name: getattr(args, name) for name in _SOURCE_FACTS}
    told = {name: value for name, value in facts.items() if isinstance(value, str | int | float)}
    return msgspec.json.encode(told).decode() if told else None
