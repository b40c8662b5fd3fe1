"""Tables with labels joined to what ran in CUDA graphs: on request, or because they came with the trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from thence.attribution.graphs.by_eager import join_eager
from thence.attribution.graphs.coverage import coverage
from thence.attribution.graphs.join import Joined, join_labels, with_places
from thence.attribution.graphs.replays import Replays
from thence.errors import InputError, MissingData

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thence.attribution.combined import Attribution
    from thence.model.graph_labels import GraphLabels
    from thence.model.tables import Tables

__all__ = ["labelled", "labelled_from_eager", "with_labels"]

_BESIDE = "labels of CUDA graphs from"
_MOST_TOLD = 3


def labelled(tables: Tables, labels: Sequence[GraphLabels]) -> Tables:
    """The tables with labels files joined.

    Raises:
        MissingData: nothing ran in a graph, or nothing of it could be joined; the message has the
            first place where graph and labels differ.
        InputError: the labels are of another process or program.
    """
    _check_graphs(tables)
    joined = join_labels(tables, labels)
    if not joined.labelled and joined.foreign:
        raise InputError(", ".join(one.source for one in labels), _without_source(joined, labels))
    return _taken(tables, joined, "the labels")


def labelled_from_eager(tables: Tables, eager: Tables, attribution: Attribution) -> Tables:
    """The tables with the places of an eager run of the same code.

    Args:
        tables: with the replays of graphs.
        eager: of the run without graphs.
        attribution: of that run.

    Raises:
        MissingData: nothing ran in a graph, or the runs differ; the message says where first.
    """
    _check_graphs(tables)
    if eager.gpu.is_empty():
        raise MissingData(f"{', '.join(eager.meta.inputs)}: holds no device activity")
    return _taken(tables, join_eager(tables, eager, attribution), "the eager run")


def with_labels(tables: Tables) -> Tables:
    """The tables with `Tables.graph_labels` joined. What does not fit is a warning, never an error."""
    labels = tables.graph_labels
    if not labels or tables.gpu.is_empty():
        return tables
    joined = join_labels(tables, labels)
    warnings = [*joined.notes]
    if not joined.labelled:
        warnings += [f"{text}; not joined" for text in joined.foreign[:_MOST_TOLD]]
        return tables.with_warnings(warnings)
    result = with_places(tables, joined)
    refused = tuple(text.split(": ")[0] for text in joined.foreign)
    used = [one for one in labels if one.source not in refused]
    names = ", ".join(Path(one.source).name for one in used[:_MOST_TOLD])
    names += " ..." if len(used) > _MOST_TOLD else ""
    return result.with_warnings([*warnings, f"{_BESIDE} {names}: {coverage(result)}"])


def _check_graphs(tables: Tables) -> None:
    if not len(Replays.of(tables).rows):
        inputs = ", ".join(tables.meta.inputs)
        raise MissingData(
            f"{inputs}: nothing in it ran in a CUDA graph, so there is nothing to label"
        )


def _taken(tables: Tables, joined: Joined, what: str) -> Tables:
    if not joined.labelled:
        inputs = ", ".join(tables.meta.inputs)
        reasons = "; ".join(joined.notes[:1]) or "none of its nodes has a label"
        raise MissingData(f"{inputs}: nothing could be labelled with {what}: {reasons}")
    # These labels take the place of those that lay beside the trace.
    others = tuple(text for text in tables.meta.warnings if not text.startswith(_BESIDE))
    meta = dataclasses.replace(tables.meta, warnings=others)
    result = with_places(dataclasses.replace(tables, meta=meta), joined)
    return result.with_warnings((*joined.notes, *joined.foreign))


def _without_source(joined: Joined, labels: Iterable[GraphLabels]) -> str:
    text = joined.foreign[0]
    for one in labels:
        text = text.removeprefix(f"{one.source}: ")
    return f"{text}; take the labels that this process saved"
