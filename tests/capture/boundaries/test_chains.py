"""Chains that are read at launches become places and boundaries."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from fake_cupti import library_path
from thence.capture.boundaries.chains import FIRST_OWN, MODULE_CALL, Chains
from thence.capture.boundaries.log import READ
from thence.capture.boundaries.places import LINE, MODULE, Place, Places
from thence.capture.boundaries.probe import Followed, choose_probe
from thence.capture.boundaries.stacks import why_unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thence.capture.boundaries.log import BoundaryLog

NEVER = (1 << 63) - 1


class Setting:
    """The fake CUPTI calls the compiled probe back for every launch."""

    def __init__(self) -> None:
        probe = choose_probe()
        why = why_unreadable(probe.compiled)
        if why is not None:
            pytest.skip(f"stacks cannot be read: {why}")
        self.library = ctypes.CDLL(library_path())
        self.handle = ctypes.c_void_p()
        callback = ctypes.c_void_p(probe.callback)
        assert self.library.cuptiSubscribe(ctypes.byref(self.handle), callback, None) == 0
        for domain, function in ((2, 1), (2, 2), (1, 2)):
            self.library.cuptiEnableCallback(1, self.handle, domain, function)
        self.library.fake_count_from(100)
        probe.follow(Followed.CALLS)
        probe.take_calls()
        address = ctypes.cast(self.library.cudaDriverGetVersion, ctypes.c_void_p).value
        self.probe = probe
        self.log: BoundaryLog = probe.log(address or 0)
        self.places = Places()
        self.chains = self.log.chains = Chains(probe.compiled, self.places)
        self.chains.begin()

    def rows(self, kind: int) -> list[tuple[int, str | None, int]]:
        """Counter, name and line of the places of a kind."""
        rows = self.log.take()
        self.taken = rows
        found = [
            (counter, self.places[place])
            for counter, place in zip(rows["counter"].tolist(), rows["place"].tolist(), strict=True)
            if place
        ]
        return [(counter, place.name, place.line) for counter, place in found if place.kind == kind]


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting()
    yield made
    made.chains.end()
    made.probe.take_calls()
    made.library.cuptiUnsubscribe(made.handle)


def compiled(text: str, name: str = "f") -> Callable[..., Any]:
    space: dict[str, Any] = {}
    exec(compile(text, "/home/user/program.py", "exec"), space)
    function: Callable[..., Any] = space[name]
    return function


TWICE = "def f(launch):\n    a = launch()\n    return a, launch(), launch(\n    )\n"


def test_a_row_is_a_change_and_between_two_calls_the_function_is_known(setting: Setting) -> None:
    function = compiled(TWICE)
    setting.chains.own(function.__code__)
    assert function(setting.library.fake_launch) == (101, 102, 103)
    assert setting.rows(LINE) == [(100, "f", 2), (101, "f", 0), (101, "f", 3)]
    assert setting.taken["flags"].tolist() == [READ] * 3
    assert setting.taken["thread"].tolist() == [threading.get_native_id()] * 3
    calls = setting.probe.take_calls()
    times = setting.taken["time"]
    # From right before its first launch to the end of it, in the function, and from right before the next one.
    assert times.tolist() == [
        calls["begin"][0] - 1, calls["end"][0], calls["begin"][1] - 1,
    ]  # fmt: skip
    setting.library.fake_launch()
    assert setting.rows(LINE) == [(103, None, 0)]
    setting.library.fake_launch()
    assert setting.rows(LINE) == []


def test_rows_that_come_while_rows_are_taken_wait(setting: Setting) -> None:
    function = compiled(TWICE)
    setting.chains.own(function.__code__)
    function(setting.library.fake_launch)
    assert not len(setting.chains.take(1)["place"])
    assert len(setting.chains.take(NEVER)["place"]) == 3


def test_the_module_is_the_innermost_call_and_its_self(setting: Setting) -> None:
    call = compiled("def call(self, f, *rest):\n    return f(*rest)\n", "call")
    setting.chains.watch(call.__code__, MODULE_CALL)
    outer, inner, unknown = object(), object(), object()
    for module, name in ((outer, "net"), (inner, "net.layer")):
        number = setting.places.number(Place(MODULE, 0, name))
        setting.chains.native.add_module(id(module), number)
    launch = setting.library.fake_launch
    call(outer, launch)
    call(outer, call, inner, launch)
    call(inner, call, unknown, launch)
    call(outer, call, unknown, launch)
    setting.chains.native.add_module(id(outer), 0)  # it is gone
    call(outer, launch)
    # These two have no place around both, so between their launches it is in none.
    assert [(counter, name) for counter, name, _ in setting.rows(MODULE)] == [
        *((100, "net"), (101, None), (101, "net.layer")),
        *((103, None), (103, "net"), (104, None)),
    ]


def test_frames_that_are_nobodys_are_passed_over(setting: Setting) -> None:
    """C code that calls back, generators, and library code between the user's functions."""
    text = (
        "def f(launch, library):\n"
        "    def inner(one):\n"
        "        return launch()\n"
        "    library(lambda: list(map(inner, [1])))\n"
        "    return sum(\n"
        "        inner(one) for one in range(1))\n"
    )
    function = compiled(text)
    space: dict[str, Any] = {}
    exec(compile("def library(f):\n    return f()\n", "/lib/library.py", "exec"), space)
    codes = [function.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if hasattr(one, "co_code")]
        setting.chains.own(code)
    function(setting.library.fake_launch, space["library"])
    rows = setting.log.take()
    chains = []
    for innermost in rows["place"].tolist():
        chain = []
        number = innermost
        while number:
            place = setting.places[number]
            chain.append((str(place.name).rpartition(".")[2], place.line))
            number = place.parent
        chains.append(chain[::-1])
    assert chains[0] == [("f", 4), ("<lambda>", 4), ("inner", 3)]
    assert chains[-1][0] in {("f", 5), ("f", 6)}
    assert chains[-1][1:] == [("<genexpr>", 6), ("inner", 3)]


