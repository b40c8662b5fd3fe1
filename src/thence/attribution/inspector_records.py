"""Describes collective kernels by what NCCL's Inspector plugin recorded of them.

NCCL notes a collective when it has launched its kernel, or as a graph begins to run it, and again when it sees that the
kernel runs. So a record is of a kernel of its process, of its kind, and with a block for each of its channels, that
started in between, or shortly before: in files of two GPUs (`tests/data/torch/nccl_inspector`), 8 us before the first
to 0.2 ms after it. If only one such kernel started since `_BEFORE_NS` before the first of these times, what the record
says is taken. How many channels NCCL uses depends on the size, so a record whose own kernel is lost fits few others.
Not all collectives have a record: the plugin leaves some out. A record is not used if the kernel is shorter than what
the GPU's clock says, and a kernel of which two records say different things keeps what is known.

Size, number of ranks and kind are taken where nothing else says them. The name that NCCL gives to a communicator is
not: other collectives of the trace have PyTorch's names, and only some kernels have a record.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.flight_records import filled
from thence.model.collective_kinds import kernels_of_nccl, kind_of
from thence.model.tables import COLLECTIVES
from thence.model.thresholds import CLOCKS_WRONG_NS
from thence.units import listed

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.inspector_records import InspectorRecord
    from thence.model.tables import Tables

_FACTS = ("collective", "bytes", "group_size")
_LISTED = 3
_BEFORE_NS = 1_000_000
"""A kernel may have started so long before its collective was noted: the thread that launches may have to wait for its
turn on a core in between."""
_ROUNDED_NS = 2_000
"""Times are whole microseconds, and so are durations."""
_NO_TIMES = "without NCCL_INSPECTOR_DUMP_VERBOSE=1 the plugin writes no times, so that no kernel can be found"


def with_inspector_records(tables: Tables, collectives: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """The table of collectives, completed by records of NCCL's Inspector plugin, and notes on what they say.

    Args:
        tables: of the trace, with the records.
        collectives: every described kernel, in the columns of `COLLECTIVES`.
    """
    joined, used, reasons = [], [], dict[str, None]()
    kernels = 0
    nccl = _kernels(tables)
    of_process = tables.host.group_by("process").agg(pl.col("rank").unique())
    for record in {record.source: record for record in tables.inspector_records}.values():
        ranks = of_process.filter(pl.col("process") == record.process)["rank"].to_list()
        if len(ranks) != 1 or len(ranks[0]) != 1:
            continue
        ours = nccl.filter(pl.col("rank") == ranks[0][0])
        used.append(Path(record.source).name)
        kernels += ours.height
        if record.untimed:
            reasons[_NO_TIMES] = None
        epoch = tables.meta.epoch_ns
        if epoch is None:
            reasons["the trace does not state the Unix time of its clock"] = None
        else:
            joined.append(_facts(record, ours, epoch))
    facts = _agreed(joined)
    if not used:
        return collectives, []
    why = f"; {listed(list(reasons), _LISTED)}" if reasons else ""
    note = (
        f"NCCL's Inspector ({listed(used, _LISTED)}) gives facts of {facts.height:,} of {kernels:,} collective kernels "
        f"of its processes{why}"
    )
    return filled(collectives, facts), [note]


def _kernels(tables: Tables) -> pl.DataFrame:
    """Kernels of NCCL: gpu (row), rank, start, duration, kind, null for one that does not name it, and blocks."""
    gpu = tables.gpu
    names = gpu["name"].cast(pl.String)
    ours = gpu.with_row_index("gpu").filter(names.str.contains("(?i)^(?:nccl|rccl)") & (gpu["kind"] == "kernel"))
    return ours.select(
        "gpu", "rank", "start", "duration", kind=kernels_of_nccl(ours["name"])["kind"],
        blocks=pl.col("grid").arr.first().cast(pl.Int64),
    ).sort("start")  # fmt: skip


def _facts(record: InspectorRecord, kernels: pl.DataFrame, epoch_ns: int) -> pl.DataFrame:
    """The facts of kernels, one row for each record whose kernel is known: gpu, and the columns `_FACTS`."""
    rows = record.rows.with_columns(
        kind_of(pl.col("collective")).alias("kind"),
        begin=pl.col("called") - epoch_ns - _BEFORE_NS,
        end=pl.col("seen") - epoch_ns + CLOCKS_WRONG_NS,
    )
    parts = []
    of_channels = rows.partition_by("channels", as_dict=True)
    for channels, alike in kernels.partition_by("blocks", as_dict=True).items():
        some = of_channels.get(channels)
        if some is None:
            continue
        for kind in alike["kind"].drop_nulls().unique():
            # A kernel that does not name its kind may be the one, but is not described.
            possible = alike.filter(pl.col("kind").is_null() | (pl.col("kind") == kind))
            of_kind = some.filter(pl.col("kind") == kind)
            start = possible["start"].to_numpy()
            first = np.searchsorted(start, of_kind["begin"].to_numpy(), "left")
            count = np.searchsorted(start, of_kind["end"].to_numpy(), "right") - first
            only: Int64 = np.flatnonzero(count == 1)
            kernel = possible[first[only]]
            executed = of_kind["executed"].gather(only).fill_null(0)
            fits = (kernel["duration"] >= executed - _ROUNDED_NS) & kernel["kind"].is_not_null()
            chosen = of_kind[only].select(*_FACTS).with_columns(kernel["gpu"].cast(pl.Int32))
            parts.append(chosen.filter(fits))
    return pl.concat(parts) if parts else _none()


def _none() -> pl.DataFrame:
    return COLLECTIVES.empty().select(*_FACTS, "gpu")


def _agreed(joined: list[pl.DataFrame]) -> pl.DataFrame:
    """One row for each kernel of which all records say the same."""
    schema = _none().schema
    every = pl.concat([_none(), *(part.select(pl.col(n).cast(t) for n, t in schema.items()) for part in joined)])
    by_activity = every.group_by("gpu", maintain_order=True).agg(
        pl.struct(_FACTS).n_unique().alias("said"), *map(pl.first, _FACTS)
    )
    return by_activity.filter(pl.col("said") == 1).drop("said")
