"""What launches say of their kernels: AMD's profiler the kernel's name, Inductor the source of a Triton kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from thence.readers.kineto.events import Args

__all__ = ["coded_texts", "source_facts"]

_SOURCE_FACTS = ("kernel_file", "kernel_hash", "kernel_kwargs")


def coded_texts(
    values: Iterable[Any], codes: Mapping[Any, int], count: int
) -> np.ndarray[Any, Any]:
    """Numbers of texts, -1 for what is none."""
    numbers = (codes[value] if isinstance(value, str) and value else -1 for value in values)
    return np.fromiter(numbers, np.int32, count)


def source_facts(args: Args) -> str | None:
    """What the launch of a Triton kernel says of its source, as a JSON object."""
    if args.kernel_file is None:
        return None
    facts = {name: getattr(args, name) for name in _SOURCE_FACTS}
    told = {name: value for name, value in facts.items() if isinstance(value, str | int | float)}
    return msgspec.json.encode(told).decode() if told else None
