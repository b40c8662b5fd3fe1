"""Marks in code that torch.compile traces: from the source to the kernels that Inductor makes of it.

1. While TorchDynamo traces a mark, the nodes of its graph get the mark's path in their metadata
   (torch.fx.traceback.annotate, PyTorch 2.9 and newer; AOTAutograd copies it to the nodes of the
   backward pass). No operation is added, so the compiled code is what it would be without marks.
2. Where Inductor writes beside a kernel which nodes it was made of, a comment in the generated code, it
   writes the paths of these nodes, too.
3. `thence.marks.generated` reads the comments when a CUDA graph captures the generated code.
"""

from __future__ import annotations

import functools
import json
import sys
import weakref
from contextlib import ExitStack
from typing import Any

from thence.importing import before_import
from thence.marks.watching import watch

__all__ = [
    "COMMENT",
    "ends",
    "follow_inductor",
    "notice_imports",
    "opens",
]

COMMENT = "thence:"
"""What stands before the paths, a JSON list, in a comment of generated code."""

_KEY = "thence"
_WRITERS = ("torch._inductor.codegen.triton", "torch._inductor.codegen.cpp")
"""Modules of Inductor that come late enough for all others to be there."""

_open: list[tuple[weakref.ref[Any], ExitStack]] = []
"""The graphs that are being traced, and what is open in them."""


def opens(name: str) -> bool:
    """TorchDynamo traces the beginning of a mark; it runs this instead of tracing into it."""
    traceback = sys.modules.get("torch.fx.traceback")
    graph = _traced_graph()
    if graph is None or not hasattr(traceback, "annotate"):
        return False
    follow_inductor()
    custom = getattr(traceback, "current_meta", {}).get("custom") or {}
    path = [*custom.get(_KEY, ()), name]
    stack = ExitStack()
    stack.enter_context(traceback.annotate({_KEY: path}))  # type: ignore[union-attr]
    stack.enter_context(traceback.preserve_node_meta())  # type: ignore[union-attr]
    graph.add_cleanup_hook(stack.close)  # tracing can be given up at any point
    _open[:] = [one for one in _open if one[0]() is not None]  # tracing was given up
    _open.append((weakref.ref(graph), stack))
    return True


def ends() -> bool:
    """TorchDynamo traces the end of the mark that it traced last."""
    graph = _traced_graph()
    if graph is not None and _open and _open[-1][0]() is graph:
        _open.pop()[1].close()
    return True


# TorchDynamo then calls them while it traces, and takes the result for a constant.
opens._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
ends._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


def _traced_graph() -> Any:
    """The graph that TorchDynamo is building; None where it does not say."""
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    current = getattr(getattr(convert, "InstructionTranslator", None), "current_tx", None)
    graph = getattr(current(), "output", None) if current is not None else None
    return graph if hasattr(graph, "add_cleanup_hook") else None


def follow_inductor(*, coming: bool = False) -> None:
    """Has Inductor write the paths of marks into its comments.

    Args:
        coming: the first module that writes comments is about to be imported. It will take the
            function from torch._inductor.utils; what is there already took the original.
    """
    utils = sys.modules.get("torch._inductor.utils")
    there = coming or any(name in sys.modules for name in _WRITERS)
    if not there or not hasattr(utils, "aggregate_origins"):
        return
    original = getattr(utils, "get_kernel_metadata", None)
    if original is None or hasattr(original, "thence_original"):
        return

    @functools.wraps(original)
    def get_kernel_metadata(nodes: Any, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        comment, *details = original(nodes, wrapper, *args, **kwargs)
        origins = list(utils.aggregate_origins(nodes))  # type: ignore[union-attr]
        paths = _paths(nodes, [node for node in origins if node.op == "call_function"])
        if paths and comment:
            comment = f"{comment}, {COMMENT} {json.dumps(paths)}"
        return (comment, *details)

    get_kernel_metadata.thence_original = original  # type: ignore[attr-defined]
    _replace(original, get_kernel_metadata)


def _replace(old: Any, new: Any) -> None:
    """Puts a function in place of another in every module of Inductor that imported its name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch._inductor") and vars(module).get("get_kernel_metadata") is old:
            vars(module)["get_kernel_metadata"] = new


def _paths(kernel: Any, nodes: list[Any]) -> list[list[str]]:
    """Paths of the marks around the nodes that a kernel was made of, its own first.

    A library's kernel is one node, though Inductor names those that its inputs came through, too. A
    fused one belongs to most of its nodes, where views count for nothing, and of equals to the last.
    """
    own = getattr(kernel, "origin_node", None)
    main = [own] if own is not None and _path(own) else sorted(nodes, key=_position)
    counts: dict[tuple[str, ...], int] = {}
    for node in main:
        path = _path(node)
        if path:
            work = 0 if getattr(node.target, "is_view", False) else 1
            counts[path] = counts.pop(path, 0) + work  # the last one seen comes last
    ordered = list(reversed(counts))  # of equals, max takes the first
    first = max(ordered, key=counts.__getitem__, default=None)
    if first is None:
        return []
    others = {_path(node) for node in nodes if not getattr(node.target, "is_view", False)}
    return [list(first), *(list(path) for path in sorted(others - {first, ()}))]


def _path(node: Any) -> tuple[str, ...]:
    return tuple((node.meta.get("custom") or {}).get(_KEY, ()))


def _position(node: Any) -> int:
    """Where a node stands in its graph; Inductor keeps that while it writes comments."""
    known = getattr(node.graph, "_inductor_kernel_metadata_node_to_idx_map", {})
    return int(known.get(node, 0))


def notice_imports() -> None:
    """Looks when TorchDynamo and Inductor are imported, as marks may be traced before any mark has run."""
    before_import("torch._dynamo", watch.look)
    for name in _WRITERS:
        before_import(name, functools.partial(follow_inductor, coming=True))
