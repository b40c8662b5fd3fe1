"""Labels of graphed activities as arguments of Kineto's events, under names that thence reads back.

``label_rule`` marks such an event: how the label was joined, or why there is none. Beside it stand
``label``, ``module``, ``op`` ... as far as the joined labels have them, ``lane``, ``label_confidence``
for alignments, and under ``annotations`` what else was said at capture. What a collective moves gets
Kineto's own names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import polars as pl

from thence.readers.kineto.collectives import METADATA_KEYS

if TYPE_CHECKING:
    from thence.model.tables import Tables

__all__ = ["PLACES", "graph_arguments"]

PLACES = ("label", "module", "op", "ops", "source", "stack", "phase", "lane")


def graph_arguments(tables: Tables, places: pl.DataFrame, *, collectives: bool) -> pl.DataFrame:
    """The arguments of every activity in ``tables.graph_places``.

    Args:
        tables: of the trace.
        places: of the same, as in `Attribution.places`.
        collectives: whether what describes collectives is wanted as well.

    Returns:
        row (in gpu) and text: members of a JSON object, each with a comma before it.
    """
    joined = tables.graph_places
    whole = places.select("label", "label_rule")[joined["gpu"]]
    # A label without a name has the reason for that; any other place is told where the label tells it.
    shown = joined.with_columns(label=whole["label"])
    texts = [_member(shown[name], name) for name in PLACES]
    rule = pl.when(joined["label"].is_null()).then(whole["label_rule"].cast(pl.String)).otherwise(
        joined["rule"].cast(pl.String)
    )  # fmt: skip
    rules = joined.select(rule.alias("label_rule")).to_series()
    confidence = joined.select(
        pl.concat_str(
            pl.lit(', "label_confidence": '), pl.col("confidence").round(4).cast(pl.String)
        )
    ).to_series()
    metadata = _metadata(joined["metadata"], collectives)
    members = [*texts, _member(rules, "label_rule"), confidence, metadata]
    columns = [values.alias(f"m{i}") for i, values in enumerate(members)]
    return pl.DataFrame(columns).select(
        row=joined["gpu"].cast(pl.UInt32), text=pl.concat_str(pl.all(), ignore_nulls=True)
    )


def _member(values: pl.Series, key: str) -> pl.Series:
    """``, "key": "value"`` for each value; every distinct one is encoded once."""
    texts = values.cast(pl.String)
    distinct = texts.drop_nulls().unique(maintain_order=True)
    encoded = [f', "{key}": {msgspec.json.encode(text).decode()}' for text in distinct.to_list()]
    return texts.replace_strict(
        distinct, pl.Series(encoded, dtype=pl.String), default=None, return_dtype=pl.String
    )


def _metadata(values: pl.Series, collectives: bool) -> pl.Series:  # noqa: FBT001 - one of two ways
    texts = values.cast(pl.String)
    distinct = texts.drop_nulls().unique(maintain_order=True)
    encoded = []
    for text in distinct.to_list():
        members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        described = {k: v for k, v in members.items() if k in METADATA_KEYS and collectives}
        rest = {k: v for k, v in members.items() if k not in METADATA_KEYS}
        found = described | ({"annotations": rest} if rest else {})
        inner = msgspec.json.encode(found).decode()[1:-1]
        encoded.append(f", {inner}" if inner else "")
    return texts.replace_strict(
        distinct, pl.Series(encoded, dtype=pl.String), default=None, return_dtype=pl.String
    )