def test_threads_have_chains_of_their_own(setting: Setting) -> None:
    function = compiled("def f(launch, n):\n    for _ in range(n):\n        launch()\n        launch()\n")
    setting.chains.own(function.__code__)
    threads = [threading.Thread(target=function, args=(setting.library.fake_launch, 300)) for _ in range(6)]
    for thread in threads:
        thread.start()
    rows = [setting.rows(LINE)]
    for thread in threads:
        thread.join()
    rows.append(setting.rows(LINE))
    lines = [line for part in rows for _, _, line in part]
    assert lines.count(3) == lines.count(4) == 6 * 300
    assert setting.chains.lost() == (0, 0, 0)


def test_too_many_chains_lack_their_callers(setting: Setting) -> None:
    """Each way down a recursion is one; the innermost line is known in any case."""
    function = compiled(
        "def f(launch, n, way):\n    if n == 0:\n        return launch()\n"
        "    if way & 1: return f(launch, n - 1, way >> 1)\n"
        "    return f(launch, n - 1, way >> 1)\n"
    )
    setting.chains.own(function.__code__)
    began = time.perf_counter()
    for way in range(1 << 12):
        function(setting.library.fake_launch, 12, way)
    assert time.perf_counter() - began < 60
    rows = setting.rows(LINE)
    assert sum(line == 3 for _, _, line in rows) == 1 << 12
    assert len(setting.places) < 1 << 14


def test_a_forked_child_reads_no_stack_of_its_parents(setting: Setting) -> None:
    function = compiled(TWICE)
    setting.chains.own(function.__code__)
    function(setting.library.fake_launch)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        function(setting.library.fake_launch)
        os.write(write, str(len(setting.chains.native.take_changes())).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"0"
    assert len(setting.rows(LINE)) == 3


def test_numbers_of_kinds_are_those_of_the_header(setting: Setting) -> None:
    function = compiled(TWICE)
    setting.chains.own(function.__code__)
    assert setting.chains.kind(function.__code__) == FIRST_OWN
    assert setting.chains.kind(compiled.__code__) == 0


def test_where_calls_are_recorded_stacks_alone_are_read(setting: Setting) -> None:
    function = compiled(TWICE)
    setting.chains.own(function.__code__)
    setting.probe.follow(Followed.STACKS)
    began = time.time_ns()
    function(setting.library.fake_launch)
    assert [line for _, _, line in setting.rows(LINE)] == [2, 0, 3]
    assert not len(setting.probe.take_calls()["begin"])
    # The clock of who records them may be behind.
    assert began - 5000 <= setting.taken["time"][0] < began + 10**9


def test_of_calls_that_are_not_followed_no_stack_is_read(setting: Setting) -> None:
    function = compiled(TWICE)
    setting.chains.own(function.__code__)
    setting.probe.follow(Followed.NOTHING)
    function(setting.library.fake_launch)
    setting.probe.follow(Followed.CALLS)
    assert setting.rows(LINE) == []
    assert not len(setting.probe.take_calls()["begin"])
    function(setting.library.fake_launch)
    assert [line for _, _, line in setting.rows(LINE)] == [2, 0, 3]
