"""Backward passes that a thread of autograd's runs, as on a GPU: with an engine and nodes made for the test."""

from __future__ import annotations

import itertools
import threading
from ctypes import CFUNCTYPE, c_uint64, c_void_p, cast
from types import SimpleNamespace
from typing import Any

import pytest

from launching import CompiledCounter
from thence.capture.boundaries.chains import Chains
from thence.capture.boundaries.log import BEGINS, ENDS, BoundaryLog
from thence.capture.boundaries.places import LINE, MODULE, PHASE, Place, Places
from thence.capture.torch.backward import BackwardCalls, nodes_of
from thence.capture.torch.phases import PhasePlaces
from thence.capture.torch.stack_tracker import StackCommon
from thence.capture.torch.threads import Common, Threads

LEAF = (1 << 64) - 1


class Node:
    """A node of an autograd graph."""

    def __init__(self, number: int, *after: Node, device: int = 0, gradient: object = None) -> None:
        self.number = number
        self.next_functions = [(one, 0) for one in after]
        self.hooks: list[Any] = []
        self.hooked = 0
        self._input_metadata = [SimpleNamespace(device=device)]
        if number == LEAF:
            self.variable = SimpleNamespace(grad=gradient)

    def _sequence_nr(self) -> int:
        return self.number

    def register_prehook(self, hook: Any) -> Any:
        self.hooked += 1
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))


class Engine:
    """Runs nodes on a thread of its own, leaves at once and others by descending number."""

    def __init__(self, launch: Any) -> None:
        self.callbacks: list[Any] = []
        self.launch = launch

    def queue_callback(self, function: Any) -> None:
        self.callbacks.append(function)

    def run(self, root: Node) -> None:
        nodes = sorted({id(n): n for n in nodes_of([SimpleNamespace(grad_fn=root)])}.values(), key=lambda n: -n.number)
        ordered = []
        for node in (one for one in nodes if one.number != LEAF):
            ordered.append(node)
            ordered += [one for one, _ in node.next_functions if one.number == LEAF]

        def work() -> None:
            for node in ordered:
                for hook in list(node.hooks):
                    hook(None)
                self.launch(node)
            for callback in self.callbacks:
                callback()
            self.callbacks.clear()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


class Setting:
    """A thread that has run a forward pass in some modules, and an engine."""

    def __init__(self, devices: int = 1) -> None:
        self.counter = 0
        self.launched: list[tuple[int, int, Node | None]] = []
        self.places = Places()
        self.log = BoundaryLog(lambda: self.counter)
        self.common = Common(self.log, self.places)
        self.threads = Threads(self.common)
        self.sequence = itertools.count()
        self.number = 0
        self.common.sequence = lambda: self.number
        self.engine = Engine(self.launch)
        torch = SimpleNamespace(
            _C=SimpleNamespace(_len_torch_dispatch_stack=lambda: 0),
            cuda=SimpleNamespace(is_initialized=lambda: devices > 1, device_count=lambda: devices),
            autograd=SimpleNamespace(Variable=SimpleNamespace(_execution_engine=self.engine)),
        )
        self.phases = PhasePlaces(self.places)
        self.calls = BackwardCalls(torch, self.common, self.threads, self.phases)

    def place(self, kind: int, name: str) -> int:
        return self.places.number(Place(kind, 0, name))

    def launch(self, node: Node | None = None) -> None:
        self.counter += 1
        self.launched.append((self.counter, threading.get_native_id(), node))

    def forward(self, module: str, line: str, *after: Node, **more: Any) -> Node:
        thread = self.threads.now
        self.common.module(thread, self.place(MODULE, module))
        self.common.line(thread, self.place(LINE, line))
        node = Node(self.number, *after, **more)
        self.number += 1
        self.launch()
        return node

    def backward(self, root: Node) -> None:
        def event(method: Any) -> None:
            method()

        def engine_run(t_outputs: Any) -> None:
            event(self.calls.enter)
            self.engine.run(t_outputs[0].grad_fn)
            event(self.calls.leave)

        engine_run([SimpleNamespace(grad_fn=root)])

    def known(self) -> list[tuple[Node | None, dict[int, str | None]]]:
        """Each launch's node, and the places of the last boundaries of its thread."""
        rows = self.log.take()
        known = dict(self.places.take())
        found = []
        for counter, thread, node in self.launched:
            mine = (rows["thread"] == thread) & (rows["counter"] < counter)
            last: dict[int, str | None] = {}
            for number in rows["place"][mine]:
                if number:
                    last[known[int(number)].kind] = known[int(number)].name
            assert not rows["flags"][mine][-1] & ENDS
            found.append((node, last))
        self.rows = rows
        return found


