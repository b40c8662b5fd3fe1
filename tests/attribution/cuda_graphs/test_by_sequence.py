"""Replays, captures and eager runs damaged in many ways: labels may be missing, but none is false."""

from __future__ import annotations

import dataclasses
import json
import random
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thence
from capture_data import Call, Recorder, compiled, layers
from helpers import TORCH, examples, recording, unzipped, written
from thence.attribution.cuda_graphs import by_sequence
from thence.attribution.cuda_graphs.by_sequence import FITS, match, max_pairs
from thence.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


REPLAY = recording("torch-2.12_graph_replay_rank0")
EAGER = TORCH / "graphs" / "torch-2.12_graph_eager_rank0.json.gz"
NODES = 48
PLACES = (0, 7, 33, 47)

Rows = list[tuple[dict[str, object], str | None]]
"""The activities of one replay in the order of their nodes, each with its true label, None where it has none."""


@cache
def eager() -> thence.Trace:
    return thence.open(EAGER)


@cache
def truth() -> list[str]:
    nodes = json.loads((TORCH / "graphs" / "graph_truth_rank0.json").read_text())["nodes"]
    return [node["label"] for node in nodes]


def recorded() -> tuple[thence.Trace, list[Rows]]:
    """The recorded replays, and the activities of each of them by node number."""
    trace = thence.open(REPLAY)
    launches = trace.tables.gpu.sort("node").partition_by("correlation", maintain_order=True)
    return trace, [list(zip(part.to_dicts(), truth(), strict=True)) for part in launches]


def rebuilt(trace: thence.Trace, launches: list[Rows]) -> tuple[thence.Trace, list[str | None]]:
    """A trace with these activities, whose nodes are numbered in this order, and their true labels."""
    rows, labels = [], []
    for launch in launches:
        graph = int(str(launch[0][0]["graph"]))
        for number, (row, label) in enumerate(launch):
            rows.append(row | {"graph": graph, "node": (graph << 32) + number})
            labels.append(label)
    gpu = pl.DataFrame(rows, schema=trace.tables.gpu.schema, orient="row")
    order = gpu.with_row_index("at").sort("start", maintain_order=True)["at"].to_list()
    return Trace(dataclasses.replace(trace.recorded, gpu=gpu[order])), [labels[at] for at in order]


def other(rows: Rows, at: int, name: str) -> tuple[dict[str, object], None]:
    """A kernel of another name that no launch corresponds to."""
    return rows[min(at, len(rows) - 1)][0] | {"name": name}, None


def lost(rows: Rows, at: int, _: random.Random) -> Rows:
    return rows[:at] + rows[at + 1 :]


def foreign(rows: Rows, at: int, _: random.Random) -> Rows:
    return [*rows[:at], other(rows, at, "foreign_kernel"), *rows[at:]]


def three_foreign(rows: Rows, at: int, chance: random.Random) -> Rows:
    for _ in range(3):
        rows = foreign(rows, at, chance)
        at = chance.randrange(len(rows))
    return rows


def twice(rows: Rows, at: int, _: random.Random) -> Rows:
    return [*rows[:at], (rows[at][0], None), *rows[at:]]


def elsewhere(rows: Rows, at: int, chance: random.Random) -> Rows:
    source = chance.randrange(len(rows))
    return [*rows[:at], (rows[source][0], None), *rows[at:]]


def exchanged(rows: Rows, at: int, _: random.Random) -> Rows:
    at = min(at, len(rows) - 2)
    return [*rows[:at], rows[at + 1], rows[at], *rows[at + 2 :]]


def renamed(rows: Rows, at: int, _: random.Random) -> Rows:
    return [*rows[:at], other(rows, at, "another_kernel"), *rows[at + 1 :]]


def reshaped(rows: Rows, at: int, _: random.Random) -> Rows:
    row, label = rows[at]
    return [*rows[:at], (row | {"grid": [9, 9, 9]}, label), *rows[at + 1 :]]


def moved(rows: Rows, at: int, chance: random.Random) -> Rows:
    rest = lost(rows, at, chance)
    to = chance.randrange(len(rest))
    return [*rest[:to], rows[at], *rest[to:]]


