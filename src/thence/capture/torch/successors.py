"""Finds which lines of a function can run right after each line."""

from __future__ import annotations

import dis
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType

_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT"})
_JUMPS_ALWAYS = frozenset(
    {*("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP", "JUMP_NO_INTERRUPT")}
)
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)


def successors(code: CodeType) -> dict[int, frozenset[int]]:
    """For each line, the other lines that can run next in the same call, through any jump or exception.

    Instructions without a line are skipped over to the instructions after them, as no line begins there.
    """
    instructions = list(dis.get_instructions(code))
    index = {one.offset: at for at, one in enumerate(instructions)}
    lines = [one.positions.lineno if one.positions else None for one in instructions]
    edges: list[list[int]] = []
    for at, one in enumerate(instructions):
        targets = []
        if one.opcode in _JUMPS:
            targets.append(index[one.argval])
        if one.opname not in _ENDS and one.opname not in _JUMPS_ALWAYS:
            targets.append(at + 1)
        edges.append([target for target in targets if target < len(instructions)])
    for start, end, target in _handlers(code):
        handler = index.get(target)
        for offset in range(start, end, 2):
            if handler is not None and (at_ := index.get(offset)) is not None:
                edges[at_].append(handler)
    found: dict[int, set[int]] = {line: set() for line in lines if line is not None}
    for at, line in enumerate(lines):
        if line is not None:
            found[line] |= _next_lines(at, edges, lines)
    return {line: frozenset(after - {line}) for line, after in found.items()}


def _next_lines(at: int, edges: list[list[int]], lines: list[int | None]) -> set[int]:
    waiting, seen, found = list(edges[at]), set(edges[at]), set()
    while waiting:
        target = waiting.pop()
        line = lines[target]
        if line is not None:
            found.add(line)
            continue
        new = [after for after in edges[target] if after not in seen]
        seen.update(new)
        waiting += new
    return found


def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    """Start, end and target (byte offsets) of every range whose exceptions are handled.

    The format is described in CPython's ``Objects/exception_handling_notes.txt``: an entry is the numbers start, length
    and target, in units of two bytes, and depth. A number has six bits in each byte; bit 6 is set if another byte
    follows, and bit 7 in the first byte of an entry.
    """
    data = iter(code.co_exceptiontable)

    def number() -> int:
        byte = next(data)
        value = byte & 63
        while byte & 64:
            byte = next(data)
            value = value << 6 | byte & 63
        return value

    found = []
    try:
        while True:
            start, length, target, _depth = number(), number(), number(), number()
            found.append((2 * start, 2 * (start + length), 2 * target))
    except StopIteration:
        return found
