"""The node of autograd's that a thread runs, and the places of its forward: with nodes and threads of the test's."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fake_cupti
from thence.capture.boundaries.chains import Chains
from thence.capture.boundaries.node_places import LEAF, MAX_ROWS, MAX_THREADS, NodePlaces
from thence.capture.boundaries.places import LINE, MODULE, PHASE, Place, Places
from thence.capture.boundaries.probe import Followed, choose_probe
from thence.capture.boundaries.stacks import why_unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FORWARD, ENGINE = 7, 9
"""Numbers of the threads, as PyTorch has them."""
NEVER = (1 << 63) - 1


class Node:
    """A node, its block of counts, and its Python object: number at the third word, maker three words on."""

    def __init__(self, number: int, maker: int, at: int = 2) -> None:
        self.number, self.maker = number, maker
        self.words = (ctypes.c_uint64 * 16)()
        self.block = (ctypes.c_uint64 * 2)(0, 3)
        self.words[1] = 3
        self.words[at], self.words[at + 3] = number, maker
        self.address = ctypes.addressof(self.words)
        self.object = (ctypes.c_uint64 * 4)(1, 0, self.address, ctypes.addressof(self.block))

    def counts(self) -> tuple[int, int]:
        return self.words[1], self.block[1]


class Setting:
    """A copy of the compiled probe, whose knowledge of nodes is its own, between the fakes of CUPTI and PyTorch."""

    def __init__(self, folder: Path, words: int) -> None:
        compiled = choose_probe().compiled
        if compiled is None:
            pytest.skip("the probe was not compiled")
        copy = folder / "_probe.abi3.so"
        shutil.copy(str(compiled.__file__), copy)
        spec = importlib.util.spec_from_file_location("thence.capture.boundaries._probe", copy)
        assert spec is not None
        assert spec.loader is not None
        self.native: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.native)
        if (why := why_unreadable(self.native)) is not None:
            pytest.skip(f"stacks cannot be read: {why}")
        self.cupti = ctypes.CDLL(fake_cupti.library_path())
        source, library = fake_cupti.HERE / "fake_autograd.c", folder / "libautograd.so"
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
        self.torch = ctypes.CDLL(str(library))
        self.torch.fake_words(words)
        self.words = words
        self.handle = ctypes.c_void_p()
        callback = ctypes.c_void_p(self.native.CALLBACK)
        assert self.cupti.cuptiSubscribe(ctypes.byref(self.handle), callback, None) == 0
        self.cupti.cuptiEnableCallback(1, self.handle, 2, 2)
        self.native.follow(Followed.CALLS)
        self.cupti.fake_count_from(100)
        self.places = Places()
        self.chains = Chains(self.native, self.places)
        self.chains.begin()
        self.chains.phases = (self.place(PHASE, "backward"), self.place(PHASE, "gradient"))
        self.native.count_nodes(self.function("fake_upcoming"))

    def function(self, name: str) -> int:
        return ctypes.cast(getattr(self.torch, name), ctypes.c_void_p).value or 0

    def look(self) -> int:
        known = self.function("fake_current_node"), self.function("fake_thread_id")
        return int(self.native.look_for_nodes(*known))

    def run(self, node: Node | None) -> None:
        address = ctypes.c_uint64(node.address if node else 0)
        block = ctypes.c_uint64(ctypes.addressof(node.block) if node else 0)
        self.torch.fake_run(address, block)

    def thread(self, number: int, upcoming: int) -> None:
        self.torch.fake_thread(ctypes.c_uint64(number), ctypes.c_uint64(upcoming))

    def tried(self, node: Node, number: int, maker: int) -> bool | None:
        self.run(node)
        agrees: bool | None = self.native.try_node(ctypes.addressof(node.object), number, maker)
        self.run(None)
        return agrees

    def use(self) -> None:
        assert self.look() == self.words
        for number in (5, 6, 8):
            assert self.tried(Node(number, FORWARD), number, FORWARD)
        assert self.native.use_nodes()

    def place(self, kind: int, name: str) -> int:
        return self.places.number(Place(kind, 0, name))

    def forward(self, first: int, count: int) -> list[Node]:
        """Nodes of this thread, each in a module and a line of its own number."""
        self.thread(FORWARD, first)
        self.native.here()
        for number in range(first, first + count):
            where = self.place(MODULE, f"m{number}"), self.place(LINE, f"l{number}")
            self.native.go_below(0, 1, *where)
            self.thread(FORWARD, number + 1)
            self.cupti.fake_launch()
        self.native.go_below(0, 0, 0, 0)
        self.native.here()
        return [Node(number, FORWARD) for number in range(first, first + count)]

    def on_engine(self, work: Callable[[], None]) -> int:
        """Run on a thread of the engine's; returns its id."""
        ids: list[int] = []

        def there() -> None:
            ids.append(threading.get_native_id())
            work()
            self.run(None)

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        return ids[0]

    def launched(self, node: Node | None) -> int:
        self.run(node)
        return int(self.cupti.fake_launch())

    def found(self, thread: int, numbers: list[int]) -> list[tuple[str | None, ...]]:
        """Module, line and phase of launches of a thread."""
        rows = self.chains.take(NEVER)
        result = []
        for number in numbers:
            mine = (rows["thread"] == thread) & (rows["counter"] < number)
            last: dict[int, str | None] = {}
            for place in rows["place"][mine].tolist():
                last[self.places[place].kind] = self.places[place].name
            result.append((last.get(MODULE), last.get(LINE), last.get(PHASE)))
        return result

    def end(self) -> None:
        self.chains.end()
        self.native.take_calls()
        self.cupti.cuptiUnsubscribe(self.handle)