def lost_and_foreign(rows: Rows, at: int, chance: random.Random) -> Rows:
    return foreign(lost(rows, at, chance), chance.randrange(len(rows) - 1), chance)


def two_lost(rows: Rows, at: int, chance: random.Random) -> Rows:
    return lost(lost(rows, at, chance), chance.randrange(len(rows) - 1), chance)


def layer_lost(rows: Rows, _: int, __: random.Random) -> Rows:
    return rows[:16] + rows[32:]


DAMAGES: dict[Callable[[Rows, int, random.Random], Rows], int] = {
    lost: 47, foreign: 48, three_foreign: 48, twice: 46, elsewhere: 46, exchanged: 45, renamed: 47, reshaped: 47,
    moved: 45, lost_and_foreign: 47, two_lost: 46, layer_lost: 28,
}  # fmt: skip
"""How to damage a replay of 48 activities, and how many of them keep their label at least."""


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("turn", range(2))
def test_a_damaged_replay_gets_no_false_label_and_keeps_the_others(first: int, turn: int) -> None:
    """Four graphs in a trace, each damaged in its own way at one of two places."""
    trace, launches = recorded()
    damages = [*DAMAGES][first::3]
    launches = [[(row | {"graph": 100 + n}, label) for row, label in rows] for n, rows in enumerate(launches[:4])]
    for number, damage in enumerate(damages):
        at = 0 if damage is layer_lost else PLACES[(first + number) % 2 + 2 * turn]
        launches[number] = damage(launches[number], at, random.Random(random.Random(at).random()))
    made, right = rebuilt(trace, launches)
    labelled = made.label(eager=eager())
    labelled.self_check()
    labels = labelled.tables.places["label"].cast(pl.String).to_list()
    assert [x for x in zip(labels, right, strict=True) if x[0] not in (None, x[1])] == []
    graphs = labelled.tables.gpu["graph"].to_list()
    for number, damage in enumerate(damages):
        kept = sum(label is not None for graph, label in zip(graphs, labels, strict=True) if graph == 100 + number)
        assert kept >= DAMAGES[damage], damage


@pytest.mark.parametrize("lines", [slice(0, None, 7), slice(0, 40)])
def test_an_eager_run_that_lost_launches_gives_no_false_label(lines: slice) -> None:
    trace, launches = recorded()
    made, right = rebuilt(trace, launches)
    whole = eager().recorded
    kept = sorted({*range(whole.gpu.height)} - {*range(whole.gpu.height)[lines]})
    labelled = made.label(eager=Trace(dataclasses.replace(whole, gpu=whole.gpu[kept])))
    labels = labelled.tables.places["label"].cast(pl.String).to_list()
    assert [x for x in zip(labels, right, strict=True) if x[0] not in (None, x[1])] == []


# Captures, whose kernels are known by nothing but their order and operators

FOREIGN: Call = ("foreign_kernel", "", "", "kernel")


def changed(calls: list[Call], how: str, at: int) -> list[Call]:
    chance = random.Random(at)
    rest = calls[:at] + calls[at + 1 :]
    to = chance.randrange(len(rest))
    second = chance.randrange(len(rest))
    copy: Call = ("", "aten::copy_", "", "memcpy")
    return {
        "lost": rest,
        "two lost": rest[:second] + rest[second + 1 :],
        "foreign": [*calls[:at], FOREIGN, *calls[at:]],
        "trailing": [*calls, ("copy_kernel", "", "", "kernel")],
        "leading": [("copy_kernel", "", "", "kernel"), *calls],
        "a copy": [*calls[:at], copy, *calls[at:]],
        "twice": [*calls[:at], (calls[at][0], *FOREIGN[1:3], calls[at][3]), *calls[at:]],
        "exchanged": [*calls[:to], *calls[to : to + 2][::-1], *calls[to + 2 :]],
        "moved": [*rest[:to], calls[at], *rest[to:]],
        "lost and foreign": [*rest[:to], FOREIGN, *rest[to:]],
        "first and last": [FOREIGN, *calls[:-1]],
        "layer lost": calls[:11] + calls[21:],
    }[how]


