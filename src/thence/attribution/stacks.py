"""The frames that each device activity ran under, outermost first: what a flame graph is made of.

source   lines of the user's own code that were open, ``file.py:12``; of XLA work the whole stack that
         the HLO keeps, a fusion's time divided among the stacks of what it is made of
op_name  parts of the HLO instruction's op_name
module   nn.Module calls
label    ranges that the user named
stack    all Python frames, ``file.py(12): function``
ops      operators, and the ranges that libraries named

Frames come from the ranges of the host and from the stacks in the HLO, so a name may hold any
character. Only what exists as text alone is cut: op_names and labels of XLA work at each ``/`` outside
of brackets, labels that stem from a library's ranges at each ``/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.hlo_places import frame_names, stack_shares
from thence.attribution.launch_places import paths_of
from thence.attribution.op_names import segments_of
from thence.attribution.paths import SEPARATOR
from thence.model.reasons import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.model.attributed import Attributed

__all__ = ["Path", "Stacks", "stacks_of"]


@dataclass(frozen=True, slots=True)
class Path:
    """Frames, outermost first; where nothing is known, ``attributed`` is False and the one frame says why."""

    frames: tuple[str, ...]
    attributed: bool


@dataclass(frozen=True)
class Stacks:
    """The paths of all activities.

    Attributes:
        claims: columns gpu (row), path (number in ``paths``) and weight; the weights of one activity
            sum to 1.
        paths: every distinct path.
        shared: whether several paths may share one activity.
    """

    claims: pl.DataFrame
    paths: tuple[Path, ...]
    shared: bool


def stacks_of(trace: Attributed, by: str) -> Stacks:
    """The path of every row of ``trace.gpu``.

    Args:
        trace: attributed.
        by: one of `thence.model.places.FLAMES`.
    """
    if by == "source" and trace.shares is not None:
        return _shared(trace)
    places = trace.places
    numbers = np.zeros(trace.gpu.height, np.int64)
    of_host: list[tuple[str, ...]] = [()]
    if by != "op_name":
        of_host, numbers = paths_of(trace, places["launch"], by, trace.own)
    of_hlo = _hlo_stacks(trace) if by == "stack" else {}
    rows = pl.DataFrame({"place": places[by], "rule": places[f"{by}_rule"], "host": numbers})
    distinct = rows.unique(maintain_order=True).with_row_index("path")
    paths = [
        _unknown(text_of(rule))
        if place is None
        else Path(_frames(by, place, of_host[host], of_hlo), True)  # noqa: FBT003 - attributed
        for place, rule, host in distinct.select(
            pl.col("place", "rule").cast(pl.String), "host"
        ).iter_rows()
    ]
    claims = rows.join(distinct, on=rows.columns, how="left", maintain_order="left", nulls_equal=True)  # fmt: skip
    return Stacks(
        claims.select(pl.int_range(pl.len(), dtype=pl.Int64).alias("gpu"), "path", weight=1.0),
        tuple(paths),
        shared=False,
    )


def _unknown(reason: str) -> Path:
    return Path((f"[{reason}]",), attributed=False)


def _frames(
    by: str, place: str, of_host: tuple[str, ...], of_hlo: dict[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """The frames that a place stands for: the structure that spells it, else its text in parts."""
    if by == "source":
        return of_host if of_host and of_host[-1] == place else (place,)
    if of_host and SEPARATOR.join(of_host) == place:
        return of_host
    if by == "stack":
        return of_hlo.get(place, (place,))
    parts = segments_of(place) if by in ("op_name", "label") else place.split(SEPARATOR)
    return tuple(part for part in parts if part) or (place,)


def _used_frames(trace: Attributed) -> Iterable[tuple[int, int]]:
    return ((m, f) for m, module in enumerate(trace.hlo) for f in module.frames["frame"].to_list())


def _hlo_stacks(trace: Attributed) -> dict[str, tuple[str, ...]]:
    """Stacks of the HLO by the text that stands for them among the places."""
    stacks = {frame_names(trace.hlo[module], frame) for module, frame in _used_frames(trace)}
    return {";".join(stack): stack for stack in stacks}


def _shared(trace: Attributed) -> Stacks:
    """Source stacks of XLA work, each with its share of the time."""
    rows = stack_shares(trace)
    keys = ["module", "frame", "rule"]
    reason = pl.when(pl.col("frame").is_null()).then("rule").alias("rule")
    rows = rows.with_columns(reason)  # how a stack was found does not make it another one
    distinct = rows.select(keys).unique(maintain_order=True).with_row_index("path")
    paths = [
        _unknown(text_of(rule))
        if frame is None
        else Path(tuple(f"{f.file}:{f.line}" for f in trace.hlo[module].stack(frame)), True)  # noqa: FBT003 - attributed
        for module, frame, rule in distinct.select(keys).iter_rows()
    ]
    claims = rows.join(distinct, on=keys, how="left", maintain_order="left", nulls_equal=True)
    return Stacks(claims.select("gpu", "path", "weight"), tuple(paths), shared=True)
