"""Frames inside kernels: the lines of their source, and what warps waited for, from samples of program counters.

The time of a kernel's frame is shared among its lines and reasons as its samples are, wherever it was launched: samples
have no launch. Kernels without samples keep their time.
"""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.flame.prefix_tree import PHASE_SUMS
from thence.analysis.stalls import stalls
from thence.model.stall_reasons import STALL_REASONS
from thence.units import format_share

if TYPE_CHECKING:
    from thence.analysis.flame.answer import Flame
    from thence.model.attributed import Attributed

_TIMES = ("self_ns", *PHASE_SUMS)
_NO_LINE = "[no lines: built without line information]"


def with_stalls(graph: Flame, trace: Attributed) -> Flame:
    """A flame graph of GPU time, or of headroom, whose kernels have lines as frames, and these reasons of stalls.

    Raises:
        MissingData: the trace holds no samples of program counters.
    """
    rows = stalls(trace).rows.select("kernel", "file", "line", "reason", "samples")
    kernels = graph.nodes.filter(pl.col("self_ns") > 0).with_columns(kernel=pl.coalesce("full_name", "name"))
    kernels = kernels.filter(~pl.col("idle").fill_null(value=False)).select("node", "depth", "count", "kernel", *_TIMES)
    parts = kernels.join(rows, on="kernel", maintain_order="left_right")
    until = pl.col("samples").cum_sum().over("node") / pl.col("samples").sum().over("node")
    ends = parts.with_columns([(until * pl.col(name)).round().cast(pl.Int64).alias(name) for name in _TIMES])
    parts = ends.with_columns([pl.col(name) - pl.col(name).shift(1, fill_value=0).over("node") for name in _TIMES])
    place = ["node", "depth", "count", "file", "line"]
    lines = parts.group_by(place, maintain_order=True).agg(pl.col(_TIMES).sum())
    lines = lines.with_row_index("number", graph.nodes.height)
    reasons = parts.join(lines.select(*place, "number"), on=place, nulls_equal=True, maintain_order="left")
    reasons = reasons.with_row_index("own", graph.nodes.height + lines.height)
    words = pl.col("reason").replace_strict(STALL_REASONS, default=pl.col("reason"))
    nodes = pl.concat(
        [
            graph.nodes.with_columns(
                self_ns=pl.when(pl.col("node").is_in(lines["node"].unique().implode())).then(0).otherwise("self_ns")
            ),
            _frames(lines, graph.nodes, "number", "node", 1, _line_names(lines)).with_columns(self_ns=pl.lit(0)),
            _frames(reasons, graph.nodes, "own", "number", 2, reasons.select(words).to_series()),
        ],
        how="vertical_relaxed",
    ).select(pl.col(name).cast(dtype) for name, dtype in graph.nodes.schema.items())
    sampled = format_share(int(lines["self_ns"].sum()), max(graph.sum_ns, 1))
    note = f"Kernels with {sampled} of the time have samples: lines and stalls share the time of a kernel as they do."
    return dataclasses.replace(graph, nodes=nodes, notes=(*graph.notes, note))


def _frames(
    rows: pl.DataFrame, like: pl.DataFrame, node: str, parent: str, deeper: int, names: pl.Series
) -> pl.DataFrame:
    """Rows of `Flame.nodes` for frames below kernels."""
    known = rows.select(
        pl.col("depth") + deeper,
        pl.lit(names.alias("name")),
        "count",
        *_TIMES,
        node=node,
        parent=parent,
        kind=pl.lit("frame"),
        total_ns="self_ns",
        idle=pl.lit(value=False),
    )
    return known.select(
        pl.col(name) if name in known.columns else pl.lit(None, dtype).alias(name)
        for name, dtype in like.schema.items()
    )


def _line_names(lines: pl.DataFrame) -> pl.Series:
    names = [
        f"{PurePath(file).name}:{line}" if file else _NO_LINE for file, line in lines.select("file", "line").rows()
    ]
    return pl.Series(names, dtype=pl.String)
