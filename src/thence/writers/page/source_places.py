"""Places in source files as a page shows them: with one short path each, in every table, chart and sentence.

A path is relative to the folder that holds all files of the program (`thence.model.own_code.short_places`), and hence
depends on which places there are: those of the whole page are shortened together.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import polars as pl

from thence.analysis.explain.finding import name as name_in_sentences
from thence.model.own_code import SOURCE_PLACE, short_places

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from thence.analysis.memory.over_time import MemoryOverTime
    from thence.analysis.report.page import Page
    from thence.model.answer import ResultOrReason

SOURCE = "source"
_Result = TypeVar("_Result")
_QUOTED = re.compile("`([^`]+)`")


def with_short_places(page: Page) -> Page:
    """The page with short places of source files."""
    short = short_places(sorted({name for name in _places(page) if SOURCE_PLACE.fullmatch(name)}))
    short = {place: text for place, text in short.items() if place != text}
    if not short:
        return page
    summaries = dict(page.summaries)
    if SOURCE in summaries:
        rows = summaries[SOURCE].rows
        summaries[SOURCE] = replace(summaries[SOURCE], rows=rows.with_columns(short_name=_short(rows["name"], short)))
    said = {f"`{name_in_sentences(place)}`": f"`{text}`" for place, text in short.items()}
    findings = tuple(
        replace(finding, claim=_QUOTED.sub(lambda match: said.get(match[0], match[0]), finding.claim))
        for finding in page.explanation.findings
    )
    return replace(
        page,
        summaries=summaries,
        explanation=replace(page.explanation, findings=findings),
        idle=_renamed(page.idle, short, "rows"),
        roofline=_renamed(page.roofline, short, "rows"),
        memory=_renamed(page.memory, short, "rows"),
        memory_over_time=_over_time(page.memory_over_time, short),
    )


def _places(page: Page) -> Iterator[str]:
    """Every name on the page that may be a place in a source file."""
    if SOURCE in page.summaries:
        yield from page.summaries[SOURCE].rows["name"].drop_nulls()
    for part in (page.idle, page.roofline, page.memory):
        if part.result is not None:
            yield from part.result.rows["name"].drop_nulls().cast(pl.String)
    if page.memory_over_time.result is not None:
        yield from page.memory_over_time.result.names


def _renamed(part: ResultOrReason[_Result], short: Mapping[str, str], column: str) -> ResultOrReason[_Result]:
    """A part of a page with short names in one of its frames."""
    if part.result is None:
        return part
    frame = getattr(part.result, column)
    short_names = _short(frame["name"].cast(pl.String), short)
    return replace(part, result=replace(part.result, **{column: frame.with_columns(name=short_names)}))  # type: ignore[type-var]


def _over_time(part: ResultOrReason[MemoryOverTime], short: Mapping[str, str]) -> ResultOrReason[MemoryOverTime]:
    part = _renamed(part, short, "points")
    if part.result is None:
        return part
    return replace(part, result=replace(part.result, names=tuple(short.get(name, name) for name in part.result.names)))


def _short(names: pl.Series, short: Mapping[str, str]) -> pl.Series:
    return names.replace(dict(short))
