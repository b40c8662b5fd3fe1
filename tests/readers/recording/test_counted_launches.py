"""Launches found by CUPTI's number of them: by hand, and against simulated threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import thence
from helpers import examples
from recording_data import BEGAN, kernel, written
from thence.capture.boundaries.log import BEGINS, ENDS, READ
from thence.model.launches import COUNTED, UNCERTAIN
from thence.readers.recording.counted_launches import boundaries_of, counted_launches, numbers_of, outside_of_ranges
from thence.readers.recording.place_ranges import place_ranges
from thence.writers.flame.folded import folded_lines

if TYPE_CHECKING:
    from pathlib import Path

    from thence.trace import Trace

SCHEMA = {"counter": pl.Int64, "time": pl.Int64, "thread": pl.Int64, "place": pl.Int64, "flags": pl.Int64}  # fmt: skip


def launches(
    boundaries: list[tuple[int, int, int, int, int]], activities: list[tuple[int, int, int | None, int]]
) -> list[tuple[int, int, str, int, int]]:
    """correlation, thread, name, start and latest of the launches of (correlation, start, graph, queued)."""
    gpu = pl.DataFrame(
        [row[:3] for row in activities],
        schema={"correlation": pl.Int64, "start": pl.Int64, "graph": pl.UInt64},
        orient="row",
    )
    queued = pl.Series([row[3] for row in activities], dtype=pl.Int64)
    table = pl.DataFrame(boundaries, schema=SCHEMA, orient="row")
    found = counted_launches(gpu, queued, pl.Series([], dtype=pl.Int64), boundaries_of(table))
    return found.select("correlation", "thread", pl.col("name").cast(pl.String), "start", "latest").rows()


LAUNCH, GRAPH = COUNTED
A, B = 501, 502


def test_a_launch_lies_between_the_boundaries_by_its_number_not_by_its_time() -> None:
    """queued may be off: it is moved between the boundaries that the number says."""
    boundaries = [(10, 1000, A, 1, 0), (13, 2000, A, 2, 0), (14, 3000, A, 3, 0)]
    activities = [(11, 5000, None, 1500), (12, 5100, None, 2500), (15, 5200, None, 2900)]
    assert launches(boundaries, activities) == [
        (11, A, LAUNCH, 1500, 1500),
        (12, A, LAUNCH, 1999, 1999),
        (15, A, LAUNCH, 3000, 3000),
    ]


def test_a_mark_begins_and_ends_where_it_was_noted(tmp_path: Path) -> None:
    """Not at the end of the call before, from which on a stack that is read later may say where the thread was."""
    boundaries = [
        {"counter": counter, "time": BEGAN + time, "thread": A, "place": 0, "flags": flags}
        for counter, time, flags in ((4, 1_000, 0), (6, 2_000, READ), (6, 9_000, 0), (8, 9_500, 0))
    ]
    mark = {"forward": -1, "name": 1, "lane": 0, "metadata": 0, "serial": 1}
    marks = [
        {**mark, "what": 0, "time": BEGAN + 9_000, "counter": 6, "thread": A},
        {**mark, "what": 1, "time": BEGAN + 9_500, "counter": 8, "thread": 0},
    ]
    tables = {
        "names": [[{"number": 1, "name": "attention", "demangled": None}]],
        "kernels": [[kernel(correlation=7, start=BEGAN + 9_300, end=BEGAN + 9_400)]],
        "marks": [marks],
        "boundaries": [boundaries],
    }
    trace = thence.open(written(tmp_path / "a", tables))
    (row,) = trace.tables.host.filter(pl.col("name").cast(pl.String) == "attention").to_dicts()
    assert (row["start"], row["duration"]) == (9_000, 500)
    assert trace.tables.places["label"].cast(pl.String).to_list() == ["attention"]


def test_boundaries_at_one_time_keep_their_order() -> None:
    """A clock of few ticks: each launch is still after its own boundary and before the next."""
    boundaries = [(1, 1000, A, 1, 0), (3, 1000, A, 2, 0), (5, 1000, A, 3, 0)]
    found = launches(boundaries, [(2, 9000, None, 1000), (4, 9000, None, 1000)])
    assert [row[3] for row in found] == [1000, 1001]


def test_copies_and_graphs_come_after_what_their_thread_launched_before() -> None:
    boundaries = [(1, 1000, A, 1, 0), (9, 3000, A, 1, 0)]
    activities = [
        (2, 5000, None, 1500),
        (3, 5100, None, 0),  # a copy: no time
        (4, 5200, 7, 1200),  # a graph: CUPTI repeats an old time
        (4, 5300, 7, 1200),
        (5, 5400, None, 1800),
    ]
    assert launches(boundaries, activities) == [
        (2, A, LAUNCH, 1500, 1500),
        (3, A, LAUNCH, 1500, 1800),
        (4, A, GRAPH, 1500, 1800),
        (5, A, LAUNCH, 1800, 1800),
    ]


def test_what_ran_early_was_launched_before() -> None:
    """The last moment is that of the next boundary, or the beginning of the work."""
    boundaries = [(1, 1000, A, 1, 0), (9, 3000, A, 1, 0)]
    assert launches(boundaries, [(2, 1400, None, 0)]) == [(2, A, LAUNCH, 1000, 1400)]


def test_two_threads_that_launch_are_never_told_apart() -> None:
    boundaries = [(1, 100, A, 1, 0), (3, 200, B, 2, 0), (5, 300, A, 3, ENDS), (7, 400, B, 4, 0)]
    activities = [(2, 900, None, 150), (4, 900, None, 250), (6, 900, None, 350)]
    found = launches(boundaries, activities)
    assert [(row[1], row[2]) for row in found] == [(A, LAUNCH), (0, UNCERTAIN["launched_together"][0]), (B, LAUNCH)]


def test_a_thread_that_waited_for_another_says_so_afterwards() -> None:
    """As in a backward pass: the engine's thread launches, and the caller only learns of it when it returns."""
    boundaries = [
        (1, 100, A, 1, 0), (3, 200, A, 2, 0), (5, 300, B, 3, 0), (8, 400, B, 0, ENDS), (10, 500, A, 4, BEGINS),
    ]  # fmt: skip
    activities = [(c, 900, None, 0) for c in (2, 6, 7, 11)]
    assert [row[1] for row in launches(boundaries, activities)] == [A, B, B, A]
    unseen = launches(boundaries, [(9, 900, None, 0), (4, 900, None, 0)])
    assert [row[2] for row in unseen] == [UNCERTAIN["launched_unseen"][0]] * 2


