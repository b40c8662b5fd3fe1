"""Which launch a buffer belongs to, and where its ranges are drawn: under that launch's slice."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import kernel, launch, opened
from inside_data import (
    EPOCH,
    LOAD,
    NAMES,
    START,
    Trace,
    description,
    launched,
    mosaic_buffer,
    ranges,
    recording,
    thence_buffer,
)
from perfetto_reading import decoded as perfetto
from thence.inside.decoding import decode
from thence.inside.description import Description
from thence.inside.launch_matching import find_launches
from thence.inside.timeline import merged

if TYPE_CHECKING:
    from pathlib import Path

    from thence.inside.decoding import Decoded

SHIFT = 1_437_000
"""How far the GPU's timer is ahead of the trace's clock; as large as seen on an H200."""


@pytest.fixture(scope="module")
def regular(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The trace of a number of launches, one every 100 us."""

    @functools.cache
    def made(count: int) -> thence.Trace:
        return recording(tmp_path_factory.mktemp("trace"), *((1_000_000 + 100_000 * i, 30_800) for i in range(count)))

    return made


def found(trace: thence.Trace, *parts: Decoded, launch: int | None = None) -> list[int]:
    named = [(f"{i}.npz", part) for i, part in enumerate(parts)]
    return [place.number for place in find_launches(trace.timeline(), named, launch)]


def part(start: int, ns: int = 30_000, shift: int = SHIFT, **moments: int) -> Decoded:
    """The buffer of a launch whose kernel began at ``start`` and took 0.8 us more than ``ns``.

    Moments are relative to that start.
    """
    launch = {name: EPOCH + start + moment for name, moment in moments.items()}
    return launched(EPOCH + start + 400 + shift, ns, launch=launch)


def test_ranges_go_under_their_kernels_slice(tmp_path: Path) -> None:
    trace = recording(tmp_path, (1_000_000, 30_800), (1_100_000, 30_800), (1_200_000, 30_800))
    own = part(1_100_000, host_ns=-20_000, next_ns=70_000, taken_ns=500_000)
    timeline = merged(trace.timeline(), [("k.npz", own)])
    assert timeline.trace.gpu.equals(trace.timeline().trace.gpu)
    starts = timeline.inside[0].ranges["start_ns"].to_list()
    assert starts == [1_100_400, 1_100_400, 1_100_400, 1_100_400 + 20_000]
    assert "launch 1 of 3" in timeline.notes[-1]
    # The start is late by 0.4 us inside, the end early by as much.
    assert "+1,437,400 ns from the trace's clock at the start of the kernel" in timeline.notes[-1]
    assert "+1,436,600 ns at its end" in timeline.notes[-1]
    from thence.writers.timelines.write import write_timeline

    write_timeline(timeline, tmp_path / "all.pftrace")
    result = perfetto((tmp_path / "all.pftrace").read_bytes())
    assert {s.name for s in result.on("GPU 0 > stream 7")} == {"gemm", "other"}
    (store,) = [s for s in result.slices if s.name == "store"]
    assert result.path(store.track).startswith("GPU 0 > inside gemm > SM 0 > block 3")
    assert (store.start, store.end) == (1_120_400, 1_121_400)


@pytest.mark.parametrize("shift", [-57_000, 60_000, 160_000, SHIFT, -4_000_000_000])
def test_the_distance_of_the_clocks_says_nothing(regular: Any, shift: int) -> None:
    """The same launch, whatever the timer read; and no launch at all without other facts."""
    trace = regular(6)
    known = part(1_200_000, shift=shift, host_ns=-20_000, next_ns=70_000)
    assert found(trace, known) == [2]
    timeline = merged(trace.timeline(), [("k.npz", known)])
    assert timeline.inside[0].ranges["start_ns"][0] == 1_200_400
    with pytest.raises(thence.MissingData, match=r"any of 6 launches.*--launch: 0 \(at 1.000 ms, 30.80 us\), 1 "):
        found(trace, part(1_200_000, shift=shift))


