"""The kinds of place to which GPU time can be attributed: one row of `KINDS` each.

To add a kind, add its row here. If `Kind.categories` or `Kind.column` names the source of its places,
nothing else is needed; otherwise the attribution must compute its column. This module imports only the
standard library, because the command line reads the table before anything heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

By = Literal[
    "kernel", "program", "hlo", "opcode", "op_name", "label", "module", "op", "ops", "source", "stack", "phase",
    "serving", "step-kind", "step", "iteration", "collective", "shape", "dtype", "kind", "rank", "device", "stream",
]  # fmt: skip
"""Names of `KINDS` as a type, for type checkers: values of ``by`` for tables of GPU time."""
FlameBy = Literal["op_name", "label", "module", "ops", "source", "stack"]
"""`FLAMES` as a type, for type checkers: values of ``by`` for flame graphs."""

Origin = Literal["launch", "hlo", "both", "gpu", "collectives"]
Verb = Literal["stated", "stated-xla", "page", "page-xla", "flame", "lanes", "graph-labels", "only", "diff", "layers"]

NOT_RECORDED = "not_recorded"
"""Code of the reason of activities without a place, where nothing more is known."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of place.

    Attributes:
        name: column of ``Attributed.places``, and value of ``--by``.
        meaning: what one place of this kind is, for --help.
        origin: what determines the place of an activity. launch: the host ranges around its launch, and the
            labels of CUDA graphs. hlo: its HLO instruction. both: the HLO instruction, else the launch.
            gpu: a column of the activity itself. collectives: the description of the collective.
        heading: of the column of a table by this kind; the name if empty.
        column: of the gpu table, if the origin is gpu; empty if `thence.analysis.grouping.time_by_place` makes it.
        categories: of the host ranges that the places are made of (see `HOST_CATEGORIES`).
        nests: whether a place is a path of names from the outermost to the innermost.
        follows_forward: whether work of a backward op has the place of its forward op.
        missing: code of the reason why an activity has no place if the trace records nothing of this kind.
        outside: code of the reason if the trace does, but nothing of this kind is around the activity's launch.
        verbs: where the kind is used, in addition to ``--by``. stated: the coverage that a summary states
            (stated-xla: for a trace with XLA programs). page: tables of the HTML report (page-xla: likewise).
            flame: frames of a flame graph. lanes: extra lanes of a timeline. graph-labels: contents of labels of
            CUDA graphs and of annotated traces. only: texts that --only searches, in addition to the name. diff:
            kinds of rows in a comparison of two sides of runs. layers: the places are paths of a model's parts,
            whose layers are folded and which make a tree.
    """

    name: str
    meaning: str
    origin: Origin
    heading: str = ""
    column: str = ""
    categories: tuple[str, ...] = ()
    nests: bool = False
    follows_forward: bool = True
    missing: str = NOT_RECORDED
    outside: str = NOT_RECORDED
    verbs: frozenset[Verb] = frozenset()


def _verbs(*verbs: Verb) -> frozenset[Verb]:
    return frozenset(verbs)


KINDS: tuple[Kind, ...] = (
    Kind(
        "kernel", "full name of the kernel, memcpy or memset", "gpu", column="name",
        verbs=_verbs("page", "page-xla", "diff"),
    ),
    Kind(
        "program", "XLA program", "hlo", missing="no_xla",
        verbs=_verbs("stated-xla", "page-xla"),
    ),
    Kind(
        "hlo", "HLO instruction", "hlo", heading="HLO op", missing="no_xla",
        verbs=_verbs("stated-xla", "page-xla", "only", "diff"),
    ),
    Kind("opcode", "opcode of the HLO instruction", "hlo", missing="no_xla", verbs=_verbs("page-xla")),
    Kind(
        "op_name", "op_name of the HLO instruction", "hlo", nests=True, missing="no_xla",
        verbs=_verbs("stated-xla", "page-xla", "flame", "only", "layers"),
    ),
    Kind(
        "label", "path of the ranges that the user named", "both", categories=("range",), nests=True,
        missing="no_ranges", outside="outside_ranges",
        verbs=_verbs(
            "stated", "stated-xla", "page", "page-xla", "flame", "lanes", "graph-labels", "only", "diff", "layers"
        ),
    ),
    Kind(
        "module", "path of nn.Module calls", "launch", categories=("module",), nests=True,
        missing="no_modules", outside="outside_modules",
        verbs=_verbs("stated", "page", "flame", "lanes", "graph-labels", "only", "diff", "layers"),
    ),
    Kind(
        "op", "innermost framework operator", "launch", heading="operator", categories=("op",),
        follows_forward=False, missing="no_operators", outside="outside_operators",
        verbs=_verbs("stated", "page", "graph-labels", "only", "diff"),
    ),
    Kind(
        "ops", "path of operators, and of ranges that libraries named", "launch", heading="operator stack",
        categories=("op", "framework"), nests=True, follows_forward=False,
        missing="no_operators", outside="outside_operators", verbs=_verbs("flame", "graph-labels"),
    ),
    Kind(
        "source", "function or line of the user's own code", "both", heading="function or source line",
        categories=("python",),
        missing="no_python_frames", outside="outside_frames",
        verbs=_verbs("stated", "stated-xla", "page", "page-xla", "flame", "graph-labels", "diff"),
    ),
    Kind(
        "stack", "path of Python frames", "both", heading="Python stack", categories=("python",), nests=True,
        missing="no_python_frames", outside="outside_frames", verbs=_verbs("flame", "graph-labels"),
    ),
    Kind(
        "phase", "forward, backward, recompute, gradient, optimizer, input, other or mixed", "both",
        categories=("op", "phase"),
        missing="no_autograd", outside="outside_operators",
        verbs=_verbs("stated", "stated-xla", "page", "page-xla", "graph-labels"),
    ),
    Kind(
        "serving", "prefill, decode or mixed, from the ranges of an inference server", "launch",
        categories=("range", "framework", "step"), missing="no_serving", outside="no_serving",
    ),
    Kind(
        "step-kind", "what a server's step computes: prefill, decode or mixed, its batch size and tokens", "launch",
        heading="kind of step", categories=("step",), missing="no_server_steps", outside="outside_server_steps",
    ),
    Kind(
        "step", "step of the program, marked or found by what repeats", "launch", categories=("step",),
        missing="no_steps", outside="outside_steps", verbs=_verbs("stated", "stated-xla", "page"),
    ),
    Kind(
        "iteration", "iteration of an XLA program's outermost loop", "launch",
        missing="no_loops", outside="outside_loops",
    ),
    Kind("collective", "collective that the kernel is part of", "collectives", missing="no_collective"),
    Kind(
        "shape", "operator with the shapes and data types of its inputs", "gpu", heading="operator and shapes",
        missing="no_shapes",
    ),
    Kind("dtype", "data type that the kernel computes in", "gpu", heading="data type", missing="no_data_type"),
    Kind("kind", "kernel, memcpy or memset", "gpu", column="kind"),
    Kind("rank", "rank of the process", "gpu", column="rank", verbs=_verbs("page", "page-xla")),
    Kind("device", "GPU of a rank", "gpu", column="device"),
    Kind("stream", "stream of a GPU", "gpu", column="stream"),
)  # fmt: skip
"""Every kind of place, in the order in which help texts and tables list them."""


def _offered(verb: Verb) -> tuple[str, ...]:
    return tuple(kind.name for kind in KINDS if verb in kind.verbs)


STEP_KIND = "step-kind"
"""The kind that says what a server's step computes."""
BY = tuple(kind.name for kind in KINDS)
"""The valid values of ``by`` for tables of GPU time."""
LAUNCH = tuple(kind for kind in KINDS if kind.origin in ("launch", "both"))
"""Kinds that the host ranges around a launch can determine."""
HLO = tuple(kind for kind in KINDS if kind.origin in ("hlo", "both"))
"""Kinds that an HLO instruction can determine."""
PLACES = tuple(kind.name for kind in KINDS if kind.origin in ("launch", "both", "hlo"))
"""Columns of ``Attributed.places`` that hold places; each has a column ``<kind>_rule``."""
STATED = _offered("stated")
"""Kinds whose share of the GPU time a summary states."""
STATED_XLA = _offered("stated-xla")
"""The same for a trace that holds XLA programs."""
FLAMES = _offered("flame")
"""Kinds that the frames of a flame graph can be."""
LAYERED = _offered("layers")
"""Kinds whose places are paths of a model's parts: their layers are folded, and they make a tree."""
FOLLOWING = tuple(kind.name for kind in LAUNCH if kind.follows_forward)
"""Kinds that give backward work the place of its forward operator."""
TABLE_KINDS = ("module", "label", "source", "op")
"""Candidates for the kind of a table if none is given, the most informative first."""
TABLE_KINDS_XLA = ("source", "op_name", *TABLE_KINDS)
"""The same for a trace that holds XLA programs: a few lines of the program's own code are most of its time, while
there is an op_name for each of hundreds of operations."""
TREE_KINDS = ("module", "label", "op_name")
"""Candidates for the kind of a tree if none is given, the most informative first."""
FLAME_KINDS = ("op_name", "module", "label", "source", "ops")
"""Candidates for the kind of a flame graph if none is given, the most informative first."""
GRAPH_LABELS = _offered("graph-labels")
"""Kinds that a label of a CUDA graph, or an annotated trace, can hold."""
SEARCHED = _offered("only")
"""Kinds that --only searches, in addition to the name of the kernel."""
COMPARED = _offered("diff")
"""Kinds of rows in a comparison of two sides of runs."""
LANES = (*_offered("lanes"), "collective", "process-group", "lane")
"""Kinds that extra lanes of a timeline can show. lane: the lane that a mark named, else the process group."""


def page_kinds(*, xla: bool) -> tuple[str, ...]:
    """Kinds for which the HTML report has a table, for a trace with or without XLA programs."""
    return _offered("page-xla" if xla else "page")


IDLE_BY = (
    *("place", "source", "module", "op"),
    *("label", "step", "call", "kernel"),
    *("wait", "rank", "device", "reason"),
)
"""What the idle time of a cause can be grouped by. place: the first of source, label, module, op and call that exists.
source: the function or line of the user's own code. call: the innermost host row. kernel: the activity that ended the
idle time. wait: the last call that waited, if it emptied the queue. reason: why a cause is unknown."""

MEMORY_BY = ("module", "source", "label", "op", "phase", "step", "kind", "rank")
"""By what memory that is live can be grouped. kind: what it is for, as `thence.model.tables.MEMORY_KINDS`."""

FREE_BY = (*PLACES, "kernel", "collective", "cause")
"""Kinds of names by which a change selects work, as in ``--free label:attention``."""