@pytest.fixture(params=[1, 2], ids=["intrusive", "shared"])
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path, request.param)
    yield made
    made.end()


def test_nodes_are_known_once_enough_of_them_agree(setting: Setting) -> None:
    assert setting.look() == setting.words
    nodes = [Node(number, FORWARD) for number in (4, 5)]
    assert not setting.native.use_nodes()
    for node in nodes:
        assert setting.tried(node, node.number, FORWARD) is True
        assert node.counts() == (3, 3)
    assert setting.tried(Node(6, 99), 6, FORWARD) is None  # of another thread
    assert setting.native.use_nodes()
    assert setting.native.nodes_known()
    assert not setting.native.in_node()
    setting.run(nodes[0])
    assert setting.native.in_node()
    setting.native.hooks_are_set(1)
    assert not setting.native.in_node()
    setting.native.hooks_are_set(-1)
    setting.run(None)
    assert nodes[0].counts() == (3, 3)


def test_fields_that_lie_elsewhere_are_found(setting: Setting) -> None:
    assert setting.look()
    for number in (4, 5):
        assert setting.tried(Node(number, FORWARD, at=3), number, FORWARD)
    assert setting.native.use_nodes()


@pytest.mark.parametrize("words", [0, 3])
def test_a_function_that_returns_something_else_is_not_used(setting: Setting, words: int) -> None:
    setting.torch.fake_words(words)
    assert setting.look() == 0
    assert setting.tried(Node(4, FORWARD), 4, FORWARD) is False
    assert not setting.native.use_nodes()


def test_nodes_that_disagree_are_not_used(setting: Setting) -> None:
    assert setting.look()
    assert setting.tried(Node(4, FORWARD), 4, FORWARD) is True
    assert setting.tried(Node(5, FORWARD), 6, FORWARD) is False
    other = Node(7, FORWARD)
    setting.run(other)  # another node than Python's
    assert not setting.native.try_node(ctypes.addressof(Node(7, FORWARD).object), 7, FORWARD)
    setting.run(None)
    assert not setting.native.use_nodes()


def test_what_the_engine_launches_has_the_places_of_its_forward(setting: Setting) -> None:
    setting.use()
    nodes = setting.forward(10, 6)
    leaf, strange = Node(LEAF, FORWARD), Node(3, FORWARD)
    order = [nodes[5], nodes[4], nodes[4], leaf, nodes[3], nodes[0], strange]
    numbers: list[int] = []
    setting.chains.nodes.calls(time.time_ns(), setting.place(LINE, "backward()"))
    setting.chains.take(NEVER)  # the forward is written before its backward pass comes
    thread = setting.on_engine(lambda: numbers.extend(setting.launched(one) for one in order))
    expected = [
        *((f"m{n}", f"l{n}", "backward") for n in (15, 14, 14)),
        ("m14", "l14", "gradient"),
        *((f"m{n}", f"l{n}", "backward") for n in (13, 10)),
        (None, "backward()", "backward"),
    ]
    assert setting.found(thread, numbers) == expected
    assert all(node.counts() == (3, 3) for node in order)


def test_nodes_that_are_made_inside_of_others_have_their_places(setting: Setting) -> None:
    """As in a backward pass that builds a graph: the second one finds the places of the forward."""
    setting.use()
    nodes = setting.forward(10, 3)
    numbers: list[int] = []

    def first() -> None:
        setting.thread(ENGINE, 0)
        setting.run(nodes[2])
        setting.native.here()
        for at, node in enumerate((nodes[2], nodes[1])):
            setting.run(node)
            setting.thread(ENGINE, at + 1)
            setting.cupti.fake_launch()

    def second() -> None:
        third = Node(0, ENGINE + 1)
        setting.thread(ENGINE + 1, 0)
        setting.run(Node(1, ENGINE))
        setting.native.here()
        setting.thread(ENGINE + 1, 1)
        made = [Node(1, ENGINE), Node(0, ENGINE), third]
        numbers.extend(setting.launched(one) for one in made)

    setting.on_engine(first)
    thread = setting.on_engine(second)
    expected = [("m11", "l11"), ("m12", "l12"), ("m11", "l11")]
    assert [one[:2] for one in setting.found(thread, numbers)] == expected


def test_rows_of_nodes_are_bounded() -> None:
    nodes = NodePlaces(no_line=0)
    for maker in range(MAX_THREADS + 5):
        one = np.array([maker], np.uint32)
        nodes.add(one, np.array([0], np.uint64), np.array([9], np.uint64), one + 1, one + 1)
    assert nodes.find(np.array([4]), np.array([3], np.uint64))[0].tolist() == [0]
    assert nodes.find(np.array([5]), np.array([3], np.uint64))[0].tolist() == [6]
    count = MAX_ROWS + 1000
    begins = np.arange(10, 10 + count, dtype=np.uint64)
    places = np.arange(1, count + 1, dtype=np.uint32)
    nodes.add(np.full(count, 5), begins, begins + np.uint64(1), places, places)
    wanted = begins[[0, 999, 1000, -1]]
    assert nodes.find(np.full(4, 5), wanted)[1].tolist() == [0, 0, 1001, count]
