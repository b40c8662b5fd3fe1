"""Matches the nodes of a command buffer to the slots of its commands, and determines which nodes are certain.

If every command adds a known number of nodes, slot n is node n. A library call of unknown length allows several
assignments of nodes to slots; a node is certain if all assignments in which no activity contradicts its slot give
it the same command.

If a kernel has the name of no command of the program, only its own node is left without a command. The same holds
for a single activity that contradicts its slot between others that fit. If two in a row contradict their slots, or
more than one for every ten that prove theirs (a kernel by its name, a copy by its size), then the graph must have
other commands, and there is no match.

Whether an activity can belong to a command follows from its name and size (`Verdict`). XLA names its own kernels
after the instruction. Kernels of libraries, of Pallas and of Triton have other names; copies have no name, but a
size.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl

from thence.attribution.xla.program_commands import MANY, Role, Slots
from thence.model.thresholds import PROOFS_FOR_EACH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.attribution.xla.program_commands import Schedule
    from thence.model.arrays import Int64, Mask


# ---- Whether an activity can belong to a command


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


_NAMED = np.int8(Verdict.NAMED)
Verdicts = npt.NDArray[np.int8]
"""A `Verdict` for each slot."""


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
    number: Int64
    name: list[str]
    kind: list[str]
    bytes: Int64
    begun: Mask

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
            graph=int(part["graph"][0]),
            number=part["number"].cast(pl.Int64).to_numpy(),
            name=part["name"].to_list(),
            kind=part["kind"].to_list(),
            bytes=part["bytes"].to_numpy(),
            begun=part["begun"].to_numpy(),
        )
        for part in nodes.partition_by("graph", maintain_order=True)
    ]


def verdicts(schedule: Schedule, slots: Slots, nodes: Nodes) -> tuple[Verdicts, Int64]:
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
    free: Mask  # kernels have names of their own: custom calls and custom fusions
    sized: Int64  # bytes that a copy has to move; -1: any number

    @classmethod
    def of(cls, schedule: Schedule, slots: Slots) -> _SlotFacts:
        custom = np.array([opcode == "custom-call" for opcode in schedule.opcodes], np.bool_)
        plain = np.array([opcode == "copy" for opcode in schedule.opcodes], np.bool_)
        free = (custom | schedule.custom)[slots.command]
        sized = np.where(plain, schedule.result_bytes, -1)[slots.command]
        return cls(schedule, slots, free, sized)

    @cached_property
    def own(self) -> Mask:
        """Slots in which the kernel of their command itself can run."""
        return self.slots.is_(Role.LEAF, Role.CALL, Role.SEVERAL)

    @cached_property
    def choice(self) -> Verdicts:
        """The verdicts on a kernel that sets the condition of a conditional node."""
        return np.where(self.slots.is_(Role.CHOICE), Verdict.NAMED, Verdict.CONTRADICTS).astype(np.int8)

    @cached_property
    def unnamed(self) -> Verdicts:
        """The verdicts on a kernel that is named after no command, but for those of the libraries that XLA calls."""
        verdict = np.full(len(self.own), Verdict.CONTRADICTS, np.int8)
        verdict[self.slots.is_(Role.LEAF) & ~self.free] = Verdict.FOREIGN
        verdict[self.own & self.free | self.slots.is_(Role.SEVERAL, Role.LAUNCHED)] = Verdict.POSSIBLE
        return verdict

    @cached_property
    def library_calls(self) -> list[tuple[int, str]]:
        """The slots of the kernels of libraries, with the target of their command."""
        rows = np.flatnonzero(self.slots.is_(Role.MAIN)).tolist()
        return [(row, self.schedule.targets[self.slots.command[row]]) for row in rows]

    def of_copy(self, size: int) -> Verdicts:
        moves = self.schedule.copies[self.slots.command] | self.free
        possible = self.slots.is_(Role.LEAF) & moves | self.slots.is_(
            Role.CALL, Role.SEVERAL, Role.BEFORE, Role.LAUNCHED
        )
        sized = self.slots.is_(Role.LEAF) & (self.sized >= 0) & (size >= 0)
        verdict = np.where(possible, Verdict.POSSIBLE, Verdict.CONTRADICTS).astype(np.int8)
        verdict[sized] = np.where(self.sized == size, Verdict.SIZED, Verdict.CONTRADICTS)[sized]
        return verdict

    def of_kernel(self, name: str) -> Verdicts:
        if _CHOICE.match(name):
            return self.choice
        if name in self.schedule.classes:
            named = self.own & self.schedule.run_by(name)[self.slots.command]
            return np.multiply(named, _NAMED)  # else 0: it contradicts
        verdict = self.unnamed.copy()
        if AFTERWARDS.search(name) is None:
            for row, target in self.library_calls:
                verdict[row] = Verdict.POSSIBLE if library_of(target, name) else Verdict.FOREIGN
        elif is_library(name):
            verdict[self.slots.is_(Role.AFTER)] = Verdict.POSSIBLE
        return verdict


@dataclass(frozen=True)
class Comparison:
    """The activities of a graph compared with all slots that it may have.

    The graph may begin at any of hundreds of commands. Most slots of these candidates are of the same commands in the
    same roles, on which a verdict depends alone, so each is compared once.

    Attributes:
        keys: of command and role, ascending.
        table: a `Verdict` for each distinct activity and key.
        of_entry: the index of the distinct activity of each entry of the nodes.
    """

    keys: Int64
    table: Verdicts
    of_entry: Int64

    @classmethod
    def of(cls, schedule: Schedule, candidates: Sequence[Slots], nodes: Nodes) -> Comparison:
        """Compares the nodes of a graph with the slots of every candidate."""
        keys = np.unique(np.concatenate([_keys(slots) for slots in candidates]))
        distinct = Slots(keys // len(Role), keys % len(Role), np.zeros(len(keys), np.int64), ())
        return cls(keys, *verdicts(schedule, distinct, nodes))

    def of_entries(self, slots: Slots) -> Verdicts:
        """A `Verdict` for each entry of the nodes and each of these slots."""
        return self.table[np.ix_(self.of_entry, np.searchsorted(self.keys, _keys(slots)))]


def _keys(slots: Slots) -> Int64:
    return slots.command * len(Role) + slots.role


# ---- Matching nodes to slots


_MAX_CELLS = 25_000_000  # nodes times slots that are compared, of a byte each
_NONE = -1


@dataclass(frozen=True)
class Match:
    """The commands of a graph's nodes; arrays with one entry per node number, up to the last that has an activity.

    Attributes:
        command: number of the command in the schedule; -1 where it is uncertain.
        level: as in `Slots`; -1 where it is uncertain.
        verdict: of the activity; `Verdict.POSSIBLE` where there is none.
        counted: whether the node has a slot of its own; else it is one of several nodes of a library call, of
            which it is unknown how many there are.
        proofs: number of kernels named after the command of their slot, and of copies of its size.
        contradicting: number of activities that contradict their slot.
    """

    command: Int64
    level: Int64
    verdict: Int64
    counted: Mask
    proofs: int
    contradicting: int

    def agreeing(self, others: Sequence[Match]) -> Match:
        """This match, made uncertain where it differs from any of the others."""
        same = np.ones(len(self.command), np.bool_)
        for other in others:
            same &= (other.command == self.command) & (other.level == self.level)
            same &= other.counted == self.counted
        command, level = (np.where(same, x, _NONE) for x in (self.command, self.level))
        return dataclasses.replace(self, command=command, level=level)


def match(schedule: Schedule, slots: Slots, nodes: Nodes, compared: Comparison | None = None) -> Match | None:
    """The best match of a graph's nodes to these slots; None if they do not fit.

    Every slot of the graph itself must have an activity, except slots that only contain others, and copies, which a
    trace can lack. Slots of branches need none, because a branch may never have run.

    Args:
        compared: the nodes with these slots, and with those of other candidates; None if there are no others.
    """
    compared = compared or Comparison.of(schedule, [slots], nodes)
    slots = _without_insides(slots, nodes)
    count = nodes.last + 1
    verdict_of_entry = compared.of_entries(slots)
    # An activity that the launch did not start itself is inside a branch.
    verdict_of_entry[np.ix_(~nodes.begun, slots.level == 0)] = Verdict.CONTRADICTS
    if slots.exact:
        return _slot_by_slot(slots, nodes, verdict_of_entry, _unseen(schedule, slots))
    if count * len(slots.command) > _MAX_CELLS:
        return None
    return _alignment(slots, nodes, verdict_of_entry, _unseen(schedule, slots))


def _without_insides(slots: Slots, nodes: Nodes) -> Slots:
    """Removes the slots inside calls whose own node has an activity: such a node contains no others."""
    many = slots.is_(*MANY)
    fixed = int(many.argmax()) if many.any() else len(many)
    call_slots = np.intersect1d(np.flatnonzero(slots.role[:fixed] == Role.CALL), nodes.number)
    plain = set(zip(slots.command[call_slots].tolist(), slots.level[call_slots].tolist(), strict=True))
    pairs = zip(slots.command.tolist(), slots.level.tolist(), strict=True)
    kept = ~((slots.role != Role.CALL) & np.array([pair in plain for pair in pairs], np.bool_))
    return Slots(slots.command[kept], slots.role[kept], slots.level[kept], slots.levels)


def _unseen(schedule: Schedule, slots: Slots) -> Mask:
    """Slots that need not have an activity."""
    held = slots.is_(Role.HOLDER, Role.CALL, Role.LAUNCHED, *MANY)
    copies = schedule.copies[slots.command] & (slots.role == Role.LEAF)
    result: Mask = held | copies | (slots.level > 0)
    return result


def _slot_by_slot(slots: Slots, nodes: Nodes, verdict_of_entry: Verdicts, unseen: Mask) -> Match | None:
    """The match in which slot n is node n; None if it does not fit."""
    count = nodes.last + 1
    seen = np.zeros(len(slots.command), np.bool_)
    if count > len(seen):
        return None
    seen[nodes.number] = True
    verdict = np.where(seen[:count], np.int64(Verdict.NAMED), np.int64(Verdict.POSSIBLE))
    np.minimum.at(verdict, nodes.number, verdict_of_entry[np.arange(len(verdict_of_entry)), nodes.number])
    matched = Match(
        command=slots.command[:count],
        level=slots.level[:count],
        verdict=verdict,
        counted=~slots.is_(*MANY)[:count],
        proofs=int(np.sum(verdict >= Verdict.SIZED)),
        contradicting=int(np.sum(verdict == Verdict.CONTRADICTS)),
    )
    fits = bool((seen | unseen).all()) and _outweighed(matched, seen[:count])
    return matched if fits else None


def _outweighed(matched: Match, seen: Mask) -> bool:
    """Whether the activities that contradict their slot are few, and no two of them are neighbours."""
    if matched.contradicting * PROOFS_FOR_EACH > matched.proofs:
        return False
    rows = np.flatnonzero(seen)
    wrong = matched.verdict[rows] == Verdict.CONTRADICTS
    beside = wrong[1:] & wrong[:-1] & (matched.level[rows[1:]] == matched.level[rows[:-1]])
    return not beside.any()


def _alignment(slots: Slots, nodes: Nodes, verdict_of_entry: Verdicts, unseen: Mask) -> Match | None:
    """The match of all assignments of nodes to slots, in order, that nothing contradicts; None if there is none."""
    count = nodes.last + 1
    cells = np.where(unseen, np.int8(Verdict.POSSIBLE), np.int8(Verdict.CONTRADICTS))
    cells = np.repeat(cells[None, :], count, axis=0)
    numbers, first = np.unique(nodes.number, return_index=True)
    cells[numbers] = np.minimum.reduceat(verdict_of_entry, first, axis=0)
    fits = cells != Verdict.CONTRADICTS
    many = slots.is_(*MANY)
    _tolerate(slots, nodes, cells, fits)
    before = _reached(fits, many, unseen)
    after = _reached(fits[::-1, ::-1], many[::-1], unseen[::-1], backwards=True)[::-1, ::-1]
    if not before[-1, count]:
        return None
    # A slot of one node begins where the slots before it end; a slot of many may also continue.
    reached_before = np.where(many[:, None], before[1:, :-1], before[:-1, :-1])
    reached_after = np.where(many[:, None], after[:-1, 1:], after[1:, 1:])
    possible = (reached_before & reached_after).T & fits
    return _certain(slots, possible, cells, nodes)


def _tolerate(slots: Slots, nodes: Nodes, cells: Verdicts, fits: Mask) -> None:
    """Accepts activities that contradict their slot, up to the first slot of unknown length, if they are few."""
    many = slots.is_(*MANY)
    fixed = np.arange(min(int(many.argmax()), len(fits)))
    seen = np.isin(fixed, nodes.number)
    verdict = cells[fixed, fixed].astype(np.int64)
    proofs = int(np.sum(seen & (verdict >= Verdict.SIZED)))
    wrong = verdict == Verdict.CONTRADICTS
    until_there = Match(slots.command[fixed], slots.level[fixed], verdict, seen, proofs, int(wrong.sum()))
    if not (wrong & ~seen).any() and _outweighed(until_there, seen):
        fits[fixed[wrong], fixed[wrong]] = True


def _certain(slots: Slots, possible: Mask, cells: Verdicts, nodes: Nodes) -> Match:
    """The match on which all assignments agree, from the slots that are possible for each node number."""
    command, level = (_agreed(possible, values) for values in (slots.command, slots.level))
    many = slots.is_(*MANY, Role.MAIN)
    verdict = np.where(possible, cells, np.int8(Verdict.NAMED)).min(axis=1).astype(np.int64)
    seen = np.zeros(len(command), np.bool_)
    seen[nodes.number] = True
    return Match(
        command=command,
        level=np.where(command == _NONE, _NONE, level),
        verdict=np.where(seen, verdict, np.int64(Verdict.POSSIBLE)),
        counted=np.logical_not((possible & many).any(axis=1)),
        proofs=int(np.sum(seen & (command != _NONE) & (verdict >= Verdict.SIZED))),
        contradicting=int(np.sum(seen & (verdict == Verdict.CONTRADICTS))),
    )


def _agreed(possible: Mask, values: Int64) -> Int64:
    """The value of all possible slots of each number, -1 where they differ or there is none."""
    highest = np.where(possible, values, _NONE).max(axis=1)
    lowest = np.where(possible, values, np.iinfo(np.int64).max).min(axis=1)
    return np.where(lowest == highest, highest, _NONE)


def _reached(fits: Mask, many: Mask, unseen: Mask, *, backwards: bool = False) -> Mask:
    """Whether the first slots (row: how many) can use up exactly the first node numbers (column: how many).

    Slots past the last number are nodes that were not seen; read backwards, they come first.
    """
    count, slots = fits.shape
    columns = np.packbits(fits.T, axis=1, bitorder="little")
    beyond = 1 << (0 if backwards else count)
    # A row is one integer with a bit for each number: hundreds of candidates take a few operations for each slot.
    rows = [1]
    for slot in range(slots):
        now, ok = rows[-1], int.from_bytes(columns[slot].tobytes(), "little")
        if many[slot]:
            # Adding carries each start over the bits that follow it without a gap, and one further.
            rows.append(now | (((now & ok) + ok) ^ ok))
        else:
            rows.append((now & ok) << 1 | (now & beyond if unseen[slot] else 0))
    width = count // 8 + 1
    packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), np.uint8).reshape(slots + 1, width)
    return np.unpackbits(packed, axis=1, count=count + 1, bitorder="little").view(np.bool_)
