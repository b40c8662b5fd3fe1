"""The file formats of thence: their names, versions, files, tables and codes.

Writers, readers and inspection tools share these definitions. This module imports nothing else of thence,
because recorded processes import it.

**Recording** (`RECORDING`): a folder for each process with `DESCRIPTION` and, for each of `TABLES`, parts
(`part_name`) numbered from 1, each a complete file of `thence.model.column_file`. `DESCRIPTION` states how many
parts and rows of each table had been written when it was. Beside them lie the labels of captured graphs
(`LABELS_FILE`) and a folder of HLO modules (`HLO_FOLDER`) with an index (`COMPILED_INDEX`).

**Labels of captured graphs** (`GRAPH_LABELS`): one JSON object; nodes and edges are stored as columns:

    format, version   `GRAPH_LABELS`, `GRAPH_LABELS_VERSION`
    process           who captured: pid, rank, boot, started_ns, saved_ns
    labels            path (names of the marks), phase (forward, backward), lane, metadata
    places            of nodes: module (path of the nn.Module), stack (``file:line function``, outermost first; line 0:
                      only the function is certain), phase, op, parts (of a fused kernel: module, line, op, phase
                      and estimated share of each)
    kernels           name (as the driver gives it), demangled (as Kineto shows it)
    graphs            id, executables, device, nodes (columns), edges
    notes             what could not be labelled and why

Collectives carry their facts in the metadata under the names that Kineto gives them in eager traces
(`thence.model.collectives.KINETO_KEYS`).
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING

from thence.model.collectives import NUMBERS, TEXTS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ACTIVITIES",
    "BACKWARD_OPENED",
    "CLOSED",
    "COMPILED",
    "COMPILED_INDEX",
    "DESCRIPTION",
    "GRAPH_LABELS",
    "GRAPH_LABELS_VERSION",
    "HLO_ENDING",
    "HLO_FOLDER",
    "LABELS_FILE",
    "LACKING",
    "OLD_PART_ENDING",
    "OPENED",
    "PART",
    "PART_ENDING",
    "RECORDING",
    "RECORDING_VERSION",
    "STEP",
    "TABLES",
    "part_name",
]

RECORDING = "thence.recording"
RECORDING_VERSION = 4
"""1: what describes a collective was JSON, the metadata of its mark. 2: parts were Arrow IPC files without
a count (`OLD_PART_ENDING`). 3: no boundaries; every launch was a row of calls."""
DESCRIPTION = "recording.json"
"""File of a recording that says which process it is of."""
PART_ENDING, OLD_PART_ENDING = ".npz", ".arrow"
PART = re.compile(r"([a-z]+)-(\d{6,})\.(?:npz|arrow)")
"""Names of parts: table and number."""


def part_name(table: str, number: int | None = None) -> str:
    """The name of a part; with no number a glob that all parts of the table match."""
    return f"{table}-{'*' if number is None else f'{number:06}'}{PART_ENDING}"


_ACTIVITY = dict.fromkeys(
    ("start", "end", "device", "stream", "correlation", "node", "graph"), "Int64"
)
_ACTIVITY["node"] = "UInt64"
_GRID = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")


def _integers(*columns: str) -> dict[str, str]:
    return dict.fromkeys(columns, "Int64")


TABLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "names": {"number": "Int64", "name": "String", "demangled": "String"},
        "kernels": _ACTIVITY
        | _integers("name", "registers", *_GRID, "static_shared", "dynamic_shared", "queued"),
        "copies": _ACTIVITY
        | _integers("bytes", "copy_kind", "source_memory", "destination_memory"),
        "sets": _ACTIVITY | _integers("bytes", "memory"),
        "calls": _integers("start", "end", "thread", "correlation", "function", "api"),
        "ranges": _integers("flags", "time", "id", "thread", "name", "domain"),
        "overheads": _integers("overhead_kind", "object_kind", "thread", "start", "end"),
        "marks": _integers(
            *("what", "serial", "forward", "time", "thread", "name", "lane", "metadata", "counter")
        ),
        "boundaries": _integers("counter", "time", "thread", "place", "flags"),
        "places": _integers("number", "kind", "parent", "name", "detail", "line"),
        "collectives": _integers("serial", *TEXTS, *NUMBERS),
    }
)
"""Columns of each table of a recording, and names of the Polars types that they are read as; narrower
integers may be written. Times are Unix time in ns. name, function, domain, lane, metadata, detail, and the texts
that describe a collective, are numbers of names, 0 for none. serial says which mark is meant. queued is when the
host queued a kernel, 0 where CUPTI does not say. counter is what CUPTI had numbered (`thence.boundaries.log`), in
marks that of the boundary at the same moment, 0 where there is none; places are those of
`thence.boundaries.places`."""
LACKING: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "collectives": frozenset((*TEXTS, *NUMBERS)) - {"sequence"},
        "kernels": frozenset({"queued"}),
        "marks": frozenset({"counter"}),
    }
)
"""Columns that recordings of version 1, or of versions before 4, do not have, by table."""
ACTIVITIES = ("kernels", "copies", "sets")
"""Tables of what ran on a device."""

OPENED, CLOSED, BACKWARD_OPENED, STEP = 0, 1, 2, 3
"""``what`` in the table marks."""

LABELS_FILE = "labels.json"
"""Labels of captured CUDA graphs, beside the parts."""
GRAPH_LABELS = "thence.graph-labels"
GRAPH_LABELS_VERSION = 2
"""1: nodes had no place."""

HLO_FOLDER = "hlo"
"""Folder of a recording that holds the HLO modules of its XLA programs."""
HLO_ENDING = ".hlo.pb"
COMPILED_INDEX = "compiled.json"
"""File there: which modules there are, and when and where each was compiled."""
COMPILED = "thence.compiled"
"""Format of that file."""