def test_launches_before_every_boundary_have_a_reason() -> None:
    found = launches([(5, 100, A, 1, 0)], [(3, 900, 4, 50), (6, 900, None, 150)])
    assert [(row[1], row[2]) for row in found] == [(0, UNCERTAIN["launched_before"][1]), (A, LAUNCH)]


def test_numbers_wrap_around() -> None:
    top = 1 << 32
    boundaries = [(top - 4, 100, A, 1, 0), (top - 1, 200, A, 2, 0), (3, 300, A, 3, 0)]
    activities = [
        (top - 2, 900, None, 150), (1, 910, None, 250), (2, 920, None, 260), (5, 930, None, 350),
    ]  # fmt: skip
    found = launches(boundaries, activities)
    assert [(row[0], row[3]) for row in found] == [
        (top - 2, 150), (1, 250), (2, 260), (5, 350),
    ]  # fmt: skip
    assert numbers_of(pl.Series([top - 1, 1, 0, 2]).to_numpy(), top - 2).tolist() == [
        top - 1, top + 1, top, top + 2,
    ]  # fmt: skip


def test_a_counter_that_begins_anew_is_noticed() -> None:
    boundaries = [(10, 100, A, 1, 0), (20, 200, A, 2, 0), (5, 300, A, 3, 0), (30, 400, A, 4, 0)]
    found = launches(boundaries, [(15, 900, None, 0), (25, 900, None, 0)])
    assert [row[2] for row in found] == [UNCERTAIN["number_reused"][0], LAUNCH]


def test_launches_that_were_recorded_are_left_out() -> None:
    gpu = pl.DataFrame({"correlation": [2, 3, 0], "start": [9, 9, 9], "graph": [None, None, 5]})
    table = pl.DataFrame([(1, 5, A, 1, 0)], schema=SCHEMA, orient="row")
    found = counted_launches(gpu, pl.Series([None, 7, None], dtype=pl.Int64), pl.Series([2]), boundaries_of(table))
    assert found["correlation"].to_list() == [3]


