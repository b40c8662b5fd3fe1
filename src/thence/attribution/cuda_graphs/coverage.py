"""How much of what ran in CUDA graphs has a label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.attribution.cuda_graphs.replays import in_cuda_graph
from thence.model.answer import Answer, TableView
from thence.model.places import GRAPH_LABELS
from thence.model.reasons import RULES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.tables import Tables


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
        int(inside.sum()),
        joined.height,
        int(tables.gpu["duration"].filter(inside).sum()),
        int(tables.gpu["duration"].gather(joined["gpu"]).sum()),
        dict(rules.rows()),
        float(lowest) if isinstance(lowest, float) else None,
        {name: count for name, count in counts.items() if count},
    )
