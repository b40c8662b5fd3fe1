"""Descriptions of collectives from the run of another rank: what belongs to a rank is computed anew, or unknown.

Ranks of one program call the same collectives, but in process groups of their own, and these may differ in size. The
layout of the groups (`thence.model.tables.Meta.process_groups`) gives the group of a rank: the one with the same
members, or else the only one with the same description that has the rank as a member. Peers, uneven splits, and
message sizes that depend on the size of the group are those of one rank.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_WHOLE = re.compile(r"\[\s*\d+(?:\s*,\s*\d+)*\s*\]")
_UNNAMED = ("", "undefined")
"""Descriptions of groups that were made without one."""
_SIZES = ("bytes", "in_elements", "out_elements")
_OF_GROUP = ("group_name", "group_description", "group_ranks", "group_size")


def collectives_of_rank(
    collectives: pl.Series, rank: int, groups: Iterable[Mapping[str, Any]]
) -> tuple[pl.Series, int]:
    """The descriptions for another rank than the one that recorded them.

    Args:
        collectives: structs of `thence.model.tables.GRAPH_PLACES`, null where there is none.
        rank: to describe them for.
        groups: the process groups that producers described: name, description and ranks.

    Returns:
        the descriptions, and in how many of the distinct ones the group is unknown.
    """
    layout = [
        {**group, "members": members} for group in groups if (members := _members(group.get("ranks"))) is not None
    ]
    distinct = collectives.drop_nulls().unique(maintain_order=True)
    described = [_described(dict(row), rank, layout) for row in distinct.to_list()]
    changed = pl.Series(described, dtype=collectives.dtype)
    table = pl.DataFrame({"was": distinct, "is": changed})
    joined = collectives.to_frame("was").join(table, on="was", how="left", maintain_order="left")
    return joined["is"], sum(row["group_size"] is None for row in described)


def _described(row: dict[str, Any], rank: int, layout: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    result = dict.fromkeys(row) | {name: row[name] for name in ("collective", "element_type")}
    uneven = any((row[name] or "[]") != "[]" for name in ("in_splits", "out_splits"))
    alike = row["in_elements"] is not None and row["in_elements"] == row["out_elements"]
    members = _members(row["group_ranks"])
    if members is not None and rank in members:
        result |= {name: row[name] for name in (*_OF_GROUP, "sequence")}
    else:
        result |= _group(row["group_description"], rank, layout)
    if not uneven and (alike or (row["group_size"] or 0) == (result["group_size"] or -1)):
        result |= {name: row[name] for name in _SIZES}
    return result


def _group(description: str | None, rank: int, layout: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The group of a rank with this description; empty if there is none, or if several have it."""
    found = {
        (str(group["name"]), group["members"])
        for group in layout
        if group["description"] == description and rank in group["members"]
    }
    if (description or "") in _UNNAMED or len(found) != 1:
        return {}
    name, members = found.pop()
    return {
        "group_name": name,
        "group_description": description,
        "group_ranks": str(list(members)),
        "group_size": len(members),
    }


def _members(ranks: object) -> tuple[int, ...] | None:
    """The ranks of a group; None if the list is cut or missing."""
    if isinstance(ranks, str):
        whole = _WHOLE.fullmatch(ranks.strip())
        ranks = [int(number) for number in re.findall(r"\d+", ranks)] if whole else None
    if not isinstance(ranks, list) or not all(type(member) is int for member in ranks):
        return None
    return tuple(ranks) or None
