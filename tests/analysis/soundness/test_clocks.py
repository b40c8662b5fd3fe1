"""Times of the device against times of the host: what proves that a clock is wrong, and what that work is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from faults import changed
from helpers import FSDP, event, kernel, launch, opened, shared
from thence.analysis.soundness.check import check

if TYPE_CHECKING:
    from pathlib import Path

    from thence.analysis.soundness.findings import Soundness
    from thence.model.tables import Tables


def codes(soundness: Soundness) -> list[str]:
    return [finding.code for finding in soundness.findings]


def call(name: str, start: float, duration: float, **rest: Any) -> dict[str, Any]:
    arguments = {"correlation": 9000 + int(start)}
    return event("cuda_runtime", name, start, duration, args=arguments, **rest)


# A kernel of 100 us that runs from 10 to 110 us, and ``late`` more.
def waited(late: float, returns: float = 110, began: float = 20) -> list[dict[str, Any]]:
    wait = call("cudaDeviceSynchronize", began, returns - began)
    return [launch(1, 5), kernel(1, 10 + late, 100), wait]


@pytest.mark.parametrize(("late", "findings", "notes"), [(5, 0, 0), (30, 0, 1), (60, 1, 0)])
def test_work_may_end_fifty_microseconds_after_a_call_that_waited_for_it(
    tmp_path: Path, late: float, findings: int, notes: int
) -> None:
    soundness = opened(tmp_path, waited(late)).check()
    assert codes(soundness) == ["late_clock"] * findings
    assert [note.code for note in soundness.notes] == ["late_clock"] * notes
    if findings:
        assert "1 of 1 activities end after a call returned" in soundness.findings[0].text
        assert "by up to 60.00 us" in soundness.findings[0].text


def test_work_that_was_launched_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    """By another thread, whose call had not returned when the wait began."""
    events = waited(0)
    events += [launch(2, 20) | {"tid": 3}, kernel(2, 150, 100)]
    assert codes(opened(tmp_path, events).check()) == []


def test_a_call_that_did_not_wait_may_be_for_another_device(tmp_path: Path) -> None:
    """A process sees several devices; the trace states neither the current one, nor those that ran nothing."""
    assert codes(opened(tmp_path, waited(500, returns=25)).check()) == []
    assert codes(opened(tmp_path, waited(500, returns=45)).check()) == ["late_clock"]


def test_with_several_devices_a_wait_for_an_unnamed_one_proves_nothing(tmp_path: Path) -> None:
    other = [launch(2, 6), kernel(2, 12, 5, args={"device": 1})]
    assert codes(opened(tmp_path, [*waited(500), *other]).check()) == []


def test_even_the_quickest_of_five_starts_tells_the_clock(tmp_path: Path) -> None:
    """Kernels every 2 ms on an idle device; the clock of the device is late by 200 us, or one of them is prompt."""

    def runs(count: int, lags: list[float]) -> list[dict[str, Any]]:
        events = [launch(1, 0), kernel(1, 5, 50)]
        for i, lag in zip(range(2, count + 2), lags, strict=True):
            events += [launch(i, 2000 * i), kernel(i, 2000 * i + 1 + lag, 50)]
        return events

    (finding,) = opened(tmp_path, runs(5, [200, 300, 200, 250, 201])).check().findings
    assert (finding.code, finding.count) == ("late_clock", 5)
    assert "even the quickest started 200.0 us after the call had returned" in finding.text
    assert "late_clock" not in codes(opened(tmp_path, runs(4, [200, 300, 200, 250])).check())
    prompt = opened(tmp_path, runs(5, [200, 300, 2, 250, 201])).check()
    assert "late_clock" not in codes(prompt)


def queued(gap: float, pieces: int = 10) -> list[dict[str, Any]]:
    """All launched in the first 20 us; kernels of 100 us with gaps between them."""
    events = [launch(i + 1, 2 * i) for i in range(pieces)]
    return events + [kernel(i + 1, 30 + i * (100 + gap), 100) for i in range(pieces)]


def test_idle_time_before_work_that_nothing_held_is_of_missing_work(tmp_path: Path) -> None:
    """9 gaps of 300 us, of which the first 5 us of each are explained: 2.655 ms of 3.7."""
    trace = opened(tmp_path, queued(300))
    (finding,) = trace.check().findings
    assert (finding.code, finding.rank, finding.device, finding.count) == ("started_late", 0, 0, 9)
    assert finding.span_ns == 9 * 295_000
    assert finding.span_share == pytest.approx(9 * 295 / (10 * 100 + 9 * 300))
    assert trace.report().to_json()["idle_is"] == "at most"
    unknown = dict(trace.idle().reasons.rows())
    assert unknown["started_late"] == finding.span_ns  # the same definition as that of idle time


@pytest.mark.parametrize("gap", [90, 20, 4])
def test_short_gaps_are_what_launching_takes(tmp_path: Path, gap: float) -> None:
    assert codes(opened(tmp_path, queued(gap)).check()) == []


def test_five_percent_of_the_span_are_no_finding(tmp_path: Path) -> None:
    """One gap of 200 us in 5 ms; in 3 ms it is more than 5 %."""

    def one_gap(length: float) -> list[dict[str, Any]]:
        events = [launch(1, 0), launch(2, 3), kernel(1, 10, length)]
        return [*events, kernel(2, 10 + length + 200, 10)]

    assert codes(opened(tmp_path, one_gap(4800)).check()) == []
    assert codes(opened(tmp_path, one_gap(2800)).check()) == ["started_late"]


def test_what_holds_a_stream_explains_that_it_waits(tmp_path: Path) -> None:
    """An event of work that runs, the profiler, a host function, and a graph that is launched for the first time."""
    two = [launch(1, 0), kernel(1, 10, 100), kernel(2, 1000, 100)]
    assert codes(opened(tmp_path, [*two, launch(2, 4)]).check()) == ["started_late"]
    host_function = call("cudaLaunchHostFunc", 2, 1)
    assert codes(opened(tmp_path, [*two, launch(2, 4), host_function]).check()) == []
    earlier = call("cudaLaunchHostFunc", -5, 1)
    assert codes(opened(tmp_path, [*two, launch(2, 4), earlier]).check()) == ["started_late"]
    profiler = event("overhead", "Buffer Flush", 100, 895)
    soundness = opened(tmp_path, [*two, launch(2, 4), profiler]).check()
    assert "started_late" not in codes(soundness)
    nodes = {"graph id": 3, "graph node id": 1}
    graph = [call("cudaGraphLaunch", 4, 2), kernel(9004, 1000, 100, args=nodes)]
    assert codes(opened(tmp_path, [*two[:2], *graph]).check()) == []


def test_an_event_explains_the_wait_only_while_its_work_runs(tmp_path: Path) -> None:
    """Stream 8 waits for the kernel of stream 7, which ends at 110 us: 200 us later it has no reason to wait."""
    events = [
        *(launch(1, 0), call("cudaEventRecord", 2, 1), call("cudaStreamWaitEvent", 4, 1), launch(2, 6)),
        kernel(1, 10, 100),
    ]  # fmt: skip
    prompt = kernel(2, 110 + 90, 100, args={"stream": 8})
    late = kernel(2, 110 + 900, 100, args={"stream": 8})
    assert codes(opened(tmp_path, [*events, prompt]).check()) == []
    (finding,) = opened(tmp_path, [*events, late]).check().findings
    assert (finding.code, finding.span_ns) == ("started_late", 800_000)


def test_streams_of_several_devices_may_wait_for_the_other(tmp_path: Path) -> None:
    events = [
        *(launch(1, 0), call("cudaEventRecord", 2, 1), call("cudaStreamWaitEvent", 4, 1), launch(2, 6)),
        kernel(1, 10, 100),
        kernel(2, 110 + 900, 100, args={"stream": 8}),
        *(launch(3, 8), kernel(3, 12, 5, args={"device": 1})),
    ]  # fmt: skip
    soundness = opened(tmp_path, events).check()
    assert codes(soundness) == []
    (reason,) = [x.text for x in soundness.not_checked if x.code == "started_late"]
    assert "perhaps of another device" in reason


def without(tables: Tables, name: str) -> Tables:
    """Without the kernels of a name, and without their launches: as if the profiler had never seen them."""
    lost = tables.gpu.filter(tables.gpu["name"].cast(str).str.contains(name))["correlation"]
    host = tables.host.filter(~tables.host["correlation"].is_in(lost.implode()).fill_null(value=False))
    gpu = tables.gpu.filter(~tables.gpu["correlation"].is_in(lost.implode()))
    return changed(tables, gpu=gpu, host=host, events=tables.events.clear(), waits=tables.waits.clear())


def test_kernels_that_a_real_trace_lacks_with_their_launches_are_missed() -> None:
    """Rank 0 of the FSDP job waits in NCCL's kernels for most of its time; of rank 3, which does not, nothing shows."""
    for rank, expected in ((0, ["started_late"]), (3, [])):
        tables = shared(FSDP[rank]).recorded
        assert codes(check(tables)) == []
        soundness = check(without(tables, "nccl"))
        assert codes(soundness) == expected
        assert soundness.work_missing == bool(expected)


def test_work_that_is_known_to_be_missing_explains_what_started_late(tmp_path: Path) -> None:
    events = queued(300)
    del events[-5]  # the kernel of a launch that the trace has
    events.append(call("cudaDeviceSynchronize", 50, 6000))
    assert codes(opened(tmp_path, events).check()) == ["launch_without_work"]


def test_a_clock_that_is_wrong_is_not_work_that_is_missing(tmp_path: Path) -> None:
    soundness = opened(tmp_path, [*queued(300), call("cudaDeviceSynchronize", 50, 1000)]).check()
    assert codes(soundness) == ["late_clock"]
    (reason,) = [x.text for x in soundness.not_checked if x.code == "started_late"]
    assert reason == "rank 0: the clocks of host and device disagree"
