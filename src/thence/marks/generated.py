"""What the lines of a module that Inductor generated launch.

The generated code is a Python module whose functions launch one kernel after the other. `thence.marks.compiling`
put a comment above each stretch of it; the first line of that stretch that runs has its facts:

    # thence: [["layers.0.mlp", ["model.py:12 forward"], "aten.linear", "forward", 1.0]]
    extern_kernels.addmm(...)

Code from a cache that was filled without thence has no such comments. There Inductor's own say which nodes of
TorchDynamo's graph a kernel was made of, and its line map which lines; the graph, where it is at hand, adds the
modules of the forward. Which modules a backward kernel is of cannot be told.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from thence.marks.launch_facts import COMMENT, Part, frames_of, module_of, parts_of_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["LineFacts", "Module", "facts_of_launches", "is_generated", "read_module"]

_ID = re.compile(r"#\s*AOT ID:\s*\[?'?\w*?_?(forward|backward|inference)\b")
_HEAD = 3  # lines, in which the id stands
_COMMENT = re.compile(
    r"^\s*#.*Source Nodes: \[(?P<nodes>[^\]]*)\], Original ATen: \[(?P<aten>[^\]]*)\]"
)
_DEFINITION = re.compile(r"^(?P<name>\w+) = async_compile\.")
_LAUNCH = re.compile(r"(?P<name>\w+)\.run\(|\bextern_kernels\.|\btorch\.ops\.|\baten\.|\b_foreach_")
_EXTERN = re.compile(r"\bextern_kernels\.(?P<name>\w+)\(")
_CALL = re.compile(r"^\s*(?:\w+ = )?(?P<name>\w+)\(")


class LineFacts(NamedTuple):
    """What is launched from one line on, to the next one with facts.

    Attributes:
        parts: what it is made of; empty where nothing is known.
        before: whether it was compiled before thence was there, so that modules of the backward are unknown.
    """

    parts: tuple[Part, ...]
    before: bool = False


@dataclass(frozen=True, eq=False)
class Module:
    """One generated module.

    Attributes:
        kind: forward, backward or inference; empty where it does not say.
        entry: the function that is called from outside; the others are its partitions.
        lines: of each function, by the id of its code object, the lines with facts.
        codes: those code objects, which keep the ids valid.
    """

    kind: str
    entry: CodeType | None
    lines: Mapping[int, Mapping[int, LineFacts]]
    codes: tuple[CodeType, ...]

    def first_facts(self) -> list[LineFacts]:
        """Those of the first launch of each function: whether any is from before tells of the whole."""
        return [next(iter(lines.values())) for lines in self.lines.values() if lines]


def is_generated(head: Iterable[str]) -> re.Match[str] | None:
    """Whether a file whose first lines are these is the code of a compiled graph."""
    return next((found for line in head if (found := _ID.match(line))), None)


def read_module(
    module: Any, lines: Sequence[str], line_map: Sequence[tuple[int, str]], graph: Any
) -> Module | None:
    """The facts of a module's functions; None where it is no code of a compiled graph.

    Args:
        module: as it was imported.
        lines: of its file.
        line_map: Inductor's pairs of a line and the traceback of what is launched from there on.
        graph: of TorchDynamo, from which it was compiled; None where it is not at hand.
    """
    identity = is_generated(lines[:_HEAD])
    if identity is None:
        return None
    runner = vars(module).get("Runner")
    entry = getattr(getattr(runner, "call", vars(module).get("call")), "__code__", None)
    functions = [getattr(value, "__code__", None) for value in vars(module).values()]
    own = {
        id(code): code
        for code in (entry, *functions)
        if isinstance(code, CodeType) and code.co_filename == module.__file__
    }
    facts = _written(lines)
    if not facts:
        kind = identity[1]
        facts = _compiled_before(lines, line_map, graph, backward=kind == "backward")
    found = {number: _first_lines(code, facts) for number, code in own.items()}
    codes = tuple(code for number, code in own.items() if found[number] or code is entry)
    return Module(identity[1], entry, found, codes)


def _written(lines: Sequence[str]) -> list[tuple[int, LineFacts]]:
    """Comments with facts, by their lines."""
    found = []
    for number, line in enumerate(lines, 1):
        if COMMENT in line and (parts := parts_of_text(line)) is not None:
            found.append((number, LineFacts(parts)))
    return found


def _first_lines(code: CodeType, facts: Sequence[tuple[int, LineFacts]]) -> dict[int, LineFacts]:
    """The first line of a function that runs after each comment, and before the next one."""
    runs = sorted({line for _, _, line in code.co_lines() if line is not None})
    found: dict[int, LineFacts] = {}
    for at, (start, known) in enumerate(facts):
        end = facts[at + 1][0] if at + 1 < len(facts) else None
        position = bisect_right(runs, start - 1)
        if position < len(runs) and (end is None or runs[position] < end) and start > runs[0]:
            found[runs[position]] = known
    return found


def _compiled_before(
    lines: Sequence[str], line_map: Sequence[tuple[int, str]], graph: Any, *, backward: bool
) -> list[tuple[int, LineFacts]]:
    """What can be told of code without comments of thence, by the lines that launch."""
    nodes = {} if graph is None or backward else {node.name: node for node in graph.nodes}
    starts = [line for line, _ in line_map]
    phase = "backward" if backward else "forward"
    found = []
    for line, (names, aten) in facts_of_launches(lines).items():
        parts = []
        for node in (nodes[name] for name in names if name in nodes):
            stack = frames_of(node.meta.get("stack_trace"))
            parts.append(Part(module_of(node.meta.get("nn_module_stack")), stack, aten, phase))
        at = bisect_right(starts, line) - 1
        if not parts and at >= 0:
            parts.append(Part(None, frames_of(line_map[at][1]), aten, phase))
        distinct = tuple(dict.fromkeys(parts)) or (Part(None, (), aten, phase),)
        shared = tuple(part._replace(share=round(1 / len(distinct), 4)) for part in distinct)
        found.append((line, LineFacts(shared, before=True)))
    return found


def facts_of_launches(lines: Iterable[str]) -> dict[int, tuple[list[str], str]]:
    """Lines that launch, with the nodes and operators in Inductor's comment about them; line 1 is the first.

    The comment stands above the launch, or above the definition of the kernel.
    """
    defined: dict[str, tuple[list[str], str]] = {}
    found: dict[int, tuple[list[str], str]] = {}
    comment: tuple[list[str], str] | None = None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith("#"):
            match = _COMMENT.match(line)
            if match is not None:
                comment = (match["nodes"].replace(" ", "").split(","), match["aten"])
        elif definition := _DEFINITION.match(line):
            defined[definition["name"]] = comment or ([], "")
            comment = None
        elif launch := _LAUNCH.search(line) or _CALL.match(line):
            name = launch["name"] or ""
            is_kernel = name in defined or not _CALL.match(line) or _LAUNCH.search(line) is not None
            if is_kernel and (facts := comment or defined.get(name)) is not None:
                found[number] = (facts[0], _own_operator(line, facts[1]))
                comment = None
        elif text.startswith(("def ", "class ")):
            comment = None
    return found


def _own_operator(line: str, aten: str) -> str:
    """The operator of a call of a library, of those that Inductor names for its inputs, too."""
    call = _EXTERN.search(line)
    own = f"aten.{call['name']}" if call else ""
    return own if own in aten.replace(" ", "").split(",") else aten
