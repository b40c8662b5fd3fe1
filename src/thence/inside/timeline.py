"""In-kernel ranges as a timeline of their own, or under the slices of their kernels in a trace.

Each launch gets its own clock shift: the mean of (slice start - first range start) and (slice end - last
range end), which agree to about 1 us on an H200. A single shift for all launches would be wrong, because
%globaltimer and CUPTI's clock drift. Times that the trace recorded are not changed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.timelines.timeline import timeline
from thence.attribution.attribute import attribute
from thence.inside.launch_matching import find_launches, span, with_rates
from thence.model.tables import Meta, Tables
from thence.model.timeline import Phases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.inside.decoding import Decoded
    from thence.model.timeline import Timeline

    Parts = Sequence[tuple[str, Decoded]]

_UNIX_TIMES_NS = 1_500_000_000_000_000_000
"""A timer with smaller values does not count from 1970."""


def standalone(parts: Parts) -> Timeline:
    """A timeline of in-kernel ranges only.

    Launches with 64-bit times keep the distances between them; every other launch begins at 0.

    Args:
        parts: name and decoded content of each buffer.
    """
    whole = [span(d)[0] for _, d in parts if d.timer_bits == 64 and d.traces.height]
    epoch = min(whole, default=None)
    notes = _notes(parts)
    if len(parts) > 1 and len(whole) < len(parts):
        notes.append("launches whose layout has no absolute times all begin at 0: the time between them is unknown")
    phases = tuple(
        _phases(d, 0, d.description.device, -(epoch or 0) if d.timer_bits == 64 else -span(d)[0])
        for _, d in parts
        if d.traces.height
    )
    meta = Meta(
        inputs=tuple(name for name, _ in parts),
        formats=tuple(f"in-kernel events ({d.description.flavour})" for _, d in parts),
        epoch_ns=epoch if epoch is not None and epoch > _UNIX_TIMES_NS else None,
        warnings=tuple(w for _, d in parts for w in d.warnings),
    )
    tables = Tables(meta=meta)
    return dataclasses.replace(timeline(attribute(tables)), inside=_with_distinct_titles(phases), notes=tuple(notes))


def merged(recorded: Timeline, parts: Parts, launch: int | None = None) -> Timeline:
    """A timeline with in-kernel ranges under the slices of their kernels.

    Args:
        recorded: timeline of a trace recorded at the same time.
        parts: name and decoded content of each buffer.
        launch: number of the launch among the kernel's launches, in order of start from 0; None finds it
            by the criteria of `thence.inside.launch_matching`.

    Raises:
        MissingData: no launch, or more than one, matches a buffer; or nothing tells the rate of its clock.
        UsageError: the kernel has no launch with the number ``launch``.
    """
    not_empty = [(name, d) for name, d in parts if d.traces.height]
    filled = with_rates(recorded, not_empty, launch)
    places = find_launches(recorded, filled, launch)
    phases = tuple(
        _phases(decoded, place.rank, place.device, place.moved_ns)
        for place, (_, decoded) in zip(places, filled, strict=True)
    )
    match_notes = [place.sentence(name) for place, (name, _) in zip(places, filled, strict=True)]
    meta = recorded.trace.meta
    warnings = (*meta.warnings, *(w for _, d in parts for w in d.warnings))
    trace = dataclasses.replace(recorded.trace, meta=dataclasses.replace(meta, warnings=warnings))
    return dataclasses.replace(
        recorded,
        trace=trace,
        inside=_with_distinct_titles((*recorded.inside, *phases)),
        notes=(*recorded.notes, *_notes(filled), *match_notes),
    )


def _with_distinct_titles(phases: Sequence[Phases]) -> tuple[Phases, ...]:
    """Numbers the titles that occur more than once, because viewers draw tracks of equal names as one track."""
    often = Counter(phase.title for phase in phases)
    number: Counter[str] = Counter()
    result = []
    for phase in phases:
        number[phase.title] += 1
        suffix = f" #{number[phase.title]}" if often[phase.title] > 1 else ""
        result.append(dataclasses.replace(phase, title=phase.title + suffix))
    return tuple(result)


def _notes(parts: Parts) -> list[str]:
    prefix = len(parts) > 1
    return [f"{name}: {note}" if prefix else note for name, d in parts for note in d.notes]


def _phases(decoded: Decoded, rank: int, device: int, shift: int) -> Phases:
    description = decoded.description
    ranges = decoded.as_ns(decoded.ranges).with_columns(
        pl.col("name").cast(pl.String).cast(pl.Categorical()), pl.col("start_ns") + shift
    )
    title = description.kernel or "kernel without a name"
    if decoded.unit == "cycles":
        title += " (a cycle is drawn as 1 ns)"
    return Phases(title, rank, device, decoded.scope, ranges)
