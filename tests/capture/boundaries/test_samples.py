"""Samples of threads by the compiled probe: whether offsets are right, what is kept of a stack, and who is sampled."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fake_cupti import library_path
from thence.capture.boundaries import samples
from thence.capture.boundaries.places import FRAME, LINE, Places
from thence.capture.boundaries.probe import Followed, NativeProbe, choose_probe
from thence.capture.boundaries.samples import SAMPLE, ChainNames, HostSamples, why_not_sampled
from thence.capture.boundaries.stacks import LAYOUTS
from thence.model.formats import SAMPLE_STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

known = pytest.mark.skipif(sys.version_info[:2] not in LAYOUTS, reason="the stack of this Python is not known")
PYTHON, C, SLEEP = (SAMPLE_STATES.index(name) for name in ("python", "c", "sleep"))
RUNS = len(SAMPLE_STATES)


@pytest.fixture
def native() -> Any:
    probe = choose_probe()
    if not isinstance(probe, NativeProbe):
        pytest.skip("the probe was not compiled")
    return probe.compiled


@known
def test_this_python_can_be_sampled(native: Any) -> None:
    assert why_not_sampled(native) is None


@known
@pytest.mark.parametrize(
    "field", ["owner", "thread", "first_line", "filename", "qualname", "lines", "compact", "kind_shift"]
)
def test_wrong_offsets_are_found_out(native: Any, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by 8 bytes, where another pointer or nothing is."""
    right = samples._layout()
    for by in (8, 1 << 20, 1 << 40):
        if field == "kind_shift" and by > 8:
            continue
        wrong = right._replace(**{field: getattr(right, field) + by})
        monkeypatch.setattr(samples, "_layout", lambda wrong=wrong: wrong)
        if field == "owner" and by == 8:
            continue  # the first local: what is there decides whether it does harm
        assert why_not_sampled(native) is not None, (field, by)
    monkeypatch.undo()
    assert why_not_sampled(native) is None


@known
def test_what_cannot_be_found_or_is_forbidden_is_said(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_sampled(None) == "the compiled probe is not in use"
    refusing = SimpleNamespace(
        use_layout=native.use_layout, try_frames=native.try_frames, use_sample_layout=lambda *_: (None, 1)
    )
    assert "does not let a process read its own memory" in str(why_not_sampled(refusing))  # type: ignore[arg-type]

    def nothing() -> Any:
        raise LookupError("a field was not found")

    monkeypatch.setattr(samples, "_layout", nothing)
    assert "is not known: a field was not found" in str(why_not_sampled(native))
    monkeypatch.delitem(LAYOUTS, sys.version_info[:2])
    assert "is not known" in str(why_not_sampled(native))


def rows(*given: tuple[int, int, int, int]) -> Any:
    """Rows of the probe: chain, position, count, state."""
    table = np.zeros(len(given), SAMPLE)
    for name, column in zip(("chain", "position", "count", "state"), zip(*given, strict=True), strict=True):
        table[name] = column
    return table


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # At four instructions of one function: Python. Always at one call: not known.
        ([(1, 2, 1, RUNS), (1, 4, 1, RUNS), (1, 6, 1, RUNS), (1, 8, 1, RUNS)], [PYTHON] * 4),
        ([(1, 2, 9, RUNS), (1, 4, 1, RUNS)], [0, 0]),
        # Too few to say; those of another chain do not count; samples that were told apart do.
        ([(1, 2, 1, RUNS), (1, 4, 1, RUNS), (2, 6, 5, RUNS)], [0, 0, 0]),
        ([(1, 2, 2, PYTHON), (1, 4, 2, RUNS), (1, 4, 1, SLEEP)], [PYTHON, PYTHON, SLEEP]),
        ([(1, 2, 9, C), (1, 4, 1, RUNS)], [C, 0]),
        ([(1, 2, 1, 0)], [0]),
    ],
)
def test_a_thread_without_cpu_time_ran_python_if_its_function_is_seen_at_many_instructions(
    given: list[tuple[int, int, int, int]], expected: list[int]
) -> None:
    assert samples._decided(rows(*given)).tolist() == expected


class Launching:
    """Threads that launch on the libcupti of the tests, and their samples."""

    def __init__(self, native: Any, probe: Any) -> None:
        self.library = ctypes.CDLL(library_path())
        self.handle = ctypes.c_void_p()
        self.library.cuptiSubscribe(ctypes.byref(self.handle), ctypes.c_void_p(probe.callback), None)
        for domain, function in ((2, 1), (2, 2), (1, 2), (2, 8)):
            self.library.cuptiEnableCallback(1, self.handle, domain, function)
        probe.follow(Followed.CALLS)
        self.samples = HostSamples(native)
        self.places = Places()

    def taken(self) -> list[tuple[str | None, str | None, str | None]]:
        """Function of the user's, innermost frame and state of each row."""
        found = self.samples.take(self.places, lambda file: file == __file__)
        named = []
        for line, frame, state in zip(
            found["line"].tolist(), found["frame"].tolist(), found["state"].tolist(), strict=True
        ):
            names = [self.places[number].name if number else None for number in (line, frame)]
            named.append((*names, SAMPLE_STATES[state]))
        return named  # type: ignore[return-value]


