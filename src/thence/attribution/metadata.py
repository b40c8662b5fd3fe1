"""Merges the metadata of nested marks into one JSON object; inner marks override outer ones.

Marks can be nested arbitrarily deep, so the inherited part is bounded: at most `MOST_MEMBERS` members, and
at most `MOST_CHARACTERS` characters of keys and values among these; members from the outermost marks are
dropped first. The metadata of the innermost mark itself is kept in full.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from thence.attribution.paths import path_tree
from thence.model.intervals import NO_ROW
from thence.model.json_fields import decoded

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_MEMBERS = 64
MOST_CHARACTERS = 4096


def merged_metadata(
    parent: npt.NDArray[np.int64], metadata: pl.Series, rows: npt.NDArray[np.int64], has_metadata: npt.NDArray[np.bool_]
) -> pl.Series:
    """The metadata of all marks around each of the rows.

    Args:
        parent: parent row of every host row, `NO_ROW` at the top.
        metadata: Categorical JSON object of every host row, null where there is none.
        rows: innermost host row with metadata of each activity, `NO_ROW` for none.
        has_metadata: which host rows have metadata.

    Returns:
        Categorical Series of JSON objects, one value per row, null where no mark has metadata.
    """
    tree, node = path_tree(parent, metadata, rows, has_metadata)
    node_texts = tree.name.cast(pl.String).to_list()
    texts: list[str | None] = []
    merged_pairs: dict[tuple[str | None, str], str | None] = {}  # many marks have the same metadata as others
    for above, text in zip(tree.parent.tolist(), node_texts, strict=True):
        pair = (None if above == NO_ROW else texts[above], text)
        if pair not in merged_pairs:
            merged_pairs[pair] = _merged(*pair)
        texts.append(merged_pairs[pair])
    texts.append(None)  # for NO_ROW
    return (
        pl.Series("metadata", texts, dtype=pl.String)
        .cast(pl.Categorical())
        .gather(np.where(node == NO_ROW, len(texts) - 1, node))
    )


def merge_metadata(outer: pl.Series, inner: pl.Series) -> pl.Series:
    """Merges two metadata columns row by row; ``inner`` overrides ``outer``. See `merged_metadata`."""
    pairs = pl.DataFrame({"outer": outer, "inner": inner})
    distinct = pairs.unique(maintain_order=True)
    texts = [_merged(*pair) for pair in distinct.cast(pl.String).iter_rows()]
    merged = distinct.with_columns(metadata=pl.Series(texts, dtype=pl.String).cast(pl.Categorical()))
    both = ["outer", "inner"]
    return pairs.join(merged, on=both, how="left", maintain_order="left", nulls_equal=True)["metadata"]


def _merged(outer: str | None, inner: str | None) -> str | None:
    """Merges two JSON objects; members of ``inner`` override those of ``outer``."""
    members = _bounded(outer) | _members(inner)
    return msgspec.json.encode(members).decode() if members else None


def _members(text: str | None) -> dict[str, msgspec.Raw]:
    if text is None:
        return {}
    return decoded(text, dict[str, msgspec.Raw])


def _bounded(text: str | None) -> dict[str, msgspec.Raw]:
    """The last members of an object, as many as the bounds allow, in their order."""
    members = _members(text)
    kept = min(len(members), MOST_MEMBERS)
    if text is not None and len(text) > MOST_CHARACTERS:
        sizes = (len(key) + len(bytes(members[key])) for key in reversed(members))
        within_bounds = (total <= MOST_CHARACTERS for total in itertools.accumulate(sizes))
        kept = min(kept, sum(itertools.takewhile(bool, within_bounds)))
    return dict(itertools.islice(members.items(), len(members) - kept, None))
