"""An explanation as text, Markdown or JSON of at most so many characters; what does not fit is left out whole.

The least useful findings are left out, and the last line, or the keys ``dropped`` and ``dropped_not_answered``, say how
many. Nothing is cut: names and sentences were shortened when the findings were made.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from thence.analysis.explain.answer import finding_lines
from thence.analysis.explain.finding import Finding
from thence.units import format_count, several

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.analysis.explain.answer import Explanation
    from thence.analysis.explain.finding import NotAnswered

FORMS = ("text", "json", "markdown")
MIN_CHARS = 1000
"""Characters in which soundness, the step and the verdict always fit."""
_WIDTHS = (160, 80, 40, 20)
"""Of the sentences of the heading where it alone exceeds the limit; the first that fits."""
_WITH_ROWS = 2000
"""Below so many characters findings have no rows of evidence, so that some of them fit."""
_MAX_INPUTS = 60
"""Most characters of the inputs in a command; longer ones are the word INPUT."""
_MARKDOWN = re.compile(r"([\\*_{}\[\]<>#|!~&])")


_COMMANDS = ("  evidence: ", "  next: ")
"""Lines that hold a command, which is copied whole: a terminal folds them itself."""


def explanation_text(explanation: Explanation, form: str, most: int, schema: int, width: int | None = None) -> str:
    """The explanation in a form, with a line feed at its end.

    Args:
        most: characters, at least `MIN_CHARS`.
        schema: of the JSON document.
        width: of the terminal in characters, at which sentences of the form text are broken; None: they are not.
    """
    if len(explanation.inputs) > _MAX_INPUTS or not explanation.inputs.isprintable():
        explanation = replace(explanation, inputs="INPUT")
    if most < _WITH_ROWS:
        explanation = replace(explanation, findings=tuple(replace(entry, rows=()) for entry in explanation.findings))
    writers: dict[str, Callable[[Explanation, tuple[Finding | NotAnswered, ...]], str]]
    writers = {"text": partial(_text, wide=width), "markdown": _markdown, "json": _json(schema)}
    write = writers[form]
    kept = len(explanation.ordered)
    while len(text := write(explanation, explanation.ordered[:kept])) > most and kept:
        kept -= 1
    for longest in _WIDTHS if len(text) > most else ():
        text = write(replace(explanation, width=longest), ())
        if len(text) <= most:
            break
    return text


def _findings(explanation: Explanation, kept: tuple[Finding | NotAnswered, ...]) -> list[Finding]:
    """The findings among what is kept, the most severe first."""
    numbers = {id(entry) for entry in kept}
    return [entry for entry in explanation.findings if id(entry) in numbers]


def _left_out(explanation: Explanation, kept: tuple[Finding | NotAnswered, ...]) -> tuple[int, int]:
    """How many findings, and how many questions that were not answered, are left out."""
    findings = sum(isinstance(entry, Finding) for entry in kept)
    return len(explanation.findings) - findings, len(explanation.not_answered) - (len(kept) - findings)


def _text(explanation: Explanation, kept: tuple[Finding | NotAnswered, ...], wide: int | None = None) -> str:
    lines = [*explanation.heading, *_lines(explanation, kept, lambda line: line), *_end(explanation, kept)]
    return "\n".join(lines if wide is None else [_broken(line, wide) for line in lines]) + "\n"


def _broken(line: str, width: int) -> str:
    """A line broken at a width between words; what follows is indented."""
    if len(line) <= width or line.startswith(_COMMANDS):
        return line
    return textwrap.fill(line, max(width, 20), subsequent_indent="    ", break_on_hyphens=False)


def _lines(explanation: Explanation, kept: tuple[Finding | NotAnswered, ...], shown: Callable[[str], str]) -> list[str]:
    findings = _findings(explanation, kept)
    missing = [entry for entry in kept if not isinstance(entry, Finding)]
    lines = [shown(line) for entry in findings for line in finding_lines(entry, explanation.inputs)]
    return lines + [shown(f"not answered: {n.question}: {n.reason}; {n.how}") for n in missing]


def _end(explanation: Explanation, kept: tuple[Finding | NotAnswered, ...]) -> list[str]:
    findings, missing = _left_out(explanation, kept)
    parts = [several(findings, "finding")] if findings else []
    parts += [f"{format_count(missing)} of what was not answered"] if missing else []
    return [f"left out: {' and '.join(parts)}; --max-chars sets the limit"] if parts else []


def _markdown(explanation: Explanation, kept: tuple[Finding | NotAnswered, ...]) -> str:
    lines = [
        f"**{_escaped(line)}**  " if number == 0 else f"{_escaped(line)}  "
        for number, line in enumerate(explanation.heading)
    ]
    lines.append("")
    lines += [
        f"  {line.strip()}  " if line.startswith("  ") else f"- {line}  "
        for line in _lines(explanation, kept, _escaped)
    ]
    lines += [_escaped(line) for line in _end(explanation, kept)]
    return "\n".join(lines) + "\n"


def _escaped(line: str) -> str:
    """A line of text in Markdown: what is in backticks stays as it is."""
    parts = line.split("`")
    return "`".join(part if number % 2 else _MARKDOWN.sub(r"\\\1", part) for number, part in enumerate(parts))


def _json(schema: int) -> Callable[[Explanation, tuple[Finding | NotAnswered, ...]], str]:
    def write(explanation: Explanation, kept: tuple[Finding | NotAnswered, ...]) -> str:
        findings, missing = _left_out(explanation, kept)
        document: dict[str, Any] = {
            "schema": schema,
            **explanation.opening(),
            "findings": [entry.to_json(explanation.inputs) for entry in _findings(explanation, kept)],
            "not_answered": [entry.to_json() for entry in kept if not isinstance(entry, Finding)],
            "dropped": findings,
            "dropped_not_answered": missing,
        }
        return msgspec.json.encode(document).decode() + "\n"

    return write