@pytest.mark.parametrize(
    ("start", "latest", "expected"),
    [
        (120, 130, 120),  # nothing happens meanwhile
        (120, 250, 200),  # a range ended: not known whether before
        (120, 320, 200),  # ... and another began
        (220, 320, 220),  # one began: still outside
        (50, 450, 50),
    ],
)
def test_a_launch_of_unknown_time_is_in_no_range_that_changed_meanwhile(start: int, latest: int, expected: int) -> None:
    ranges = pl.DataFrame({"thread": [A, A, B], "start": [100, 300, 0], "end": [200, 400, 1000]})
    row = pl.DataFrame({"thread": [A], "start": [start], "end": [start], "latest": [latest]})
    assert outside_of_ranges(row, ranges)["start"].to_list() == [expected]


# Threads that launch and cross boundaries at random.

IDLE, LAUNCHING = "idle", "launching"
ACTIONS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["note", "launch", "launch", "ends", "begins"])), max_size=80
)


def simulated(actions: list[tuple[int, str]]) -> tuple[list[Any], dict[int, tuple[int, int]]]:
    """Boundaries, and (thread, place) of each launch by its number; threads keep the promises of their flags."""
    counter = 0
    rows = []
    truth: dict[int, tuple[int, int]] = {}
    may_launch: dict[int, bool] = {}
    launched: dict[int, bool] = {}
    place: dict[int, int] = {}
    for number, (thread, what) in enumerate(actions):
        counter += 1
        if what == "launch":
            if may_launch.get(thread, False):
                truth[counter] = thread, place[thread]
                launched[thread] = True
            continue
        flags = ENDS if what == "ends" else BEGINS if what == "begins" else 0
        if flags == BEGINS and launched.get(thread, False):
            flags = 0
        rows.append((counter, 1000 + 10 * counter, thread + A, number, flags))
        may_launch[thread], launched[thread], place[thread] = flags != ENDS, False, number
    return rows, truth


def possible(rows: list[Any], number: int) -> set[int]:
    """Threads that may have made a launch, by the promises: one boundary after the other."""
    found = set()
    for thread in {row[2] for row in rows}:
        own = [row for row in rows if row[2] == thread]
        before = [row for row in own if row[0] < number]
        after = [row for row in own if row[0] > number]
        if before and before[-1][4] != ENDS and not (after and after[0][4] == BEGINS):
            found.add(thread)
    return found


@settings(max_examples=examples(150), deadline=None)
@given(ACTIONS)
def test_what_is_certain_is_right_and_what_can_be_certain_is(actions: list[tuple[int, str]]) -> None:
    rows, truth = simulated(actions)
    if not rows:
        return
    times = {row[3]: row[1] for row in rows}
    found = launches(rows, [(number, 10_000, None, 0) for number in truth])
    assert len(found) == len(truth)
    for number, thread, name, start, _ in found:
        certain = len(possible(rows, number)) == 1
        assert (name == LAUNCH) == certain
        if certain:
            own, place = truth[number]
            later = [r[1] for r in rows if r[2] == own + A and r[0] > number]
            assert thread == own + A
            assert times[place] <= start < min(later, default=1 << 40)


# Ranges of places, against the state of the thread at every moment.