@pytest.fixture
def launching(native: Any) -> Iterator[Launching]:
    if why_not_sampled(native) is not None:
        pytest.skip("threads cannot be sampled here")
    probe = choose_probe()
    made = Launching(native, probe)
    yield made
    made.samples.end()
    made.library.cuptiUnsubscribe(made.handle)
    probe.follow(Followed.NOTHING)


def pause(seconds: float = 0.25) -> None:
    time.sleep(seconds)


def test_a_thread_is_sampled_while_it_launches_nothing(launching: Launching) -> None:
    launching.library.fake_launch()
    pause()
    launching.samples.end()
    rows = launching.taken()
    assert rows.count(("pause", "pause", "sleep")) >= 1
    line = next(p for p in launching.places.named().values() if p.kind == LINE and p.name == "pause")
    assert line.line == pause.__code__.co_firstlineno + 1
    frame = next(p for p in launching.places.named().values() if p.kind == FRAME and p.name == "pause")
    assert frame.detail == __file__
    caller = launching.places[line.parent]
    assert caller.name == "test_a_thread_is_sampled_while_it_launches_nothing"
    counts = launching.samples.facts()
    assert counts["read"] >= 1
    assert counts["unmoved"] >= 3


def test_a_thread_in_a_call_is_not_sampled(launching: Launching) -> None:
    """Its time is that of the call, which is recorded."""
    launching.library.fake_launch()
    launching.library.fake_wait(60_000_000)
    before = launching.samples.facts()
    launching.library.fake_wait(60_000_000)
    after = launching.samples.facts()
    assert after["read"] + after["unmoved"] - before["read"] - before["unmoved"] <= 1


def test_a_thread_that_never_called_cuda_is_not_sampled(launching: Launching) -> None:
    def apart() -> None:
        pause(0.1)

    thread = threading.Thread(target=apart)
    thread.start()
    thread.join()
    launching.samples.end()
    assert "apart" not in {name for row in launching.taken() for name in row}


def test_threads_that_end_give_their_place_to_others(launching: Launching) -> None:
    """There is room for 256 threads at a time."""

    def one() -> None:
        launching.library.fake_launch()

    for _ in range(600):
        thread = threading.Thread(target=one)
        thread.start()
        thread.join()

    def last() -> None:
        launching.library.fake_launch()
        pause()

    thread = threading.Thread(target=last)
    thread.start()
    thread.join()
    launching.samples.end()
    assert ("pause", "pause", "sleep") in launching.taken()


def test_nothing_is_sampled_while_calls_are_not_followed(launching: Launching, native: Any) -> None:
    native.follow(Followed.NOTHING)
    time.sleep(0.02)
    before = launching.samples.facts()
    pause()
    after = launching.samples.facts()
    assert after["read"] + after["unmoved"] <= before["read"] + before["unmoved"]
    native.follow(Followed.CALLS)
    pause()
    assert launching.samples.facts()["unmoved"] > after["unmoved"]


def test_only_one_thread_samples_at_a_time(launching: Launching, native: Any) -> None:
    with pytest.raises(RuntimeError, match="sampled already"):
        native.begin_samples()
    with pytest.raises(RuntimeError, match="is sampling"):
        native.try_sample()
    launching.samples.end()
    launching.samples.end()


def test_a_sample_shows_names_that_are_not_ascii_and_frames_of_generators(launching: Launching) -> None:
    space: dict[str, Any] = {"time": time}
    text = "def größe_名前():\n    for _ in steps():\n        pass\n\ndef steps():\n    time.sleep(0.25)\n    yield\n"
    exec(compile(text, __file__, "exec"), space)
    launching.library.fake_launch()
    space["größe_名前"]()
    launching.samples.end()
    launching.taken()
    frames = {place.name for place in launching.places.named().values()}
    assert {"größe_名前", "steps"} <= frames


@known
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("use_sample_layout", (1, 2)), ("sample_chains", ("text",)), ("sample_codes", (None,)), ("begin_samples", (0, 1))],
)
def test_what_makes_no_sense_is_refused(native: Any, name: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        getattr(native, name)(*arguments)


@known
def test_a_deep_stack_is_cut_to_its_innermost_frames(native: Any) -> None:
    assert why_not_sampled(native) is None

    def deep(left: int, function: Callable[[], Any]) -> Any:
        return deep(left - 1, function) if left else function()

    chain, _, holds = deep(600, native.try_sample)
    names = ChainNames(native)
    frames = [names.of(code).name for code, _ in names.chain(chain)]
    assert holds
    assert len(frames) == 200
    assert {name.rpartition(".")[2] for name in frames} == {"deep"}
