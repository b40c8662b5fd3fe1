"""Kernels, memory copies and memsets of an export; copies and memsets get the names that Kineto gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.losses import Loss
from thence.model.tables import KINDS
from thence.readers.nsight.store import bounded, left_out, names, process_of, with_durations
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.readers.nsight.store import Store, Timed

_DIRECTIONS = {
    "Host-to-Device": "HtoD", "Device-to-Host": "DtoH", "Host-to-Array": "HtoA", "Array-to-Host": "AtoH",
    "Array-to-Array": "AtoA", "Array-to-Device": "AtoD", "Device-to-Array": "DtoA", "Device-to-Device": "DtoD",
    "Host-to-Host": "HtoH", "Peer-to-Peer": "PtoP",
}  # fmt: skip
"""Labels of ENUM_CUDA_MEMCPY_OPER and Kineto's abbreviations of them; other labels are shown unchanged."""

# Enums from the exporter schema reference, for exports from before 2022, which lack the enum tables.
_COPY_KINDS = ("Unknown", *_DIRECTIONS)
_MEMORY_KINDS = (*("Pageable", "Pinned", "Device", "Array", "Managed"), *("Device Static", "Managed Static", "Unknown"))

_WHERE = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId")
_TRIPLES = {"grid": ("gridX", "gridY", "gridZ"), "block": ("blockX", "blockY", "blockZ")}
_KERNEL = (
    *("demangledName", "shortName", "graphId", "registersPerThread"),
    *("staticSharedMemory", "dynamicSharedMemory", *_TRIPLES["grid"], *_TRIPLES["block"]),
)


def copy_name(direction: str | None, source: str | None, destination: str | None) -> str:
    """Name of a copy, such as ``Memcpy HtoD (Pinned -> Device)``, from the labels that nsys writes."""
    short = _DIRECTIONS.get(direction or "", direction or "")
    kinds = f" ({source or 'Unknown'} -> {destination or 'Unknown'})"
    return f"Memcpy {short}{kinds if source or destination else ''}"


def set_name(kind: str | None) -> str:
    """Name of a memset, such as ``Memset (Device)``."""
    return f"Memset ({kind or 'Unknown'})"


def activities(store: Store) -> tuple[pl.DataFrame, list[str], list[Loss]]:
    """Every device activity of an export, warnings, and losses of activities.

    Returns:
        The columns of `GPU` that the export provides, with ``process`` instead of rank; in no
        particular order.

    Raises:
        DamagedInput: a table cannot be read.
    """
    warnings: list[str] = []
    parts: list[pl.DataFrame] = []
    losses: list[Loss] = []
    for read, what in ((_kernels, "kernel"), (_graphs, "graph launch"),
                       (_copies, "copy"), (_sets, "set")):  # fmt: skip
        timed = with_durations(read(store))
        warnings += left_out([timed], what)
        losses += _losses(timed, store.name, what)
        parts.append(_common(timed.frame))
    if parts[1].height:
        warnings.append(
            f"nsys traced {several(parts[1].height, 'CUDA graph launch')} as a whole, shown as one kernel each; "
            "nsys profile --cuda-graph-trace=node records the kernels"
        )
    return pl.concat(parts), warnings, losses


def _losses(timed: Timed, name: str, what: str) -> Iterator[Loss]:
    for code, count, text in timed.problems(what):
        yield Loss(code, name, count, f"{name}: {text}")


def _kernels(store: Store) -> pl.DataFrame:
    frame = store.frame("CUPTI_ACTIVITY_KIND_KERNEL", (*_WHERE, *_KERNEL))
    return frame.select(
        *_WHERE,
        "graphId",
        bounded("registersPerThread", 31).alias("registers"),
        kind=_kind("kernel"),
        name=names(store, frame["demangledName"], frame["shortName"]),
        shared_memory=pl.col("staticSharedMemory") + pl.col("dynamicSharedMemory"),
        **{name: _triple(frame.select(columns)) for name, columns in _TRIPLES.items()},
    )


