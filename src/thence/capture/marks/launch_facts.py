"""The parts of a launch in code that Inductor generated: facts of FX nodes, in a comment in that code.

Every FX node of the graph that Inductor compiles has the nn.Module and the lines that it was traced from, and the
operator before decomposition, in the forward and in the backward. Above the code of each scheduler node is a comment
with a JSON list of parts, to which the FX nodes that it was made from are combined:

    # thence: [[module, [frame, ...], operator, phase, share, [mark, ...]], ...]

module is a path relative to the module that was compiled, null outside of all modules; a frame is
``file:line function``, outermost first, without the frames of torch; the marks are left out if there are none. Shares
are *estimated*: each operator call that the user wrote counts the same, and views count as no work.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COMMENT = "thence:"
"""The text before the parts in a comment of generated code."""
MARKS = "thence"
"""The key in the ``custom`` metadata of a node whose value is the path of the marks around the node."""

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')
_IN_TORCH = re.compile(r"(?:^|/)torch/|/thence/capture/marks/|^<")
_IN_OPTIMIZER = re.compile(r"/torch/optim/")
_GRADIENT_SUM = "Gradient addition node"
"""In the traceback of nodes that sum the gradients of a tensor with several uses (torch.fx.traceback)."""
_ROOT = re.compile(r"^[LG]\['[^']*'\]\.?")
_ITEM = re.compile(r"\[['\"]?([^'\"\]]*)['\"]?\]")
_FIELDS = 5  # fields of a part without marks


class Part(NamedTuple):
    """A part of the work of one launch.

    Attributes:
        module: path of the nn.Module, relative to the compiled one; None outside of all modules.
        stack: lines that it was traced from, ``file:line function``, outermost first.
        op: operator that the user's line called, such as ``aten.linear``; empty if it is not known.
        phase: forward, backward, recompute, gradient (a sum of gradients) or optimizer; empty if it is not known.
        share: estimated share of the launch, 0 to 1.
        marks: names of the marks around it, outermost first.
    """

    module: str | None
    stack: tuple[str, ...] = ()
    op: str = ""
    phase: str = ""
    share: float = 1.0
    marks: tuple[str, ...] = ()


def parts_of_nodes(nodes: Iterable[Any], *, backward: bool) -> tuple[Part, ...]:
    """The parts of a launch, in the order of its nodes.

    Args:
        nodes: FX nodes of the graph that Inductor compiles, in their order there.
        backward: whether it is a backward graph.
    """
    distinct: dict[object, tuple[Part, bool]] = {}
    for node in nodes:
        part = _part(node, backward=backward)
        works = not getattr(node.target, "is_view", False)
        # Nodes of one decomposed operator share its seq_nr. Without gradients all nodes have the same seq_nr.
        key = (node.meta.get("seq_nr"), node.meta.get("stack_trace"), part)
        distinct[key] = (part, works or distinct.get(key, (part, False))[1])
    # Views are ignored if other nodes do work, and nodes that Inductor made itself if there are others.
    working = [part for part, works in distinct.values() if works]
    kept = working or [part for part, _ in distinct.values()]
    kept = [part for part in kept if part.module is not None or part.stack] or kept
    counts: dict[Part, int] = {}
    for part in kept:
        counts[part] = counts.pop(part, 0) + 1
    return tuple(part._replace(share=round(count / len(kept), 4)) for part, count in counts.items())


def _part(node: Any, *, backward: bool) -> Part:
    meta = node.meta
    trace = meta.get("stack_trace") or ""
    own = meta.get("nn_module_stack")
    of_forward = meta.get("fwd_nn_module_stack")
    if _GRADIENT_SUM in trace:
        phase, own, of_forward = "gradient", None, None
    elif _IN_OPTIMIZER.search(trace):
        phase = "optimizer"
    elif not backward:
        phase = "forward"
    else:  # a node of the forward that the backward graph recomputes has the metadata of the forward
        again = own and not of_forward and meta.get("partitioner_tag") != "is_backward"
        phase = "recompute" if again else "backward"
    return Part(module_of(own or of_forward), frames_of(trace), _operator(node), phase, marks=marks_of(node))


def module_of(stack: Any) -> str | None:
    """Path of the innermost module: ``L['self'].layers[0].attention`` is ``layers.0.attention``."""
    if not stack:
        return None
    path = str(next(reversed(stack.values()))[0])
    names = _ITEM.sub(r".\1", _ROOT.sub("", path)).split(".")
    return ".".join(name for name in names if name not in ("", "_modules"))


def _operator(node: Any) -> str:
    """The operator before decomposition: ``aten.linear``, ``mylib.op``; for a Triton kernel of the user its name."""
    original = node.meta.get("original_aten")
    kernel = node.kwargs.get("kernel_idx") if original is None else None
    if isinstance(kernel, int):
        return _triton_kernel(kernel) or "triton kernel"
    known = original if original is not None else node.target
    return str(getattr(known, "_overloadpacket", known))


def _triton_kernel(number: int) -> str | None:
    wrapping = sys.modules.get("torch._higher_order_ops.triton_kernel_wrap")
    table = getattr(wrapping, "kernel_side_table", None)
    if table is None:
        return None
    function = table.get_kernel(number)
    function = getattr(function, "fn", function)  # the function of an autotuner
    return str(getattr(function, "__name__", None) or "triton kernel")


def frames_of(trace: str | None) -> tuple[str, ...]:
    """The lines in the text of a traceback, without those of torch, as ``file:line function``, outermost first."""
    return tuple(
        f"{file}:{line} {function}"
        for file, line, function in _FRAME.findall(trace or "")
        if not _IN_TORCH.search(file)
    )


def marks_of(node: Any) -> tuple[str, ...]:
    """Names of the marks around a node."""
    return tuple((node.meta.get("custom") or {}).get(MARKS, ()))


def main_part(parts: Sequence[Part]) -> Part:
    """The part with the greatest share; ties: the last, because it produces the output.

    Recomputation in a kernel of the backward pass, and sums of gradients, are the main part only if the kernel does
    nothing else.
    """
    own = [part for part in parts if part.phase not in ("recompute", "gradient")] or parts
    return max(reversed(own), key=lambda part: part.share)


def main_marks(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    """Paths of the marks: first the path around the largest share (ties: the last), then the others."""
    counts: dict[tuple[str, ...], float] = {}
    for part in parts:
        if part.marks:
            counts[part.marks] = counts.pop(part.marks, 0.0) + part.share
    first = max(reversed(counts), key=lambda path: round(counts[path], 3), default=None)
    return [] if first is None else [first, *sorted(set(counts) - {first})]


def comment_of(parts: Iterable[Part]) -> str:
    """The text of the comment, without the comment character."""
    rows = [list(part) if part.marks else list(part[:_FIELDS]) for part in parts]
    return f"{COMMENT} {json.dumps(rows)}"


def parts_of_text(line: str) -> tuple[Part, ...] | None:
    """The parts in a line of generated code; None if the line is no such comment."""
    before, mark, text = line.partition(COMMENT)
    if not mark or before.strip() != "#":
        return None
    try:
        return tuple(_read(*row) for row in json.loads(text))
    except (ValueError, TypeError):
        return None  # another comment


def _read(module: str | None, stack: list[str], op: str, phase: str, share: float, marks: Sequence[str] = ()) -> Part:
    if not isinstance(stack, list) or isinstance(marks, str):
        raise TypeError
    name = None if module is None else str(module)
    return Part(name, tuple(map(str, stack)), str(op), str(phase), float(share), tuple(map(str, marks)))
