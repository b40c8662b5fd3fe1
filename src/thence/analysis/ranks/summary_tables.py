"""The tables of a summary: the data of a rank from which to find which rank is late, since when, and why.

They are small: collectives are the only activities with rows of their own, and the other tables have at most a few
hundred rows per step of a rank. Times are ns on the clock of the rank's machine (since 1970 if the trace tells when
its clock read 0), so that ranks that were read one by one can be compared.
"""

from __future__ import annotations

import polars as pl

from thence.analysis.idle.host_causes import CAUSES
from thence.model.tables import Column, Table

MOST_ROWS = 150
"""Maximum number of rows with a name for one step, device and kind of place: those with the most time. The others are
merged into rows without a name."""

_RANK = Column("rank", pl.Int32(), "rank of the process in its job")
_DEVICE = Column("device", pl.Int32(), "device index within the process")
_STEP = Column("step", pl.Int32(), "row of the step among those of its rank and device, in order")
_COUNT = Column("count", pl.Int64(), "activities, or pieces of idle time")
_TOTAL = Column("total_ns", pl.Int64(), "plain sum of their durations, ns")
_NAME = Column("name", pl.String(), "null: the sum of all names without a row of their own")

DEVICES = Table(
    "devices",
    "one device of one rank",
    (
        _RANK,
        _DEVICE,
        Column("name", pl.String(), "name of the GPU; null where the trace does not state it"),
        Column("start", pl.Int64(), "ns: start of its first activity"),
        Column("end", pl.Int64(), "ns: end of its last activity"),
        Column("busy_ns", pl.Int64(), "union of its activities"),
        Column("step_kind", pl.String(), "how steps were found, as in STEP_KINDS; null: the whole trace is one step"),
        Column("undescribed", pl.Int64(), "kernels that communicate without a description"),
        Column("epoch_known", pl.Boolean(), "whether times count from 1970"),
        Column(
            "job_ranks",
            pl.Int32(),
            "ranks of the job, see `thence.analysis.collectives.missing`; null where the rank's trace does not tell",
        ),
    ),
    required=("rank", "device", "start", "end", "busy_ns", "undescribed", "epoch_known"),
)
STEPS = Table(
    "steps",
    "one step on one device, as `thence.analysis.steps.windows` finds it",
    (
        _RANK,
        _DEVICE,
        _STEP,
        Column("name", pl.String(), "name of the step; null where the whole trace is one step"),
        Column("number", pl.Int64(), "number at the end of the name; null without one"),
        Column("start", pl.Int64(), "ns"),
        Column("duration", pl.Int64(), "ns; busy_ns and idle_ns add up to it"),
        Column("busy_ns", pl.Int64(), "union of the activities"),
        Column("idle_ns", pl.Int64(), "the rest"),
        Column("compute_ns", pl.Int64(), "union of all kernels that do not communicate"),
        Column("copy_ns", pl.Int64(), "time of memcpys and memsets in which nothing computed"),
        Column("exposed_ns", pl.Int64(), "time of communication in which nothing computed, whether or not copies ran"),
        Column(
            "host_ns",
            pl.Int64(),
            "ns that its host worked for the step, see `thence.analysis.ranks.host_work`; null where not known",
        ),
        Column("first", pl.Boolean(), "whether it is the first step on its device"),
    ),
    required=(
        "rank",
        "device",
        "step",
        "start",
        "duration",
        "busy_ns",
        "idle_ns",
        "compute_ns",
        "copy_ns",
        "exposed_ns",
        "first",
    ),
)
COLLECTIVES = Table(
    "collectives",
    "one kernel of a collective that its library described",
    (
        _RANK,
        _DEVICE,
        Column("number", pl.Int32(), "row among the collectives of its rank"),
        Column("step", pl.Int32(), "step that launched it; -1 without one"),
        Column("start", pl.Int64(), "ns: when it arrived"),
        Column("duration", pl.Int64(), "ns"),
        Column("launch", pl.Int64(), "ns: begin of its launch; null where unknown"),
        Column("correlation", pl.Int64(), "correlation id of its launch"),
        Column("replayed", pl.Boolean(), "whether it ran in a CUDA graph"),
        Column(
            "first_call",
            pl.Boolean(),
            "whether it created its communicator, see `thence.analysis.collectives.first_calls`",
        ),
        Column("execution", pl.Int32(), "execution of an XLA program, numbered within the rank"),
        Column("program", pl.String(), "name of that program"),
        Column("hlo", pl.String(), "HLO instruction"),
        Column("collective", pl.String(), "as its library names it"),
        Column("bytes", pl.Int64(), "message size"),
        Column("element_type", pl.String(), "as the library spells it"),
        Column("group_size", pl.Int32(), "ranks that take part"),
        Column("group", pl.Int32(), "row in groups of the same rank"),
        Column("sequence", pl.Int64(), "sequence number in its group"),
        Column("source_rank", pl.Int32(), "source of broadcasts, sends and receives"),
        Column("destination_rank", pl.Int32(), "destination of sends and receives"),
        Column("exposed_ns", pl.Int64(), "exposed time charged to it, see `thence.analysis.collectives.exposure`"),
        Column("exposed_start", pl.Int64(), "ns: begin of the longest piece of that time"),
        Column("exposed_end", pl.Int64(), "ns: end of that piece"),
        *(
            Column(f"{what}_{when}_ns", pl.Int64(), f"{of} from the device's first activity to its {when}")
            for when in ("start", "end")
            for what, of in (
                ("compute", "time in which something computed,"),
                ("copy", "time of copies in which nothing computed,"),
                ("idle", "time in which nothing ran,"),
            )
        ),
    ),
    required=("rank", "device", "number", "step", "start", "duration", "replayed", "first_call", "collective", "group"),
)
PARTS = Table(
    "parts",
    "one message of a kernel that sends and receives several",
    (
        _RANK,
        Column("number", pl.Int32(), "row in collectives of the same rank"),
        Column("order", pl.Int64(), "position among the messages of its kernel"),
        *(
            column
            for column in COLLECTIVES.columns
            if column.name
            in (
                *("collective", "bytes", "element_type", "group_size", "group", "sequence"),
                *("source_rank", "destination_rank"),
            )
        ),
    ),
    required=("rank", "number", "order"),
)
GROUPS = Table(
    "groups",
    "one process group of one rank",
    (
        _RANK,
        Column("group", pl.Int32(), "number within the rank"),
        Column("name", pl.String(), "as the library names it; null where it does not"),
        Column("description", pl.String(), "as the library describes it"),
        Column("members", pl.String(), "its ranks, as the producer wrote them"),
    ),
    required=("rank", "group"),
)
KERNELS = Table(
    "kernels",
    "kernels that compute, and copies, of one step and device, by name and shape",
    (
        _RANK,
        _DEVICE,
        _STEP,
        Column("kind", pl.String(), "kernel, thunk, memcpy or memset"),
        _NAME,
        Column("shape", pl.String(), "grid and block, or bytes of copies; null where not known"),
        _COUNT,
        _TOTAL,
    ),
    required=("rank", "device", "step", "kind", "count", "total_ns"),
)
PLACES = Table(
    "places",
    "where the kernels that compute, and copies, of one step and device came from",
    (
        _RANK,
        _DEVICE,
        _STEP,
        Column("by", pl.String(), "source, module, label, op, phase or hlo"),
        Column("name", pl.String(), "the place; null: no place, or the sum of all places without a row of their own"),
        _COUNT,
        _TOTAL,
    ),
    required=("rank", "device", "step", "by", "count", "total_ns"),
)
IDLE = Table(
    "idle",
    "idle time that began in a step of a device, by cause and place",
    (
        _RANK,
        _DEVICE,
        _STEP,
        Column("cause", pl.Enum(CAUSES), "as `thence.analysis.idle.causes` finds it"),
        Column("by", pl.String(), "line, module, label, op, call, phase or cause (all of it)"),
        Column("name", pl.String(), "the place; null: no place, or the sum of all places without a row of their own"),
        _COUNT,
        _TOTAL,
    ),
    required=("rank", "device", "step", "cause", "by", "count", "total_ns"),
)

SUMMARY = {table.name: table for table in (DEVICES, STEPS, COLLECTIVES, PARTS, GROUPS, KERNELS, PLACES, IDLE)}
"""Every table of a summary, by name."""
