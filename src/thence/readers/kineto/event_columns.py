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

__all__ = ["any_said", "coded", "launch_facts", "triples"]

_SOURCE_FACTS = ("kernel_file", "kernel_hash", "kernel_kwargs")


def launch_facts(args: Sequence[Any], codes: Mapping[Any, int]) -> dict[str, Any]:
    """Columns ``kernel`` and ``metadata`` (a JSON object): numbers of texts, -1 for none.

    Args:
        args: of each host event, as `thence.readers.kineto.events.Args`.
        codes: gives each text its number.
    """

    def code(value: Any) -> int:
        return codes[value] if isinstance(value, str) and value else -1

    def column(field: str, texts: Callable[[], Iterable[Any]]) -> np.ndarray[Any, Any]:
        if not any_said(args, field):
            return np.full(len(args), -1, np.int32)
        return coded(texts(), code, len(args))

    return {
        "kernel": column("kernel", lambda: map(attrgetter("kernel"), args)),
        "metadata": column("kernel_file", lambda: map(_source_facts, args)),
    }


def any_said(args: Sequence[Any], field: str) -> bool:
    """Whether any arguments have a field: in most pieces none does, which is told several times as fast."""
    return list(map(attrgetter(field), args)).count(None) < len(args)


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
