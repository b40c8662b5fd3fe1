"""Matches kernels of a trace to captured kernels by name and launch shape.

The driver gives mangled names (``_ZN2at6native...``), profilers demangled ones
(``void at::native::...<...>(...)``), and demanglers differ a little. Equal text matches first; for a
name of the trace without an equal text, the plain function name matches all kernels that share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.kernel_names import demangle, function_name, short_names

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from thence.model.arrays import Int64
    from thence.model.graph_labels import CapturedGraph, Kernel

ACTIVITIES = ("kernel", "memcpy", "memset")
"""Types of nodes that leave an activity in a trace."""

_VARIANT = ("kind", "name", "grid", "block")


@dataclass(frozen=True)
class Variants:
    """The distinct kernels, memcpys and memsets of a trace, by kind, name and launch shape.

    Attributes:
        frame: columns kind, name (String), grid and block; one row per variant.
        of_row: number of the variant of each row of the table that they were made from.
    """

    frame: pl.DataFrame
    of_row: Int64

    @classmethod
    def of(cls, gpu: pl.DataFrame) -> Variants:
        """The variants among rows of gpu."""
        shapes = [pl.col(shape).arr.get(i).alias(f"{shape}{i}") for shape in ("grid", "block") for i in range(3)]
        key = gpu.select(pl.struct(pl.col("kind", "name").to_physical(), *shapes).hash()).to_series()
        first = pl.DataFrame({"key": key}).with_row_index("row").unique("key", keep="first", maintain_order=True)
        variants = first.select("key", variant=pl.int_range(pl.len(), dtype=pl.Int64))
        of_row = key.to_frame("key").join(variants, on="key", how="left", maintain_order="left")
        frame = gpu.select(_VARIANT)[first["row"]].with_columns(pl.col("kind", "name").cast(pl.String))
        return cls(frame, of_row["variant"].to_numpy())


def short_name(name: str) -> str:
    """A kernel's name for messages."""
    return short_names([name])[name]


class KernelNames:
    """Numbers for kernel names; all spellings of one kernel's name have the same number.

    Args:
        kernels: the captured kernels.
        traced: names of kernels in the trace.
    """

    def __init__(self, kernels: Sequence[Kernel], traced: Iterable[str]) -> None:
        self._same = list(range(len(kernels)))
        by_text: dict[str, int] = {}
        for i, kernel in enumerate(kernels):
            for text in {kernel.name, kernel.demangled or kernel.name, demangle(kernel.name)}:
                self._join(by_text.setdefault(text, i), i)
        self._of_trace: dict[str, int] = {}
        by_function: dict[str, list[int]] = {}
        for i, kernel in enumerate(kernels):
            function = function_name(kernel.demangled or kernel.name)
            by_function.setdefault(function, []).append(i)
        for name in traced:
            number = by_text.get(name, by_text.get(demangle(name)))
            if number is None:
                for i in by_function.get(function_name(name), []):
                    number = i if number is None else number
                    self._join(number, i)
            if number is not None:
                self._of_trace[name] = number

    def _root(self, i: int) -> int:
        while self._same[i] != i:
            i = self._same[i]
        return i

    def _join(self, first: int, second: int) -> None:
        self._same[self._root(second)] = self._root(first)

    def of_kernel(self, kernel: int) -> int:
        """Number of a captured kernel."""
        return self._root(kernel)

    def of_trace(self, name: str | None) -> int:
        """Number of a kernel of the trace, -1 if no captured kernel has its name."""
        number = self._of_trace.get(name or "")
        return -1 if number is None else self._root(number)


@dataclass(frozen=True)
class Signatures:
    """Numbers that equal kernels of equal shape share, in a captured graph and in a trace.

    Attributes:
        nodes: number of each node of the graph; -1 for nodes that leave no activity, or whose kernel is unknown.
        variants: number of each variant of the trace; -1 where no node has an equal kernel.
        complete: whether every node that leaves an activity has a number.
    """

    nodes: Int64
    variants: Int64
    complete: bool

    @classmethod
    def of(cls, graph: CapturedGraph, names: KernelNames, variants: Variants) -> Signatures:
        """The numbers for one graph. Grid and block are compared only if all kernels on both sides have them."""
        nodes, frame = graph.nodes, variants.frame
        kernels = nodes.filter(pl.col("type") == "kernel")
        shapes = [
            shape
            for shape in ("grid", "block")
            if not kernels[shape].null_count() and not frame.filter(pl.col("kind") == "kernel")[shape].null_count()
        ]
        nodes = nodes.with_columns(
            name=pl.Series([-1 if k is None else names.of_kernel(k) for k in nodes["kernel"]], dtype=pl.Int64)
        )
        traced = frame.with_columns(
            name=pl.Series([names.of_trace(name) for name in frame["name"]], dtype=pl.Int64)
        ).rename({"kind": "type"})
        numbers: dict[Hashable, int] = {}
        of_node = [numbers.setdefault(key, len(numbers)) if key is not None else -1 for key in _keys(nodes, shapes)]
        of_variant = [numbers.get(key, -1) for key in _keys(traced, shapes)]
        leave = nodes["type"].is_in(ACTIVITIES).to_numpy()
        result = np.array(of_node, np.int64)
        return cls(result, np.array(of_variant, np.int64), bool((result[leave] >= 0).all()))


def _keys(frame: pl.DataFrame, shapes: Sequence[str]) -> list[tuple[Any, ...] | None]:
    """The key by which kernels are equal; None for nodes that leave no activity or are unknown."""
    columns = [frame[shape].to_list() for shape in shapes]
    keys: list[tuple[Any, ...] | None] = []
    for row, (kind, name) in enumerate(frame.select("type", "name").rows()):
        if kind in ("memcpy", "memset"):
            keys.append((kind,))
        elif kind != "kernel" or name < 0:
            keys.append(None)
        else:
            shape = (tuple(column[row] or ()) for column in columns)
            keys.append((name, *shape))
    return keys
