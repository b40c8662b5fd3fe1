"""Code that Inductor generated, while a CUDA graph captures it: which line makes which nodes.

The generated code is a Python module whose functions launch one kernel after the other. Above a launch
stands a comment that names the operators it was made of, and the marks (see `thence.marks.compiling`):

    # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.addmm], thence: [["mlp"]]
    extern_kernels.addmm(...)

So, during a capture, the lines of such functions are followed with sys.settrace, on the capturing
thread only. A replay runs no Python, so it costs nothing there.
"""

from __future__ import annotations

import json
import linecache
import re
import sys
from typing import TYPE_CHECKING, Any

from thence.marks.compiling import COMMENT
from thence.marks.frames import numbers
from thence.marks.marking import LibraryMark, mark

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from thence.marks.watching import Frame

__all__ = ["GeneratedCode", "facts_of_lines"]

_MODULE = re.compile(r"#\s*AOT ID:")
_COMMENT = re.compile(
    r"^\s*#.*Source Nodes: \[(?P<nodes>[^\]]*)\], Original ATen: \[(?P<aten>[^\]]*)\]"
)
_DEFINITION = re.compile(r"^(?P<name>\w+) = async_compile\.")
_LAUNCH = re.compile(r"(?P<name>\w+)\.run\(|\bextern_kernels\.|\btorch\.ops\.|\baten\.|\b_foreach_")
_CALL = re.compile(r"^\s*(?:\w+ = )?(?P<name>\w+)\(")

Facts = tuple[tuple[str, ...], str]
"""Path of marks, and the metadata as JSON."""


class GeneratedCode:
    """Follows the lines of generated code on this thread.

    Args:
        changed: told of the innermost frame.
        base: gives the frame around the generated code.
        note: told why nothing could be followed.
    """

    def __init__(
        self,
        changed: Callable[[Frame | None], None],
        base: Callable[[], Frame | None],
        note: Callable[[str], None],
    ) -> None:
        self._changed = changed
        self._base = base
        self._note = note
        self._files: dict[str, dict[int, Facts]] = {}
        self._tracing = False

    def start(self) -> None:
        """Follow from here on, if Inductor is there at all."""
        if self._tracing or "torch._inductor.codecache" not in sys.modules:
            return
        if sys.gettrace() is not None:
            self._note(
                "kernels of compiled code have only the label of the whole, as a debugger or a "
                "coverage tool was following the program"
            )
            return
        self._tracing = True
        sys.settrace(self._called)

    def stop(self) -> None:
        """Follow no longer."""
        if self._tracing:
            self._tracing = False
            sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _argument: object) -> Any:
        """A function begins: only those of generated code are followed."""
        if event != "call":
            return None
        facts = self._facts(frame.f_code)
        return _Follower(facts, self._base(), self._changed).line if facts else None

    def _facts(self, code: CodeType) -> dict[int, Facts]:
        name = code.co_filename
        if name not in self._files:
            # The first lines of a generated module say so; other files are not read.
            if "/torch/" in name or "/thence/" in name or not name.endswith(".py"):
                self._files[name] = {}
            else:
                lines = linecache.getlines(name)
                generated = any(_MODULE.match(line) for line in lines[:3])
                self._files[name] = facts_of_lines(lines) if generated else {}
        return self._files[name]


class _Follower:
    """One run of a generated function."""

    def __init__(
        self,
        facts: dict[int, Facts],
        base: Frame | None,
        changed: Callable[[Frame | None], None],
    ) -> None:
        self._facts = facts
        self._base = base
        self._changed = changed
        self._last: Facts | None = None

    def line(self, frame: FrameType, event: str, _argument: object) -> Any:
        """A line is about to run, or the function is over."""
        facts = self._facts.get(frame.f_lineno) if event == "line" else None
        if facts != self._last:
            self._last = facts
            self._changed(self._base if facts is None else _frame(self._base, facts))
        return self.line


def _frame(base: Frame | None, facts: Facts) -> Frame:
    """The frame of a launch in generated code."""
    path, metadata = facts
    frame = base
    for name in path:
        frame = (frame, next(numbers), mark(name), None)
    known = json.loads(metadata)
    return (
        frame,
        next(numbers),
        LibraryMark(known["Original ATen"] or "compiled", None, **known),
        None,
    )


def facts_of_lines(lines: list[str]) -> dict[int, Facts]:
    """What the lines of a generated module that launch something were made of; line 1 is the first."""
    defined: dict[str, Facts] = {}
    found: dict[int, Facts] = {}
    comment: Facts | None = None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith("#"):
            comment = _comment(line) or comment
        elif definition := _DEFINITION.match(line):
            if comment is not None:
                defined[definition["name"]] = comment
            comment = None
        elif launch := _LAUNCH.search(line) or _CALL.match(line):
            name = launch["name"] or ""
            is_kernel = name in defined or not _CALL.match(line) or _LAUNCH.search(line) is not None
            if is_kernel and (facts := comment or defined.get(name)) is not None:
                found[number] = facts
                comment = None
        elif text.startswith(("def ", "class ")):
            comment = None
    return found


def _comment(line: str) -> Facts | None:
    """The facts in a comment above a launch."""
    match = _COMMENT.match(line)
    if match is None:
        return None
    paths = _paths(line[match.end() :])
    metadata: dict[str, object] = {
        "Original ATen": match["aten"],
        "Source Nodes": match["nodes"],
    }
    if len(paths) > 1:  # fused from several
        metadata["marks"] = ["/".join(path) for path in paths]
    return (paths[0] if paths else (), json.dumps(metadata))


def _paths(rest: str) -> list[tuple[str, ...]]:
    _, found, text = rest.partition(COMMENT)
    if not found:
        return []
    try:
        return [tuple(str(name) for name in path) for path in json.loads(text)]
    except (ValueError, TypeError):
        return []  # a comment of somebody else's