KIND_OF = {1: ("module", ["m1", "m1.a", "m2"]), 2: ("python", ["l1", "l2"]), 3: ("phase", ["p1", "p2"])}
TREE = pl.DataFrame(
    [
        {"number": 10 * kind + i, "kind": kind, "parent": 11 if name == "m1.a" else 0, "name": name, "detail": "f.py",
         "line": 7}
        for kind, (_, names) in KIND_OF.items()
        for i, name in enumerate([None, *names])
    ],
    schema_overrides={"name": pl.String},
)  # fmt: skip
NUMBERS = TREE["number"].to_list()
NAME_OF = {row["number"]: (row["kind"], row["name"]) for row in TREE.to_dicts()}


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=25),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), max_size=3),
)
def test_ranges_of_places_never_cross_and_are_the_state_of_every_moment(
    places: list[int], spans: list[tuple[int, int]]
) -> None:
    crossing = [(a, b) for a in spans for b in spans if a[0] < b[0] < sum(a) < sum(b)]
    assume(not crossing)  # then what lies in both cannot but cross one of them
    rows = [(i, 10 * i, A, place, 0) for i, place in enumerate(places, 1)]
    fixed = pl.DataFrame(
        [(A, start, start + length, "range") for start, length in spans],
        schema={"thread": pl.Int64, "start": pl.Int64, "end": pl.Int64, "category": pl.String},
        orient="row",
    )
    last = 10 * len(places) + 10
    table = boundaries_of(pl.DataFrame(rows, schema=SCHEMA, orient="row"))
    found = place_ranges(table, TREE, fixed, last)
    ranges = found.select(pl.col("category"), pl.col("name").cast(pl.String), "start", "end").rows()
    every = [(start, end) for *_, start, end in ranges] + [(s, s + n) for s, n in spans]
    for one in ranges:
        for start, end in every:
            assert not (start < one[2] < end < one[3]), (one, start, end)
            assert not (one[2] < start < one[3] < end), (one, start, end)
    state: dict[int, str | None] = {}
    for i, place in enumerate(places, 1):
        kind, name = NAME_OF[place]
        state[kind] = name
        moment = 10 * i + 5
        for of_kind, (category, _) in KIND_OF.items():
            at = {n for c, n, s, e in ranges if c == category and s <= moment < e}
            expected = {state[of_kind]} if state.get(of_kind) else set()
            expected = {"m1", "m1.a"} if expected == {"m1.a"} else expected
            assert {(n or "").rpartition(": ")[2] for n in at} == expected, (moment, category)


def test_of_places_entered_and_left_together_the_outer_one_comes_first() -> None:
    """Equal ranges nest by their order: a backward pass enters all the lines and modules of a forward at once."""
    rows = [(1, 10, A, 12, 0), (2, 20, A, 10, 0)]
    table = boundaries_of(pl.DataFrame(rows, schema=SCHEMA, orient="row"))
    nothing = pl.DataFrame(schema={"thread": pl.Int64, "start": pl.Int64, "end": pl.Int64, "category": pl.String})
    found = place_ranges(table, TREE, nothing, 30).select(pl.col("name").cast(pl.String), "start", "end")
    assert found.rows() == [("m1", 10, 20), ("m1.a", 10, 20)]


def test_ranges_of_other_threads_cut_nothing() -> None:
    rows = [(1, 10, A, 11, 0), (2, 20, A, 10, 0)]
    table = boundaries_of(pl.DataFrame(rows, schema=SCHEMA, orient="row"))
    of_b = pl.DataFrame({"thread": [B], "start": [15], "end": [25], "category": ["range"]})
    found = place_ranges(table, TREE, of_b, 30).select(pl.col("name").cast(pl.String), "start", "end")
    assert found.rows() == [("m1", 10, 20)]


# Through the reader and attribution.

NAMES = [
    "f", "model", "model.layers.0", "model.layers.0.attn", "train.py", "main", "step", "forward", "decode", "my mark",
    "model call",
]  # fmt: skip
NUMBER = {name: number for number, name in enumerate(NAMES, 1)}
(NONE_OF_MODULE, MODEL, LAYER, ATTENTION, LINE_1, LINE_2, FUNCTION, FORWARD, STEP_0, STEP_1, MODEL_CALL, UNRECORDED) = (
    range(1, 13)
)


def place(number: int, kind: int, name: str | None, parent: int = 0, **more: int) -> dict[str, int]:
    return {
        "number": number, "kind": kind, "parent": parent, "name": NUMBER.get(name or "", 0),
        "detail": 0, "line": 0, **more,
    }  # fmt: skip


PLACES = [
    place(NONE_OF_MODULE, 1, None),
    place(MODEL, 1, "model"),
    place(LAYER, 1, "model.layers.0", MODEL),
    place(ATTENTION, 1, "model.layers.0.attn", LAYER),
    place(LINE_1, 2, "main", detail=NUMBER["train.py"], line=12),
    place(LINE_2, 2, "step", LINE_1, detail=NUMBER["train.py"], line=40),
    place(FUNCTION, 2, "step", LINE_1, detail=NUMBER["train.py"]),
    place(FORWARD, 3, "forward"),
    place(STEP_0, 4, "step"),
    place(STEP_1, 4, "decode", detail=NUMBER["main"]),
    place(MODEL_CALL, 4, "model call", detail=NUMBER["main"]),
    place(UNRECORDED, 4, None),
]


