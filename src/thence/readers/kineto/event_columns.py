"""Columns from fields of events.

Launches say of their kernels what nothing else does: AMD's profiler the kernel's name, Inductor the source of a
Triton kernel.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["coded", "launch_facts", "triples"]

_SOURCE_FACTS = ("kernel_file", "kernel_hash", "kernel_kwargs")


def launch_facts(args: Sequence[Any], codes: Mapping[Any, int]) -> dict[str, Any]:
    """Columns ``kernel`` and ``metadata`` (a JSON object): numbers of texts, -1 for none.

    Args:
        args: of each host event, as `thence.readers.kineto.events.Args`.
        codes: gives each text its number.
    """
    texts = {"kernel": map(attrgetter("kernel"), args), "metadata": map(_source_facts, args)}

    def code(value: Any) -> int:
        return codes[value] if isinstance(value, str) and value else -1

    return {name: coded(values, code, len(args)) for name, values in texts.items()}


def coded(values: Iterable[Any], code: Callable[[Any], int], count: int) -> np.ndarray[Any, Any]:
    """A number for each value."""
    return np.fromiter(map(code, values), np.int32, count)


def triples(values: Iterable[tuple[int, int, int] | None], count: int) -> np.ndarray[Any, Any]:
    """Shape (count, 3), -1 where there is none."""
    flat = chain.from_iterable(value or (-1, -1, -1) for value in values)
    return np.fromiter(flat, np.int64, 3 * count).reshape(count, 3)


def _source_facts(args: Any) -> str | None:
    """What the launch of a Triton kernel says of its source."""
    if args.kernel_file is None:
        return None
    facts = {name: getattr(args, name) for name in _SOURCE_FACTS}
    told = {name: value for name, value in facts.items() if isinstance(value, str | int | float)}
    return msgspec.json.encode(told).decode() if told else None
