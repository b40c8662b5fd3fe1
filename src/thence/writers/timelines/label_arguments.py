"""Labels and metadata of marks as arguments of Kineto events, under names that thence's reader knows.

An event of an activity in a CUDA graph has ``label_rule``: the code of how its label or other places were joined, or of
the reason why there are none. In the latter case ``label_detail`` may have more about the reason. Other arguments are
``label``, ``module``, ``op`` ... as far as the joined label has them, ``lane``, ``label_confidence`` for alignments,
and ``annotations`` with the other metadata of marks at capture. ``operator``, ``operator_inputs``, ``operator_node``
and ``operator_nodes`` are the call that launched the activity, as in ``graph_places``. Collectives are described under
Kineto's own names.
Activities that were launched outside of graphs have only ``lane`` and ``annotations``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import polars as pl

from thence.model.collectives import KINETO_KEYS, TEXTS
from thence.model.places import GRAPH_LABELS

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.model.attributed import Attributed

_PLACES = (*GRAPH_LABELS, "lane")


def graph_arguments(trace: Attributed, *, collectives: bool) -> pl.DataFrame:
    """The arguments of every activity in ``trace.graph_places``.

    Args:
        collectives: whether to include the descriptions of collectives.

    Returns:
        Columns row (row number in gpu) and text (members of a JSON object, each with a comma before it).
    """
    joined = trace.graph_places
    whole = trace.places.select("label", "label_rule", "lane", "metadata")[joined["gpu"]]
    # `label` and `lane` are those of `trace.places`; other places are written if the joined label has them.
    # `label_rule` is that of the label, of which only the ranges around the launch may be known.
    shown = joined.with_columns(whole.select("label", "lane"))
    texts = [_member(shown[name], name) for name in _PLACES]
    of_launch = joined["label"].is_null() & whole["label"].is_not_null()
    rule = pl.when(of_launch).then(whole["label_rule"].cast(pl.String)).otherwise(joined["rule"].cast(pl.String))
    rules = joined.select(rule.alias("label_rule")).to_series()
    confidence = joined.select(
        pl.concat_str(pl.lit(', "label_confidence": '), pl.col("confidence").round(4).cast(pl.String))
    ).to_series()
    details = _member(joined["detail"], "label_detail")
    members = [*texts, _member(rules, "label_rule"), details, confidence, annotations_of(whole["metadata"])]
    members += [_member(joined["operator"], "operator"), _member(joined["inputs"], "operator_inputs")]
    members += [_number(joined[name], f"operator_{name}") for name in ("node", "nodes")]
    if collectives:
        members.append(collective_arguments(joined.unnest("collective")))
    columns = [values.alias(f"m{i}") for i, values in enumerate(members)]
    return pl.DataFrame(columns).select(
        row=joined["gpu"].cast(pl.UInt32), text=pl.concat_str(pl.all(), ignore_nulls=True)
    )


def _member(values: pl.Series, key: str) -> pl.Series:
    """``, "key": "value"`` for each value; each distinct value is encoded once."""
    return _each_distinct(values, lambda text: f', "{key}": {msgspec.json.encode(text).decode()}')


def annotations_of(metadata: pl.Series) -> pl.Series:
    """``, "annotations": {...}`` for the metadata of each activity, as in `Attributed.places`."""
    return pl.select(pl.concat_str(pl.lit(', "annotations": '), metadata.cast(pl.String))).to_series()


def collective_arguments(described: pl.DataFrame) -> pl.Series:
    """``, "Collective name": "allreduce", ...`` for each row, under Kineto's names; empty without a description.

    Args:
        described: one row per event, with columns of `thence.model.tables.COLLECTIVES`.
    """
    members = [
        _member(described[column], key) if column in TEXTS else _number(described[column], key)
        for column, key in KINETO_KEYS.items()
    ]
    columns = [values.alias(f"m{i}") for i, values in enumerate(members)]
    return pl.DataFrame(columns).select(pl.concat_str(pl.all(), ignore_nulls=True)).to_series()


def _number(values: pl.Series, key: str) -> pl.Series:
    return pl.select(pl.concat_str(pl.lit(f', "{key}": '), values.cast(pl.String))).to_series()


def _each_distinct(values: pl.Series, changed: Callable[[str], str]) -> pl.Series:
    texts = values.cast(pl.String)
    distinct = texts.drop_nulls().unique(maintain_order=True)
    new = pl.Series([changed(text) for text in distinct.to_list()], dtype=pl.String)
    return texts.replace_strict(distinct, new, default=None, return_dtype=pl.String)
