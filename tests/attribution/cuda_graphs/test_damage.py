"""Eager runs, label files and annotation files damaged in many ways: no false label, and no false size or group.

The kernels and descriptions of collectives are recorded ones (`comm_eager_rank0`, `comm_replay_rank0`), repeated in
four layers with sizes of their own. What `test_by_sequence` damages is not damaged here again.
"""

from __future__ import annotations

import functools
import json
import random
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import TORCH, unzipped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GRAPHS = TORCH / "graphs"
LAYERS = 4
PLACES = (0, 1, 4, 7, 11)
ELEMENTS = {"allreduce": 1 << 20, "_allgather_base": 1 << 20, "_reduce_scatter_base": 1 << 21}
"""Elements that a rank puts in, in `comm_eager_rank0`; a layer has as many times as many as its number."""
GROUP = ("0", "default_pg", "[0, 1]", 2)

Event = dict[str, Any]


def document(name: str) -> Event:
    return dict(json.loads(unzipped(GRAPHS / f"{name}.json.gz")))


def kernels(events: list[Event]) -> list[Event]:
    return sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])


@functools.cache
def eager_calls() -> tuple[list[Event], ...]:
    """For each launch of four layers: its kernel, its call, and the range around the call, which is its label."""
    events = document("comm_eager_rank0")["traceEvents"]
    made = kernels(events)
    made_by = made[0]["args"]["correlation"]
    calls = (e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    call = next(e for e in calls if e["args"].get("correlation") == made_by)
    user_range = {key: call[key] for key in ("ph", "pid", "tid")} | {"cat": "user_annotation", "args": {}}
    result = []
    for layer in range(LAYERS):
        for row in made:
            kernel = deepcopy(row)
            for key in ("In msg nelems", "Out msg nelems"):
                kernel["args"][key] *= layer + 1
            result.append([kernel, deepcopy(call), user_range | {"name": f"layer{layer}", "args": {}}])
    return tuple(result)


def eager(folder: Path, calls: list[list[Event]], rank: int = 0) -> thence.Trace:
    """An eager run of these launches, one after the other."""
    whole = document("comm_eager_rank0")
    events: list[Event] = []
    for number, (kernel, call, around) in enumerate(deepcopy(calls)):
        for event, start, duration in ((kernel, 100, 50), (call, 0, 5), (around, -10, 40)):
            event |= {"ts": 1000.0 * number + start, "dur": duration}
            event["args"].pop("External id", None)
        kernel["args"]["correlation"] = call["args"]["correlation"] = 900_000 + number
        events += [kernel, call, around]
    whole["traceEvents"] = events
    whole["distributedInfo"]["rank"] = rank
    (folder / "eager.json").write_text(json.dumps(whole))
    return thence.open(folder / "eager.json")


def replay(folder: Path, rows: list[Event], *, nodes: int | None = None) -> thence.Trace:
    """Three replays of a graph with these kernels; ``nodes``: the id of the graph, if nodes have ids."""
    whole = document("comm_replay_rank0")
    events = [e for e in whole["traceEvents"] if e.get("cat") != "kernel"]
    correlations = dict.fromkeys(k["args"]["correlation"] for k in kernels(whole["traceEvents"]))
    first = kernels(whole["traceEvents"])[0]["ts"]
    for number, correlation in enumerate(correlations):
        for place, row in enumerate(rows):
            kernel = {key: value for key, value in row.items() if key != "layer"}
            args = row["args"] | {"correlation": correlation}
            if nodes is not None:
                args |= {"graph id": nodes, "graph node id": (nodes << 32) + place}
            start = first + 5000 * number + 30.0 * place
            events.append(kernel | {"args": args, "ts": start, "dur": 20})
    whole["traceEvents"] = events
    (folder / "replay.json").write_text(json.dumps(whole))
    return thence.open(folder / "replay.json")


def replayed() -> list[Event]:
    """The kernels of one replay of four layers, each with its layer."""
    three = kernels(document("comm_replay_rank0")["traceEvents"])[:3]
    return [deepcopy(row) | {"layer": layer} for layer in range(LAYERS) for row in three]


def check(trace: thence.Trace, rows: list[Event]) -> int:
    """Asserts that nothing false is said of three replays of these kernels; returns how many are labelled."""
    trace.self_check()
    order = trace.tables.gpu.with_row_index("row").sort("start")["row"].to_list()
    labels = trace.tables.places["label"].cast(pl.String).to_list()
    described = {row["gpu"]: row for row in trace.tables.collectives.to_dicts()}
    kind = {"allreduce": "AllReduce", "_allgather_base": "AllGather", "_reduce_scatter_base": "ReduceScatter"}
    count = 0
    for at, true in zip(order, 3 * rows, strict=True):
        label, said = labels[at], described.get(at)
        assert label in (None, f"layer{true['layer']}")
        count += label is not None
        if said is None:
            continue
        assert said["collective"] is None or kind[said["collective"]] in true["name"]
        known = (said["in_elements"], said["out_elements"], said["bytes"])
        if known != (None, None, None):
            assert said["in_elements"] == ELEMENTS[said["collective"]] * (true["layer"] + 1)
        group = tuple(said[f"group_{name}"] for name in ("name", "description", "ranks", "size"))
        assert group in (GROUP, (None, None, None, None))
    return count


def changed(rows: list[Any], how: str, at: int, other: Callable[[Any], Any]) -> list[Any]:
    """A sequence after damage; ``other`` makes a launch or kernel of another name."""
    chance = random.Random(at)
    rest = rows[:at] + rows[at + 1 :]
    to = chance.randrange(len(rest))
    return {
        "none": rows,
        "twice": [*rows[:at], rows[at], *rows[at:]],
        "lost": rest,
        "two lost": rest[:to] + rest[to + 1 :],
        "layer lost": rows[:3] + rows[6:],
        "cut at the beginning": rows[max(at, 1) :],
        "foreign": [*rows[:at], other(rows[at]), *rows[at:]],
        "renamed": [*rows[:at], other(rows[at]), *rows[at + 1 :]],
        "exchanged": [*rows[:to], *rows[to : to + 2][::-1], *rows[to + 2 :]],
        "moved": [*rest[:to], rows[at], *rest[to:]],
        "lost and foreign": [*rest[:to], other(rows[0]), *rest[to:]],
    }[how]


KEPT = {
    "none": 12, "twice": 11, "lost": 11, "two lost": 0, "layer lost": 0, "cut at the beginning": 0, "foreign": 12,
    "renamed": 11, "exchanged": 10, "moved": 9, "lost and foreign": 10,
}  # fmt: skip
"""Damages, and how many of the 12 kernels keep their label at least."""
KEPT_OF_RUN = {"foreign": 11, "lost and foreign": 0, "moved": 0}
"""The same of an eager run, if it differs: a range that is damaged may look like a run of its own."""


def places(how: str, first: int) -> tuple[int, ...]:
    """Where to damage: at another place for each damage, for eager runs and replays at different ones."""
    return PLACES[([*KEPT].index(how) + first) % 3 :: 3][:1]


@pytest.mark.parametrize("how", KEPT)
def test_a_damaged_eager_run_gives_no_false_label_size_or_group(tmp_path: Path, how: str) -> None:
    rows = replayed()
    bare = replay(tmp_path, rows)

    def other(call: list[Event]) -> list[Event]:
        return [call[0] | {"name": "foreign"}, *call[1:]]

    for at in places(how, 0):
        calls = list(eager_calls())
        run = eager(tmp_path, changed(calls, how, at, other))
        try:
            trace = bare.label(eager=run)
        except thence.MissingData:
            assert not KEPT_OF_RUN.get(how, KEPT[how]), (how, at)
            continue
        assert check(trace, rows) >= 3 * KEPT_OF_RUN.get(how, KEPT[how]), (how, at)


@pytest.mark.parametrize("how", KEPT)
def test_a_damaged_replay_gets_no_false_label_size_or_group(tmp_path: Path, how: str) -> None:
    run = eager(tmp_path, list(eager_calls()))
    for at in places(how, 1):
        rows = changed(replayed(), how, at, lambda row: row | {"name": "foreign", "layer": None})
        if how == "twice":
            rows[at] = rows[at] | {"layer": None}
        try:
            trace = replay(tmp_path, rows).label(eager=run)
        except thence.MissingData:
            assert not KEPT[how], (how, at)
            continue
        lost = 12 - sum(row["layer"] is not None for row in rows)
        assert check(trace, rows) >= 3 * (KEPT[how] - lost), (how, at)


def test_an_eager_run_of_another_program_labels_nothing(tmp_path: Path) -> None:
    run = thence.open(GRAPHS / "block_eager.json.gz")
    with pytest.raises(thence.MissingData):
        replay(tmp_path, replayed()).label(eager=run)


def test_two_steps_of_other_sizes_leave_the_sizes_open(tmp_path: Path) -> None:
    """An eager run of a small and a large batch, of which the graph has one: the group is known, the size is not."""
    small = list(eager_calls())
    large = deepcopy(small)
    for kernel, _, _ in large:
        for key in ("In msg nelems", "Out msg nelems"):
            kernel["args"][key] *= 8
    trace = replay(tmp_path, replayed()).label(eager=eager(tmp_path, small + large))
    assert check(trace, replayed()) == 36
    assert trace.tables.collectives["bytes"].null_count() == trace.tables.collectives.height
    assert trace.tables.collectives["group_ranks"].unique().to_list() == ["[0, 1]"]


# Files of labels and annotations

NODES = 3
IDS = 5
LABELS = "comm_labels_rank0.json"


def annotations(shift: int = 0) -> dict[str, Any]:
    """What PyTorch's annotations of one layer of collectives hold, for nodes with numbers that may be shifted."""
    keys = ("Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name")
    more = ("Process Group Description", "Process Group Ranks")
    made = [call[0]["args"] for call in eager_calls()[:NODES]]
    return {
        str((IDS << 32) + number + shift): [{"name": "layer0"} | {key: args[key] for key in (*keys, *more)}]
        for number, args in enumerate(made)
    }


@pytest.mark.parametrize("how", ["none", "shifted by 1", "exchanged", "another graph", "another type", "one lost",
                                 "doubled in another graph", "another kind"])  # fmt: skip
def test_a_damaged_annotation_file_gives_no_false_size(tmp_path: Path, how: str) -> None:
    content = annotations()
    keys, values = list(content), list(content.values())
    bad = {"another type": "Float", "another kind": "allgather_into_tensor_coalesced"}
    content = {
        "none": content,
        "shifted by 1": annotations(1),
        "exchanged": dict(zip(keys, [values[1], values[0], values[2]], strict=True)),
        "another graph": {str(int(key) + (1 << 32)): value for key, value in content.items()},
        "another type": {key: [value[0] | {"dtype": bad["another type"]}] for key, value in content.items()},
        "another kind": {key: [value[0] | {"Collective name": bad["another kind"]}] for key, value in content.items()},
        "one lost": dict(list(content.items())[1:]),
        "doubled in another graph": content | {str(int(keys[0]) + (1 << 32)): values[1]},
    }[how]  # fmt: skip
    (tmp_path / "kernel_annotations_rank0.json").write_text(json.dumps(content))
    rows = replayed()[:NODES]
    trace = replay(tmp_path, rows, nodes=IDS)
    count = check(trace, rows)
    kept = {"none": 9, "one lost": 6, "doubled in another graph": 9}
    assert count == kept.get(how, 0)
    if how not in kept and how != "another graph":
        assert any("ran other kernels than were captured" in text for text in trace.meta.warnings)


def label_file(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    made = json.loads((GRAPHS / LABELS).read_text())
    change(made)
    return dict(made)


def of_nodes(made: dict[str, Any], rows: Callable[[list[Any]], list[Any]]) -> None:
    """Applies a change to every column of the nodes."""
    for name, column in made["graphs"][0]["nodes"].items():
        if name != "number" and isinstance(column, list):
            made["graphs"][0]["nodes"][name] = rows(column)


@pytest.mark.parametrize(
    ("how", "change"),
    [
        ("kernels exchanged", lambda made: of_nodes(made, lambda c: [*c[2:4], *c[:2], *c[4:]])),
        ("reversed", lambda made: of_nodes(made, lambda c: c[::-1])),
        ("edges lost", lambda made: made["graphs"][0].update(edges=None)),
        ("edges reversed", lambda made: made["graphs"][0].update(edges=[e[::-1] for e in made["graphs"][0]["edges"]])),
        ("another kernel", lambda made: made["kernels"][0].update(name="x", demangled="x")),
        ("another grid", lambda made: made["graphs"][0]["nodes"]["grid"].__setitem__(1, [9, 9, 9])),
        ("another process", lambda made: made["process"].update(pid=4242)),
        ("another rank", lambda made: made["process"].update(rank=3)),
        ("another time", lambda made: made["process"].update(started_ns=2 * 10**18)),
        ("labels lost", lambda made: made["graphs"][0]["nodes"].update(label=[-1] * 8)),
        ("a label that does not exist", lambda made: made["graphs"][0]["nodes"]["label"].__setitem__(0, 99)),
        ("numbers doubled", lambda made: made["graphs"][0]["nodes"]["number"].__setitem__(0, 1)),
        ("a column cut", lambda made: made["graphs"][0]["nodes"]["kernel"].pop()),
    ],
)  # fmt: skip
def test_a_damaged_label_file_gives_no_label(
    tmp_path: Path, how: str, change: Callable[[dict[str, Any]], None]
) -> None:
    (tmp_path / "damaged.json").write_text(json.dumps(label_file(change)))
    bare = replay(tmp_path, replayed()[:3])
    with pytest.raises(thence.ThenceError):
        bare.label(tmp_path / "damaged.json")
    assert bare.tables.collectives.is_empty(), how
