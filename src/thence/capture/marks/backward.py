"""Applies the marks around forward operations to the nodes of the backward pass.

Autograd numbers its nodes in the order in which a thread makes them, and a `frames.Log` holds at which
numbers marks opened and closed. If there is a listener or a capture during a backward pass, its graph is
walked once, and every node gets a hook that sets a frame with the mark of its forward operation while the
node runs, on the thread that runs it. A node's frame stays until the next node begins: sums of gradients
that autograd computes in between, and the accumulation into parameters, belong to the node that caused them.

Not labelled are nodes that another thread made than the one that calls backward, and nodes made by a
backward pass itself (create_graph). They have the marks that were open around the call, with the phase
backward.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from thence.capture.marks.frames import Backward, numbers, thread, top

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thence.capture.marks.captures import Captures
    from thence.capture.marks.watching import Frame, Watch

_NEVER = (1 << 64) - 1
"""The sequence number that all nodes share which accumulate gradients into leaves."""
_MADE_BY_BACKWARD = "thence.made_by_backward"


class _Run:
    """One call of the engine.

    Attributes:
        caller: the thread that called the engine.
        around: innermost frame of the caller.
        log: log of the caller.
        upcoming: next sequence number of the caller.
        done: whether the call has returned.
    """

    def __init__(self, upcoming: int) -> None:
        self.caller = threading.get_ident()
        self.around = top.get()
        self.log = thread.state.log
        self.upcoming = upcoming
        self.done = False


class _Worker(threading.local):
    """The runs whose nodes this thread is running, and its innermost frame before each run."""

    def __init__(self) -> None:
        self.runs: list[tuple[_Run, Frame | None]] = []
        self.frame: Frame | None = None  # frame of the node that runs


class BackwardMarks:
    """Sets frames while the nodes of backward passes run."""

    def __init__(self, torch: Any, watch: Watch, captures: Captures) -> None:
        self._torch = torch
        self._watch = watch
        self._captures = captures
        self._worker = _Worker()
        self._running: list[_Run] = []
        self._second_order = False

    def run(self, original: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the engine: original(roots, gradients, keep graph, create graph, ...)."""
        if len(thread.state.log.starts) == 1:
            return original(roots, *args, **kwargs)
        if self._torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - no public name
            return original(roots, *args, **kwargs)  # AOTAutograd only traces under a dispatch mode: nothing runs
        run = _Run(self._torch.autograd._get_sequence_nr())  # noqa: SLF001 - no public name
        self._running.append(run)
        try:
            if not (self._watch.backward and self._watch.live) and self._watch.changed is None:
                return original(roots, *args, **kwargs)
            return self._watched(run, original, roots, *args, **kwargs)
        finally:
            run.done = True
            self._running.remove(run)

    def current(self) -> Frame | None:
        """The frame of the autograd node that this thread is running; None outside of nodes.

        It is for captures that begin inside a node, as those of compiled functions do.
        """
        node = self._torch._C._current_autograd_node()  # noqa: SLF001 - no public name
        if node is None:
            return None
        here = threading.get_ident()
        runs = [run for run in self._running if run.caller == here] or self._running
        if self._worker.runs:
            return self._worker.frame
        if len(runs) != 1:
            return None  # it is not known which run the node belongs to
        return self._frame(runs[0], self._forward(runs[0], node))

    def _watched(self, run: _Run, original: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
        nodes = list(_nodes(roots))
        hooks = self._hook(nodes, run)
        try:
            result = original(roots, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
            self._end(run)
            run.done = True
            if self._watch.changed is not None:
                self._watch.changed(top.get())
        if len(args) > 2 and args[2]:  # create_graph
            self._remember_new(nodes, result)
        return result

    def _hook(self, nodes: list[Any], run: _Run) -> list[Any]:
        """Put hooks on the nodes; returns their handles, to be removed afterwards."""
        hooks = []
        frames: dict[int, Frame] = {}
        for node in nodes:
            if node._sequence_nr() == _NEVER:  # noqa: SLF001 - no public name
                continue
            forward = self._forward(run, node)
            key = forward[1] if forward else 0
            if key not in frames:
                frames[key] = self._frame(run, forward)
            begin = functools.partial(self._begin, run, frames[key], node.name())
            hooks.append(node.register_prehook(begin))
        return hooks

    def _forward(self, run: _Run, node: Any) -> Frame | None:
        """The innermost frame when a node was made; None if it is not known."""
        sequence = node._sequence_nr()  # noqa: SLF001 - no public name
        # The caller has not used this number yet, so another thread made the node; or a backward pass did.
        if sequence >= run.upcoming or (self._second_order and _MADE_BY_BACKWARD in node.metadata):
            return None
        return run.log.innermost(sequence)

    def _frame(self, run: _Run, forward: Frame | None) -> Frame:
        return (run.around, next(numbers), Backward(forward), None)

    def _begin(self, run: _Run, frame: Frame, name: str, _gradients: Any) -> None:
        """Prehook: a node begins on this thread."""
        runs = self._worker.runs
        while runs and runs[-1][0].done:  # the run failed, or ended on another thread
            self._leave()
        if runs and runs[-1][0] is run:
            self._close()
        else:
            runs.append((run, top.get()))
            if run.caller != threading.get_ident():
                self._captures.work_for(run.caller)
            engine = self._torch.autograd.Variable._execution_engine  # noqa: SLF001 - no public name
            engine.queue_callback(functools.partial(self._end, run))
        top.set(frame)
        self._worker.frame = frame
        forward = frame[2].forward
        for listener in self._watch.listeners:
            listener.backward_opened(forward[1] if forward else None, name)
        if self._watch.changed is not None:
            self._watch.changed(frame)

    def _end(self, run: _Run) -> None:
        """Handle the end of a run."""
        if self._worker.runs and self._worker.runs[-1][0] is run:
            self._leave()

    def _leave(self) -> None:
        run, before = self._worker.runs.pop()
        self._close()
        top.set(before)
        if self._watch.changed is not None:  # callbacks at the end of the run still belong to the backward pass
            self._watch.changed((run.around, 0, Backward(None), None))
        if not self._worker.runs and run.caller != threading.get_ident():
            self._captures.work_for(None)

    def _close(self) -> None:
        for listener in self._watch.listeners:
            listener.backward_closed()

    def _remember_new(self, nodes: list[Any], result: Any) -> None:
        """Flag the nodes that a backward pass made, because the engine's threads numbered them, not the caller."""
        old = set(nodes)
        leaves = [n.variable.grad for n in nodes if hasattr(n, "variable")]
        roots = [t for t in (*(result or ()), *leaves) if t is not None]
        for node in _nodes(roots):
            if node not in old and node._sequence_nr() != _NEVER:  # noqa: SLF001 - no public name
                node.metadata[_MADE_BY_BACKWARD] = True
                self._second_order = True


def _nodes(roots: Any) -> Iterator[Any]:
    """Every node of the autograd graph that is reachable from tensors or gradient edges."""
    starts = (getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots)
    waiting = [node for node in starts if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)


def patch_autograd(torch: Any, marks: BackwardMarks) -> Callable[[], None]:
    """Wrap the function that runs backward passes; the result undoes that."""
    owners = [torch.autograd.graph, torch.autograd]  # the second imports the name from the first
    original = torch.autograd.graph._engine_run_backward  # noqa: SLF001 - no public name

    @functools.wraps(original)
    def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        return marks.run(original, roots, *args, **kwargs)

    for owner in owners:
        owner._engine_run_backward = run_backward  # noqa: SLF001

    def undo() -> None:
        for owner in owners:
            owner._engine_run_backward = original  # noqa: SLF001

    return undo