HOW = (
    "lost", "two lost", "foreign", "trailing", "leading", "a copy", "twice", "exchanged", "moved", "lost and foreign",
    "first and last", "layer lost",
)  # fmt: skip


DAMAGED = ((compiled, 0, 0), (layers, 12, 0), (layers, 12, 1), (compiled, 29, 1))
"""Programs, where they are damaged, and whether the capture (0) or its replay (1) is."""


@cache
def captured_trace(calls: tuple[Call, ...], amd: bool, folder: Path) -> thence.Trace:
    """A capture of these calls, read once for all replays."""
    capture = Recorder(amd)
    capture.capture([(k, op or "aten::copy_", label or "none", kind) for k, op, label, kind in calls])
    return thence.open(written(folder / "capture.json", capture.events))


@cache
def replayed_trace(calls: tuple[Call, ...], amd: bool, folder: Path) -> thence.Trace:
    """Three replays of these calls, read once for all captures."""
    replay = Recorder(amd)
    replay.replay(list(calls), nodes=3)
    return thence.open(written(folder / "replay.json", replay.events))


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undamaged")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("amd", [True, False])
def test_a_damaged_capture_or_its_replay_gives_no_false_label(
    tmp_path: Path, undamaged: Path, amd: bool, how: str
) -> None:
    # Two of the four for each damage; AMD's launches name their kernels, so that the place decides little: one.
    number = HOW.index(how)
    for make, at, side in [DAMAGED[number % 4]] if amd else DAMAGED[number % 2 :: 2]:
        calls = make(6)
        damaged = changed(calls, how, at)
        captured, replayed = ((damaged, calls), (calls, damaged))[side]
        folders = [undamaged if these is calls else tmp_path for these in (captured, replayed)]
        source = captured_trace(tuple(captured), amd, folders[0])
        trace = replayed_trace(tuple(replayed), amd, folders[1])
        if how == "layer lost" and not amd:
            with pytest.raises(thence.MissingData, match="can be matched in order with the"):
                trace.label(eager=source)
            continue
        labelled = trace.label(eager=source)
        labels = labelled.tables.places["label"].cast(pl.String).to_list()
        # What the capture lost has no label in it.
        known = [call[2] or None if call in captured else None for call in replayed]
        wrong = [x for x in zip(labels, known, strict=True) if x[0] not in (None, x[1])]
        assert wrong == [], (make, at, side)
        if how == "layer lost":  # kernel names alone
            assert set(labelled.graph_coverage.rules) == {"eager_kernel_name"}
        else:
            assert sum(label is not None for label in labels) >= len(calls) - 7


# Annotation files

ANNOTATED = {2 << 32 | n for n in range(NODES)}