class StackSetting(Setting):
    """The same, with the compiled probe: the places of the forward are those below its thread's stack."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = CompiledCounter("")
        native = self.compiled.log.stack_reader
        assert native is not None
        self.peek = CFUNCTYPE(c_uint64)(lambda: self.number)
        self.log = self.compiled.log
        self.log.chains = self.chains = Chains(native, self.places)
        self.chains.begin()
        native.count_nodes(cast(self.peek, c_void_p).value)
        native.here()
        self.common = StackCommon(self.log, self.places, self.chains)
        self.common.sequence = lambda: self.number
        self.threads = Threads(self.common)
        torch = self.calls._torch
        self.calls = BackwardCalls(torch, self.common, self.threads, self.phases)

    def launch(self, node: Node | None = None) -> None:
        number = self.compiled.library.fake_launch()
        self.launched.append((number, threading.get_native_id(), node))

    def forward(self, module: str, line: str, *after: Node, **more: Any) -> Node:
        self.chains.native.go_below(0, 1, self.place(MODULE, module), self.place(LINE, line))
        node = Node(self.number, *after, **more)
        self.number += 1
        self.launch()
        return node

    def backward(self, root: Node) -> None:
        self.chains.native.go_below(0, 0, 0, 0)
        super().backward(root)

    def known(self) -> list[tuple[Node | None, dict[int, str | None]]]:
        try:
            return super().known()
        finally:
            self.chains.end()
            self.compiled.end()


def chain(setting: Setting, count: int, width: int = 3, **more: Any) -> tuple[Node, dict[Node, tuple[str, str]]]:
    """A forward pass of nodes one after another, and module and line of each."""
    node, made = None, {}
    for at in range(count):
        where = (f"layer {at // width}", f"line {at // (width - 1)}")
        options = {name: value(at) for name, value in more.items()}
        node = setting.forward(*where, *([node] if node else []), **options)
        made[node] = where
    setting.common.module(setting.threads.now, setting.common.nowhere[0])
    assert node is not None
    return node, made


@pytest.mark.parametrize("kind", [Setting, StackSetting])
def test_nodes_have_the_places_of_their_forward_with_few_hooks(kind: type[Setting]) -> None:
    setting = kind()
    root, made = chain(setting, 60)
    setting.backward(root)
    seen = 0
    for node, last in setting.known():
        if node is not None:
            seen += 1
            assert (last[MODULE], last[LINE], last[PHASE]) == (*made[node], "backward")
    assert seen == 60
    changes = sum(a != b for a, b in itertools.pairwise(made.values()))
    assert sum(node.hooked for node in made) == changes + 1
    assert not any(node.hooks for node in made)


@pytest.mark.parametrize("kind", [Setting, StackSetting])
def test_the_threads_say_when_they_wait(kind: type[Setting]) -> None:
    setting = kind()
    root, _ = chain(setting, 9)
    for _ in range(2):
        setting.backward(root)
        setting.launch()
    setting.known()
    here = threading.get_native_id()
    by_thread: dict[int, list[int]] = {}
    for thread, flags in zip(setting.rows["thread"], setting.rows["flags"], strict=True):
        by_thread.setdefault(int(thread), []).append(int(flags) & (BEGINS | ENDS))
    mine = [flags for flags in by_thread.pop(here) if flags]
    assert mine == [ENDS, BEGINS] * 2
    assert len(by_thread) == 2
    for flags in by_thread.values():
        assert flags[0] == BEGINS
        assert flags[-1] == ENDS
        assert not any(flags[1:-1])


@pytest.mark.parametrize("kind", [Setting, StackSetting])
def test_accumulation_is_a_phase_and_the_node_after_it_is_itself_again(kind: type[Setting]) -> None:
    setting = kind()
    first = setting.forward("a", "1", Node(LEAF, gradient=None))
    second = setting.forward("a", "1", first, Node(LEAF, gradient=object()))
    root = setting.forward("a", "1", second)
    setting.backward(root)
    found = [(node.number, last[PHASE]) for node, last in setting.known() if node is not None]
    assert found == [(2, "backward"), (1, "backward"), (LEAF, "gradient"), (0, "backward"), (LEAF, "backward")]


def test_where_devices_take_turns_every_node_has_a_hook() -> None:
    setting = Setting(devices=2)
    root, made = chain(setting, 12, device=lambda at: at % 2)
    setting.backward(root)
    assert [node.hooked for node in made] == [1] * 12
    setting = Setting(devices=2)
    root, made = chain(setting, 12, device=lambda _at: 1)
    setting.backward(root)
    assert sum(node.hooked for node in made) < 12


def test_forward_passes_of_two_threads_are_not_told_apart() -> None:
    setting = Setting()
    root, made = chain(setting, 6)
    number = setting.number
    setting.number = 0
    other = threading.Thread(target=chain, args=(setting, 6))
    other.start()
    other.join()
    setting.number = number
    setting.backward(root)
    assert setting.calls.unknown_threads
    for node, last in setting.known():
        if node in made:
            assert last.get(MODULE) is None
            assert last[PHASE] == "backward"


def test_a_thread_that_made_fewer_nodes_cannot_have_made_the_root() -> None:
    setting = Setting()
    other = threading.Thread(target=chain, args=(setting, 6))
    other.start()
    other.join()
    setting.number = 100
    root, made = chain(setting, 6)
    setting.backward(root)
    assert not setting.calls.unknown_threads
    for node, last in setting.known():
        if node in made:
            assert last[MODULE] == made[node][0]