def _triple(columns: pl.DataFrame) -> pl.Series:
    """Three columns as one array column of `GPU`, null where one of them is not an unsigned 32-bit size."""
    valid = columns.select(pl.all_horizontal(pl.all().is_between(0, (1 << 32) - 1).fill_null(value=False))).to_series()
    values = columns.select(pl.all().fill_null(0).cast(pl.UInt32, wrap_numerical=True)).to_numpy(order="c")
    triple = pl.Series(values, dtype=pl.Array(pl.UInt32, 3))
    if valid.all():
        return triple
    return pl.select(pl.when(valid).then(triple)).to_series()


def _kind(name: str) -> pl.Expr:
    return pl.lit(name, pl.Enum(KINDS))


def _graphs(store: Store) -> pl.DataFrame:
    """Launches of whole graphs, in recordings made with --cuda-graph-trace=graph."""
    frame = store.frame("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", (*_WHERE, "graphId"))
    return frame.with_columns(
        kind=_kind("kernel"), name=pl.format("[CUDA graph {}]", pl.col("graphId").fill_null(0)).cast(pl.Categorical())
    )


def _copies(store: Store) -> pl.DataFrame:
    kinds = ("copyKind", "srcKind", "dstKind")
    frame = store.frame("CUPTI_ACTIVITY_KIND_MEMCPY", (*_WHERE, "bytes", *kinds))
    directions = _labels(store, "ENUM_CUDA_MEMCPY_OPER", _COPY_KINDS)
    memories = _labels(store, "ENUM_CUDA_MEM_KIND", _MEMORY_KINDS)
    used = frame.select(kinds).unique()
    names = [copy_name(directions.get(c), memories.get(s), memories.get(d)) for c, s, d in used.rows()]
    named = used.with_columns(name=pl.Series(names, dtype=pl.Categorical()))
    return frame.join(named, on=kinds, how="left", nulls_equal=True, maintain_order="left").with_columns(
        kind=_kind("memcpy")
    )


def _sets(store: Store) -> pl.DataFrame:
    frame = store.frame("CUPTI_ACTIVITY_KIND_MEMSET", (*_WHERE, "bytes", "memKind"))
    memories = _labels(store, "ENUM_CUDA_MEM_KIND", _MEMORY_KINDS)
    used = frame.select("memKind").unique()
    names = [set_name(memories.get(kind)) for kind in used["memKind"]]
    named = used.with_columns(name=pl.Series(names, dtype=pl.Categorical()))
    return frame.join(named, on="memKind", how="left", nulls_equal=True, maintain_order="left").with_columns(
        kind=_kind("memset")
    )


def _labels(store: Store, table: str, default_labels: tuple[str, ...]) -> dict[int, str]:
    frame = store.frame(table, ("id",), ("label",)).drop_nulls()
    return dict(enumerate(default_labels)) | dict(frame.with_columns(pl.col("label").cast(pl.String)).rows())


def _common(frame: pl.DataFrame) -> pl.DataFrame:
    node = pl.when(pl.col("graphNodeId") >= 0).then(pl.col("graphNodeId")).cast(pl.UInt64)
    # A node id is the graph's id (high 32 bits) and the node's number in the graph (low 32 bits).
    graph = bounded("graphId", 32) if "graphId" in frame.columns else pl.lit(None, pl.Int64)
    optional = {
        "grid": pl.Array(pl.UInt32, 3), "block": pl.Array(pl.UInt32, 3), "registers": pl.Int32(),
        "shared_memory": pl.Int64(), "bytes": pl.Int64(),
    }  # fmt: skip
    return frame.select(
        process_of(pl.col("globalPid")).fill_null(0).alias("process"),
        bounded("deviceId", 31).fill_null(0).cast(pl.Int32).alias("device"),
        pl.col("streamId").fill_null(0).alias("stream"),
        pl.col("kind"),
        pl.col("name").cast(pl.Categorical()),
        "start",
        "duration",
        pl.col("correlationId").alias("correlation"),
        pl.coalesce(graph.cast(pl.UInt64), node // (1 << 32)).alias("graph"),
        node.alias("node"),
        *(
            pl.col(name).cast(dtype) if name in frame.columns else pl.lit(None, dtype).alias(name)
            for name, dtype in optional.items()
        ),
    )
