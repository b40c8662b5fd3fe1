"""Writes the facts that torch.compile has about its kernels into the code that Inductor generates.

1. While TorchDynamo traces a mark, the nodes of its graph get the mark's path in their metadata
   (torch.fx.traceback.annotate, PyTorch 2.9 and newer; AOTAutograd copies it to the nodes of the
   backward pass). No operation is added, so the compiled code is the same as without marks.
2. Before Inductor writes the code of a scheduler node, a comment is written with module, lines, operator, phase and
   marks of the FX nodes that it was made from (`thence.capture.marks.launch_facts`). The comment changes neither a
   kernel nor a cache key; caches hold the text, so the comments are there after a warm start, too.
3. `thence.capture.marks.generated` reads the comments when the code is loaded.
"""

from __future__ import annotations

import functools
import sys
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from thence.capture.marks.generated_lines import generated
from thence.capture.marks.launch_facts import MARKS, comment_of, parts_of_nodes
from thence.capture.marks.watching import watch
from thence.importing import before_import, when_imported

if TYPE_CHECKING:
    from collections.abc import Iterable

_FOLLOWED = tuple(f"torch._inductor.{name}" for name in ("codecache", "compile_fx", "scheduler"))
"""Modules of Inductor in which functions are wrapped."""

_open: list[tuple[weakref.ref[Any], ExitStack]] = []
"""For each mark that is open in a graph that is being traced: the graph, and the context managers of the mark."""


def opens(name: str) -> bool:
    """Open a mark in the graph that TorchDynamo traces; TorchDynamo runs this instead of tracing into it."""
    traceback = sys.modules.get("torch.fx.traceback")
    graph = _traced_graph()
    if graph is None or not hasattr(traceback, "annotate"):
        return False
    follow_inductor()
    custom = getattr(traceback, "current_meta", {}).get("custom") or {}
    path = [*custom.get(MARKS, ()), name]
    stack = ExitStack()
    stack.enter_context(traceback.annotate({MARKS: path}))  # type: ignore[union-attr]
    stack.enter_context(traceback.preserve_node_meta())  # type: ignore[union-attr]
    graph.add_cleanup_hook(stack.close)  # tracing can be aborted at any point
    _open[:] = [(traced, marks) for traced, marks in _open if traced() is not None]  # drops aborted graphs
    _open.append((weakref.ref(graph), stack))
    return True


def ends() -> bool:
    """Close the mark that was opened last in the graph that TorchDynamo traces."""
    graph = _traced_graph()
    if graph is not None and _open and _open[-1][0]() is graph:
        _open.pop()[1].close()
    return True


# With this attribute TorchDynamo calls the functions while it traces, and takes the result for a constant.
opens._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
ends._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


def _traced_graph() -> Any:
    """The graph that TorchDynamo is building; None if it is not found."""
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    current = getattr(getattr(convert, "InstructionTranslator", None), "current_tx", None)
    graph = getattr(current(), "output", None) if current is not None else None
    return graph if hasattr(graph, "add_cleanup_hook") else None


def follow_inductor() -> None:
    """Wrap functions of Inductor, where imported, to write comments into generated code and to read code on loading."""
    generated.follow_loading()
    scheduler = getattr(sys.modules.get("torch._inductor.scheduler"), "Scheduler", None)
    original = getattr(scheduler, "enter_context", None)
    if original is None or hasattr(original, "thence_original"):
        return
    virtualized = sys.modules["torch._inductor.virtualized"]

    @functools.wraps(original)
    def enter_context(self: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, node, *args, **kwargs)
        try:
            _comment(self, node, virtualized.V.graph)
        except Exception as error:  # noqa: BLE001 - the program comes first
            generated.note(f"the module and line of a kernel of compiled code could not be recorded: {error!r}")
        return result

    enter_context.thence_original = original  # type: ignore[attr-defined]
    scheduler.enter_context = enter_context  # type: ignore[union-attr]


def _comment(scheduler: Any, node: Any, graph: Any) -> None:
    """Write the comment about a scheduler node just before its code."""
    if getattr(graph, "cpp_wrapper", False):
        generated.note("code compiled with cpp_wrapper is not Python, so its kernels have no module and no line")
        return  # comments would change C++ code that is compiled again
    origins = {origin: None for inner in node.get_nodes() for origin in _origins(inner)}
    index = getattr(scheduler, "origin_to_index", {})
    calls = (origin for origin in origins if origin.op == "call_function")
    nodes = sorted(calls, key=lambda origin: index.get(origin, 0))
    backward = bool(graph.is_backward)
    if not backward and _in_compiled_autograd():
        backward = True
        generated.note("with compiled autograd the module of most backward kernels is not known")
    wrapper = graph.wrapper_code
    text = comment_of(parts_of_nodes(nodes, backward=backward))
    wrapper.make_comment(f"{wrapper.comment} {text}")


def _origins(inner: Any) -> Iterable[Any]:
    """The FX nodes whose work an inner node of a scheduler node does."""
    ir = inner.node
    if ir is None:
        return ()
    own = getattr(ir, "origin_node", None)
    if own is not None and inner.is_extern():
        return (own,)  # Inductor's other origins are those of its inputs
    # The origins of the loop itself; those of its buffer include the node that caused it to be realized, too.
    origins: Iterable[Any] = getattr(getattr(ir, "data", None), "origins", None) or ir.get_origins()
    return origins


def _in_compiled_autograd() -> bool:
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def notice_imports() -> None:
    """Act when TorchDynamo and Inductor are imported, as code may be compiled before the first mark."""
    before_import("torch._dynamo", watch.look)
    for name in _FOLLOWED:
        when_imported(name, lambda _module: follow_inductor())
