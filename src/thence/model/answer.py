"""`Answer`: what every analysis returns, and its form in notebooks.

An answer has its JSON document, its tables with headings, its notes, and a check of itself. The terminal, JSON, CSV,
notebooks and pages show any answer by these alone (`thence.cli.output` has the first three).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from thence.errors import MissingData, MissingRequirement
from thence.units import format_cell, format_count, format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import polars as pl

_Result = TypeVar("_Result")

MAX_ROWS = 20
"""Rows of a table that a notebook shows."""
_BAR = 12
"""Characters of the longest bar. Bars are made of characters, because sites that only show notebooks, such as GitHub,
remove styles and scripts."""
_GAUGE = 5
_MAX_CELL = 90
"""Characters of a cell in a notebook."""


@dataclass(frozen=True)
class TableView:
    """A table of an answer, and how it is shown. Units follow from the names of columns: `thence.units.format_cell`.

    Attributes:
        rows: of the table.
        headings: columns that are shown, with their headings.
        title: a sentence above the table.
        ranked: columns that a narrow terminal keeps longest, the most important first.
        rows_shown: how many rows a terminal shows unless the user says; None: all.
        bar: column of numbers that a notebook also shows as bars, relative to the largest.
        full: column with the full name of each row, which a notebook shows on hover; empty: the first heading's.
    """

    rows: pl.DataFrame
    headings: Mapping[str, str]
    title: str = ""
    ranked: Sequence[str] = ()
    rows_shown: int | None = None
    bar: str = ""
    full: str = ""

    def html(self) -> str:
        """The table as an HTML fragment; every text is escaped."""
        shown = self.rows.head(MAX_ROWS)
        largest = max([value for value in shown[self.bar] if value is not None], default=0) if self.bar else 0
        full = self.full or next(iter(self.headings))
        rows = (
            (
                str(row[full]),
                (
                    *(_cell(column, row[column]) for column in self.headings),
                    *((_bar(row[self.bar] or 0, largest),) if self.bar else ()),
                ),
            )
            for row in shown.iter_rows(named=True)
        )
        headings = (*self.headings.values(), *(("",) if self.bar else ()))
        return (_paragraph(self.title) if self.title else "") + table_html(headings, rows, self.rows.height - MAX_ROWS)


@dataclass(frozen=True)
class Lines:
    """Lines of text of an answer.

    Attributes:
        lines: each with its style on a terminal (such as bold, dim, red; empty for none). Further lines of a long one
            are indented as its first.
        limited: whether a terminal shows only as many as the user says.
        at_least: lines that it shows nevertheless.
        counted: what the lines are, such as devices.
        apart: whether an empty line is above them on a terminal.
    """

    lines: tuple[tuple[str, str], ...]
    limited: bool = False
    at_least: int = 0
    counted: str = ""
    apart: bool = True

    def html(self) -> str:
        """The lines as an HTML fragment; every text is escaped."""
        return f"<p>{'<br>'.join(escape(text) for text, _ in self.lines[:MAX_ROWS])}</p>" if self.lines else ""


@dataclass(frozen=True)
class Caveats:
    """What holds for every answer about a trace, and is shown with it.

    Attributes:
        inputs: names of the trace's inputs.
        unsound: sentences on the findings that make the trace unsound.
        findings: these findings as JSON values.
        work_missing: whether the trace lacks device work that ran; idle time is then an upper bound.
        left_out: files of the inputs that were not read; shown above the answer.
        notes: what was done with the inputs, and what the selection left out.
        warnings: of the readers.
    """

    inputs: tuple[str, ...] = ()
    unsound: tuple[str, ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()
    work_missing: bool = False
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The result of an analysis.

    Attributes:
        caveats: of the trace; `thence.trace.Trace` adds them.
    """

    caveats: Caveats = field(default=Caveats(), kw_only=True, repr=False, compare=False)

    def about(self) -> tuple[str, ...]:
        """What the answer is of, and its totals: the heading in a notebook, then lines."""
        return ()

    def views(self) -> tuple[TableView | Lines, ...]:
        """Tables and lines of text in the order in which they are shown."""
        raise NotImplementedError

    def remarks(self) -> Iterable[str]:
        """The answer's own notes, one sentence each."""
        return ()

    def known(self) -> Mapping[str, float]:
        """Shares (0 to 1) of the time for which something is known, by its name."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON values; units are in the keys."""
        raise NotImplementedError

    def self_check(self) -> None:
        """Checks that figures are possible and add up.

        Raises:
            Contradiction: they do not.
        """

    def all_notes(self) -> tuple[str, ...]:
        """All notes: `caveats.left_out` and `notes_below`."""
        return (*self.caveats.left_out, *self.notes_below())

    def notes_below(self) -> tuple[str, ...]:
        """What makes the trace unsound, the answer's own notes, those on the inputs, and warnings."""
        caveats = self.caveats
        return (*caveats.unsound, *self.remarks(), *caveats.notes, *caveats.warnings)

    def document(self) -> dict[str, Any]:
        """`to_json` with notes and findings, as ``--format json`` prints it."""
        return {**self.to_json(), "soundness": list(self.caveats.findings), "warnings": list(self.all_notes())}

    def to_frame(self) -> pl.DataFrame:
        """The main table with all of its columns, as ``--format csv`` prints it."""
        return next(view.rows for view in self.views() if isinstance(view, TableView))

    def to_pandas(self) -> Any:
        """`to_frame` as a ``pandas.DataFrame``.

        Raises:
            MissingRequirement: pandas or pyarrow is not installed.
        """
        try:
            return self.to_frame().to_pandas()
        except ImportError as error:
            raise MissingRequirement(
                "to_pandas needs pandas and pyarrow, which are not installed: pip install 'thence[pandas]'"
            ) from error

    def _repr_html_(self) -> str:
        return f"<div>{''.join(self._html())}</div>"

    def _html(self) -> Iterator[str]:
        first, *others = self.about() or ("",)
        if first:
            yield f"<p><b>{escape(first)}</b>{''.join(f'<br>{escape(text)}' for text in others)}</p>"
        yield from (view.html() for view in self.views())
        if shares := self.known():
            known = ", ".join(f"{name} {format_share(share, 1)} {_gauge(share)}" for name, share in shares.items())
            yield _paragraph(f"known: {known}")
        yield from map(_paragraph, self.all_notes())