@pytest.mark.parametrize(
    ("moments", "number"),
    [
        ({"host_ns": -20_000, "next_ns": 80_000}, 2),
        ({"host_ns": -20_000, "taken_ns": 50_000}, 2),
        ({"taken_ns": 40_000, "previous_ns": -50_000}, 2),
        ({"host_ns": -150_000, "next_ns": -120_000, "taken_ns": 40_000}, None),  # made ahead: 1 or 2
        ({"host_ns": -20_000}, None),  # 2, 3 or 4
        ({"taken_ns": 40_000}, None),  # 0, 1 or 2
        ({"taken_ns": -160_000}, 0),
        ({"host_ns": 195_000 - 5_000}, 4),
    ],
)
def test_moments_on_the_hosts_clock_find_the_launch(regular: Any, moments: dict[str, int], number: int | None) -> None:
    trace = regular(5)
    one = part(1_200_000, **moments)
    if number is None:
        with pytest.raises(thence.MissingData, match="could be any of"):
            found(trace, one)
    else:
        assert found(trace, one) == [number]


def test_buffers_made_ahead_are_found_by_their_order_and_distances(tmp_path: Path) -> None:
    starts = [1_000_000, 1_031_000, 1_063_000, 1_094_000]  # back to back
    trace = recording(tmp_path, *((start, 30_800) for start in starts))
    parts = [
        part(
            start, host_ns=900_000 + 5_000 * i - start, next_ns=905_000 + 5_000 * i - start, taken_ns=2_000_000 - start
        )
        for i, start in enumerate(starts)
    ]
    assert found(trace, *parts) == [0, 1, 2, 3]
    assert found(trace, *parts[::-1]) == [3, 2, 1, 0]
    with pytest.raises(thence.MissingData, match="one buffer at a time"):
        found(trace, *parts[:2])  # 0 and 1, or 2 and 3
    with pytest.raises(thence.MissingData, match="could be any of 4"):
        found(trace, parts[0])


