"""Reads the facts about each launch in a module that Inductor generated.

The generated code is a Python module whose functions launch one kernel after the other.
`thence.capture.marks.compiling` has put a comment above the code of each scheduler node; its facts are assigned to the
first line of that code that runs:

    # thence: [["layers.0.mlp", ["model.py:12 forward"], "aten.linear", "forward", 1.0]]
    extern_kernels.addmm(...)

Code from a cache that was filled without thence has no such comments. There Inductor's own comments give the nodes of
TorchDynamo's graph from which a kernel was made, and its line map gives the lines of the program; the graph, if it is
available, adds the modules of the forward. The modules of backward kernels are not known then.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from thence.capture.marks.launch_facts import COMMENT, Part, frames_of, module_of, parts_of_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_ID = re.compile(r"#\s*AOT ID:\s*\[?'?\w*?_?(forward|backward|inference)\b")
_HEAD = 3  # first lines of a module, which contain the id
_COMMENT = re.compile(r"^\s*#.*Source Nodes: \[(?P<nodes>[^\]]*)\], Original ATen: \[(?P<aten>[^\]]*)\]")
_DEFINITION = re.compile(r"^(?P<name>\w+) = async_compile\.")
_LAUNCH = re.compile(r"(?P<name>\w+)\.run\(|\bextern_kernels\.|\btorch\.ops\.|\baten\.|\b_foreach_")
_EXTERN = re.compile(r"\bextern_kernels\.(?P<name>\w+)\(")
_CALL = re.compile(r"^\s*(?:\w+ = )?(?P<name>\w+)\(")


class LineFacts(NamedTuple):
    """The facts about the launches from one line on, up to the next line with facts.

    Attributes:
        parts: the parts of the launch; empty if nothing is known.
        before: whether the code was compiled without thence, so that the modules of backward kernels are unknown.
    """

    parts: tuple[Part, ...]
    before: bool = False


@dataclass(frozen=True, eq=False)
class Module:
    """One generated module.

    Attributes:
        kind: forward, backward or inference.
        entry: the function that is called from outside; other functions are its partitions.
        lines: for each function, by the id of its code object, the facts by line.
        codes: these code objects, which are kept alive so that the ids stay valid.
    """

    kind: str
    entry: CodeType | None
    lines: Mapping[int, Mapping[int, LineFacts]]
    codes: tuple[CodeType, ...]

    def first_facts(self) -> list[LineFacts]:
        """The facts of the first launch of each function; their `before` holds for the whole module."""
        return [next(iter(lines.values())) for lines in self.lines.values() if lines]


def is_generated(head: Iterable[str]) -> re.Match[str] | None:
    """The match of the id of a compiled graph in the first lines of a file; None if the file is something else."""
    return next((match for line in head if (match := _ID.match(line))), None)


def read_module(module: Any, lines: Sequence[str], line_map: Sequence[tuple[int, str]], graph: Any) -> Module | None:
    """The facts of a module's functions; None if it is not the code of a compiled graph.

    Args:
        lines: lines of its file.
        line_map: Inductor's pairs of a line, and the traceback of the launches from that line on.
        graph: TorchDynamo's graph from which it was compiled; None if it is not available.
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
    by_code = {number: _first_lines(code, facts) for number, code in own.items()}
    codes = tuple(code for number, code in own.items() if by_code[number] or code is entry)
    return Module(identity[1], entry, by_code, codes)


def _written(lines: Sequence[str]) -> list[tuple[int, LineFacts]]:
    """The facts in comments of thence, with the lines of the comments."""
    written = []
    for number, line in enumerate(lines, 1):
        if COMMENT in line and (parts := parts_of_text(line)) is not None:
            written.append((number, LineFacts(parts)))
    return written


def _first_lines(code: CodeType, facts: Sequence[tuple[int, LineFacts]]) -> dict[int, LineFacts]:
    """For each comment, the first line of a function that runs after it and before the next comment."""
    runs = sorted({line for _, _, line in code.co_lines() if line is not None})
    first_lines: dict[int, LineFacts] = {}
    for index, (start, known) in enumerate(facts):
        end = facts[index + 1][0] if index + 1 < len(facts) else None
        position = bisect_right(runs, start - 1)
        if position < len(runs) and (end is None or runs[position] < end) and start > runs[0]:
            first_lines[runs[position]] = known
    return first_lines


def _compiled_before(
    lines: Sequence[str], line_map: Sequence[tuple[int, str]], graph: Any, *, backward: bool
) -> list[tuple[int, LineFacts]]:
    """The facts about code without comments of thence, with the lines that launch."""
    nodes = {} if graph is None or backward else {node.name: node for node in graph.nodes}
    starts = [line for line, _ in line_map]
    phase = "backward" if backward else "forward"
    facts = []
    for line, (names, aten) in facts_of_launches(lines).items():
        parts = []
        for node in (nodes[name] for name in names if name in nodes):
            stack = frames_of(node.meta.get("stack_trace"))
            parts.append(Part(module_of(node.meta.get("nn_module_stack")), stack, aten, phase))
        index = bisect_right(starts, line) - 1
        if not parts and index >= 0:
            parts.append(Part(None, frames_of(line_map[index][1]), aten, phase))
        distinct = tuple(dict.fromkeys(parts)) or (Part(None, (), aten, phase),)
        shared = tuple(part._replace(share=round(1 / len(distinct), 4)) for part in distinct)
        facts.append((line, LineFacts(shared, before=True)))
    return facts


def facts_of_launches(lines: Iterable[str]) -> dict[int, tuple[list[str], str]]:
    """Lines that launch, with the nodes and operators in Inductor's comment about them; lines count from 1.

    The comment is above the launch, or above the definition of the kernel.
    """
    defined: dict[str, tuple[list[str], str]] = {}
    launches: dict[int, tuple[list[str], str]] = {}
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
                launches[number] = (facts[0], _own_operator(line, facts[1]))
                comment = None
        elif text.startswith(("def ", "class ")):
            comment = None
    return launches


def _own_operator(line: str, aten: str) -> str:
    """The operator of a line that calls a library; other lines have all operators of Inductor's comment.

    For calls of libraries the comment also names the operators of their inputs.
    """
    call = _EXTERN.search(line)
    own = f"aten.{call['name']}" if call else ""
    return own if own in aten.replace(" ", "").split(",") else aten
