"""The tables of a trace: every column with its type, unit and missing value.

Readers fill these tables; everything else only reads them. Times are int64 nanoseconds on the trace's
own clock; ``Meta.epoch_ns`` is the epoch of that clock. A null always means "the trace does not say".
`thence.attribution.steps` finds steps, and defines where each kind of them begins and ends.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import polars as pl

from thence.credentials import without_credentials
from thence.model import counter_names
from thence.model.phases import HOST_STATES, POSITIONS
from thence.model.reasons import CODES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from thence.model.flight_records import FlightRecord
    from thence.model.graph_labels import GraphLabels
    from thence.model.hlo import HloModule
    from thence.model.inspector_records import InspectorRecord
    from thence.model.losses import Loss


STEP_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "step": "marked by the program or its profiler",
        "pass": "passes of an inference server",
        "range": "named ranges that count steps",
        "program": "executions of the XLA program with most time",
        "optimizer": "from one optimizer step to the next",
        "graph": "launches of CUDA graphs that repeat",
        "module": "calls of the outermost module",
        "batch": "from one batch of a DataLoader to the next",
    }
)
"""Every kind of steps, in the order in which they are looked for: the first one that a trace has counts."""
ENDLESS = frozenset({"program", "graph", "module"})
"""Kinds whose last step ends with its own last work, because nothing marks its end."""
NO_STEPS = (
    "nothing marks steps (torch.profiler's step(), thence.step() and jax.profiler.StepTraceAnnotation do), and no "
    "XLA program, step of an optimizer, outermost module, CUDA graph or fetch of a batch is seen to repeat"
)
"""Why a trace has no steps, as a part of a sentence."""
KINDS = ("kernel", "memcpy", "memset", "thunk")
"""Kinds of device activities. thunk: the work of one XLA thunk, from producers that do not list its kernels."""
HOST_CATEGORIES = (
    "step",
    "phase",
    "module",
    "python",
    "range",
    "framework",
    "op",
    "compile",
    "sample",
    "runtime",
    "driver",
    "overhead",
)
"""Categories of host ranges, outermost first: of two equal intervals, the one of the earlier category contains the
other. step: one profiler step. phase: a part of a training step, named as `Phase`. module: a call of an
nn.Module. python: a Python frame, ``file.py(12): function``. range: a range that the user named
(record_function, NVTX). framework: a range that a library named. op: a framework operator. compile: a
compilation phase. sample: a Python frame, written as for python, that samples of the thread showed between two
API calls; of nested ones the innermost is where the thread was, and has the column ``state``. runtime, driver: a
CUDA or HIP API call. overhead: time taken by the profiler itself."""
API_CALLS = ("runtime", "driver")
"""Categories of `HOST_CATEGORIES` that are API calls: the activities that they launched share their correlation id."""
_MAX_NAMED = 3
"""Most inputs that a sentence names."""
_NAME = pl.Categorical()
EVENT_KINDS = ("record", "wait")
"""What a stream can do with a CUDA event: record it, or wait until it has been recorded."""
WAIT_KINDS = ("device", "stream", "event", "copy", "free")
"""What a host call can wait for. device: all work of the device (cudaDeviceSynchronize). stream: all work of one
stream. event: all work before the record of an event. copy: its own copy (cudaMemcpy). free: cudaFree, which
waits for the device before it frees memory."""
MEMORY_KINDS = (
    "parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "temporary",
    "workspace",
    "communication",
    "argument",
    "output",
    "constant",
)
"""What memory can be for, where it can be proved. parameter, gradient, optimizer_state: of a model. activation: made in
the forward pass and returned in the backward pass or after it. temporary: returned in the operator or the pass that
allocated it, or scratch memory of an XLA program. workspace: of a library such as cuBLAS. communication: of
collectives. argument, output, constant: of an XLA program."""
KNOWN = ("recorded", "inferred", "never_recorded", "unknown")
"""How the stream and the record of an event or wait are known. recorded: the producer wrote ids that fit the
trace. inferred: they follow from the order of the calls, and the times of the activities do not contradict this.
never_recorded: the event was never recorded, so that waiting for it has no effect. unknown: the trace does not
say, or the times contradict what follows from the order."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        name: as in the frame.
        dtype: Polars type.
        meaning: what it holds, in which unit, and what null stands for.
    """

    name: str
    dtype: pl.DataType | type[pl.DataType]
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    """The schema of one table.

    Attributes:
        name: attribute of `Tables` and name in SQL.
        meaning: what one row is.
        columns: in order.
        required: names of columns that are never null.
        schema: Polars schema: column name to type.
        nothing: the frame without rows, and one null of each column, made when they are first used: thousands of small
            inputs need them.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    required: tuple[str, ...] = ()
    schema: dict[str, Any] = field(init=False, repr=False, compare=False)
    nothing: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", {column.name: column.dtype for column in self.columns})

    def frame(self, columns: Mapping[str, Any]) -> pl.DataFrame:
        """A frame with this schema; columns that are not given are null.

        Args:
            columns: column name to Series, array or list, all of one length.
        """
        rows = len(next(iter(columns.values()), ()))
        if not rows:
            return self.empty()
        return pl.DataFrame(
            [
                _column(name, columns[name], dtype)
                if name in columns
                else self._null(name, dtype).new_from_index(0, rows)
                for name, dtype in self.schema.items()
            ]
        )

    def _null(self, name: str, dtype: Any) -> pl.Series:
        """A column of one null."""
        if name not in self.nothing:
            self.nothing[name] = pl.Series(name, [None], dtype=dtype)
        null: pl.Series = self.nothing[name]
        return null

    def lacking(self, frame: pl.DataFrame) -> list[str]:
        """The required columns that are null in some row of a frame with this schema."""
        if not frame.height:
            return []
        return [name for name in self.required if frame.get_column(name).null_count()]

    def complete(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Returns a frame with this schema, after a check that no required column holds a null.

        Raises:
            ValueError: a required column holds a null.
        """
        if lacking := self.lacking(frame):
            raise ValueError(f"rows of the table {self.name} without {', '.join(lacking)}")
        return frame

    def empty(self) -> pl.DataFrame:
        """A frame with this schema and no rows."""
        if "" not in self.nothing:
            self.nothing[""] = pl.DataFrame(schema=self.schema)
        frame: pl.DataFrame = self.nothing[""]
        return frame


def _column(name: str, values: Any, dtype: Any) -> pl.Series:
    column = values.alias(name) if isinstance(values, pl.Series) else pl.Series(name, values)
    return column.cast(dtype)


GPU = Table(
    "gpu",
    "one device activity: a kernel, a memcpy or a memset",
    (
        Column("rank", pl.Int32(), "rank of the process in its job, 0 for a single process"),
        Column("device", pl.Int32(), "device index within the process"),
        Column("stream", pl.Int64(), "stream id as the driver numbers it"),
        Column("kind", pl.Enum(KINDS), "kernel, memcpy or memset"),
        Column("name", _NAME, "full name, demangled where the producer did so"),
        Column("start", pl.Int64(), "ns on the trace's clock"),
        Column("duration", pl.Int64(), "ns"),
        Column("correlation", pl.Int64(), "id shared with the API call that launched it"),
        Column("external", pl.Int64(), "id of the framework op that the producer linked"),
        Column("graph", pl.UInt64(), "id of the executable CUDA graph; null when launched eagerly"),
        Column("node", pl.UInt64(), "id of the node in that graph, with as many bits as the producer wrote"),
        Column("grid", pl.Array(pl.UInt32, 3), "blocks in x, y, z; null for memcpys and memsets"),
        Column("block", pl.Array(pl.UInt32, 3), "threads in x, y, z; null for memcpys and memsets"),
        Column("registers", pl.Int32(), "registers per thread"),
        Column("shared_memory", pl.Int64(), "bytes per block, static and dynamic"),
        Column("bytes", pl.Int64(), "bytes copied or set; null for kernels"),
        Column("program", pl.Int32(), "row in programs of the XLA program execution it is part of"),
        Column("hlo", _NAME, "name of the HLO instruction that it runs"),
        Column("iteration", pl.Int32(), "how often the same instruction ran before in that execution"),
    ),
    required=("rank", "device", "stream", "kind", "name", "start", "duration"),
)


HOST = Table(
    "host",
    "one range on a host thread, sorted by rank, process, thread and start",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("process", pl.Int64(), "process id"),
        Column("thread", pl.Int64(), "thread id"),
        Column("category", pl.Enum(HOST_CATEGORIES), "see HOST_CATEGORIES"),
        Column("name", _NAME, "op, range, call or ``file.py(12): function``"),
        Column("start", pl.Int64(), "ns on the trace's clock"),
        Column("duration", pl.Int64(), "ns"),
        Column("correlation", pl.Int64(), "of API calls: id shared with the activities launched"),
        Column("external", pl.Int64(), "of ops: own id; of API calls: id of the op around them"),
        Column("sequence", pl.Int64(), "autograd sequence number of an op"),
        Column(
            "position",
            pl.Enum(POSITIONS),
            "of Python frames: what their line number is, as `Position`; null: as of a function",
        ),
        Column(
            "state",
            pl.Enum(HOST_STATES),
            "of the innermost sample: what the thread did, as `HostState`; null elsewhere, and where it is unknown",
        ),
        Column("parent", pl.Int32(), "row of the innermost range around it on its thread"),
        Column("forward", pl.Int32(), "of backward ops: row of the forward op they belong to"),
        Column("kernel", _NAME, "of API calls: kernel that it launches, where AMD's profiler says so"),
        Column("lane", _NAME, "of marks: extra lane in which timelines show their activities; null without one"),
        Column(
            "metadata",
            _NAME,
            "of marks, and of launches of Triton kernels: further facts as a JSON object; null elsewhere",
        ),
        Column(
            "inputs",
            _NAME,
            "of operators: a JSON object with shapes (dims), element types (types), strides and scalars (values) of "
            "their arguments; null where they were not recorded",
        ),
    ),
    required=("rank", "process", "thread", "category", "name", "start", "duration"),
)


COLLECTIVES = Table(
    "collectives",
    "one collective kernel, with the message as its library described it",
    (
        Column("gpu", pl.Int32(), "row in gpu; null until the host op has been matched"),
        Column("host", pl.Int32(), "row in host of the op that described it; null if no op did"),
        Column("collective", _NAME, "name as the library gives it, such as all_reduce"),
        Column("bytes", pl.Int64(), "message size in bytes: the input of one rank; for reduce-scatter, its output"),
        Column("in_elements", pl.Int64(), "elements that this rank puts in"),
        Column("out_elements", pl.Int64(), "elements that this rank gets"),
        Column("element_type", _NAME, "element type as the library spells it"),
        Column("group_size", pl.Int32(), "ranks that take part"),
        Column("group_name", _NAME, "process group name"),
        Column("group_description", _NAME, "process group description"),
        Column("group_ranks", _NAME, "ranks of the group as the producer wrote them"),
        Column("sequence", pl.Int64(), "number of the collective within its group"),
        Column("source_rank", pl.Int32(), "sending rank of point-to-point operations"),
        Column("destination_rank", pl.Int32(), "receiving rank of point-to-point operations"),
        Column("in_splits", pl.String(), "uneven split sizes in, as written"),
        Column("out_splits", pl.String(), "uneven split sizes out, as written"),
    ),
)


DESCRIBED = tuple(name for name in COLLECTIVES.schema if name not in ("gpu", "host"))
"""Columns of `COLLECTIVES` that describe the collective."""


PROGRAMS = Table(
    "programs",
    "one execution of an XLA program (an XLA module) on one device",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("device", pl.Int32(), "device index, as in gpu"),
        Column("program", _NAME, "identity: fingerprint or id, equal on all ranks where possible"),
        Column("name", _NAME, "name of the program, such as jit_train_step"),
        Column("execution", pl.Int32(), "how often the same program ran on this device before"),
        Column("start", pl.Int64(), "ns: start of its first device activity"),
        Column("duration", pl.Int64(), "ns: to the end of its last device activity"),
        Column("launch", pl.Int64(), "ns: when the host began to launch it"),
        Column("launch_duration", pl.Int64(), "ns that the host took to launch it"),
        Column("hlo", pl.Int32(), "index in Tables.hlo of its HLO module"),
    ),
    required=("rank", "device", "name", "execution", "start", "duration"),
)


GRAPH_PLACES = Table(
    "graph_places",
    "where an activity of a CUDA graph came from, by labels taken at capture or from an eager run",
    (
        Column("gpu", pl.Int32(), "row in gpu; each occurs at most once"),
        Column("label", _NAME, "path of the labels, outermost first: ``layer0/attention``"),
        Column("module", _NAME, "path of nn.Module calls"),
        Column("op", _NAME, "innermost framework operator"),
        Column("ops", _NAME, "path of operators"),
        Column("source", _NAME, "``file.py:12 function``"),
        Column("position", pl.Enum(POSITIONS), "what its line number is, as `Position`"),
        Column("stack", _NAME, "path of Python frames"),
        Column("phase", _NAME, "as `Phase`; labels taken at capture say forward or backward"),
        Column("lane", _NAME, "extra lane in which timelines show it"),
        Column("rule", pl.Enum(CODES), "code of the rule that gave its label, or of the reason why it has none"),
        Column("confidence", pl.Float64(), "of an alignment, 0 to 1; null where ids decided"),
        Column("metadata", _NAME, "further facts of the label as a JSON object"),
        Column("detail", _NAME, "sentence about a graph that fits no label; null elsewhere"),
        Column(
            "collective",
            pl.Struct(
                {
                    name: pl.String() if COLLECTIVES.schema[name] == _NAME else COLLECTIVES.schema[name]
                    for name in DESCRIBED
                }
            ),
            "what a collective moved, as `DESCRIBED`; null for all others",
        ),
        Column("operator", _NAME, "operator whose call launched it, where its inputs are known"),
        Column("inputs", _NAME, "of that operator, as in host"),
        Column("node", pl.Int32(), "position of the activity among those of the call, from 0"),
        Column("nodes", pl.Int32(), "number of the activities of the call"),
    ),
    required=("gpu", "rule"),
)


THREADS = Table(
    "threads",
    "one named host thread",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("process", pl.Int64(), "process id"),
        Column("thread", pl.Int64(), "thread id"),
        Column("name", pl.String(), "name that the producer gave; null where it gave none"),
    ),
    required=("rank", "process", "thread"),
)


EVENTS = Table(
    "events",
    "one call that made a stream record a CUDA event or wait for one, sorted by rank and start of the call",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("device", pl.Int32(), "device index; null where the trace does not say"),
        Column("stream", pl.Int64(), "stream that records or waits; null where unknown"),
        Column("kind", pl.Enum(EVENT_KINDS), "record or wait"),
        Column("host", pl.Int32(), "row in host of the call"),
        Column("event", pl.Int64(), "id of the event as the producer numbers it"),
        Column("record", pl.Int32(), "of waits: row in events of the record that it waits for; else null"),
        Column("known", pl.Enum(KNOWN), "how stream (of records) and record (of waits) are known"),
    ),
    required=("rank", "kind", "host"),
)


WAITS = Table(
    "waits",
    "one host call that waits for the device, sorted by rank and start of the call",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("host", pl.Int32(), "row in host of the call"),
        Column("kind", pl.Enum(WAIT_KINDS), "see WAIT_KINDS"),
        Column("device", pl.Int32(), "device index; null where the trace does not say"),
        Column("stream", pl.Int64(), "stream waited for; null for whole devices and where unknown"),
        Column("record", pl.Int32(), "of waits for an event: row in events of its record; else null"),
        Column("known", pl.Enum(KNOWN), "how stream and record are known"),
    ),
    required=("rank", "host", "kind"),
)


_PLACES_OF_MEMORY = (
    Column("label", _NAME, "path of the labels, outermost first"),
    Column("module", _NAME, "path of nn.Module calls"),
    Column("op", _NAME, "innermost framework operator, or the HLO instruction"),
    Column("source", _NAME, "``file.py:12 function``"),
    Column("position", pl.Enum(POSITIONS), "what its line number is, as `Position`"),
    Column("stack", _NAME, "path of Python frames, as `thence.model.graph_labels.Place.stack_text` writes it"),
    Column("phase", _NAME, "as `Phase`"),
)
"""Where a call of an allocator came from, as far as the format itself says (memory snapshots have the true lines).
`thence.analysis.memory.places` keeps these, and finds the others by the host ranges around the call."""


CUDA_ALLOCATOR = "cuda"
"""Name of the allocator of what was asked of CUDA itself. Where the readings of a framework's allocator are known, what
that allocator asked for is left out, and the others have no readings of their own."""
MEMORY = Table(
    "memory",
    "one allocation: a block of memory from the call that handed it out to the call that returned it, sorted by rank, "
    "device and opened, those without it first",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("device", pl.Int32(), "device index within the process; null: memory of the host"),
        Column("process", pl.Int64(), "process id; null where unknown"),
        Column("thread", pl.Int64(), "thread id of the call that allocated it; null where unknown"),
        Column("start", pl.Int64(), "ns on the trace's clock; null: allocated before the trace began"),
        Column("end", pl.Int64(), "ns when it was returned; null: still live when the trace ended"),
        Column(
            "launch",
            pl.Int64(),
            "ns: in recordings, which note places at launches, when the work it was made for was launched; else null",
        ),
        Column(
            "opened",
            pl.Int32(),
            "row in memory_totals of the reading after it was allocated; null as start, or if its allocator has none",
        ),
        Column("closed", pl.Int32(), "row in memory_totals of the reading after it was returned; null as end"),
        Column("address", pl.UInt64(), "where it begins; null where unknown"),
        Column("bytes", pl.Int64(), "as the allocator counts it: with what it rounded up"),
        Column("requested", pl.Int64(), "bytes that were asked for; null where unknown"),
        Column("stream", pl.Int64(), "stream for whose work it was allocated; null where unknown"),
        Column(
            "pool",
            _NAME,
            "pool of the allocator, such as a CUDA graph's private one; of CUDA itself, the library that asked; null: "
            "the default or unknown",
        ),
        Column("allocator", _NAME, "name of the allocator: torch, cuda (`CUDA_ALLOCATOR`), or as XLA names it"),
        Column("kind", pl.Enum(MEMORY_KINDS), "see MEMORY_KINDS; null where the producer does not say it"),
        *_PLACES_OF_MEMORY,
    ),
    required=("rank", "bytes", "allocator"),
)


MEMORY_TOTALS = Table(
    "memory_totals",
    "what an allocator had handed out and reserved after one change, sorted by rank, device and order of the changes; "
    "the first row of a device may be a reading before any change",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("device", pl.Int32(), "device index within the process; null: memory of the host"),
        Column("allocator", _NAME, "name of the allocator, as in memory"),
        Column("start", pl.Int64(), "ns on the trace's clock"),
        Column("allocated", pl.Int64(), "bytes handed out and not returned, as the allocator states or counts them"),
        Column("reserved", pl.Int64(), "bytes that the allocator holds of the device; null where unknown"),
        Column("inactive", pl.Int64(), "bytes of reserved that are handed out to nobody; null where unknown"),
        Column(
            "outside",
            pl.Int64(),
            "bytes that the process held of the device beside reserved, at the sample of them that is nearest in time; "
            "null where unknown",
        ),
    ),
    required=("rank", "allocator", "start", "allocated"),
)
"""Allocations refer to its rows, because only their order tells which of two changes at the same time came first.
The allocations that are live after a change are those with ``opened`` null or at most its row, and ``closed`` null or
after it; their bytes are ``allocated``, less what was allocated before the trace and never seen."""


MEMORY_FAILURES = Table(
    "memory_failures",
    "one allocation that failed because the device was out of memory, sorted by rank, device and start",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("device", pl.Int32(), "device index within the process"),
        Column("process", pl.Int64(), "process id; null where unknown"),
        Column("thread", pl.Int64(), "thread id of the call; null where unknown"),
        Column("start", pl.Int64(), "ns on the trace's clock"),
        Column("after", pl.Int32(), "row in memory_totals of the last reading before it; null: none"),
        Column("bytes", pl.Int64(), "bytes that were asked for"),
        Column("allocated", pl.Int64(), "bytes that were handed out at that time; null where unknown"),
        Column("reserved", pl.Int64(), "bytes that the allocator held at that time; null where unknown"),
        Column("device_free", pl.Int64(), "bytes of the device that no process held; null where unknown"),
        Column("largest_inactive", pl.Int64(), "bytes of the largest block that the allocator held and nobody used"),
        Column("stream", pl.Int64(), "stream for whose work it was asked; null where unknown"),
        Column("allocator", _NAME, "name of the allocator, as in memory"),
        *_PLACES_OF_MEMORY,
    ),
    required=("rank", "start", "bytes", "allocator"),
)


STEPS = Table(
    "steps",
    "one step of the program, sorted by rank, device and start",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("device", pl.Int32(), "device index; null: a step of all devices of the rank"),
        Column("kind", pl.Enum(tuple(STEP_KINDS)), "how it was found, as in STEP_KINDS"),
        Column("name", _NAME, "its name, or that of what repeats and a number"),
        Column(
            "number", pl.Int64(), "number at the end of its name; if a step of the rank has none, its position from 0"
        ),
        Column("start", pl.Int64(), "ns on the trace's clock: when the host began it"),
        Column("duration", pl.Int64(), "ns until the host ended it, or began the next one"),
    ),
    required=("rank", "kind", "name", "number", "start", "duration"),
)


STEP_TIMES = Table(
    "step_times",
    "how long one step took, recorded or not, as thence's recorder measured it; sorted by rank and start",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("number", pl.Int64(), "position of the step from 0, or the number that the program gave"),
        Column("start", pl.Int64(), "ns on the trace's clock: when the host began it"),
        Column(
            "duration",
            pl.Int64(),
            "ns to the next step: on the device, between CUDA events on the current stream, where the recorder "
            "compares steps; elsewhere on the host",
        ),
        Column("recorded", pl.Boolean(), "whether the step was recorded; if not, nothing of it is in other tables"),
        Column(
            "counted",
            pl.Boolean(),
            "whether it shows what recording costs: a plain step, or a recorded one near plain steps, and not the "
            "first one after the recorder was switched on or off",
        ),
    ),
    required=("rank", "number", "start", "duration", "recorded", "counted"),
)


COUNTERS = Table(
    "counters",
    "one sample of the hardware counters of a device, sorted by rank, device and start; different counters may be "
    "sampled at different times, so that samples overlap",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("device", pl.Int32(), "device index within the process"),
        Column("start", pl.Int64(), "ns on the trace's clock"),
        Column("end", pl.Int64(), "ns on the trace's clock"),
        *(
            Column(counter.name, pl.Float64(), f"{counter.text}; null: not in this sample")
            for counter in counter_names.COUNTERS
        ),
    ),
    required=("rank", "device", "start", "end"),
)

STALLS = Table(
    "stalls",
    "samples of the program counters of kernels, added up over the whole recording (`thence record --stalls`), largest "
    "number first; samples of code that CUPTI does not name are in no row",
    (
        Column("rank", pl.Int32(), "rank of the process in its job"),
        Column("device", pl.Int32(), "device index within the process"),
        Column("kernel", pl.Categorical(), "name of the kernel or of a function that it calls, as in gpu"),
        Column("file", pl.Categorical(), "source file of the instruction; null: its module has no lines"),
        Column("line", pl.Int32(), "line in that file"),
        Column("reason", pl.Categorical(), "code: why the warp issued nothing, or that it did (selected)"),
        Column("samples", pl.Int64(), "number of samples, of one warp of one multiprocessor each"),
    ),
    required=("rank", "device", "kernel", "reason", "samples"),
)


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU of one rank, as the producer described it; None for what it did not describe."""

    rank: int
    device: int
    name: str | None = None
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    compute_capability: str | None = None
    clock_mhz: float | None = None
    """Median of the clock of its multiprocessors, of samples that were taken while it worked."""
    node: str | None = None
    """Name of the machine that it is in."""


def copies_or_sets(gpu: pl.DataFrame) -> pl.Series:
    """Which activities copy or set memory."""
    return (gpu["kind"] == "memcpy") | (gpu["kind"] == "memset")


def named_inputs(inputs: Sequence[str]) -> str:
    """The names of inputs for a sentence or a title; of more than three, the first two and the number of the others."""
    if len(inputs) <= _MAX_NAMED:
        return ", ".join(inputs)
    return f"{', '.join(inputs[: _MAX_NAMED - 1])} and {len(inputs) - _MAX_NAMED + 1} more"


@dataclass(frozen=True, slots=True)
class Meta:
    """Facts about a whole trace.

    Credentials in URLs of the inputs are left out, because these facts are shown and stored.

    Attributes:
        inputs: what was read, as the user named it.
        formats: format of each input.
        epoch_ns: Unix time in ns at which the trace's clock reads 0; None when unknown.
        facts: producer, versions and settings of each input, as written there.
        devices: every GPU that was used.
        process_groups: ranks of every process group that the producers described.
        warnings: what the reader had to leave out, repair or assume, one sentence each.
        left_out: which files of the inputs were not read, such as those of older runs, one sentence each.
        notes: what was done with the inputs that is no problem, such as labels that were joined, one sentence each.
        losses: lost, damaged and repaired records, which the warnings describe to the user and `thence check` judges.
        ranks_stated: whether every input states its rank, in its content or its name; else ranks are only numbers
            that tell the inputs apart.
    """

    inputs: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    epoch_ns: int | None = None
    facts: tuple[Mapping[str, Any], ...] = ()
    devices: tuple[Device, ...] = ()
    process_groups: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()
    ranks_stated: bool = False

    def __post_init__(self) -> None:
        """Removes credentials from ``inputs`` and all sentences."""
        for name in ("inputs", "warnings", "left_out", "notes"):
            shown = tuple(map(without_credentials, getattr(self, name)))
            object.__setattr__(self, name, shown)

    @property
    def named(self) -> str:
        """The inputs, for a sentence or a title: see `named_inputs`."""
        return named_inputs(self.inputs)

    @property
    def accelerators(self) -> frozenset[str]:
        """The accelerators on which the inputs ran, as far as they state it: cuda, rocm, xpu, mtia, privateuse1."""
        return frozenset(str(f["accelerator"]) for f in self.facts if "accelerator" in f)


@dataclass(frozen=True)
class Tables:
    """What a reader returns: the tables of one or several ranks, and facts about them.

    ``graph_labels`` are labels of captured graphs that came with the trace, or were found next to it;
    ``graph_places`` holds the labels that have been joined to activities. ``flight_records`` are the collective calls
    of PyTorch's flight recorder, ``inspector_records`` the collectives that NCCL's Inspector plugin wrote; attribution
    joins both to ``collectives``. ``steps`` is empty until attribution has found them.
    """

    gpu: pl.DataFrame = field(default_factory=GPU.empty)
    host: pl.DataFrame = field(default_factory=HOST.empty)
    collectives: pl.DataFrame = field(default_factory=COLLECTIVES.empty)
    threads: pl.DataFrame = field(default_factory=THREADS.empty)
    programs: pl.DataFrame = field(default_factory=PROGRAMS.empty)
    events: pl.DataFrame = field(default_factory=EVENTS.empty)
    waits: pl.DataFrame = field(default_factory=WAITS.empty)
    steps: pl.DataFrame = field(default_factory=STEPS.empty)
    step_times: pl.DataFrame = field(default_factory=STEP_TIMES.empty)
    memory: pl.DataFrame = field(default_factory=MEMORY.empty)
    memory_totals: pl.DataFrame = field(default_factory=MEMORY_TOTALS.empty)
    memory_failures: pl.DataFrame = field(default_factory=MEMORY_FAILURES.empty)
    counters: pl.DataFrame = field(default_factory=COUNTERS.empty)
    stalls: pl.DataFrame = field(default_factory=STALLS.empty)
    hlo: tuple[HloModule, ...] = ()
    graph_places: pl.DataFrame = field(default_factory=GRAPH_PLACES.empty)
    graph_labels: tuple[GraphLabels, ...] = ()
    flight_records: tuple[FlightRecord, ...] = ()
    inspector_records: tuple[InspectorRecord, ...] = ()
    meta: Meta = field(default_factory=Meta)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have at least one row, ascending."""
        ranks: set[int] = set()
        for column in (self.gpu["rank"], self.host["rank"], self.memory_totals["rank"]):
            low, high = column.min(), column.max()  # mostly the same
            ranks.update({low, high} - {None} if low == high else column.unique())  # type: ignore[arg-type]
        return sorted(ranks)

    @property
    def around(self) -> Self:
        """All work of these ranks and devices: of a selected part, the trace that it was selected from."""
        return self

    def with_losses(self, losses: Iterable[Loss]) -> Tables:
        """The same tables with more losses."""
        meta = dataclasses.replace(self.meta, losses=(*self.meta.losses, *losses))
        return dataclasses.replace(self, meta=meta)

    def with_warnings(self, warnings: Iterable[str]) -> Tables:
        """The same tables with more warnings."""
        meta = dataclasses.replace(self.meta, warnings=(*self.meta.warnings, *warnings))
        return dataclasses.replace(self, meta=meta)