def recorded(folder: Path, notes: list[int | str], **tables: list[list[dict[str, Any]]]) -> Trace:
    """A process that crosses boundaries (numbers of places), opens and closes a mark, and launches ("launch")."""
    boundaries, kernels, marks = [], [], []
    for counter, note in enumerate(notes, 1):
        time = BEGAN + 100 * counter
        if note == "launch":
            at = {"queued": time, "start": time + 5000, "end": time + 5001 + counter}
            kernels.append(kernel(correlation=counter, name=1, **at))
            continue
        number = note if isinstance(note, int) else 0
        boundaries.append({"counter": counter, "time": time, "thread": A, "place": number, "flags": 0})  # fmt: skip
        if isinstance(note, str):
            what = {"open": 0, "close": 1}[note]
            # The clock of marks is off; the counter decides.
            marks.append({
                "what": what, "serial": 1, "forward": -1, "time": time + 70, "thread": A if note == "open" else 0,
                "name": NUMBER["my mark"] * (note == "open"), "lane": 0, "metadata": 0, "counter": counter,
            })  # fmt: skip
    names = [{"number": n, "name": name, "demangled": None} for name, n in NUMBER.items()]
    about = {
        "names": [names], "kernels": [kernels], "boundaries": [boundaries], "places": [PLACES], "marks": [marks],
    }  # fmt: skip
    written(folder, {**about, **tables}, stopped_ns=BEGAN + 1_000_000)
    return thence.open(str(folder))


def places_of(trace: Trace, kind: str) -> list[str | None]:
    """Place of each kernel in order of launch."""
    return trace.tables.places[kind].cast(pl.String).to_list()


def test_modules_and_lines_of_launches(tmp_path: Path) -> None:
    notes = [
        "launch", STEP_0, LINE_1, "launch", MODEL, LAYER, LINE_2, "launch", ATTENTION, "launch", LAYER, "launch",
        MODEL, NONE_OF_MODULE, LINE_1, "launch", FUNCTION, "launch",
    ]  # fmt: skip
    trace = recorded(tmp_path / "a", notes)
    attention = "model.layers.0.attn"
    assert places_of(trace, "module") == [
        None, None, "model.layers.0", attention, "model.layers.0", None, None,
    ]  # fmt: skip
    line, inner = "train.py:12 main", "train.py:40 step"
    assert places_of(trace, "source") == [None, line, inner, inner, inner, line, "train.py step"]
    assert places_of(trace, "source_rule")[0] == "launched_before"
    assert places_of(trace, "source_rule")[5:] == ["launch_ranges", "function_frame"]
    assert places_of(trace, "position")[5:] == ["line", "function"]
    assert places_of(trace, "stack")[3] == "train.py(12): main/train.py(40): step"
    assert places_of(trace, "step") == [None, *["step"] * 6]


def test_places_and_marks_that_cross(tmp_path: Path) -> None:
    """A line goes on behind the end of a mark and of a module; neither swallows the other's launches."""
    notes = [
        LINE_1, "open", "launch", LINE_2, "launch", MODEL, "launch", "close", "launch", NONE_OF_MODULE, "launch",
        LINE_1, "launch",
    ]  # fmt: skip
    trace = recorded(tmp_path / "a", notes)
    outer, inner = "train.py:12 main", "train.py:40 step"
    assert places_of(trace, "source") == [outer, inner, inner, inner, inner, outer]
    assert places_of(trace, "label") == ["my mark", "my mark", "my mark", None, None, None]
    assert places_of(trace, "module") == [None, None, "model", "model", None, None]


def test_phases_steps_and_serving_are_as_noted(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "a", [STEP_0, FORWARD, "launch", STEP_1, "launch", STEP_1, "launch"])
    assert places_of(trace, "phase") == ["forward"] * 3
    assert places_of(trace, "phase_rule") == ["phase_noted"] * 3
    assert places_of(trace, "step") == ["step", "decode (main)", "decode (main)"]
    assert places_of(trace, "serving") == [None, "decode", "decode"]
    steps = trace.tables.host.filter(pl.col("category") == "step")
    assert steps.height == 3


