"""Command buffers that XLA planned for an H200 without one: loops, branches, sorts, copies, collectives.

`tests/data/jax/aot/make.py` compiled the programs and kept XLA's own lists: which thunks a command buffer holds, and
which HLO op each is of. Here these lists become graphs, their nodes numbered as the driver numbers them (checked
against CUPTI on recordings, `test_command_buffers.py`), and launches in which each conditional takes one branch. What
thence says of each node, from the HLO alone, must be what XLA's list says.
"""

from __future__ import annotations

import lzma
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import polars as pl
import pytest

from helpers import DATA
from thence.attribution.xla.command_buffers import derived_instructions
from thence.model.tables import GPU, HOST, PROGRAMS, Tables
from thence.readers.jax.hlo_dump import hlo_dump_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

AOT = DATA / "jax" / "aot"
PROGRAMS_MADE = sorted(path.name.partition(".")[0] for path in AOT.glob("*.hlo.pb.xz"))
_THUNK = re.compile(r"^(\s*)(\d+): (k\w+)\s*\[.*?\]\s*(\S*)")
_LABEL = re.compile(r"^(\s*)(\w+):$")
_BATCH = 8  # branches that one conditional node holds


@dataclass
class Thunk:
    """A thunk, or the heading of a branch or a part of a loop, of XLA's list."""

    number: int
    kind: str
    name: str
    inside: list[Thunk] = field(default_factory=list)


def listed(name: str) -> list[Thunk]:
    """XLA's list of thunks, nested by its indentation."""
    roots: list[Thunk] = []
    stack = [(-1, roots)]
    for line in lzma.decompress((AOT / f"{name}.thunks.xz").read_bytes()).decode().splitlines():
        thunk, label = _THUNK.match(line), _LABEL.match(line)
        if thunk is None and label is None:
            continue
        found = thunk or label
        assert found is not None
        depth = len(found[1])
        while stack[-1][0] >= depth:
            stack.pop()
        made = Thunk(int(thunk[2]), thunk[3], thunk[4]) if thunk else Thunk(-1, "label", found[2])
        stack[-1][1].append(made)
        stack.append((depth, made.inside))
    return roots


