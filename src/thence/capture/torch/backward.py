"""Gives each node of a backward pass the module and the line of its forward operation.

Autograd numbers the nodes in the order in which a thread makes them, and the thread's `ForwardLog` holds in which
module and line they were made. Of the nodes that are ready, the engine runs that with the highest number first, and a
node is ready when all nodes that use its output have run; those were made later. So the graph is walked once before a
backward pass, and only nodes at which module or line change along that order get a prehook. If several devices take
part, a thread for each device runs its own nodes, and every node gets a prehook.

Nodes that accumulate gradients into leaves share one number and run as soon as they are ready. They launch something
if the leaf already has a gradient: such nodes get a prehook for the phase ``gradient``, and the next node gets a
prehook, too.

The thread that calls the engine waits for it, unless it runs the nodes itself.

Where the compiled probe can read which node runs (`thence.capture.torch.running_nodes`), no walk, no hook and no Python
code is needed: at each launch the probe notes the node's number and thread, and these are joined with the forward
when rows are written (`thence.capture.boundaries.node_places`). Everything that leaves' nodes launch has the phase
``gradient`` then. Hooks are still set until the probe has been tested, and while an observer is called with each
place, which is during captures.
"""

from __future__ import annotations

import functools
import sys
from time import time_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.capture.boundaries.log import BEGINS, ENDS
from thence.capture.boundaries.node_places import LEAF
from thence.capture.torch.threads import ForwardLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.capture.boundaries.log import BoundaryLog
    from thence.capture.torch.phases import PhasePlaces
    from thence.capture.torch.running_nodes import RunningNodes
    from thence.capture.torch.threads import Common, Thread, Threads


class _Run:
    """One call of the engine.

    Attributes:
        caller: the thread that called the engine.
        state: the caller's state at the call; None for calls that are not followed.
        line: number of the place of the caller's innermost line.
        on_caller: whether the caller ran nodes itself.
        by_number: whether the probe reads nodes, without hooks.
        hooks: handles of the prehooks, to be removed.
        done: whether the call has ended.
    """

    def __init__(self, caller: Thread, line: int) -> None:
        self.caller = caller
        self.state: tuple[Any, ...] | None = None
        self.line = line
        self.on_caller = False
        self.by_number = False
        self.hooks: list[Any] = []
        self.done = False


