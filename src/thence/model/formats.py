"""Names of the formats of inputs, and the file formats of thence: their versions, files, tables and codes.

Writers, readers and inspection tools share these definitions. This module imports only the standard library and
modules of `thence.model` that do the same, because recorded processes import it.

**Recording** (`RECORDING`): a folder for each process with `DESCRIPTION` and, for each of `TABLES`, parts
(`part_name`) numbered from 1, each a complete file of `thence.model.column_file`. `DESCRIPTION` states how many
parts and rows of each table had been written at the time when it was written itself. The folder also holds the
labels of captured graphs (`LABELS_FILE`), a snapshot of PyTorch's memory (`MEMORY_FILE`), and a folder of HLO modules
(`HLO_FOLDER`) with an index (`COMPILED_INDEX`).

**Labels of captured graphs** (`GRAPH_LABELS`): one JSON object; nodes and edges are stored as columns:

    format, version   `GRAPH_LABELS`, `GRAPH_LABELS_VERSION`
    process           the process that captured: pid, rank, boot, started_ns, saved_ns
    labels            path (names of the marks), phase (forward, backward), lane, metadata
    places            of nodes: module (path of the nn.Module), stack (``file:line function``, outermost first; line 0:
                      only the function is certain), phase, op, parts (of a fused kernel: module, line, op, phase
                      and estimated share of each), call (of the operator that made the node: name, index of its
                      inputs, position of the node among those of the call, and their number)
    inputs            of operators, as ``HOST.inputs`` holds them
    kernels           name (as the driver gives it), demangled (as Kineto shows it)
    graphs            id, executables, device, nodes (columns), edges
    notes             what could not be labelled and why

Collectives are described in the metadata, under the keys that Kineto uses in eager traces
(`thence.model.collectives.KINETO_KEYS`).
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING

from thence.model.collectives import NUMBERS, TEXTS
from thence.model.counter_names import BY_NAME, COUNTERS_TABLE
from thence.model.phases import HOST_STATES
from thence.model.stall_reasons import STALLS_TABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

KINETO_TRACE = "torch.profiler (Kineto JSON)"
XSPACE_TRACE = "jax.profiler (XSpace)"
NSIGHT_EXPORT = "Nsight Systems export"
"""For all file types of exports."""
NSIGHT_CSV = "Nsight Systems cuda_gpu_trace (CSV)"
NSYS_JAX_ARCHIVE = "nsys-jax archive"
THENCE_RECORDING = "thence recording"
"""Names of the formats of inputs, as messages and ``Meta.formats`` have them; advice and analyses go by them."""

RECORDING = "thence.recording"
RECORDING_VERSION = 4
"""How earlier versions differ. 1: the description of a collective was JSON, the metadata of its mark. 2: parts were
Arrow IPC files (`OLD_PART_ENDING`), and their number was not stated. 3: there were no boundaries, and every launch was
a row of calls."""
DESCRIPTION = "recording.json"
"""File of a recording that describes the recorded process."""
PART_ENDING, OLD_PART_ENDING = ".npz", ".arrow"
PART = re.compile(r"([a-z]+)-(\d{6,})\.(?:npz|arrow)")
"""File names of parts: table and number."""


def part_name(table: str, number: int | None = None) -> str:
    """The file name of a part; without a number, a glob that matches all parts of the table."""
    return f"{table}-{'*' if number is None else f'{number:06}'}{PART_ENDING}"


_ACTIVITY = dict.fromkeys(("start", "end", "device", "stream", "correlation", "node", "graph"), "Int64")
_ACTIVITY["node"] = "UInt64"
_GRID = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")


def _integers(*columns: str) -> dict[str, str]:
    return dict.fromkeys(columns, "Int64")


TABLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "names": {"number": "Int64", "name": "String", "demangled": "String"},
        "kernels": _ACTIVITY | _integers("name", "registers", *_GRID, "static_shared", "dynamic_shared", "queued"),
        "copies": _ACTIVITY | _integers("bytes", "copy_kind", "source_memory", "destination_memory"),
        "sets": _ACTIVITY | _integers("bytes", "memory"),
        "calls": _integers("start", "end", "thread", "correlation", "function", "api"),
        "ranges": _integers("flags", "time", "id", "thread", "name", "domain"),
        "overheads": _integers("overhead_kind", "object_kind", "thread", "start", "end"),
        "allocations": _integers("operation", "memory", "correlation", "address", "bytes", "time", "device", "source"),
        "marks": _integers(*("what", "serial", "forward", "time", "thread", "name", "lane", "metadata", "counter")),
        "boundaries": _integers("counter", "time", "thread", "place", "flags"),
        "places": _integers("number", "kind", "parent", "name", "detail", "line"),
        "samples": _integers("time", "until", "thread", "line", "frame", "count", "state"),
        "steps": _integers("number", "start", "duration", "recorded", "counted"),
        "collectives": _integers("serial", *TEXTS, *NUMBERS),
        COUNTERS_TABLE: _integers("device", "start", "end") | dict.fromkeys(BY_NAME, "Float64"),
        STALLS_TABLE: _integers("device", "kernel", "file", "line", "reason", "samples"),
    }
)
"""Columns of each table of a recording, and names of the Polars types that they are read as; narrower integers may be
written. Times are Unix time in ns. name, source, function, domain, lane, metadata, detail, kernel, file, reason and the
text columns of collectives hold numbers from the table names, 0 for none. serial identifies a mark. queued is the time
when the host queued a kernel, 0 if CUPTI does not report it. counter is the value of the counter by which CUPTI numbers
launches (`thence.capture.boundaries.log`); in marks it is that of the boundary at the same time, 0 without one. places
are described in `thence.capture.boundaries.places`. A row of samples is ``count`` consecutive samples of a thread
between two of its calls, from ``time`` to ``until``, all with the same line of the user's code and innermost frame
(``line`` and ``frame``, numbers of places, 0 for none) and state (a number of `SAMPLE_STATES`). Recordings of this
version that were made before there were samples have no such table. steps are those that the recorder saw while it ran
(`thence.capture.session.step_times`): ``recorded`` is 1 or 0, ``counted`` is 1 for steps that show what recording
costs; older recordings have no such table. counters holds samples of hardware counters (`thence.model.counter_names`);
a counter that was not sampled has no column, or is not a number where a row does not hold it. stalls holds samples of
program counters since the part before: of a kernel, a line of its source (file 0: unknown), and a reason
(`thence.model.stall_reasons`)."""
SAMPLE_STATES = (None, *HOST_STATES)
"""What a thread did in a sample, by the number in the table samples; None: unknown."""
LACKING: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "collectives": frozenset((*TEXTS, *NUMBERS)) - {"sequence"},
        "allocations": frozenset({"source"}),
        "kernels": frozenset({"queued"}),
        "marks": frozenset({"counter"}),
        COUNTERS_TABLE: frozenset(BY_NAME),
    }
)
"""By table, the columns that recordings of version 1, or of versions before 4, do not have, or that are optional."""
ACTIVITIES = ("kernels", "copies", "sets")
"""Tables of device activities."""
REFERRED_TO = ("names", "places")
"""Tables of a recording that stay when old windows are deleted, because later rows refer to them."""

OPENED, CLOSED, BACKWARD_OPENED, STEP = 0, 1, 2, 3
"""Values of the column ``what`` of the table marks."""

MEMORY_FILE = "memory.pickle"
"""File of a recording with a snapshot of PyTorch's memory (`thence.readers.memory_snapshot`), if it was asked for."""
LABELS_FILE = "labels.json"
"""File of a recording that holds the labels of its captured CUDA graphs."""
MEASURED_PEAKS_FILE = "measured-peaks"
"""File of a recording, in the folder around those of its processes, that ``thence record --with peaks`` writes."""
REQUEST_FILE = "record-now"
"""Touched in the directory of a recording that samples steps, this file asks all of its processes for a window."""
SUMMARIES_FILE, OLDER_SUMMARIES_FILE = "summaries.jsonl", "summaries.1.jsonl"
"""Files of a recording that samples steps, in the folder of a process (`thence.watch.summary_file`)."""
GRAPH_LABELS = "thence.graph-labels"
GRAPH_LABELS_VERSION = 3
"""In version 1, nodes had no place; in version 2, places had no call."""

HLO_FOLDER = "hlo"
"""Folder of a recording that holds the HLO modules of its XLA programs."""
HLO_ENDING = ".hlo.pb"
COMPILED_INDEX = "compiled.json"
"""Index file in that folder: its modules, and when and where each was compiled."""
COMPILED = "thence.compiled"
"""Name of the format of that file."""