def operations(name: str) -> dict[int, str]:
    """The HLO op of each thunk that has a number."""
    text = lzma.decompress((AOT / f"{name}.metadata.xz").read_bytes()).decode()
    return {int(i): op for op, i in re.findall(r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)', text)}


def command_buffers(thunks: list[Thunk]) -> Iterator[list[Thunk]]:
    """What each command buffer holds."""
    for thunk in thunks:
        if thunk.kind == "kCommandBuffer":
            yield thunk.inside
        else:
            yield from command_buffers(thunk.inside)


def between_collectives(thunks: list[Thunk]) -> Iterator[list[Thunk]]:
    """For several devices, XLA lists no command buffers: what lies between collectives and loops."""
    run: list[Thunk] = []
    for thunk in [*thunks, Thunk(-1, "end", "")]:
        if thunk.kind in ("end", "kAllReduce", "kWhile", "label"):
            if len(run) > 1:
                yield run
            run = []
            yield from between_collectives(thunk.inside) if thunk.inside else ()
        else:
            run.append(thunk)


@dataclass
class Node:
    """A node that leaves activities: its number, the thunk, the kernel, and in which branches it lies."""

    number: int
    thunk: int
    kernel: str
    branches: tuple[tuple[int, int], ...]


def flat(thunks: list[Thunk]) -> Iterator[Thunk]:
    """The thunks, asynchronous ones where they start; their ends add nothing."""
    for thunk in thunks:
        if thunk.kind == "kAsyncStart":
            yield from flat(thunk.inside)
        elif thunk.kind != "kAsyncDone":
            yield thunk


def branches_of(conditional: Thunk) -> list[tuple[int, list[Thunk]]]:
    """Branches as XLA lists them, with their places, in the order of creation: true before false."""
    names = [part.name for part in conditional.inside]
    places = list(range(len(names)))
    if set(names) == {"true_branch", "false_branch"}:
        places.sort(key=lambda place: names[place] != "true_branch")
    return [(place, conditional.inside[place].inside) for place in places]


@dataclass
class Numbered:
    """The nodes of a graph.

    A level is numbered in the order of its commands, then depth first what its nodes hold: branches of a predicate
    in reverse. A conditional is one kernel and one node for each branch, eight branches at a time; a
    dynamic-slice fusion is one child graph.

    Attributes:
        nodes: those that leave activities.
        counts: the number of branches of each conditional.
        following: the next number.
    """

    nodes: list[Node] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    following: int = 0

    def level(
        self, thunks: list[Thunk], branches: tuple[tuple[int, int], ...] = (), owner: int | None = None
    ) -> Numbered:
        """Adds a level; activities in a child graph are the owner's."""
        held: list[tuple[list[Thunk], tuple[tuple[int, int], ...], int | None]] = []
        for thunk in flat(thunks):
            number = thunk.number if owner is None else owner
            if thunk.kind == "kConditional":
                parts = branches_of(thunk)
                self.counts[thunk.number] = len(parts)
                for first in range(0, len(parts), _BATCH):
                    self._node(number, "set_case_condition", branches)
                    for place, inside in parts[first : first + _BATCH]:
                        self.following += 1
                        held.append((inside, (*branches, (thunk.number, place)), owner))
            elif thunk.kind == "kDynamicSliceFusion":
                self.following += 1
                held.append((thunk.inside, branches, thunk.number))
            else:
                copy = thunk.kind == "kCopy"
                self._node(number, "Memcpy DtoD (Device -> Device)" if copy else thunk.name, branches)
        for inside, where, of in held:
            self.level(inside, where, of)
        return self

    def _node(self, thunk: int, kernel: str, branches: tuple[tuple[int, int], ...]) -> None:
        self.nodes.append(Node(self.following, thunk, kernel, branches))
        self.following += 1


def recorded(name: str, *, host: bool) -> tuple[Tables, list[str | None]]:
    """The graphs of a program as the tables of a trace, and the true HLO op of each activity."""
    known, thunks = operations(name), listed(name)
    module = hlo_dump_modules(str(AOT / f"{name}.hlo.pb.xz"))[0]
    copied = module.instructions.filter(pl.col("opcode") == "copy")
    sizes = dict(copied.select("name", "result_bytes").iter_rows())
    graphs = list(command_buffers(thunks)) or list(between_collectives(thunks))
    gpu: list[dict[str, object]] = []
    ranges: list[dict[str, object]] = []
    truth: list[str | None] = []
    now = 1000
    for graph, commands in enumerate(graphs, 2):
        numbered = Numbered().level(commands)
        nodes, counts = numbered.nodes, numbered.counts
        name_of_thunk = f"Thunk:#hlo_op=command_buffer_{commands[0].number}#"
        for launch in range(max([1, *counts.values()])):
            correlation = 100 * graph + launch
            row = len(ranges)
            ranges += [
                {"name": name_of_thunk, "parent": None, "correlation": None},
                {"name": "cuGraphLaunch", "parent": row, "correlation": correlation},
            ]  # fmt: skip
            ranges[-2] |= {"start": now, "duration": 10, "category": "range"}
            ranges[-1] |= {"start": now + 1, "duration": 5, "category": "driver"}
            now += 20
            for node in nodes:
                if any(launch % counts[of] != place for of, place in node.branches):
                    continue
                copy = node.kernel.startswith("Memcpy")
                operation = known.get(node.thunk)
                gpu.append(
                    {
                        "rank": 0, "device": 0, "stream": 1, "kind": "memcpy" if copy else "kernel",
                        "name": node.kernel, "start": now, "duration": 10, "graph": graph,
                        "correlation": 0 if node.branches else correlation,
                        "node": (graph << 32) + node.number, "program": 0,
                        "bytes": sizes.get(operation or "") if copy else None,
                    }
                )  # fmt: skip
                truth.append(operation)
                now += 20
    programs = PROGRAMS.frame(
        {
            "rank": [0], "device": [0], "program": ["x"], "name": ["x"], "execution": [0], "start": [0],
            "duration": [now], "launch": [0], "launch_duration": [1], "hlo": [0],
        }
    )  # fmt: skip
    rows = pl.DataFrame(ranges).with_columns(rank=0, process=1, thread=1)
    frame = HOST.frame(rows.to_dict()) if host else HOST.empty()
    activities = GPU.frame(pl.DataFrame(gpu).to_dict())
    return Tables(gpu=activities, host=frame, programs=programs, hlo=(module,)), truth


def test_the_programs_are_there() -> None:
    assert len(PROGRAMS_MADE) == 14


@pytest.mark.parametrize("name", PROGRAMS_MADE)
def test_without_the_number_of_the_first_thunk_nothing_is_wrong(name: str) -> None:
    tables, truth = recorded(name, host=False)
    found = derived_instructions(tables)["hlo"]
    assert [ours for ours, true in zip(found, truth, strict=True) if ours not in (None, true)] == []


@pytest.mark.parametrize("name", PROGRAMS_MADE)
def test_every_node_is_the_thunk_that_xla_lists(name: str) -> None:
    tables, truth = recorded(name, host=True)
    found = derived_instructions(tables)
    wrong = [
        (kernel, ours, true)
        for kernel, ours, true in zip(tables.gpu["name"], found["hlo"], truth, strict=True)
        if ours != true
    ]
    assert wrong == []
