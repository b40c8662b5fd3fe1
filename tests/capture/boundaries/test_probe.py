"""The compiled probe and the one in Python: the same rows from the same calls."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fake_cupti import library_path
from thence.capture.boundaries.log import BEGINS, COLUMNS, ENDS, BoundaryLog
from thence.capture.boundaries.probe import Followed, Probe, choose_probe
from thence.capture.boundaries.stacks import LAYOUTS
from thence.model.formats import CLOSED, OPENED, STEP

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNTIME, VERSION = 2, 1


@pytest.fixture(params=["c", "python"])
def probe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Probe:
    monkeypatch.setenv("THENCE_PROBE", request.param)
    chosen = choose_probe()
    if chosen.name != request.param:
        pytest.skip("the probe was not compiled")
    chosen.follow(Followed.CALLS)
    return chosen


@pytest.fixture
def cupti(probe: Probe) -> Iterator[ctypes.CDLL]:
    """The fake CUPTI, which counts from 1 and calls the probe back for cudaDriverGetVersion."""
    library = ctypes.CDLL(library_path())
    handle = ctypes.c_void_p()
    assert library.cuptiSubscribe(ctypes.byref(handle), ctypes.c_void_p(probe.callback), None) == 0
    library.cuptiEnableCallback(1, handle, RUNTIME, VERSION)
    library.fake_count_from(0)
    yield library
    library.cuptiUnsubscribe(handle)


def log_of(probe: Probe, cupti: ctypes.CDLL) -> BoundaryLog:
    address = ctypes.cast(cupti.cudaDriverGetVersion, ctypes.c_void_p).value
    assert address
    return probe.log(address)


def test_a_boundary_lies_between_the_launches(probe: Probe, cupti: ctypes.CDLL) -> None:
    log = log_of(probe, cupti)
    before = time.time_ns()
    first = log.note(7)
    launches = [cupti.fake_launch() for _ in range(3)]
    second = log.note(9, BEGINS | ENDS)
    rows = log.take()
    assert {name: str(column.dtype) for name, column in rows.items()} == {
        "counter": "uint32", "time": "int64", "thread": "uint32", "place": "uint32", "flags": "uint8",
    }  # fmt: skip
    assert list(rows) == list(COLUMNS)
    assert rows["counter"].tolist() == [first, second] == [1, 5]
    assert launches == [2, 3, 4]
    assert rows["place"].tolist() == [7, 9]
    assert rows["flags"].tolist() == [0, 3]
    assert rows["thread"].tolist() == [threading.get_native_id()] * 2
    assert before <= rows["time"][0] <= rows["time"][1] <= time.time_ns()
    assert [len(column) for column in log.take().values()] == [0] * 5


def test_many_boundaries_come_back_in_order(probe: Probe, cupti: ctypes.CDLL) -> None:
    """More than one chunk of memory holds, taken in several portions."""
    log = log_of(probe, cupti)
    places = []
    for count in (1, 4096, 4095, 10_000, 0):
        for place in range(count):
            log.note(place)
        taken = log.take()
        assert taken["place"].tolist() == list(range(count))
        places += taken["counter"].tolist()
    assert places == list(range(1, len(places) + 1))
    assert log.lost == 0


def test_moments_of_marks_are_boundaries_too(probe: Probe, cupti: ctypes.CDLL) -> None:
    log = log_of(probe, cupti)
    moments = log.moments()
    facts = {"layer": 3}
    before = time.time_ns()
    moments.opened(5, "attention", None, {})
    launch = cupti.fake_launch()
    moments.began(STEP, 1, 0, "step 1")
    for number in (6, 7):
        moments.opened(number, "loss", "62", facts)
    moments.closed(5)
    rows, texts = moments.take()
    assert {name: str(column.dtype) for name, column in rows.items()} == {
        "what": "uint8", "serial": "int64", "forward": "int64", "time": "int64", "counter": "uint32",
        "thread": "uint32", "texts": "uint32",
    }  # fmt: skip
    assert rows["what"].tolist() == [OPENED, STEP, OPENED, OPENED, CLOSED]
    assert rows["serial"].tolist() == [5, 1, 6, 7, 5]
    assert rows["forward"].tolist() == [-1, 0, -1, -1, -1]
    assert rows["counter"].tolist() == [1, 3, 4, 5, 6]
    assert launch == 2
    mine = threading.get_native_id()
    assert rows["thread"].tolist() == [mine] * 4 + [0]
    assert before <= rows["time"][0]
    assert (np.diff(rows["time"]) >= 0).all()
    assert rows["time"][-1] <= time.time_ns()
    named = [texts[number - 1] for number in rows["texts"].tolist()[:4]]
    assert rows["texts"][4] == 0
    assert named == [
        ("attention", None, None), ("step 1", None, None), ("loss", "62", facts), ("loss", "62", facts),
    ]  # fmt: skip
    assert named[2][2] is facts
    boundaries = log.take()
    assert boundaries["counter"].tolist() == rows["counter"].tolist()
    assert boundaries["place"].tolist() == [0] * 5
    assert [len(column) for column in moments.take()[0].values()] == [0] * 7


def test_names_of_many_moments_stay_apart(probe: Probe, cupti: ctypes.CDLL) -> None:
    """More names than are remembered, each a new object every time, and freed objects whose address serves again."""
    moments = log_of(probe, cupti).moments()
    for _ in range(2):
        expected = [f"mark {number % 300}" for number in range(5000)]
        for number, name in enumerate(expected):
            moments.opened(number, f"{name}!"[:-1], None, {"number": number})
            moments.closed(number)
        rows, texts = moments.take()
        opened = rows["texts"][rows["what"] == OPENED].tolist()
        assert [texts[number - 1][0] for number in opened] == expected
        assert [texts[number - 1][2] for number in opened] == [{"number": i} for i in range(5000)]


def test_moments_of_marks_make_nothing_for_the_garbage_collector(probe: Probe, cupti: ctypes.CDLL) -> None:
    """A mark in a loop is recorded as numbers: the objects that wait to be written do not grow with the loop."""
    if probe.name != "c":
        pytest.skip("of the compiled probe")
    log = log_of(probe, cupti)
    moments = log.moments()
    gc.collect()
    count, holders = len(gc.get_objects()), sys.getrefcount(None)
    for number in range(10_000):
        moments.opened(number, "block", None, {})
        moments.closed(number)
    assert len(gc.get_objects()) - count < 100
    assert sys.getrefcount(None) - holders < 100
    assert len(moments.take()[0]["what"]) == 20_000


def test_each_thread_notes_its_own_number_and_id(probe: Probe, cupti: ctypes.CDLL) -> None:
    log = log_of(probe, cupti)
    said: dict[int, tuple[int, list[int]]] = {}

    def work(number: int) -> None:
        said[number] = threading.get_native_id(), [log.note(number) for _ in range(2000)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = log.take()
    assert sorted(rows["counter"].tolist()) == list(range(1, 8001))
    for number, (thread_id, counters) in said.items():
        own = rows["place"] == number
        assert rows["counter"][own].tolist() == counters
        assert np.unique(rows["thread"][own]).tolist() == [thread_id]


def test_where_cupti_does_not_call_back_the_counter_is_0(probe: Probe, cupti: ctypes.CDLL) -> None:
    log = log_of(probe, cupti)
    assert log.note(1) == 1
    cupti.cuptiEnableCallback(0, ctypes.c_void_p(), RUNTIME, VERSION)
    handle_free = probe.log(ctypes.cast(cupti.fake_latency, ctypes.c_void_p).value or 0)
    assert handle_free.note(2) == 0


def test_other_calls_are_noted_with_their_times(probe: Probe, cupti: ctypes.CDLL) -> None:
    """Those that CUPTI calls back for while nobody reads the counter: here on another thread, without the GIL."""
    log = log_of(probe, cupti)
    log.note(1)
    probe.take_calls()
    threads: list[int] = []

    def wait() -> None:
        threads.append(threading.get_native_id())
        for _ in range(300):
            assert cupti.cudaDriverGetVersion(ctypes.byref(ctypes.c_int())) == 0

    before = time.time_ns()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    log.note(2)
    calls = probe.take_calls()
    assert calls["number"].tolist() == list(range(2, 302))
    assert (calls["thread"] == threads[0]).all()
    assert (calls["domain"] == RUNTIME).all()
    assert (calls["function"] == VERSION).all()
    assert (np.diff(calls["begin"], prepend=before) >= 0).all()
    assert (calls["end"] >= calls["begin"]).all()
    assert calls["end"][-1] <= time.time_ns()
    assert [len(column) for column in probe.take_calls().values()] == [0] * 6


def test_calls_are_noted_while_they_are_followed(probe: Probe, cupti: ctypes.CDLL) -> None:
    log = log_of(probe, cupti)
    probe.take_calls()
    for what in Followed:
        probe.follow(what)
        cupti.cudaDriverGetVersion(ctypes.byref(ctypes.c_int()))
        assert log.note(1) > 0, "the counter is read all the same"
        assert len(probe.take_calls()["begin"]) == (what is Followed.CALLS)


def test_the_compiled_probe_follows_nothing_unknown(probe: Probe) -> None:
    if probe.name == "python":
        pytest.skip("of the compiled probe")
    with pytest.raises(ValueError, match="not 3"):
        probe.follow(3)  # type: ignore[arg-type]


def test_a_forked_child_has_ids_of_its_own(probe: Probe, cupti: ctypes.CDLL) -> None:
    log = log_of(probe, cupti)
    log.note(1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        log = log_of(probe, cupti)
        log.note(2)
        os.write(write, str(int(log.take()["thread"][-1])).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(read, 100)) == child


@pytest.mark.parametrize("arguments", [(), (1, 2, 3), ("text",), (None,)])
def test_the_compiled_probe_refuses_what_is_no_place(
    arguments: tuple[object, ...], cupti: ctypes.CDLL, probe: Probe
) -> None:
    if probe.name == "python":
        pytest.skip("Python looks at types only when rows are taken")
    log = log_of(probe, cupti)
    with pytest.raises(TypeError):
        log.note(*arguments)  # type: ignore[arg-type]
    assert len(log.take()["place"]) == 0


def test_the_compiled_probe_has_no_function_at_0(probe: Probe) -> None:
    if probe.name == "python":
        pytest.skip("of the compiled probe")
    with pytest.raises(ValueError, match="not 0"):
        probe.log(0)


def test_the_c_files_are_clean(tmp_path: Path) -> None:
    """No warning, and nothing that the sanitizers find while the tests above run."""
    if sys.version_info[:2] not in LAYOUTS:
        pytest.skip("needs a Python whose stack is known, which runs all of this C code: .ci/torch has one")
    library_path()  # skips where there is no compiler
    # Of the checkout, also where an installed wheel is tested: a wheel has no sources.
    sources = map(str, sorted((Path(__file__).parents[3] / "src/thence/capture/boundaries").glob("*.c")))
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        pytest.skip("Python's headers are not here")
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g"]
    command = ["cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-DPy_LIMITED_API=0x030B0000"]
    built = tmp_path / "_probe.abi3.so"
    compiled = subprocess.run(
        [*command, *sanitize, "-fPIC", "-shared", f"-I{include}", *sources, "-o", str(built)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert compiled.returncode == 0, compiled.stderr
    find = subprocess.run(["cc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    runtime = find.stdout.strip()
    if not Path(runtime).is_file():
        pytest.skip("the compiler has no library for the sanitizers")
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('thence.capture.boundaries._probe', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "import thence.capture.boundaries; thence.capture.boundaries._probe = module\n"
        "sys.modules['thence.capture.boundaries._probe'] = module\n"
        "import pytest\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-p', 'no:xdist', *sys.argv[2:]]))\n"
    )
    stacks = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("stacks", "chains", "nodes")]
    done = subprocess.run(
        [sys.executable, "-c", program, str(built), __file__, *stacks, "-k", "[c] or c- or stacks or chains or nodes"],
        check=False, capture_output=True, text=True,
        env={**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "THENCE_PROBE": "c"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
    assert "ERROR: AddressSanitizer" not in done.stderr + done.stdout
    assert "runtime error" not in done.stderr + done.stdout


LAUNCH, DRIVER, DRIVER_LAUNCH = 2, 1, 2


@pytest.fixture
def launching(probe: Probe, cupti: ctypes.CDLL) -> ctypes.CDLL:
    """The fake CUPTI, which calls back for cudaLaunchKernel and cuLaunchKernel too."""
    if not probe.notes_launches:
        pytest.skip("the probe in Python notes no launches")
    subscriber = ctypes.c_void_p(ctypes.c_void_p.in_dll(cupti, "fake_subscriber").value)
    for domain, function in ((RUNTIME, LAUNCH), (DRIVER, DRIVER_LAUNCH)):
        assert cupti.cuptiEnableCallback(1, subscriber, domain, function) == 0
    probe.take_calls()
    return cupti


def test_a_launch_is_noted_once_between_its_boundaries(probe: Probe, launching: ctypes.CDLL) -> None:
    """A call of the runtime calls the driver, whose own number no activity has."""
    log = log_of(probe, launching)
    log.note(1)
    expected = [launching.fake_launch(), launching.fake_driver_launch(0), launching.fake_launch()]
    log.note(2)
    calls, boundaries = probe.take_calls(), log.take()
    assert calls["number"].tolist() == expected == [2, 3, 4]
    assert calls["domain"].tolist() == [RUNTIME, DRIVER, RUNTIME]
    assert calls["thread"].tolist() == [threading.get_native_id()] * 3
    times = [boundaries["time"][0], *np.stack([calls["begin"], calls["end"]], 1).ravel()]
    assert [*times, boundaries["time"][1]] == sorted([*times, boundaries["time"][1]])


def test_launches_of_threads_that_come_and_go_are_all_noted(probe: Probe, launching: ctypes.CDLL) -> None:
    """While another thread takes them."""
    said: dict[int, list[int]] = {}
    taken: dict[int, list[int]] = {}
    going = True

    def take() -> None:
        calls = probe.take_calls()
        for thread, number in zip(calls["thread"].tolist(), calls["number"].tolist(), strict=True):
            taken.setdefault(thread, []).append(number)

    def work(number: int) -> None:
        numbers = [launching.fake_launch() for _ in range(100 * number)]
        said.setdefault(threading.get_native_id(), []).extend(numbers)

    def taking() -> None:
        while going:
            take()

    taker = threading.Thread(target=taking)
    taker.start()
    for _ in range(5):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    going = False
    taker.join()
    take()
    assert taken == said
    assert sum(map(len, said.values())) == 5 * 100 * 36
    assert probe.lost_calls == 0
