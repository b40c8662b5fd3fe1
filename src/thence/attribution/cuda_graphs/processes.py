"""Checks that labels and a trace are of one process, because node ids alone match any process."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import polars as pl

from thence.model.graph_labels import Process

if TYPE_CHECKING:
    from thence.model.graph_labels import GraphLabels
    from thence.model.tables import Tables

_CLOCKS_NS = 2_000_000_000  # by how much clocks of one machine may disagree about when a process began


def process_mismatch(labels: GraphLabels, tables: Tables, rank: int) -> str | None:
    """The reason why labels are not of a rank's process, as the end of a sentence; None if they may be.

    Compares process id, rank, boot of the machine, and the time of the trace with the time at which the
    labelled process began; a fact that either side lacks is not compared.
    """
    process = labels.process
    reason = _other_process(process, tables, rank)
    if reason is not None:
        return reason
    boots = {f["boot"] for f in tables.meta.facts if isinstance(f.get("boot"), str)}
    if process.boot and boots and process.boot not in boots:
        return "the machine was restarted between capture and trace"
    began = tables.gpu.filter(pl.col("rank") == rank)["start"].min()
    if process.started_ns is None or tables.meta.epoch_ns is None or not isinstance(began, int):
        return None
    if began + tables.meta.epoch_ns + _CLOCKS_NS < process.started_ns:
        return (
            f"the process that captured these graphs began at {_moment(process.started_ns)}, "
            f"but the trace at {_moment(began + tables.meta.epoch_ns)}"
        )
    return None


def _other_process(process: Process, tables: Tables, rank: int) -> str | None:
    """The reason as in `process_mismatch`, by process ids and ranks alone."""
    # Profilers write their own overhead under a process id that does not exist.
    of_rank = tables.host.filter((pl.col("rank") == rank) & (pl.col("process") > 0))
    pids = of_rank["process"].unique().to_list()
    if process.pid is not None and pids and process.pid not in pids:
        traced = ", ".join(str(pid) for pid in sorted(pids)[:3])
        return f"process {process.pid} captured these graphs, but the trace is of process {traced}"
    several = len(tables.ranks) > 1
    if several and process == Process(started_ns=process.started_ns):
        return (
            "the file does not say which rank captured these graphs, and the trace holds "
            f"{len(tables.ranks)} ranks: rename it to kernel_annotations_rank0_... (with its rank), "
            "or label each rank alone"
        )
    # A trace of one process may lack its rank. Process ids alone prove nothing: they are equal in equal containers.
    ranked = not pids or several or process.pid is None or tables.meta.ranks_stated
    if ranked and process.rank is not None and process.rank != rank:
        return f"rank {process.rank} captured these graphs, but the trace is of rank {rank}"
    return None


def _moment(ns: int) -> str:
    try:
        moment = datetime.fromtimestamp(ns / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{ns} ns"
    return moment.isoformat(sep=" ", timespec="seconds")
