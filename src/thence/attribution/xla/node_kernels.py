"""Whether the activity of a command buffer's node can belong to the command that the HLO implies for that node.

XLA names its own kernels after the instruction. Kernels of libraries, of Pallas and of Triton have other names;
copies have no name, but a size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.xla.node_numbers import Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thence.attribution.xla.node_numbers import Slots
    from thence.attribution.xla.schedules import Schedule

LOW = 0xFFFF_FFFF
"""Mask of the node's number in a node's id; the upper half is the graph's id (CUPTI, graphNodeId)."""

_COPY = re.compile(r"(?i)^mem(?:cpy|set)")  # also as kernels of the driver: memcpy128
_CHOICE = re.compile(r"^set_\w*condition\w*$")
"""Kernels of XLA that set the condition of a conditional node (xla/stream_executor/cuda)."""
_GEMM = r"nvjet|xmma|cutlass|gemm|gemv|cublas|splitk"
_NOT_OF_XLA = r"(?i)^(?!\w*fusion\w*$).*"  # XLA's own kernels include gemm_fusion_dot
_LIBRARIES = (
    ("__cublas", re.compile(rf"{_NOT_OF_XLA}(?:{_GEMM})")),
    ("__cudnn", re.compile(rf"{_NOT_OF_XLA}(?:{_GEMM}|cudnn|fmha|fprop|dgrad|wgrad)")),
    ("__cub$", re.compile(r"\bcub::|DeviceRadixSort|DeviceScan")),
)
"""Custom call targets (xla/service/gpu/cublas_cudnn.cc) and the kernels of the library behind each."""
AFTERWARDS = re.compile(r"(?i)splitk_?reduce|reduce_?splitk")
"""The second kernel of a matrix product that was split."""


class Verdict(IntEnum):
    """How well a node's activity fits the command of a slot."""

    CONTRADICTS = 0
    """it is the kernel of another command, or a copy of another size"""
    FOREIGN = 1
    """a kernel with a name that is not known for any command, at a slot whose kernels have known names"""
    POSSIBLE = 2
    """nothing contradicts it"""
    SIZED = 3
    """a copy of as many bytes as the command copies"""
    NAMED = 4
    """the kernel is named after the command, or after one that computes the same"""


def is_copy(name: str, kind: str) -> bool:
    """Whether an activity only copies or sets memory; the driver also has kernels for that."""
    return kind != "kernel" or _COPY.match(name) is not None


def library_of(target: str, kernel: str) -> bool:
    """Whether a kernel is one of the library behind a custom call target."""
    return any(target.startswith(prefix) and p.search(kernel) for prefix, p in _LIBRARIES)


def is_library(kernel: str) -> bool:
    """Whether a kernel is one of the libraries that XLA calls."""
    return any(p.search(kernel) for _, p in _LIBRARIES)


@dataclass(frozen=True)
class Nodes:
    """The nodes of one executable graph that have recorded activities.

    Attributes:
        graph: id of the graph.
        number: of each node, ascending; a node that ran different kernels occurs several times.
        name: of the activity.
        kind: kernel, memcpy or memset.
        bytes: copied; -1 where unknown.
        begun: whether the launch itself started it; else the device did, as part of a conditional node.
    """

    graph: int
    number: NDArray[np.int64]
    name: list[str]
    kind: list[str]
    bytes: NDArray[np.int64]
    begun: NDArray[np.bool_]

    @property
    def last(self) -> int:
        """The highest number."""
        return int(self.number[-1])


def nodes_of(inside: pl.DataFrame) -> list[Nodes]:
    """The nodes of each graph.

    Args:
        inside: activities of graphs: graph, number (null where the trace names no nodes), name, kind,
            bytes and correlation.
    """
    keys = ["graph", "number", "name", "kind"]
    nodes = (
        inside.drop_nulls("number")
        .group_by(keys)
        .agg(
            pl.when(pl.col("bytes").n_unique() == 1).then(pl.col("bytes").first()).fill_null(-1),
            begun=(pl.col("correlation").fill_null(-1) != 0).any(),
        )
        .sort(keys)
    )
    return [
        Nodes(
            int(part["graph"][0]),
            part["number"].cast(pl.Int64).to_numpy(),
            part["name"].to_list(),
            part["kind"].to_list(),
            part["bytes"].to_numpy(),
            part["begun"].to_numpy(),
        )
        for part in nodes.partition_by("graph", maintain_order=True)
    ]