@pytest.mark.parametrize(
    "damage",
    ["cut", "garbage", "half of the nodes", "another graph", "another rank", "no ids", "nested", "empty", "numbers",
     "a node too large"],
)  # fmt: skip
def test_a_damaged_annotation_file_gives_no_false_label(tmp_path: Path, damage: str) -> None:
    content: dict[str, object] = {str(2 << 32 | n): [{"name": label}] for n, label in enumerate(truth())}
    first = next(iter(content))
    changes: dict[str, Callable[[], object]] = {
        "half of the nodes": lambda: dict(list(content.items())[::2]),
        "another graph": lambda: {str(int(key) + (3 << 32)): value for key, value in content.items()},
        "no ids": lambda: content | {"node": [{"name": "x"}]},
        "nested": lambda: content | {first: [[{"name": "x"}]]},
        "empty": dict,
        "numbers": lambda: content | {first: [3]},
        "a node too large": lambda: content | {str(1 << 64): [{"name": "x"}]},
    }
    text = json.dumps(changes.get(damage, lambda: content)())
    text = {"cut": text[: len(text) // 2], "garbage": "\x00" + text[1:]}.get(damage, text)
    rank = 1 if damage == "another rank" else 0
    (tmp_path / "trace_rank0.json").write_bytes(unzipped(REPLAY))
    (tmp_path / f"kernel_annotations_rank{rank}.json").write_text(text)
    trace = thence.open(tmp_path / "trace_rank0.json")
    right = [truth()[node & 0xFFFFFFFF] for node in trace.tables.gpu["node"].to_list()]
    labels = trace.tables.places["label"].cast(pl.String).to_list()
    assert [x for x in zip(labels, right, strict=True) if x[0] not in (None, x[1])] == []
    assert sum(label is not None for label in labels) == (120 if damage == "half of the nodes" else 0)
    if damage not in ("another rank", "half of the nodes", "empty", "another graph"):
        assert any("kernel_annotations" in text for text in trace.meta.warnings)


# ---- The match of two sequences


EQUAL = (FITS * np.eye(256)).astype(np.int8)


def matched(launches: str, activities: str) -> str:
    """The launch that each activity can only be, as its position; `.` where it is open, `-` where it has none."""
    found = match(EQUAL, *(np.array([ord(x) for x in text], np.int64) for text in (launches, activities)))
    possible = set(found.activity.tolist())
    return "".join(
        chr(ord("0") + launch) if launch >= 0 else "." if at in possible else "-"
        for at, launch in enumerate(found.only().tolist())
    )


def test_a_foreign_kernel_costs_its_neighbours_nothing() -> None:
    assert matched("abcabd", "abXcabd") == "01-2345"
    assert matched("abcabdX", "abcabd") == "012345"
    assert matched("Xabcabd", "abcabd") == "123456"


def test_an_ambiguous_stretch_stays_open_and_nothing_else() -> None:
    assert matched("xaaay", "xaay") == "0..4"
    assert matched("xaay", "xaaay") == "0...3"
    assert matched("xabababy", "xababy") == "0....7"


def test_two_that_are_exchanged_are_open() -> None:
    assert matched("wabz", "wbaz") == "0..3"


@given(
    weight=st.lists(st.lists(st.sampled_from([0, 1, 2, 2]), min_size=3, max_size=3), min_size=3, max_size=3),
    launches=st.lists(st.integers(0, 2), max_size=5),
    activities=st.lists(st.integers(0, 2), min_size=1, max_size=5),
)
@settings(max_examples=examples(400), deadline=None)
def test_only_pairs_of_all_best_alignments_are_certain(
    weight: list[list[int]], launches: list[int], activities: list[int]
) -> None:
    every = []
    for count in range(min(len(launches), len(activities)) + 1):
        for rows in combinations(range(len(launches)), count):
            for columns in combinations(range(len(activities)), count):
                pairs = tuple(zip(rows, columns, strict=True))
                weights = [weight[launches[i]][activities[j]] for i, j in pairs]
                if all(weights):
                    every.append((sum(weights), pairs))
    best = max(total for total, _ in every)
    alignments = [pairs for total, pairs in every if total == best]
    kinds = np.array(weight, np.int8)
    found = match(kinds, np.array(launches, np.int64), np.array(activities, np.int64))
    possible = {pair for pairs in alignments for pair in pairs}
    assert set(zip(found.launch.tolist(), found.activity.tolist(), strict=True)) == possible
    for at, launch in enumerate(found.only().tolist()):
        of_each = {{j: i for i, j in pairs}.get(at, -1) for pairs in alignments}
        assert launch == (of_each.pop() if len(of_each) == 1 else -1)
    assert found.pairs in {len(pairs) for pairs in alignments}


def test_long_sequences_are_divided_at_unique_kernels_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_sequence, "_MAX_CELLS", 16)
    assert matched("aaaaUaabaVaaca", "aaaaUaXbaVaaca") == "01234.-789:;<="
    # Two that changed places divide nothing, and what is too long to be compared stays open.
    assert matched("aaUbVaa", "abVbUaa").count("-") == 7


def test_the_most_that_two_sequences_have_in_common_is_an_upper_bound() -> None:
    launches, activities = (np.array([ord(x) for x in t], np.int64) for t in ("abcab", "abXab"))
    assert max_pairs(EQUAL, launches, activities) == 4
