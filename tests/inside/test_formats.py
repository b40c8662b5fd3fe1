"""Every layout of in-kernel events: what the kernel did comes out, in true nanoseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import thence
from inside_data import (
    COMPUTE,
    ENTER,
    EXIT,
    INSTANT,
    LOAD,
    LOW,
    NAMES,
    RECORDED,
    START,
    STORE,
    Trace,
    description,
    flashinfer_buffer,
    mosaic_buffer,
    proton_buffer,
    ranges,
    rows,
    thence_buffer,
)
from thence.inside.clocks import unwrapped
from thence.inside.decoding import decode
from thence.inside.description import Description

TWO = ranges((LOAD, 0, 400), (COMPUTE, 500, 2500))


def test_cycles_become_ns_by_each_traces_own_two_samples() -> None:
    slow = Trace(TWO, ns=10_000, cycles=10_000, sm=3)
    fast = Trace(TWO, ns=10_000, cycles=20_000, sm=5, start=START + 64)
    decoded = decode(thence_buffer([slow, fast], 8), description(2, 8, overhead_cycles=0))
    assert rows(decoded) == [
        (0, "load", START, 400), (0, "compute", START + 500, 2000),
        (1, "load", START + 64, 200), (1, "compute", START + 314, 1000),
    ]  # fmt: skip
    assert rows(decoded, "sm", "block", "index", "depth", "kind", "closed")[2] == (
        5, 1, 0, 0, "range", True,
    )  # fmt: skip
    assert decoded.traces["clock_ghz"].to_list() == [1.0, 2.0]
    assert decoded.traces["clock_source"].to_list() == ["measured"] * 2
    assert decoded.traces["end_ns"].to_list() == [START + 10_000, START + 10_064]
    assert decoded.traces["state"].to_list() == ["complete"] * 2
    assert (decoded.notes, decoded.warnings) == ((), ())


def test_events_are_as_recorded() -> None:
    events = [(ENTER, LOAD, 0), (INSTANT, STORE, 100), (EXIT, LOAD, 200)]
    decoded = decode(thence_buffer([Trace(events, ns=1000, cycles=2000)], 4), description(1, 4))
    assert decoded.events.rows() == [
        (0, "load", "enter", START, 0),
        (0, "store", "instant", START + 50, 100),
        (0, "load", "exit", START + 100, 200),
    ]
    assert rows(decoded, "name", "kind", "start_ns", "duration_ns", "depth") == [
        ("load", "range", START, 100, 0),
        ("store", "instant", START + 50, 0, 1),
    ]


def test_events_timed_by_the_global_timer_need_no_rate() -> None:
    trace = Trace(TWO, in_ns=True, start=(7 << 32) - 600, ns=5000, cycles=7000)
    decoded = decode(thence_buffer([trace], 8), description(1, 8, overhead_cycles=7))
    assert rows(decoded) == [
        (0, "load", (7 << 32) - 600, 400), (0, "compute", (7 << 32) - 100, 2000),
    ]  # fmt: skip
    assert decoded.traces["clock_source"].to_list() == ["timer"]
    # Overhead is in cycles of the SM clock, 1.4 GHz here: 5 ns for the one event between.
    assert decoded.ranges["net_ns"].to_list() == [395.0, 1995.0]


def test_the_low_word_of_the_clock_may_wrap_many_times() -> None:
    turn = 1 << 32
    steps = [0, turn - 1, turn + 5, 2 * turn + 4, 3 * turn, 3 * turn + 10]
    events = [(i % 2, i // 2, at) for i, at in enumerate(steps)]
    total = 4 * turn
    trace = Trace(events, clock=turn - 7, ns=2 * total, cycles=total)
    decoded = decode(thence_buffer([trace], 8), description(1, 8, overhead_cycles=0))
    assert [d for *_, d in rows(decoded)] == [2 * (turn - 1), 2 * (turn - 1), 20]
    assert [s - START for _, _, s, _ in rows(decoded)] == [0, 2 * (turn + 5), 6 * turn]


def test_overhead_leaves_times_alone_and_shortens_net_times() -> None:
    events = [
        (ENTER, LOAD, 0), (ENTER, COMPUTE, 100), (EXIT, COMPUTE, 300), (EXIT, LOAD, 600),
        (ENTER, STORE, 700), (EXIT, STORE, 720),
    ]  # fmt: skip
    trace = Trace(events, ns=1000, cycles=1000)
    decoded = decode(thence_buffer([trace], 8), description(1, 8, overhead_cycles=50))
    assert rows(decoded, "name", "duration_ns", "net_ns") == [
        ("load", 600, 450.0),  # three events were recorded between its two clocks
        ("compute", 200, 150.0),
        ("store", 20, 0.0),  # never negative
    ]
    assert [s - START for _, _, s, _ in rows(decoded)] == [0, 100, 700]
    assert "50 cycles" in decoded.notes[0]
    estimated = decode(thence_buffer([trace], 8), description(1, 8))
    assert estimated.overhead_cycles == 20  # between the events of store
    distant = Trace(ranges((LOAD, 0, 5000)))
    none = decode(thence_buffer([distant], 8), description(1, 8))
    assert none.overhead_cycles == 0
    assert none.ranges["net_ns"].to_list() == pytest.approx([5000 / 1.97])
    assert "is unknown" in none.notes[0]


def test_a_trace_shorter_than_the_timers_steps_takes_the_others_rate() -> None:
    long = [Trace(TWO, ns=10_000, cycles=19_000) for _ in range(3)]
    short = Trace(ranges((LOAD, 0, 95)), ns=64, cycles=95)  # 50 ns at 1.9 GHz, 64 by the timer
    decoded = decode(thence_buffer([*long, short], 8), description(4, 8))
    assert decoded.traces["clock_source"].to_list() == [*["measured"] * 3, "neighbours"]
    assert rows(decoded)[-1] == (3, "load", START, 50)
    slowed = Trace(ranges((LOAD, 0, 500)), ns=500, cycles=500)  # no step explains that
    decoded = decode(thence_buffer([*long, slowed], 8), description(4, 8))
    assert decoded.traces["clock_source"].to_list() == ["measured"] * 4
    assert rows(decoded)[-1] == (3, "load", START, 500)


def test_short_traces_say_how_certain_their_rates_are() -> None:
    traces = [Trace(TWO, ns=ns, cycles=2 * ns) for ns in (1248, 1280, 1312)]
    decoded = decode(thence_buffer(traces, 8), description(3, 8, overhead_cycles=0))
    (note,) = decoded.notes
    assert "steps of 32 ns" in note
    assert "up to 2.5 %" in note  # 32 of 1280


def recorded_mosaic() -> tuple[np.ndarray, dict]:
    words = np.load(RECORDED / "mosaic.npy").reshape(64, 64)
    return words, json.loads((RECORDED / "mosaic.json").read_text())


def test_mosaic_recording_in_true_nanoseconds() -> None:
    words, _ = recorded_mosaic()
    # By hand: events 4 and 5 of each trace are enter and exit of compute (id 2).
    assert (words[:, 3 + 2 * 4] == 2).all()
    assert (words[:, 3 + 2 * 5] == 1 << 31 | 2).all()
    cycles = words[:, 4 + 2 * 5].astype(np.int64) - words[:, 4 + 2 * 4].astype(np.int64)
    profile = thence.inside.open(RECORDED / "mosaic.npy", clock_ghz=1.6)
    compute = profile.ranges.filter(pl.col("name").cast(pl.String) == "compute")
    exact = cycles / 1.6
    assert compute["duration_ns"].to_numpy() == pytest.approx(exact, abs=1)
    assert compute["net_ns"].to_numpy() == pytest.approx((cycles - 11) / 1.6)
    assert compute["sm"].to_list() == words[:, 1].tolist()
    first_clock = words[:, 4].astype(np.int64)
    entered = words[:, 0] + (words[:, 4 + 2 * 4] - first_clock) / 1.6
    assert compute["start_ns"].to_numpy() == pytest.approx(entered, abs=0.51)
    assert "as given" in profile.notes[0]


def test_what_jax_writes_as_ns_are_cycles() -> None:
    shown = json.loads(gzip.decompress((RECORDED / "mosaic.jax.json.gz").read_bytes()))
    times = {}
    for event in shown["traceEvents"]:
        key = event["tid"] - 1, event["name"]  # tid: 1 + trace
        times.setdefault(key, []).append(event["ts"] * 1000)
    ours = thence.inside.open(RECORDED / "mosaic.npy").ranges
    assert ours.height == len(times)
    for trace, name, net in ours.select("trace", "name", "net_cycles").rows():
        begin, end = times[trace, name]
        # Its "ns" are cycles less 11 for each event.
        assert end - begin == pytest.approx(net, abs=0.6)


def test_times_of_an_unknown_rate_stay_cycles_and_say_so() -> None:
    profile = thence.inside.open(RECORDED / "mosaic.npy")
    words, _ = recorded_mosaic()
    assert profile.traces["clock_source"].unique().to_list() == ["unknown"]
    assert profile.traces["clock_ghz"].null_count() == profile.traces.height
    assert not any(
        "_ns" in name for frame in (profile.traces, profile.ranges, profile.events) for name in frame.columns
    )
    cycles = (words[:, 4 + 2 * 5].astype(np.int64) - words[:, 4 + 2 * 4]) % (1 << 32)
    compute = profile.ranges.filter(pl.col("name").cast(pl.String) == "compute")
    assert compute["duration_cycles"].to_list() == cycles.tolist()
    assert "times are in cycles of the SM clock, not in ns" in profile.notes[0]
    summary = profile.summary()
    assert summary.unit == "cycles"
    assert (summary.span_ns, summary.trace_ns, summary.tail_ns, summary.waves) == (None,) * 4
    row = summary.rows.row(by_predicate=pl.col("name") == "compute", named=True)
    assert row["total_cycles"] == sum(cycles) - 11 * len(cycles)
    assert "cycles" in profile._repr_html_()
    given = thence.inside.open(RECORDED / "mosaic.npy", clock_ghz=1.0)
    assert "total_ns" in given.summary().rows.columns


def test_a_buffer_that_mixes_ns_and_cycles_of_an_unknown_rate_is_refused() -> None:
    in_ns = Trace(TWO, in_ns=True, ns=5000, cycles=-1)
    in_cycles = Trace(TWO, ns=-1, cycles=-1)
    with pytest.raises(thence.UsageError, match="--clock-ghz"):
        decode(thence_buffer([in_ns, in_cycles], 8), description(2, 8))


@pytest.mark.parametrize("counts_header", [False, True])
def test_both_generations_of_mosaic(counts_header: bool) -> None:
    traces = [Trace(TWO, sm=block, clock=LOW - 450, start=START + 32 * block) for block in range(4)]
    flavour = "mosaic-2024" if counts_header else "mosaic"
    about = description(4, 4, flavour=flavour, words_per_trace=12, overhead_cycles=0)
    decoded = decode(mosaic_buffer(traces, 12, counts_header=counts_header), about, clock_ghz=2.0)
    low = START & LOW
    assert rows(decoded)[:2] == [(0, "load", low, 200), (0, "compute", low + 250, 1000)]
    assert rows(decoded)[-1] == (3, "compute", low + 96 + 250, 1000)
    assert decoded.timer_bits == 32
    other = "mosaic" if counts_header else "mosaic-2024"
    wrong = description(4, 4, flavour=other, words_per_trace=12)
    with pytest.raises(thence.DamagedInput, match=f"that is the layout '{flavour}', not '{other}'"):
        decode(mosaic_buffer(traces, 12, counts_header=counts_header), wrong)


def test_the_old_layout_with_an_even_number_of_entries_as_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "inside.md").read_text()
    (example,) = [line for line in text.splitlines() if '"flavour": "mosaic-2024"' in line]
    spec = json.loads(example)
    about = Description.from_json(spec)
    assert (about.flavour, about.capacity, about.trace_words) == ("mosaic-2024", 62, 128)
    count = about.traces
    traces = [Trace(ranges((LOAD, 0, 50 + n))) for n in range(count)]
    decoded = decode(mosaic_buffer(traces, 128, counts_header=True), about, clock_ghz=1.0)
    assert decoded.ranges.height == count == 132 * 2
    assert set(decoded.ranges["name"].cast(str)) == {"load"}


def test_mosaic_numbers_blocks_with_x_slowest() -> None:
    grid = (2, 3, 4)
    traces = []
    for x in range(2):
        for y in range(3):
            for z in range(4):
                number = x + 2 * (y + 3 * z)  # as CUDA counts
                traces.append(Trace(ranges((LOAD, 0, 100 + number))))
    about = Description(NAMES, grid, (128, 1, 1), 1, 2, flavour="mosaic", words_per_trace=7, overhead_cycles=0)
    decoded = decode(mosaic_buffer(traces, 7), about, clock_ghz=1.0)
    assert decoded.ranges.height == 24
    for block, duration in rows(decoded, "block", "duration_ns"):
        assert duration == 100 + block


@pytest.mark.parametrize(("scope", "per_block", "word"), [("warp", 4, "warp"), ("warpgroup", 1, "warpgroup")])
def test_mosaic_scopes(scope: str, per_block: int, word: str) -> None:
    traces = [Trace(ranges((LOAD, 0, 50 + n))) for n in range(2 * per_block)]
    spec = {"names": {"load": 0}, "entries": 8, "grid": [2], "block": [128], "scope": scope}
    about = Description.from_json(spec)
    assert (about.traces_per_block, about.capacity) == (per_block, 2)
    decoded = decode(mosaic_buffer(traces, 8), about, clock_ghz=1.0)
    assert decoded.scope == word
    assert rows(decoded, "block", "index", "duration_ns") == [
        (n // per_block, n % per_block, 50 + n) for n in range(2 * per_block)
    ]


def test_the_rate_is_estimated_from_successive_blocks_on_one_sm() -> None:
    gap_ns, ghz = 200_000, 1.5
    traces = [
        Trace(ranges((LOAD, 0, 150_000)), sm=sm, start=START + wave * gap_ns, clock=int(LOW - 9 + wave * gap_ns * ghz))
        for wave in range(3)
        for sm in range(4)
    ]  # fmt: skip
    about = description(12, 2, flavour="mosaic", words_per_trace=7)
    decoded = decode(mosaic_buffer(traces, 7), about)
    assert set(decoded.traces["clock_source"]) == {"estimated"}
    assert {d for *_, d in rows(decoded)} == {100_000}
    assert "1.500 GHz" in decoded.notes[0]
    given = decode(mosaic_buffer(traces, 7), about, clock_ghz=1.0)
    assert {d for *_, d in rows(given)} == {150_000}


def test_the_global_timers_low_word_may_wrap_between_blocks() -> None:
    turn = 1 << 32
    starts = [5 * turn - 100, 5 * turn - 20, 5 * turn + 40, 5 * turn + 90]
    traces = [Trace(ranges((LOAD, 0, 10)), start=start) for start in starts]
    about = description(4, 2, flavour="mosaic", words_per_trace=7)
    decoded = decode(mosaic_buffer(traces, 7), about, clock_ghz=1.0)
    assert decoded.traces["start_ns"].to_list() == [turn - 100, turn - 20, turn + 40, turn + 90]
    assert unwrapped(np.array([40, turn - 100])).tolist() == [turn + 40, turn - 100]
    half = turn // 2  # one that is far off does not tear the others apart
    apart = unwrapped(np.array([0, half - 1, half + 1, half + 3])).tolist()
    assert [time - apart[1] for time in apart[1:]] == [0, 2, 4]
    assert unwrapped(np.array([], np.int64)).tolist() == []


@pytest.mark.parametrize("flavour", ["flashinfer", "flashinfer-old", "mirage"])
def test_flashinfer_layouts(flavour: str) -> None:
    # Two groups a block: FlashInfer's own decoder puts them on wrong tracks.
    traces = [
        Trace(ranges((LOAD, 0, 64 + 32 * n), (COMPUTE, 320, 960)), sm=7 + n // 2, start=START + 32 * n)
        for n in range(6)
    ]  # fmt: skip
    about = description(3, 0, flavour=flavour)
    decoded = decode(flashinfer_buffer(traces, 2, 8, flavour), about)
    low = START & LOW
    assert rows(decoded, "block", "index", "name", "start_ns", "duration_ns") == [
        row
        for n in range(6)
        for row in (
            (n // 2, n % 2, "load", low + 32 * n, 64 + 32 * n),
            (n // 2, n % 2, "compute", low + 32 * n + 320, 640),
        )
    ]
    sms = [7, 7, 8, 8, 9, 9] if flavour == "flashinfer" else [None] * 6
    assert decoded.traces["sm"].to_list() == sms
    assert decoded.warnings == ()
    as_int64 = flashinfer_buffer(traces, 2, 8, flavour).view(np.int64)
    assert decode(as_int64, about).ranges.equals(decoded.ranges)


def test_flashinfer_times_wrap_within_a_trace() -> None:
    trace = Trace(ranges((LOAD, 0, 500), (STORE, 600, 900)), start=(9 << 32) - 200)
    decoded = decode(flashinfer_buffer([trace], 1, 8), description(1, 0, flavour="flashinfer"))
    assert [d for *_, d in rows(decoded)] == [500, 300]
    assert [s for *_, s, _ in rows(decoded)] == [LOW + 1 - 200, LOW + 1 + 400]


def test_more_blocks_than_flashinfers_tags_have_bits_for() -> None:
    traces = [Trace(ranges((LOAD, 0, 32 + n)), sm=1) for n in range(4200)]
    about = description(4200, 0, flavour="flashinfer")
    decoded = decode(flashinfer_buffer(traces, 1, 2), about)
    assert [d for *_, d in rows(decoded)] == [32 + n for n in range(4200)]
    assert decoded.traces["sm"].null_count() == 4200
    assert any("SMs are unknown" in text for text in decoded.warnings)


def proton(*, ring: int = 8, **more: bool | int) -> thence.inside.Decoded:
    blocks = [
        [Trace(TWO, sm=b, clock=(1 << 34) + 100 * w, start=START + 32 * b, ns=4000) for w in range(2)] for b in range(3)
    ]
    return decode(proton_buffer(blocks, ring, **more), description(3, 0, flavour="proton"), clock_ghz=2.0)


def test_proton() -> None:
    decoded = proton()
    assert rows(decoded, "block", "index", "sm", "name", "start_ns", "duration_ns")[:5] == [
        (0, 0, 0, "load", START, 200), (0, 0, 0, "compute", START + 250, 1000),
        # The second warp's first event comes 100 cycles after the first one's.
        (0, 1, 0, "load", START + 50, 200), (0, 1, 0, "compute", START + 300, 1000),
        (1, 0, 1, "load", START + 32, 200),
    ]  # fmt: skip
    assert decoded.traces["end_ns"].to_list()[0] == START + 4000
    assert decoded.overhead_cycles == 7
    assert decoded.scope == "warp"


def test_protons_ring_begins_where_it_was_overwritten_last() -> None:
    many = ranges(*((n % 3, 100 * n, 100 * n + 40) for n in range(10)))  # 20 events in room for 8
    blocks = [[Trace(many, clock=1 << 40)]]
    about = description(1, 0, flavour="proton", overhead_cycles=0)
    decoded = decode(proton_buffer(blocks, 8), about, clock_ghz=1.0)
    assert rows(decoded, "name", "duration_ns") == [(NAMES[n % 3], 40) for n in range(6, 10)]
    assert decoded.traces["dropped"].to_list() == [12]
    assert "12 events lost at the start of" in " ".join(decoded.warnings)


def test_protons_clocks_wrap() -> None:
    for bits in (32, 43):
        blocks = [[Trace(TWO, clock=(1 << bits) - 450)]]
        about = description(1, 0, flavour="proton")
        decoded = decode(proton_buffer(blocks, 8, clock_bits=bits), about, clock_ghz=1.0)
        assert [d for *_, d in rows(decoded)] == [400, 2000]


def test_protons_older_blocks_have_no_times() -> None:
    decoded = proton(times=False)
    assert decoded.timer_bits == 0
    assert [s for _, _, s, _ in rows(decoded)][:3] == [0, 250, 50]
    assert any("does not record when blocks began" in note for note in decoded.notes)


def test_ids_without_a_name_are_shown_as_numbers() -> None:
    trace = Trace(ranges((LOAD, 0, 10), (12, 20, 50), (2**27, 60, 100)))
    decoded = decode(thence_buffer([trace], 8), description(1, 8))
    assert decoded.ranges["name"].to_list() == ["load", "range 12", f"range {2**27}"]
    assert any("does not name" in text for text in decoded.warnings)


def test_equal_names_of_two_ids_are_one() -> None:
    about = Description(("a", "a", ""), (1, 1, 1), (32, 1, 1), 1, 8)
    decoded = decode(thence_buffer([Trace(ranges((0, 0, 1), (1, 2, 3), (2, 4, 5)))], 8), about)
    assert decoded.ranges["name"].to_list() == ["a", "a", "range 2"]


@pytest.mark.parametrize(
    "mixed",
    [
        {"format": "thence.inside", "version": 1, "flavour": "mosaic", "names": {"load": 0}},
        {"names": ["load"], "entries": 512, "grid": [1, 1, 1], "block": [128, 1, 1]},
    ],
)
def test_a_description_that_mixes_both_forms_is_told_so(mixed: dict[str, object]) -> None:
    with pytest.raises(thence.DamagedInput, match=r"it mixes two forms: either .*ProfilerSpec"):
        Description.from_json(mixed)
    with pytest.raises(thence.DamagedInput) as other:
        Description.from_json({"format": "thence.inside", "version": "1"})
    assert "mixes" not in str(other.value)