@dataclass(frozen=True)
class ResultOrReason(Generic[_Result]):
    """A result, or the reason why there is none.

    Attributes:
        result: None if the trace lacks the data that the analysis needs, or if it was not computed.
        reason: why there is no result; empty if there is one.
    """

    result: _Result | None
    reason: str = ""


def result_or_reason(question: Callable[[], _Result]) -> ResultOrReason[_Result]:
    """Runs an analysis; catches `MissingData` and keeps its message as the reason."""
    try:
        return ResultOrReason(question())
    except MissingData as error:
        return ResultOrReason(None, str(error))


def table_html(headings: Iterable[str], rows: Iterable[tuple[str, Sequence[str]]], hidden: int) -> str:
    """A table as an HTML fragment; every text is escaped.

    Args:
        rows: for each row its full name, which is shown on hover, and the text of each column.
        hidden: how many further rows there are.
    """
    titles = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join(
        f'<tr><td title="{escape(name)}" style="text-align:left">{escape(first)}</td>'
        + "".join(_column(text) for text in others)
        + "</tr>"
        for name, (first, *others) in rows
    )
    more = f"<p>... {format_count(hidden)} more rows in <code>.to_frame()</code></p>" if hidden > 0 else ""
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{more}"


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _column(text: str) -> str:
    """A cell after the first column. Notebooks align cells to the right, so bars get an explicit left alignment."""
    style = ' style="text-align:left"' if text and not text.strip("█") else ""
    return f"<td{style}>{escape(text)}</td>"


def _bar(value: float, largest: float) -> str:
    return "█" * (round(_BAR * min(max(value / largest, 0), 1)) if largest else 0)


def _gauge(share: float) -> str:
    """A share as filled and empty marks; only a share of 1 fills all of them."""
    filled = min(int(_GAUGE * max(share, 0) + 0.5), _GAUGE if share >= 1 else _GAUGE - 1)
    return "▮" * filled + "▯" * (_GAUGE - filled)


def _cell(column: str, value: object) -> str:
    """A value as text; a no-break space keeps a number and its unit on one line."""
    text = format_cell(column, value)
    if isinstance(value, int | float):
        return text.replace(" ", "\u00a0")
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"
