"""Labels what ran in CUDA graphs, on request or because labels came with the trace, and states how much has a label."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.attribution.cuda_graphs.assigned_labels import JoinedLabels, with_places
from thence.attribution.cuda_graphs.by_eager import join_eager
from thence.attribution.cuda_graphs.captures import captured_calls
from thence.attribution.cuda_graphs.join_labels import join_labels
from thence.attribution.cuda_graphs.replays import Replays, in_cuda_graph
from thence.errors import InputError, MissingData
from thence.model.answer import Answer, TableView
from thence.model.places import GRAPH_LABELS
from thence.model.reasons import RULES
from thence.model.tables import named_inputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thence.model.attributed import Attributed
    from thence.model.graph_labels import GraphLabels
    from thence.model.tables import Tables


LABELS_NOTE = "labels of CUDA graphs"
"""Begin of the note that names the label files that were joined."""
_MAX_LISTED = 3  # files in a note or warning


def labelled(tables: Tables, labels: Sequence[GraphLabels]) -> Tables:
    """Joins labels files to the tables. Files that hold only the edges of graphs label nothing.

    Raises:
        MissingData: nothing ran in a graph, or nothing of it could be joined; the message has the
            first place where graph and labels differ.
        InputError: the labels are of another process or program.
    """
    _check_graphs(tables)
    joined = join_labels(tables, labels)
    if not joined.labelled and joined.foreign:
        _, reason = joined.foreign[0]
        raise InputError(
            ", ".join(file.source for file in labels), f"{reason}; use the labels file that the traced process saved"
        )
    known = dataclasses.replace(tables, graph_labels=(*tables.graph_labels, *labels))
    if not any(file.labels for file in labels) and any(
        graph.edges is not None for file in labels for graph in file.graphs
    ):
        return known
    return _replace_labels(known, joined, "the labels")


def labelled_from_eager(tables: Tables, eager: Sequence[Attributed]) -> Tables:
    """Labels the tables from runs of the same code without graphs, or from traces of the captures.

    Args:
        tables: with the replays of graphs.
        eager: the runs, or the traces of the captures.

    Raises:
        MissingData: nothing ran in a graph, the traces hold no launches, or the runs differ; then the message
            has the first difference.
    """
    _check_graphs(tables)
    if not any(trace.gpu.height or captured_calls(trace).height for trace in eager):
        inputs = named_inputs([name for trace in eager for name in trace.meta.inputs])
        raise MissingData(f"{inputs}: holds no device activity, and no launch that was captured into a CUDA graph")
    return _replace_labels(tables, join_eager(tables, eager), "the eager run")


def with_labels(tables: Tables) -> Tables:
    """Joins `Tables.graph_labels` to the tables. Labels that do not match cause warnings, not errors."""
    labels = tables.graph_labels
    if not labels or tables.gpu.is_empty():
        return tables
    joined = join_labels(tables, labels)
    warnings = [*joined.notes]
    if not joined.labelled:
        refusals = joined.foreign[:_MAX_LISTED]
        warnings += [f"{source}: {text}; its labels are not used" for source, text in refusals]
        return tables.with_warnings(warnings)
    result = with_places(tables, joined).with_warnings(warnings)
    notes = (*result.meta.notes, _used(joined, result))
    return dataclasses.replace(result, meta=dataclasses.replace(result.meta, notes=notes))


def _used(joined: JoinedLabels, result: Tables) -> str:
    """A note on the files that labelled activities, and on how many each if there are several."""
    several = len(joined.files) > 1
    names = [
        f"{Path(source).name} ({count:,} activities)" if several else Path(source).name
        for source, count in joined.files.items()
    ]
    listed = ", ".join(names[:_MAX_LISTED]) + (" ..." if len(names) > _MAX_LISTED else "")
    return f"{LABELS_NOTE} from {listed}: {coverage(result)}"


def _check_graphs(tables: Tables) -> None:
    if not len(Replays.of(tables).rows):
        inputs = tables.meta.named
        raise MissingData(f"{inputs}: nothing in it ran in a CUDA graph, so there is nothing to label")


def _replace_labels(tables: Tables, joined: JoinedLabels, what: str) -> Tables:
    if not joined.labelled:
        inputs = tables.meta.named
        reasons = "; ".join(joined.notes[:1]) or "none of its nodes has a label"
        raise MissingData(f"{inputs}: nothing could be labelled with {what}: {reasons}")
    # These labels replace those found next to the trace, so the note about those is removed.
    notes = tuple(note for note in tables.meta.notes if not note.startswith(LABELS_NOTE))
    meta = dataclasses.replace(tables.meta, notes=notes)
    result = with_places(dataclasses.replace(tables, meta=meta), joined)
    if len(joined.files) > 1:
        meta = dataclasses.replace(result.meta, notes=(*notes, _used(joined, result)))
        result = dataclasses.replace(result, meta=meta)
    refusals = (f"{source}: {text}" for source, text in joined.foreign)
    return result.with_warnings((*joined.notes, *refusals))


# ---- How much has a label


@dataclass(frozen=True)
class Coverage(Answer):
    """What ran in CUDA graphs, and how much of that has a joined label.

    Attributes:
        activities: how many activities ran in graphs, XLA's command buffers not counted.
        labelled: how many of them have a label.
        graphed_ns: sum of their durations.
        labelled_ns: sum of the durations of those with a label.
        rules: for the code of each rule, how many activities got a label or another place by it.
        places: for each kind of place, how many activities have a joined one; kinds without any are left out.
        confidence: lowest confidence of an alignment that gave a label; None without any.
    """

    activities: int
    labelled: int
    graphed_ns: int
    labelled_ns: int
    rules: Mapping[str, int]
    confidence: float | None
    places: Mapping[str, int]

    @property
    def share(self) -> float | None:
        """Share of the time in graphs that has a label, 0 to 1; None where nothing ran in graphs."""
        return self.labelled_ns / self.graphed_ns if self.graphed_ns else None

    def __str__(self) -> str:
        if self.share is None:
            return "nothing ran in CUDA graphs"
        part = f"{self.labelled:,} of {self.activities:,} activities in CUDA graphs have a label"
        text = f"{part}: {100 * self.share:.1f} % of their time"
        operators = self.places.get("op", 0)
        return text if self.labelled or not operators else f"{text}; {operators:,} have an operator"

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return "CUDA graphs", str(self)

    def views(self) -> tuple[TableView, ...]:
        """The rules by which labels were found."""
        schema = {"rule": pl.String, "count": pl.Int64}
        rules = pl.DataFrame(list(self.rules.items()), schema=schema, orient="row")
        headings = {"rule": "found by", "count": "activities", "meaning": ""}
        return (TableView(rules.with_columns(meaning=pl.col("rule").replace(RULES)), headings, bar="count"),)

    def known(self) -> Mapping[str, float]:
        """See `Answer`."""
        return {} if self.share is None else {"label": self.share}

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "graphed": self.activities,
            "labelled": self.labelled,
            "graphed_ns": self.graphed_ns,
            "labelled_ns": self.labelled_ns,
            "coverage": self.share,
            "rules": dict(self.rules),
            "places": dict(self.places),
            "confidence_min": self.confidence,
        }


def coverage(tables: Tables) -> Coverage:
    """The coverage of a trace."""
    placed = tables.graph_places.filter(pl.any_horizontal(pl.col(GRAPH_LABELS).is_not_null()))
    joined = placed.filter(pl.col("label").is_not_null())
    inside = pl.Series(in_cuda_graph(tables)) & tables.gpu["program"].is_null()
    rules = placed["rule"].cast(pl.String).value_counts(sort=True)
    lowest = placed["confidence"].min()
    counts = {name: placed.height - placed[name].null_count() for name in GRAPH_LABELS}
    return Coverage(
        activities=int(inside.sum()),
        labelled=joined.height,
        graphed_ns=int(tables.gpu["duration"].filter(inside).sum()),
        labelled_ns=int(tables.gpu["duration"].gather(joined["gpu"]).sum()),
        rules=dict(rules.rows()),
        confidence=float(lowest) if isinstance(lowest, float) else None,
        places={name: count for name, count in counts.items() if count},
    )
