"""Damaged, overflowing and unfinished buffers: a clear error, or what is sound and a warning."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest

import thence
from inside_data import (
    COMPUTE,
    ENTER,
    EXIT,
    INSTANT,
    LOAD,
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
from thence.inside import Description, Limits, decode, save
from thence.inside.files import found

if TYPE_CHECKING:
    from pathlib import Path

ONE = ranges((LOAD, 0, 100))
PLAIN = {"ns": 1000, "cycles": 1000}


def decoded_events(*events: tuple[int, int, int], capacity: int = 8) -> thence.inside.Decoded:
    buffer = thence_buffer([Trace([*events], ns=2000, cycles=2000)], capacity)
    return decode(buffer, description(1, capacity, overhead_cycles=0))


def test_a_range_that_nothing_closes_ends_with_its_trace_and_is_marked() -> None:
    decoded = decoded_events((ENTER, LOAD, 0), (ENTER, COMPUTE, 100), (EXIT, COMPUTE, 300))
    assert rows(decoded, "name", "duration_ns", "depth", "closed") == [
        ("load", 2000, 0, False), ("compute", 200, 1, True),
    ]  # fmt: skip
    assert "1 range entered and never left" in decoded.warnings[0]


def test_an_exit_that_nothing_entered_is_left_out_and_counted() -> None:
    decoded = decoded_events(
        (EXIT, STORE, 10), (ENTER, LOAD, 20), (EXIT, LOAD, 50), (EXIT, STORE, 60), (ENTER, LOAD, 70),
        (EXIT, LOAD, 90),
    )  # fmt: skip
    assert [(n, d) for _, n, _, d in rows(decoded)] == [("load", 30), ("load", 20)]
    assert "2 exits of ranges that were not entered" in decoded.warnings[0]
    assert "'store'" in decoded.warnings[0]


def test_an_exit_left_out_does_not_shift_the_others() -> None:
    decoded = decoded_events(
        (ENTER, LOAD, 0), (ENTER, COMPUTE, 10), (EXIT, LOAD, 100), (ENTER, LOAD, 200), (EXIT, LOAD, 260)
    )
    assert rows(decoded, "name", "duration_ns", "closed") == [
        ("load", 100, True), ("compute", 1990, False), ("load", 60, True),
    ]  # fmt: skip


def test_ranges_that_cross_keep_their_own_ends() -> None:
    decoded = decoded_events((ENTER, LOAD, 0), (ENTER, COMPUTE, 50), (EXIT, LOAD, 80), (EXIT, COMPUTE, 200))
    assert [(n, d) for _, n, _, d in rows(decoded)] == [("load", 80), ("compute", 150)]
    assert decoded.warnings == ()


def test_one_odd_trace_leaves_the_others_as_they_are() -> None:
    good = [Trace(ONE, **PLAIN) for _ in range(3)]
    odd = Trace([(ENTER, LOAD, 0), (EXIT, STORE, 40), (EXIT, LOAD, 100)], **PLAIN)
    decoded = decode(thence_buffer([good[0], odd, *good[1:]], 4), description(4, 4))
    assert [(t, n, d) for t, n, _, d in rows(decoded)] == [(t, "load", 100) for t in range(4)]
    assert "1 exit" in decoded.warnings[0]


def test_deep_nesting() -> None:
    depth = 5000
    events = [(ENTER, i % 3, i) for i in range(depth)]
    events += [(EXIT, (depth - 1 - i) % 3, depth + i) for i in range(depth)]
    buffer = thence_buffer([Trace(events, ns=20_000, cycles=20_000)], 2 * depth)
    decoded = decode(buffer, description(1, 2 * depth, overhead_cycles=0))
    assert rows(decoded, "depth", "duration_ns") == [(i, 2 * (depth - i) - 1) for i in range(depth)]


def test_events_that_found_no_room() -> None:
    full = [(ENTER, LOAD, 0), (EXIT, LOAD, 10), (ENTER, COMPUTE, 20), (ENTER, STORE, 30)]
    decoded = decode(thence_buffer([Trace(full, dropped=5, **PLAIN), Trace(ONE, **PLAIN)], 4), description(2, 4))
    assert decoded.traces["state"].to_list() == ["overflow", "complete"]
    assert decoded.traces["dropped"].to_list() == [5, 0]
    assert decoded.ranges["closed"].to_list() == [True, False, False, True]
    assert any("no room for 5 further events" in text for text in decoded.warnings)


def test_a_count_beyond_the_capacity_is_not_believed() -> None:
    trace = Trace(ONE, patch={5: 1_000_000}, **PLAIN)
    decoded = decode(thence_buffer([trace], 2), description(1, 2))
    assert rows(decoded)[0][3] == 100
    assert decoded.traces["dropped"].to_list() == [999_998]
    assert any("with more events than fit" in text for text in decoded.warnings)


def test_a_trace_that_never_finished_ends_at_its_last_event() -> None:
    traces = [Trace(ONE, ns=5000, cycles=10_000) for _ in range(2)]
    stopped = Trace([*ONE, (ENTER, COMPUTE, 300)], finished=False)
    decoded = decode(thence_buffer([*traces, stopped], 4), description(3, 4, overhead_cycles=0))
    last = decoded.traces.row(2, named=True)
    assert (last["state"], last["clock_source"], last["clock_ghz"]) == ("unfinished", "neighbours", 2.0)
    assert last["end_ns"] == START + 150
    assert rows(decoded)[-2:] == [(2, "load", START, 50), (2, "compute", START + 150, 0)]


def test_traces_that_were_never_written_are_counted() -> None:
    decoded = decode(thence_buffer([None, Trace(ONE, **PLAIN), None], 4), description(3, 4))
    assert decoded.traces["trace"].to_list() == [1]
    assert "no events in 2 traces of the grid" in decoded.warnings
    nothing = decode(thence_buffer([None] * 3, 4), description(3, 4))
    assert nothing.ranges.is_empty()
    assert nothing.events.is_empty()
    with pytest.raises(thence.MissingData, match="all traces of the buffer are empty"):
        thence.inside.Inside(nothing, "x").summary()


def test_a_clock_that_runs_backwards_is_marked() -> None:
    events = [(ENTER, LOAD, 500), (EXIT, LOAD, 400)]
    decoded = decode(thence_buffer([Trace(events, **PLAIN)], 4), description(1, 4))
    assert decoded.traces["state"].to_list() == ["damaged"]
    assert decoded.ranges["duration_ns"].to_list() == [0]
    late = Trace(ranges((LOAD, 0, 5000)), **PLAIN)
    assert decode(thence_buffer([late], 4), description(1, 4)).traces["state"].to_list() == ["damaged"]


@pytest.mark.parametrize(
    "patch",
    [
        {10: 5, 11: 0},  # ended before it began, by the timer
        {14: 0, 15: 5_000_000},  # more cycles than a clock can make
        {11: 0xFFFF_FFFF},
    ],
)
def test_headers_with_impossible_times_are_marked(patch: dict[int, int]) -> None:
    traces = [Trace(ONE, **PLAIN), Trace(ONE, patch=patch, **PLAIN)]
    decoded = decode(thence_buffer(traces, 4), description(2, 4))
    assert decoded.traces["state"].to_list() == ["complete", "damaged"]
    assert [d for *_, d in rows(decoded)] == [100, 100]  # at the rate of the other


@pytest.mark.parametrize("patch", [{0: 7}, {3: 9}, {4: 1}, {7: 3}, {1: 0x702}, {9: 0x7FFF_FFFF}])
def test_a_damaged_header_costs_its_trace_only(patch: dict[int, int]) -> None:
    traces = [Trace(ONE, **PLAIN), Trace(ONE, patch=patch, **PLAIN), Trace(ONE, **PLAIN)]
    decoded = decode(thence_buffer(traces, 4), description(3, 4))
    assert decoded.traces["trace"].to_list() == [0, 2]
    assert "1 unreadable trace left out" in decoded.warnings[0]


def test_events_of_no_known_kind_are_left_out() -> None:
    decoded = decoded_events((ENTER, LOAD, 0), (3, LOAD, 10), (EXIT, LOAD, 100))
    assert [d for *_, d in rows(decoded)] == [100]
    assert decoded.events.height == 2
    assert any("of unknown kind" in text for text in decoded.warnings)


@pytest.mark.parametrize("capacity", [3, 5, 4000])
def test_a_description_of_another_buffer_is_noticed(capacity: int) -> None:
    buffer = thence_buffer([Trace(ONE, **PLAIN) for _ in range(4)], 4)
    with pytest.raises(thence.DamagedInput, match="belongs"):
        decode(buffer, description(4 if capacity != 5 else 3, capacity))


def test_a_cut_buffer_gives_its_whole_traces() -> None:
    buffer = thence_buffer([Trace(ONE, **PLAIN) for _ in range(4)], 4)
    decoded = decode(buffer[: 2 * 24 + 7], description(4, 4), path="k.npz")
    assert decoded.traces.height == 2
    assert decoded.warnings[0] == "k.npz: is cut: it holds 2 of 4 traces"
    with pytest.raises(thence.DamagedInput, match="holds 10 words"):
        decode(buffer[:10], description(4, 4))


def test_a_newer_version_is_said_to_be_one() -> None:
    trace = Trace(ONE, patch={0: 0x7E4CE002})
    with pytest.raises(thence.DamagedInput, match="version 2, and this thence reads version 1"):
        decode(thence_buffer([trace], 4), description(1, 4))


@pytest.mark.parametrize("values", [np.zeros(24), np.zeros(24, bool), np.zeros(3, np.uint8), np.array(["a"])])
def test_values_that_are_no_words(values: np.ndarray) -> None:
    with pytest.raises(thence.DamagedInput, match="words"):
        decode(values, description(1, 4))


def test_mosaic_odd_counts_and_overflow() -> None:
    traces = [Trace(ONE), Trace(ONE, patch={2: 5}), Trace(ranges(*((LOAD, 10 * i, 10 * i + 5) for i in range(4))))]
    about = description(3, 2, flavour="mosaic", words_per_trace=8)
    decoded = decode(mosaic_buffer(traces, 8), about, clock_ghz=1.0)
    assert decoded.traces["state"].to_list() == ["complete", "damaged", "overflow"]
    assert [(t, d) for t, _, _, d in rows(decoded)] == [(0, 100), (1, 100), (2, 5)]
    assert decoded.traces["dropped"].to_list() == [0, 0, 6]
    assert any("odd number of words" in text for text in decoded.warnings)
    assert any("overwritten other memory" in text for text in decoded.warnings)


def test_mosaic_backward_clock_is_reported_as_a_long_gap() -> None:
    trace = Trace([(ENTER, LOAD, 0), (EXIT, LOAD, 50), (ENTER, LOAD, 40), (EXIT, LOAD, 90)])
    about = description(1, 4, flavour="mosaic", words_per_trace=11)
    decoded = decode(mosaic_buffer([trace], 11), about, clock_ghz=1.0)
    assert any("1 gap of 2^31 cycles or more" in text for text in decoded.warnings)


def test_mosaic_buffer_of_another_launch() -> None:
    about = description(3, 2, flavour="mosaic", words_per_trace=8)
    with pytest.raises(thence.DamagedInput, match="another launch"):
        decode(mosaic_buffer([Trace(ONE)] * 2, 8), about)


def test_flashinfer_defects() -> None:
    about = description(2, 0, flavour="flashinfer")
    good = flashinfer_buffer([Trace(ONE, sm=1)] * 2, 1, 4)
    for wrong in (good[:1], good[:3], np.zeros(32, np.uint32), good[:4]):
        with pytest.raises(thence.DamagedInput):
            decode(wrong, about)
    with pytest.raises(thence.DamagedInput, match="written by 2 blocks; its description says 7"):
        decode(good, description(7, 0, flavour="flashinfer"))
    dirty = good.copy()
    dirty[-1] = 5  # behind an empty entry
    decoded = decode(dirty, about)
    assert decoded.ranges.height == 2
    assert any("not zeroed" in text for text in decoded.warnings)
    full = decode(flashinfer_buffer([Trace(ONE)] * 2, 1, 2), about)
    assert any("no bounds check" in text for text in full.warnings)
    other = decode(flashinfer_buffer([Trace(ONE)] * 4, 2, 4, "flashinfer-old"), about)
    assert any("a block in the tag that differs" in text for text in other.warnings)


def test_flashinfers_instants_survive_where_nothing_overwrote_them() -> None:
    trace = Trace([*ONE, (INSTANT, STORE, 300)])
    decoded = decode(flashinfer_buffer([trace], 1, 4), description(1, 0, flavour="flashinfer"))
    assert rows(decoded, "name", "kind", "duration_ns") == [("load", "range", 100), ("store", "instant", 0)]


def test_proton_defects() -> None:
    about = description(2, 0, flavour="proton")
    good = proton_buffer([[Trace(ONE)], [Trace(ONE)]], 4)
    for word, value in ((0, 2), (3, 41), (6, 3), (7, 0), (7, 65), (8, 10), (9, 0), (9, 5), (10, 9)):
        wrong = good.copy()
        wrong[word] = value
        with pytest.raises(thence.DamagedInput):
            decode(wrong, about)
    with pytest.raises(thence.DamagedInput):
        decode(good[:30], about)
    unmarked = good.copy()
    unmarked[11] = 0
    decoded = decode(unmarked, about, clock_ghz=1.0)
    assert decoded.traces["block"].to_list() == [1]
    assert "1 block without Proton's mark" in decoded.warnings[0]
    unmarked[unmarked == 0xDEADBEEF] = 1
    with pytest.raises(thence.DamagedInput, match="no block with Proton's mark"):
        decode(unmarked, about)


def test_the_latest_times_of_protons_blocks() -> None:
    """The nearest float of this time is 2^63, which no column of times holds."""
    trace = Trace(ONE, start=2**63 - 100, ns=10)
    buffer = proton_buffer([[trace], [trace]], 4)
    decoded = decode(buffer, description(2, 0, flavour="proton"), clock_ghz=1.0)
    assert decoded.traces["state"].to_list() == ["complete", "complete"]
    assert decoded.traces["start_ns"].to_list() == [2**63 - 100] * 2


@pytest.mark.parametrize("rate", [0.0, -1.0, 1980.0, float("nan")])
def test_a_rate_that_no_clock_has(rate: float) -> None:
    with pytest.raises(thence.UsageError, match="SM clocks run at"):
        decode(mosaic_buffer([Trace(ONE)], 8), description(1, 2, flavour="mosaic", words_per_trace=8), rate)


@pytest.mark.parametrize("flavour", ["thence", "mosaic", "flashinfer", "proton"])
def test_arbitrary_words_never_crash(flavour: str) -> None:
    random = np.random.default_rng(7)
    words_per_trace = 23 if flavour == "mosaic" else None
    about = description(6, 10, flavour=flavour, words_per_trace=words_per_trace)
    traces = [Trace(ranges(*((i % 3, 90 * i, 90 * i + 50) for i in range(5)))) for _ in range(6)]
    made = {
        "thence": lambda: thence_buffer(traces, 10),
        "mosaic": lambda: mosaic_buffer(traces, 23),
        "flashinfer": lambda: flashinfer_buffer(traces, 1, 12),
        "proton": lambda: proton_buffer([[t] for t in traces], 10),
    }[flavour]()
    decoded_some = 0
    for _ in range(50):
        words = made.copy()
        for place in random.integers(0, len(words), random.integers(1, 30)):
            words[place] = random.choice([0, 1, 0xFFFF_FFFF, 1 << 31, random.integers(1 << 32)])
        try:
            decoded = decode(words, about)
        except thence.DamagedInput:
            continue
        decoded_some += 1
        assert (decoded.as_ns(decoded.ranges)["duration_ns"] >= 0).all()
        assert (decoded.as_ns(decoded.ranges)["net_ns"] >= 0).all()
        if decoded.traces.height:
            thence.inside.Inside(decoded, "x").summary().to_json()
    assert decoded_some > 5


def test_descriptions_keep_their_fields() -> None:
    about = Description(
        ("a", "ü"), (2, 3, 4), (128, 2, 1), 2, 7, "k<int>", "thence", 3, 48.5, launch={"multiprocessors": 132}
    )
    values = json.loads(about.to_bytes())
    assert (values["format"], values["version"]) == ("thence.inside", 1)
    assert values["names"] == ["a", "ü"]
    assert Description.from_bytes(about.to_bytes()) == about
    assert (about.traces, about.trace_words, about.words) == (48, 30, 1440)
    assert (about.global_bytes, about.shared_bytes) == (5760, 112)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], "not a description"),
        ({}, "missing required field"),
        ({"format": "thence.inside", "version": 2, "flavour": "thence"}, "version 2"),
        ({"format": "thence.inside", "version": 1, "flavour": "nvtx"}, "'nvtx' is not a layout"),
        ({"format": "thence.inside", "version": 1, "flavour": "thence", "grid": [0, 1, 1]}, "at least 1"),
        ({"format": "thence.inside", "version": 1, "flavour": "thence", "grid": [2**31, 1, 1]}, "<= 2147483647"),
        ({"format": "thence.inside", "version": 1, "flavour": "thence", "grid": [65536, 65536, 1]}, "such a grid"),
        ({"format": "thence.inside", "version": 1, "flavour": "thence", "names": [1]}, "names"),
        ({"names": {"a": 0}, "entries": 8, "grid": [1], "block": [100]}, "whole number of warpgroups"),
        ({"names": {"a": 1 << 40}, "entries": 8, "grid": [1], "block": [128]}, "names"),
        ({"names": {}, "entries": 8, "grid": [1, 1, 1, 1], "block": [128]}, "three dimensions"),
    ],
)  # fmt: skip
def test_descriptions_that_make_no_sense(values: object, says: str) -> None:
    with pytest.raises(thence.DamagedInput, match=says):
        Description.from_json(values, "d.json")


def test_limits_are_checked_before_the_launch() -> None:
    h200 = Limits(shared_memory_bytes=232_448, global_memory_bytes=140 * 10**9)
    about = Description((), (132, 1, 1), (384, 1, 1), 3, 4096)
    about.check(h200)
    about.check(h200, shared_bytes_used=102_000)
    with pytest.raises(thence.UsageError, match="a capacity of 5,435 fits"):
        Description((), (132, 1, 1), (384, 1, 1), 3, 8192).check(h200, shared_bytes_used=102_000)
    assert (232_448 - 102_000) // 8 // 3 == 5435
    with pytest.raises(thence.UsageError, match="1,152 threads"):
        Description((), (1, 1, 1), (1152, 1, 1)).check(h200)
    huge = Description((), (1 << 20, 1, 1), (128, 1, 1), 4, 10_000)
    with pytest.raises(thence.UsageError, match="the buffer of 4,194,304 traces"):
        huge.check(h200, staged=False)


def test_files_round_trip(tmp_path: Path) -> None:
    buffer, about = thence_buffer([Trace(ONE, **PLAIN)], 4), description(1, 4)
    save(tmp_path / "k.npz", buffer, about)
    assert found([tmp_path]) == found([tmp_path / "*.npz"]) == [tmp_path / "k.npz"]
    assert [p.name for p in tmp_path.iterdir()] == ["k.npz"]
    profile = thence.inside.open(tmp_path / "k.npz")
    assert profile.description == about
    assert rows(profile)[0][3] == 100
    np.save(tmp_path / "raw.npy", buffer)
    with pytest.raises(thence.InputError, match=r"no description next to it: raw\.json"):
        thence.inside.open(tmp_path / "raw.npy")
    (tmp_path / "raw.json").write_bytes(about.to_bytes())
    assert thence.inside.open(tmp_path / "raw.npy").ranges.equals(profile.ranges)
    with pytest.raises(thence.InputError, match=r"end in \.npz"):
        save(tmp_path / "k.bin", buffer, about)
    with pytest.raises(thence.InputError, match="cannot be written"):
        save(tmp_path / "missing" / "k.npz", buffer, about)


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_of_gigabytes_is_damage(tmp_path: Path, version: int) -> None:
    (tmp_path / "raw.json").write_bytes(description(1, 4).to_bytes())
    begin = b"\x93NUMPY" + bytes([version, 0]) + (3_500_000_000).to_bytes(4, "little")
    (tmp_path / "raw.npy").write_bytes(begin + bytes(1000))
    with pytest.raises(thence.DamagedInput, match=r"header has a stated length of 3,500,000,000 bytes"):
        thence.inside.open(tmp_path / "raw.npy")


def test_a_header_with_a_null_byte_is_damage(tmp_path: Path) -> None:
    (tmp_path / "raw.json").write_bytes(description(1, 4).to_bytes())
    header = b"{'descr': '<u4', 'fortran_o}al\xef\xbb\xbfpe': (144,), }{\"ph\": \"X\"}\x93NUMPY\n] \n \x01\0\0\0\x04\n"
    length = len(header).to_bytes(2, "little")
    (tmp_path / "raw.npy").write_bytes(b"\x93NUMPY\x01\0" + length + header + bytes(576))
    with pytest.raises(thence.DamagedInput, match=r"raw\.npy: is cut or damaged"):
        thence.inside.open(tmp_path / "raw.npy")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "k.npz"
    with pytest.raises(thence.InputError, match="no such file"):
        thence.inside.open(path)
    path.write_bytes(b"hello")
    with pytest.raises(thence.UnknownFormat):
        thence.inside.open(path)
    save(path, thence_buffer([Trace(ONE)], 4), description(1, 4))
    whole = path.read_bytes()
    for size in (20, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:size])
        with pytest.raises(thence.DamagedInput):
            thence.inside.open(path)
    np.savez(path, buffer=np.zeros(4, np.uint32))
    with pytest.raises(thence.DamagedInput, match="no array description"):
        thence.inside.open(path)
    np.savez(path, buffer=np.array([{}]), description=np.frombuffer(b"{}", np.uint8))
    with pytest.raises(thence.DamagedInput):
        thence.inside.open(path)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "k.npz"
    text = np.frombuffer(description(1, 4).to_bytes(), np.uint8)
    np.savez(path, buffer=np.array([{"a": 1}], object), description=text)
    with pytest.raises(thence.DamagedInput, match="pickle"):
        thence.inside.open(path)


def test_an_archive_that_unpacks_to_far_too_much(tmp_path: Path) -> None:
    path = tmp_path / "k.npz"
    save(path, thence_buffer([Trace(ONE)], 4), description(1, 4))
    with zipfile.ZipFile(path) as old:
        text = old.read("description.npy")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("buffer.npy", b"\0" * 50_000_000)
        archive.writestr("description.npy", text)
    with pytest.raises(thence.DamagedInput, match=r"holds a buffer of 50\.00 MB"):
        thence.inside.open(path)
