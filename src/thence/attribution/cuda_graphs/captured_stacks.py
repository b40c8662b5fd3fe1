"""The source place in the stack of the program at the capture of a CUDA graph node."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import polars as pl

from thence.model.graph_labels import FRAME_SEPARATOR
from thence.model.phases import Position

if TYPE_CHECKING:
    from thence.model.own_code import OwnCode

_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<function>.*)", re.DOTALL)


def with_sources(joined: pl.DataFrame, own: OwnCode) -> pl.DataFrame:
    """Adds the innermost line of the user's own code to rows that have a stack and no source.

    Args:
        joined: rows of `thence.model.tables.GRAPH_PLACES`.
        own: which files are the user's own code; if no line is of these files, the innermost line is used.
    """
    wanted = joined["stack"].is_not_null() & joined["source"].is_null()
    if not wanted.any():
        return joined
    distinct = joined["stack"].filter(wanted).unique()
    found = [_source(text, own) for text in distinct.cast(pl.String)]
    sources = pl.DataFrame(
        {"stack": distinct, "found": [place for place, _ in found], "at": [at for _, at in found]},
        schema_overrides={"found": joined.schema["source"], "at": joined.schema["position"]},
    )
    columns = joined.join(sources, on="stack", how="left", maintain_order="left")
    return columns.with_columns(
        source=pl.when(wanted).then("found").otherwise("source"),
        position=pl.when(wanted).then("at").otherwise("position"),
    ).drop("found", "at")


def _source(text: str, own: OwnCode) -> tuple[str | None, str | None]:
    """The place of the innermost own frame, and its `Position`; line 0 stands for the whole function."""
    frames = [match for part in text.split(FRAME_SEPARATOR) if (match := _FRAME.fullmatch(part))]
    if not frames:
        return None, None
    frame = next((one for one in reversed(frames) if own(one["file"])), frames[-1])
    if frame["line"] == "0":
        return f"{frame['file']} {frame['function']}", Position.FUNCTION.value
    return frame[0], Position.LINE.value