class BackwardCalls:
    """Follows backward passes: the `Handler` of ``torch.autograd.graph._engine_run_backward``.

    Args:
        log: the log whose observer is called with each place.
        nodes: reads the nodes that run, by the compiled probe; None if this is not available.
    """

    def __init__(
        self,
        torch: Any,
        common: Common,
        threads: Threads,
        phases: PhasePlaces,
        log: BoundaryLog | None = None,
        nodes: RunningNodes | None = None,
    ) -> None:
        self._torch = torch
        self._common = common
        self._threads = threads
        self._phases = phases
        self._boundaries = log
        self._nodes = nodes
        self._runs: list[_Run] = []
        self.unknown_threads = False
        self.compiled = False

    def enter(self) -> None:
        """Handle a call of the engine."""
        thread = self._threads.now
        run = _Run(thread, self._common.here(thread)[1])
        self._runs.append(run)
        if self._traces():
            return
        if self._nodes is not None and self._nodes.trouble is None and not self._observed():
            self._enter_by_number(run, self._nodes)
            return
        if self._nodes is not None:
            self._nodes.called()
            self._nodes.native.hooks_are_set(1)
        roots = sys._getframe(2).f_locals["t_outputs"]  # noqa: SLF001 - no other way to the caller's frame
        self._common.made(thread)
        self._hook(run, nodes_of(roots))
        self._common.cross(thread, 0, ENDS)
        run.state = self._common.enter_engine(thread)

    def leave(self) -> None:
        """Handle the end of a call of the engine."""
        thread = self._threads.now
        run = next((run for run in reversed(self._runs) if run.caller is thread), None)
        if run is None:
            return  # it began before the recording
        self._runs.remove(run)
        run.done = True
        if run.state is None:
            return
        if self._nodes is not None and run.by_number:
            self._leave_by_number(run, self._nodes)
            return
        if self._nodes is not None:
            self._nodes.native.hooks_are_set(-1)
        for hook in run.hooks:
            hook.remove()
        self._restore(thread, run.state, 0 if run.on_caller else BEGINS)

    def resume(self) -> None:
        """Do nothing: the function is no generator."""

    @property
    def running(self) -> bool:
        """Whether any thread is in a call of the engine."""
        return bool(self._runs)

    def inside(self) -> bool:
        """Whether the calling thread runs a node."""
        return self._torch._C._current_autograd_node() is not None  # noqa: SLF001 - no public name

    def _observed(self) -> bool:
        return self._boundaries is not None and self._boundaries.observer is not None

    def _enter_by_number(self, run: _Run, nodes: RunningNodes) -> None:
        run.by_number = True
        nodes.places.calls(time_ns(), run.line if len(self._runs) == 1 else 0)
        self._common.cross(run.caller, 0, ENDS)
        run.state = self._common.enter_engine(run.caller)
        run.caller.phase = self._phases.backward

    def _leave_by_number(self, run: _Run, nodes: RunningNodes) -> None:
        assert run.state is not None
        ran = self._common.leave_engine(run.caller, run.state)
        self._common.cross(run.caller, run.caller.phase, 0 if ran else BEGINS)
        nodes.places.calls(time_ns(), self._runs[0].line if len(self._runs) == 1 else 0)

    def _traces(self) -> bool:
        """Whether this call only traces, as AOTAutograd does, or runs compiled code in place of nodes."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "compiled_autograd_enabled", False):
            self.compiled = True
            return True
        return bool(self._torch._C._len_torch_dispatch_stack())  # noqa: SLF001 - no public name

    def _hook(self, run: _Run, nodes: list[Any]) -> None:
        """Put prehooks on the nodes at which module, line or phase may change."""
        numbers = np.array([node._sequence_nr() for node in nodes], np.uint64)  # noqa: SLF001 - no public name
        leaf = numbers == LEAF
        order = np.argsort(numbers)[::-1]  # as the engine runs nodes that are ready
        order = order[~leaf[order]]
        modules, lines = self._forward(run, numbers[order])
        changes = np.ones(len(order), bool)
        if len(order) and not self._several_devices(nodes, order):
            changes[1:] = (modules[1:] != modules[:-1]) | (lines[1:] != lines[:-1])
        accumulating = self._accumulating(nodes, np.flatnonzero(leaf))
        self._after_leaves(nodes, order, changes, accumulating)
        for index in np.flatnonzero(changes):
            module, line = int(modules[index]), int(lines[index])
            begin = functools.partial(self._begin, run, module, line, self._phases.backward)
            run.hooks.append(nodes[order[index]].register_prehook(begin))
        for node in accumulating:
            begin = functools.partial(self._begin, run, None, None, self._phases.gradient)
            run.hooks.append(node.register_prehook(begin))

    def _forward(self, run: _Run, numbers: Any) -> tuple[Any, Any]:
        """Places of module and line in which the nodes of these numbers were made."""
        nowhere = self._common.nowhere[0]
        log = self._log(run.caller, int(numbers[0]) if len(numbers) else 0)
        if log is None or not log.starts or not len(numbers):
            return np.full(len(numbers), nowhere), np.full(len(numbers), run.line)
        starts, modules, lines = map(np.array, log.since(int(numbers[-1])))
        ranges = np.searchsorted(starts, numbers.astype(np.int64), "right") - 1
        # Made before the recording, or by a thread that crossed no boundary.
        known = (ranges >= 0) & (numbers < log.upcoming)
        lines = np.where(lines == self._common.nowhere[1], run.line, lines)
        return np.where(known, modules[ranges], nowhere), np.where(known, lines[ranges], run.line)

    def _log(self, caller: Thread, root: int) -> ForwardLog | None:
        """The log of the thread that made the node with the highest number; None if two threads may have."""
        if caller.log is not caller.forward:
            return caller.log
        logs = [log for log in self._common.makers if root < log.upcoming]
        if len(logs) > 1:
            self.unknown_threads = True
            return None
        return logs[0] if logs else caller.forward

    def _several_devices(self, nodes: list[Any], order: Any) -> bool:
        if self._torch.cuda.device_count() < 2 if self._torch.cuda.is_initialized() else True:
            return False
        devices = {
            metadata.device
            for index in order
            for metadata in nodes[index]._input_metadata  # noqa: SLF001 - no public name
        }
        return len(devices) > 1

    def _accumulating(self, nodes: list[Any], leaves: Iterable[int]) -> list[Any]:
        """Those of the leaves' nodes whose leaf already has a gradient."""
        with_variable = ((nodes[index], getattr(nodes[index], "variable", None)) for index in leaves)
        return [node for node, leaf in with_variable if leaf is not None and leaf.grad is not None]

    def _after_leaves(self, nodes: list[Any], order: Any, changes: Any, leaves: list[Any]) -> None:
        """Mark a change at each node that follows a node which passes a gradient to one of these leaves."""
        if not leaves:
            return
        waiting = set(leaves)
        for place, index in enumerate(order[:-1]):
            if any(after in waiting for after, _ in nodes[index].next_functions):
                changes[place + 1] = True

    def _begin(self, run: _Run, module: int | None, line: int | None, phase: int, _gradients: Any) -> None:
        """Prehook: a node begins on this thread."""
        if self._nodes is not None:
            self._nodes.look()
        thread = self._threads.now
        flags = 0
        if thread is run.caller:
            run.on_caller = True
        elif thread.running is not run:
            if not isinstance(thread.running, _Run) or thread.running.done:
                flags = BEGINS
            thread.running = run
            engine = self._torch.autograd.Variable._execution_engine  # noqa: SLF001 - no public name
            engine.queue_callback(functools.partial(self._end, thread))
        common = self._common
        if thread.log is thread.forward:
            common.make_in(thread, ForwardLog(common.sequence()))
        # On a thread that waited before, the first boundary is noted even if nothing changes.
        if flags or phase != thread.phase:
            common.cross(thread, phase, flags)
            thread.phase = phase
        common.begin_node(thread, module, line)

    def _end(self, thread: Thread) -> None:
        """Handle the end of a backward pass on a thread of the engine."""
        if self._threads.now is not thread:
            return  # several devices took part: other threads note nothing until their next node
        self._common.cross(thread, 0, ENDS)
        thread.running = None
        thread.phase = self._phases.backward  # for nodes without a hook that it runs next
        self._common.end_nodes(thread)

    def _restore(self, thread: Thread, state: tuple[Any, ...], flags: int) -> None:
        common = self._common
        here = (thread.module, thread.line, thread.phase)
        common.leave_engine(thread, state)
        for place, before in zip((thread.module, thread.line, thread.phase), here, strict=True):
            if place != before:
                common.cross(thread, place, flags)
                flags = 0
        if flags:
            common.cross(thread, 0, flags)


def nodes_of(roots: Any) -> list[Any]:
    """Every node of the autograd graph that is reachable from tensors or gradient edges."""
    if hasattr(roots, "grad_fn"):
        roots = (roots,)
    starts = (getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots)
    nodes = [node for node in starts if node is not None]
    seen = set(nodes)
    for node in nodes:
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
    return nodes
