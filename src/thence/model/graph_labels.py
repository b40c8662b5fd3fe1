"""Labels of CUDA graphs from their capture: nodes, edges, and a label for each node.

`thence.save_labels()` writes them after capture; PyTorch's annotation files hold a part of them. They
contain nothing about replays; `thence.attribution.cuda_graphs` joins them to the replayed activities.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from thence.model.collectives import Collective

NODES: Mapping[str, Any] = MappingProxyType(
    {
        "number": pl.Int64(),
        "type": pl.String(),
        "label": pl.Int32(),
        "kernel": pl.Int32(),
        "grid": pl.Array(pl.UInt32, 3),
        "block": pl.Array(pl.UInt32, 3),
        "shared_memory": pl.Int64(),
        "parent": pl.Int64(),
    }
)
"""Columns of `CapturedGraph.nodes`. number: low 32 bits of the id that CUPTI gives the node, counting
up as nodes are created. type: kernel, memcpy, memset, host, graph, empty, event_wait, event_record,
conditional ... label, kernel: index in `GraphLabels.labels` and ``kernels``. grid, block: blocks and
threads in x, y, z. shared_memory: dynamic bytes per block. parent: number of the child-graph node that
contains the node. A null means none or unknown."""

MODULE_KEYS = ("module", "module_fqn")
"""Keys of metadata under which frameworks annotate the nn.Module."""

FRAME_SEPARATOR = ";"
"""Separates the frames in the text of a stack, each ``file:line function``, outermost first."""

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Process:
    """The process that captured the graphs; None where the file does not say.

    Attributes:
        pid: process id.
        rank: rank in its job.
        boot: boot id of its machine (/proc/sys/kernel/random/boot_id).
        started_ns: Unix time in ns at which it began.
    """

    pid: int | None = None
    rank: int | None = None
    boot: str | None = None
    started_ns: int | None = None


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """The call of the operator that made a node.

    Attributes:
        name: of the operator.
        inputs: as ``HOST.inputs`` holds them.
        node: position of the node among those of the call, from 0.
        nodes: number of the nodes that the call made.
    """

    name: str
    inputs: str
    node: int
    nodes: int


@dataclass(frozen=True, slots=True)
class CapturedPlace:
    """Where in the program a node was created, as far as the capture shows it.

    Attributes:
        module: path of the nn.Module.
        stack: lines, ``file:line function``, outermost first; line 0 where only the function is certain.
        phase: forward, backward, recompute ...
        op: the operator; in compiled code the operator to which most of the kernel belongs.
        parts: of a kernel that was fused from several operators: module, line, op, phase and estimated share of each.
        call: of the operator that made the node.
    """

    module: str | None = None
    stack: tuple[str, ...] = ()
    phase: str | None = None
    op: str | None = None
    parts: tuple[tuple[str | None, str | None, str, str, float], ...] = ()
    call: CapturedCall | None = None

    @property
    def stack_text(self) -> str | None:
        """The stack as one text; None without one."""
        return FRAME_SEPARATOR.join(self.stack) or None


@dataclass(frozen=True, slots=True)
class Label:
    """What a node was created for: the marks that were open, and the place in the program.

    Attributes:
        path: names of the marks, outermost first.
        phase: backward, or forward for all other work; None if unknown.
        lane: name of the extra lane in which timelines show it, if any.
        metadata: of the marks.
        collective: description of the collective, if the node is part of one.
        place: where in the program the node was created, independently of the marks.
    """

    path: tuple[str, ...]
    phase: str | None = None
    lane: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=lambda: _NO_METADATA)
    collective: Collective | None = None
    place: CapturedPlace | None = None

    @property
    def module(self) -> str | None:
        """The nn.Module that the metadata name."""
        values = (self.metadata.get(key) for key in MODULE_KEYS)
        return next((value for value in values if isinstance(value, str)), None)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's name as the driver gives it, and the demangled name that a profiler shows, if known."""

    name: str
    demangled: str | None = None


@dataclass(frozen=True)
class CapturedGraph:
    """One captured graph.

    Attributes:
        id: id that CUPTI gave the captured graph.
        executables: ids of the executable graphs instantiated from it.
        device: index of the device that it was captured on; None if unknown.
        nodes: a frame with the columns `NODES`, in order of creation.
        edges: int64 array of shape (n, 2): numbers of a node, and of a node that depends on it; None if the
            file does not hold edges.
    """

    id: int
    executables: tuple[int, ...]
    device: int | None
    nodes: pl.DataFrame
    edges: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class GraphLabels:
    """One labels file.

    Attributes:
        source: the file, as the user named it.
        process: the process that captured the graphs.
        labels: every distinct label.
        kernels: every distinct kernel.
        graphs: in order of capture.
        notes: what could not be labelled and why, as sentences.
    """

    source: str
    process: Process = field(default_factory=Process)
    labels: tuple[Label, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    graphs: tuple[CapturedGraph, ...] = ()
    notes: tuple[str, ...] = ()