@pytest.mark.parametrize(
    ("noted", "steps"),
    [
        ([STEP_0, MODEL_CALL, MODEL_CALL, MODEL_CALL], ["step", "step (main)", "step (main)", "step (main)"]),
        ([STEP_0, MODEL_CALL, MODEL_CALL, STEP_0, MODEL_CALL, STEP_0], ["step"] * 3),
        ([STEP_0, MODEL_CALL, UNRECORDED, UNRECORDED, MODEL_CALL, UNRECORDED], ["step", "step (main)", "step (main)"]),
    ],
    ids=["inference", "training that begins with a rollout", "inference with steps that are not recorded"],
)
def test_calls_of_a_model_begin_steps_unless_an_optimizer_does(
    tmp_path: Path, noted: list[int], steps: list[str]
) -> None:
    """A rollout's calls of the model, before an optimizer has stepped, are parts of the first training step."""
    launched = [item for number in noted for item in (number, "launch")]
    trace = recorded(tmp_path / "a", launched)
    found = trace.tables.host.filter(pl.col("category") == "step").sort("start")["name"]
    assert found.cast(pl.String).to_list() == steps


def test_places_without_numbers_go_by_time(tmp_path: Path) -> None:
    """Where every launch is recorded the counter is not read."""
    boundaries = [
        {"counter": 0, "time": BEGAN + time, "thread": A, "place": number, "flags": 0}
        for time, number in ((100, MODEL), (200, LAYER), (300, NONE_OF_MODULE))
    ]
    calls = [
        {"start": BEGAN + time, "end": BEGAN + time + 5, "thread": thread, "correlation": time, "function": 1, "api": 5}
        for time, thread in ((150, A), (250, A), (260, B), (350, A))
    ]
    kernels = [kernel(correlation=call["correlation"], start=call["start"] + 1000, end=call["start"] + 1001, name=1)
               for call in calls]  # fmt: skip
    tables = {"boundaries": [boundaries], "calls": [calls], "kernels": [kernels]}
    trace = recorded(tmp_path / "a", [], **tables)
    assert places_of(trace, "module") == ["model", "model.layers.0", None, None]
    assert places_of(trace, "module_rule")[2] == "outside_modules"


def test_steps_of_the_program_itself_win(tmp_path: Path) -> None:
    row = {"what": 3, "forward": 1, "thread": A, "lane": 0, "metadata": 0, "counter": 0}
    steps = [{**row, "serial": n, "time": BEGAN + 150 + n * 200, "name": NUMBER["model"]} for n in (0, 1)]
    trace = recorded(tmp_path / "a", [STEP_0, "launch", STEP_1, "launch"], marks=[steps])
    assert places_of(trace, "step") == ["model", "model"]


def test_modules_nest_in_flames(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "a", [MODEL, LAYER, ATTENTION, "launch", MODEL, "launch"])
    lines = [line.rpartition(" ")[0] for line in folded_lines(trace.flame("module"))]
    assert [line for line in lines if line.endswith("model;model.layers.0;model.layers.0.attn;f")]
    assert [line for line in lines if line.endswith("model;f")]


def test_a_check_does_not_ask_for_launches_that_were_not_recorded(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "a", [MODEL, "launch", "launch", MODEL, "launch"])
    assert not trace.check().findings
    said = [entry.text for entry in trace.check().not_checked]
    assert any("launches are known by their CUPTI numbers alone" in text for text in said)


@pytest.mark.parametrize("column", ["kind", "parent", "number", "name", "line"])
def test_places_that_cannot_be_are_passed_over(tmp_path: Path, column: str) -> None:
    for value in (-1, 1 << 40):
        wrong = [{**row, column: value} for row in PLACES]
        folder = tmp_path / f"{column}{value}"
        trace = recorded(folder, [MODEL, LAYER, LINE_2, "launch", STEP_0], places=[wrong])
        assert trace.tables.gpu.height == 1


def test_hostile_boundaries_are_read(tmp_path: Path) -> None:
    rows = [
        {"counter": c, "time": t, "thread": th, "place": p, "flags": f}
        for c, t, th, p, f in [
            (-5, -5, -5, -5, -5), (1 << 62, 1 << 40, 1 << 40, 1 << 50, 255), (7, 0, 0, MODEL, 3), (7, 0, 0, LAYER, 0),
        ]
    ]  # fmt: skip
    trace = recorded(tmp_path / "a", [MODEL, "launch", LAYER, "launch"], boundaries=[rows])
    assert trace.tables.gpu.height == 2