def verdicts(schedule: Schedule, slots: Slots, nodes: Nodes) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Compares the activities of a graph with its slots.

    Returns:
        A `Verdict` for each distinct activity (name, kind and bytes) and slot; and the index of the distinct
        activity of each entry of the nodes.
    """
    distinct: dict[tuple[str, str, int], int] = {}
    of_entry = [
        distinct.setdefault(activity, len(distinct))
        for activity in zip(nodes.name, nodes.kind, nodes.bytes.tolist(), strict=True)
    ]
    table = np.empty((len(distinct), len(slots.command)), np.int8)
    facts = _SlotFacts.of(schedule, slots)
    for (name, kind, size), row in distinct.items():
        table[row] = facts.of_copy(size) if is_copy(name, kind) else facts.of_kernel(name)
    return table, np.array(of_entry, np.int64)


@dataclass(frozen=True)
class _SlotFacts:
    """The slots of a graph, with the facts of the schedule that decide which activities they may have."""

    schedule: Schedule
    slots: Slots
    free: NDArray[np.bool_]  # kernels have names of their own: custom calls and custom fusions
    sized: NDArray[np.int64]  # bytes that a copy has to move; -1: any number

    @classmethod
    def of(cls, schedule: Schedule, slots: Slots) -> _SlotFacts:
        custom = np.array([opcode == "custom-call" for opcode in schedule.opcodes], np.bool_)
        plain = np.array([opcode == "copy" for opcode in schedule.opcodes], np.bool_)
        free = (custom | schedule.custom)[slots.command]
        sized = np.where(plain, schedule.result_bytes, -1)[slots.command]
        return cls(schedule, slots, free, sized)

    @cached_property
    def own(self) -> NDArray[np.bool_]:
        """Slots in which the kernel of their command itself can run."""
        return self.slots.is_(Role.LEAF, Role.CALL, Role.SEVERAL)

    def of_copy(self, size: int) -> NDArray[np.int64]:
        moves = self.schedule.copies[self.slots.command] | self.free
        possible = self.slots.is_(Role.LEAF) & moves | self.slots.is_(
            Role.CALL, Role.SEVERAL, Role.BEFORE, Role.LAUNCHED
        )
        sized = self.slots.is_(Role.LEAF) & (self.sized >= 0) & (size >= 0)
        verdict = np.where(possible, Verdict.POSSIBLE, Verdict.CONTRADICTS)
        verdict[sized] = np.where(self.sized == size, Verdict.SIZED, Verdict.CONTRADICTS)[sized]
        return verdict

    def of_kernel(self, name: str) -> NDArray[np.int64]:
        if _CHOICE.match(name):
            return np.where(self.slots.is_(Role.CHOICE), Verdict.NAMED, Verdict.CONTRADICTS)
        if name in self.schedule.classes:
            named = self.own & self.schedule.run_by(name)[self.slots.command]
            return np.where(named, Verdict.NAMED, Verdict.CONTRADICTS)
        verdict = np.full(len(self.own), Verdict.CONTRADICTS, np.int64)
        verdict[self.slots.is_(Role.LEAF) & ~self.free] = Verdict.FOREIGN
        verdict[self.own & self.free | self.slots.is_(Role.SEVERAL, Role.LAUNCHED)] = Verdict.POSSIBLE
        afterwards = AFTERWARDS.search(name) is not None
        main = self.slots.is_(Role.MAIN)
        if not afterwards:
            targets = self.schedule.targets
            of_library = [main[i] and library_of(targets[c], name) for i, c in enumerate(self.slots.command)]
            verdict[main] = Verdict.FOREIGN
            verdict[of_library] = Verdict.POSSIBLE
        elif is_library(name):
            verdict[self.slots.is_(Role.AFTER)] = Verdict.POSSIBLE
        return verdict