def test_distances_that_differ_find_all(tmp_path: Path) -> None:
    """Without any moment, in a trace with more launches, under a timer that drifts."""
    generator = random.Random(5)
    start, starts = 1_000_000, []
    for _ in range(60):
        starts.append(start)
        start += generator.randrange(40_000, 400_000)
    trace = recording(tmp_path, *((start, 30_800) for start in starts))
    chosen = sorted(generator.sample(range(60), 6))
    parts = [
        part(starts[i], shift=SHIFT + (starts[i] - starts[0]) // 50_000 + generator.randrange(-900, 900))
        for i in chosen
    ]
    assert found(trace, *parts) == chosen
    timeline = merged(trace.timeline(), [(f"{i}.npz", p) for i, p in zip(chosen, parts, strict=True)])
    firsts = [phases.ranges["start_ns"][0] for phases in timeline.inside]
    assert firsts == [starts[i] + 400 for i in chosen]  # each by its own slice, without the drift
    stranger = part(starts[chosen[2]] + 21_000)
    with pytest.raises(thence.MissingData, match="the trace does not contain all of their launches"):
        found(trace, *parts, stranger)


def test_a_timer_that_drifts_over_seconds_is_followed(tmp_path: Path) -> None:
    starts = [1_000_000, 2_000_000_000, 5_000_000_000, 5_000_900_000]
    trace = recording(tmp_path, *((start, 30_800) for start in starts))
    drift = [0, 25_000, 60_000, 60_000]
    parts = [part(s, shift=SHIFT + d) for s, d in zip(starts, drift, strict=True)]
    assert found(trace, *parts[:3]) == [0, 1, 2]
    # A jump, which no drift explains: not the launches of these buffers.
    parts[1] = part(starts[1], shift=SHIFT + 900_000)
    with pytest.raises(thence.MissingData, match="does not contain all of their launches"):
        found(trace, *parts[:3])


def test_timers_of_32_bits_come_round_between_two_buffers(tmp_path: Path) -> None:
    starts = [1_000_000, 1_300_000, 9_000_000]
    about = description(4, 2, flavour="mosaic", words_per_trace=8, overhead_cycles=0)
    # Half a round ahead of the trace's clock, once a little less and once a little more.
    shift = (1 << 31) - 2_000
    epoch = 1 << 60
    parts = [
        decode(
            mosaic_buffer([Trace(ranges((LOAD, 0, 1000)), start=epoch + start + 400 + shift + late)] * 4, 8),
            about,
            clock_ghz=1.0,
        )
        for start, late in ((starts[0], 0), (starts[1], 3_000))
    ]
    trace = recording(tmp_path, *((start, 1_800) for start in starts), epoch=epoch)
    assert found(trace, *parts) == [0, 1]


def test_a_buffer_goes_to_its_own_device(tmp_path: Path) -> None:
    events = [
        e
        for i in range(2)
        for e in (
            launch(i + 1, 900 + i),
            kernel(i + 1, 1000 + i, 30.8, pid=i, args={"device": i, "grid": [4, 1, 1], "block": [128, 1, 1]}),
        )
    ]
    trace = opened(tmp_path, events, baseTimeNanoseconds=EPOCH)
    for device in (0, 1):
        own = launched(EPOCH + 1_000_400, device=device)
        (place,) = find_launches(trace.timeline(), [("k.npz", own)])
        assert (place.device, place.of) == (device, 1)
    unknown = launched(EPOCH + 1_000_400, launch={"device": "one of 2; jax does not say which"})
    with pytest.raises(thence.MissingData, match="any of 2 launches"):
        found(trace, unknown)


def test_a_trace_without_calls_goes_by_the_kernels_starts(tmp_path: Path) -> None:
    recorded = recording(tmp_path, (1_000_000, 30_800), (1_100_000, 30_800)).timeline()
    bare = dataclasses.replace(recorded, trace=dataclasses.replace(recorded.trace, host=recorded.trace.host.clear()))
    for moments, number in (({"host_ns": -4_000}, 1), ({"taken_ns": -10_000}, 0)):
        own = part(1_100_000, **moments)
        assert [p.number for p in find_launches(bare, [("k.npz", own)])] == [number]


def test_two_buffers_are_never_given_one_launch(tmp_path: Path) -> None:
    trace = recording(tmp_path, (1_000_000, 30_800), (1_100_000, 30_800))
    with pytest.raises(thence.MissingData, match="does not contain all of their launches"):
        found(trace, part(1_000_000), part(1_001_000))


def test_kernels_of_several_names_find_each_other(tmp_path: Path) -> None:
    """A buffer with moments fixes the others of its device, by their distances."""
    trace = recording(tmp_path, *((1_000_000 + 100_000 * i, 30_800) for i in range(4)))
    other = part(1_050_000, ns=100, shift=SHIFT)
    about = dataclasses.replace(other.description, kernel="other", grid=(1, 1, 1), block=(1, 1, 1))
    assert found(trace, part(1_200_000), part(1_100_000, host_ns=-20_000, next_ns=0)) == [2, 1]
    with pytest.raises(thence.MissingData):
        found(trace, dataclasses.replace(other, description=about), part(1_200_000))


def test_length_rules_launches_out(tmp_path: Path) -> None:
    trace = recording(tmp_path, (1_000_000, 5_000), (1_100_000, 30_800), (1_200_000, 27_900))
    assert found(trace, part(1_000_000)) == [1]
    one = part(1_200_000, ns=27_000, host_ns=-20_000)
    assert found(trace, one) == [2]
    with pytest.raises(thence.MissingData, match=r"none took as long as the 40\.00 us"):
        found(trace, part(1_000_000, ns=40_000))
    assert found(trace, part(1_000_000, ns=40_000), launch=0) == [0]
    timeline = merged(trace.timeline(), [("k.npz", part(1_000_000, ns=40_000))], launch=0)
    assert "longer than the kernel" in timeline.notes[-1]


def test_the_process_says_which_rank(tmp_path: Path) -> None:
    trace = recording(tmp_path, (1_000_000, 30_800))
    tables = trace.timeline().trace
    both = dataclasses.replace(
        tables,
        gpu=pl.concat([tables.gpu, tables.gpu.with_columns(pl.lit(1, pl.Int32).alias("rank"))]),
        host=pl.concat(
            [
                tables.host,
                tables.host.with_columns(pl.lit(1, pl.Int32).alias("rank"), pl.lit(4321, pl.Int64).alias("process")),
            ]
        ),
    )
    recorded = dataclasses.replace(trace.timeline(), trace=both)
    for process, rank in ((1, 0), (4321, 1)):
        own = launched(EPOCH + 1_000_400, launch={"pid": process})
        (place,) = find_launches(recorded, [("k.npz", own)])
        assert place.rank == rank
    for process in (5, "x", None):
        with pytest.raises(thence.MissingData, match="any of 2 launches"):
            find_launches(recorded, [("k.npz", launched(EPOCH + 1_000_400, launch={"pid": process}))])


def test_a_ranks_corrected_clock_moves_its_ranges_along(tmp_path: Path) -> None:
    recorded = recording(tmp_path, (1_000_000, 30_800), (1_100_000, 30_800)).timeline()
    gpu, host = (table.with_columns(pl.col("start") - 7_000) for table in (recorded.trace.gpu, recorded.trace.host))
    corrected = dataclasses.replace(
        recorded, corrections={0: 7_000}, trace=dataclasses.replace(recorded.trace, gpu=gpu, host=host)
    )
    # 6 us after the first call, which says so only by the clock as it was recorded
    own = part(1_100_000, host_ns=-99_000, next_ns=0)
    timeline = merged(corrected, [("k.npz", own)])
    assert timeline.inside[0].ranges["start_ns"][0] == 1_100_400 - 7_000
    assert "+1,437,400 ns" in timeline.notes[-1]


@pytest.mark.parametrize(
    ("shown", "found"),
    [("void gemm<int>(float*)", True), ("ns::gemm(float*)", True), ("gemm_relu", False), ("sgemm", False)],
)
def test_kernels_are_found_by_their_whole_name(tmp_path: Path, shown: str, found: bool) -> None:
    events = [launch(1, 5), kernel(1, 1000, 30.8, name=shown)]
    trace = opened(tmp_path, events, baseTimeNanoseconds=EPOCH)
    parts = [("k.npz", launched(EPOCH + 1_060_700))]
    if found:
        assert merged(trace.timeline(), parts).inside[0].ranges["start_ns"][0] == 1_000_400
    else:
        with pytest.raises(thence.MissingData):
            merged(trace.timeline(), parts)


@pytest.mark.parametrize(
    ("shown", "found"),
    [("mosaic_gpu_body_kernel", True), ("body_mosaic_gpu_kernel", True), ("some_body_kernel", False)],
)
def test_kernels_of_mosaic_are_found_by_their_bodys_name(tmp_path: Path, shown: str, found: bool) -> None:
    events = [launch(1, 5), kernel(1, 1000, 30.8, name=shown)]
    trace = opened(tmp_path, events, baseTimeNanoseconds=EPOCH)
    own = launched(EPOCH + 1_060_700)
    about = dataclasses.replace(own.description, kernel="body")
    parts = [("k.npz", dataclasses.replace(own, description=about))]
    if found:
        assert merged(trace.timeline(), parts).inside[0].ranges["start_ns"][0] == 1_000_400
    else:
        with pytest.raises(thence.MissingData, match="no launch of 'body'"):
            merged(trace.timeline(), parts)


@pytest.mark.parametrize("start", [START, 1_795_196_758_971_754_976 // 2**32 * 2**32 + 100])
def test_a_timer_of_32_bits_is_compared_as_far_as_it_goes(tmp_path: Path, start: int) -> None:
    """Also where it comes round between the trace's times and its own."""
    epoch = start - 1_500_400 - SHIFT
    trace = recording(tmp_path, (1_000_000, 1_800), (1_500_000, 1_800), epoch=epoch)
    about = description(
        4,
        2,
        flavour="mosaic",
        words_per_trace=8,
        overhead_cycles=0,
        launch={"taken_ns": epoch + 1_600_000, "previous_ns": epoch + 1_200_000},
    )
    buffer = mosaic_buffer([Trace(ranges((LOAD, 0, 1000)), start=start)] * 4, 8)
    timeline = merged(trace.timeline(), [("m.npy", decode(buffer, about, clock_ghz=1.0))])
    assert timeline.inside[0].ranges["start_ns"].to_list() == [1_500_400] * 4
    assert "+1,437,400 ns" in timeline.notes[-1]


def test_without_a_common_clock_lengths_and_distances_say_it_or_the_user(tmp_path: Path) -> None:
    one = recording(tmp_path, (1_000_000, 30_800), epoch=None)
    timeline = merged(one.timeline(), [("k.npz", launched(START))])
    assert timeline.inside[0].ranges["start_ns"][0] == 1_000_400  # middles put together
    assert "clocks cannot be compared" in timeline.notes[-1]
    two = recording(tmp_path, (1_000_000, 30_800), (1_100_000, 30_800), epoch=None)
    with pytest.raises(thence.MissingData, match="any of 2 launches"):
        merged(two.timeline(), [("k.npz", launched(START))])
    both = [launched(START + 100_000), launched(START)]
    assert found(two, *both) == [1, 0]
    chosen = merged(two.timeline(), [("k.npz", launched(START))], launch=1)
    assert chosen.inside[0].ranges["start_ns"][0] == 1_100_400
    with pytest.raises(thence.UsageError, match="2 launches"):
        merged(two.timeline(), [("k.npz", launched(START))], launch=2)
    longer = recording(tmp_path, (1_000_000, 5_000), (1_100_000, 30_800), epoch=None)
    assert found(longer, launched(START)) == [1]  # the other is too short


def test_launches_that_cannot_be_it_are_not_taken(tmp_path: Path) -> None:
    trace = recording(tmp_path, (1_000_000, 30_800), (1_100_000, 30_800))
    far = launched(EPOCH + 100_000_000_000)
    with pytest.raises(thence.MissingData, match="the trace was recorded at another time"):
        found(trace, far)
    for moments in ({"host_ns": 200_000}, {"taken_ns": -10_000}):
        with pytest.raises(thence.MissingData, match="the trace does not cover that time"):
            found(trace, part(1_000_000, **moments))
    softmax = Description(NAMES, (4, 1, 1), (128, 1, 1), 1, 2, "softmax")
    other = decode(thence_buffer([Trace(ranges((LOAD, 0, 10)))] * 4, 2), softmax)
    with pytest.raises(thence.MissingData, match=r"no launch of 'softmax' with grid \(4, 1, 1\)"):
        found(trace, other)
    small = recording(tmp_path, (1_000_000, 30_800), grid=[8, 1, 1])
    with pytest.raises(thence.MissingData):
        found(small, launched(EPOCH + 1_060_700))


@pytest.mark.parametrize("value", ["soon", True, -5, 1 << 70, 1.5, None, [1]])
def test_moments_that_are_none_are_left_alone(tmp_path: Path, value: Any) -> None:
    trace = recording(tmp_path, (1_000_000, 30_800))
    facts = dict.fromkeys(("host_ns", "taken_ns", "next_ns", "previous_ns", "pid"), value)
    assert found(trace, launched(EPOCH + 1_000_400, launch=facts)) == [0]
