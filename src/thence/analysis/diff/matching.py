"""Matches rows of two sides whose names changed.

Rows with equal names are the same row. Kernels that only one side has are matched by these rules, in this order:

place   launched at the same place (label, module, op and, for XLA, op_name), with a single name on each side, or with
        names of the same family;
family  names that differ only in what autotuning, a compiler or a rebuild changes: template arguments and sizes of
        tiles, numbers and hashes;
group   with the same label, module and op_name, the only unmatched kernel of its group (GEMM, attention, reduction,
        communication) on each side.

Source lines of one function that only one side has are also matched, because an edit further up changes line numbers.
All other rows belong to one side only: they are new or gone. If different kernels of the two sides were launched at
the same place, time moved between them; see `moved_time`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.diff.sample import PLACED
from thence.analysis.grouping.kernel_groups import groups_of_names
from thence.model.kernel_names import short_names
from thence.model.thresholds import NEGLIGIBLE_STEP_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from thence.analysis.diff.sample import Sample

_TYPES = r"(?:b?f(?:8|16|32|64))+"
_CHANGING = (
    (re.compile(r"_[0-9]+d[0-9de]+$"), ""),  # Triton's old signature: which arguments are divisible by 16
    # A hash; bf16bf16 and the like are types.
    (re.compile(rf"_(?!{_TYPES}(?:_|$))(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{{6,64}}(?=_|$)"), ""),
    (re.compile(r"[0-9]+(?:x[0-9]+)+"), "#"),  # sizes of tiles
    (re.compile(r"(?<=[_.])[0-9]+(?=[_.]|$)"), "#"),  # numbers of fusions, stages
    (re.compile(r"(?:stage|stages|align|splitK|warpgroupsize|tilesize|bias|r|v|k)[0-9#]+"), "#"),
    (re.compile(r"(?:[_.]?#)+"), "#"),
    (re.compile(r"[_.]?#$"), ""),
)
"""Parts of a name that may differ between two builds of a kernel, and their replacements."""
_LINE = re.compile(r":\d+(?= |$)")
_TELLING = ("GEMM", "attention", "reduction", "communication")
"""Groups of which a label and module rarely have more than one kernel that changes."""


@dataclass(frozen=True)
class Match:
    """One row whose names differ between the sides.

    Attributes:
        by: kernel or source.
        name: name of the row.
        before, after: the names on each side.
        rule: place, family, group or line.
    """

    by: str
    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    rule: str

    @property
    def replaces(self) -> bool:
        """Whether one kernel took the place of another one: names of one family are the same kernel, built anew."""
        return self.by == "kernel" and {*map(family, self.before)} != {*map(family, self.after)}


@lru_cache(maxsize=65_536)
def family(name: str) -> str:
    """The short name of a kernel without the parts that autotuning, template arguments or a rebuild change."""
    text = next(iter(short_names([name]).values()))
    for pattern, replacement in _CHANGING:
        text = pattern.sub(replacement, text)
    return text


def kernels_of(samples: Sequence[Sample]) -> pl.DataFrame:
    """The kernels of a side, as `Sample.kernels`, with means over the runs."""
    frames = pl.concat([sample.kernels for sample in samples])
    return frames.group_by("name", *PLACED, maintain_order=True).agg(pl.col("ns", "count").sum() / len(samples))


def matched_names(before: pl.DataFrame, after: pl.DataFrame, sources: tuple[set[str], set[str]]) -> tuple[Match, ...]:
    """The names of one side that are the same row as different names of the other side.

    Args:
        before: as `kernels_of` returns it.
        after: as `kernels_of` returns it.
        sources: names of the source lines of each side.
    """
    common = set(before["name"]) & set(after["name"])
    sides = [_main_places(side, common) for side in (before, after)]
    names = pl.Series([name for side in sides for name in side], dtype=pl.String)
    groups = dict(zip(names, groups_of_names(names), strict=True))
    matches: list[Match] = []
    passes: tuple[tuple[str, Callable[[str, tuple[Any, ...]], Hashable], bool], ...] = (
        ("place", lambda _, place: place if any(place) else None, True),
        ("place", lambda name, place: (place, family(name)) if any(place) else None, False),
        ("family", lambda name, _: family(name), False),
        ("group", lambda name, place: _group_at(groups[name], place), True),
    )
    for rule, key, single in passes:
        matches += _paired(sides, "kernel", rule, key, single=single)
    lines = [dict.fromkeys(names - others, ()) for names, others in _both(sources)]
    matches += _paired(lines, "source", "line", lambda name, _: _LINE.sub("", name), single=False)
    return tuple(matches)


def _both(pair: tuple[set[str], set[str]]) -> tuple[tuple[set[str], set[str]], ...]:
    return (pair, pair[::-1])


def _group_at(group: str | None, place: tuple[Any, ...]) -> Hashable:
    return (group, place[:3]) if group in _TELLING and any(place[:3]) else None


def _main_places(side: pl.DataFrame, common: set[str]) -> dict[str, tuple[Any, ...]]:
    """For each kernel that the other side does not have, the place with most of its time."""
    rows = side.filter(~pl.col("name").is_in([*common])).sort("ns", *PLACED, "name")
    rows = rows.unique("name", keep="last", maintain_order=True)
    return {name: tuple(place) for name, *place in rows.select("name", *PLACED).iter_rows()}


def _paired(
    sides: Sequence[dict[str, tuple[Any, ...]]],
    by: str,
    rule: str,
    key: Callable[[str, tuple[Any, ...]], Hashable],
    *,
    single: bool,
) -> list[Match]:
    """Removes names with the same key from both sides and returns them as matches; if single, only one name a side."""
    keyed: tuple[dict[Hashable, list[str]], ...] = ({}, {})
    for by_key, side in zip(keyed, sides, strict=True):
        for name, place in side.items():
            if (name_key := key(name, place)) is not None:
                by_key.setdefault(name_key, []).append(name)
    matches = []
    for shared in keyed[0].keys() & keyed[1].keys():
        ours, theirs = sorted(keyed[0][shared]), sorted(keyed[1][shared])
        if single and (len(ours) > 1 or len(theirs) > 1):
            continue
        matches.append(Match(by, _row_name(ours, theirs), tuple(ours), tuple(theirs), rule))
        for side, names in zip(sides, (ours, theirs), strict=True):
            for name in names:
                del side[name]
    return sorted(matches, key=lambda match: match.name)


def _row_name(before: Sequence[str], after: Sequence[str]) -> str:
    def text(names: Sequence[str]) -> str:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{names[0]}{more}"

    return f"{text(before)} -> {text(after)}"


def moved_time(before: pl.DataFrame, after: pl.DataFrame, step_ns: float) -> list[dict[str, Any]]:
    """Places at which kernels of one side replace other kernels of the other side, so that time moved between them.

    Args:
        before: as `kernels_of` returns it.
        after: as `kernels_of` returns it.
        step_ns: length of a step; places where less than a thousandth of it moved are left out.

    Returns:
        ``by`` and ``place``, ``from`` and ``to`` (names, most time first), ``before_ns`` and ``after_ns`` (their time
        per step) and ``before_count`` and ``after_count``; most time first.
    """
    gone, new = (
        _on_one_side_only(here, other)
        for here, other in ((_placed(before), _placed(after)), (_placed(after), _placed(before)))
    )
    rows = []
    for by, outer in {(by, _outermost(place)) for by, place in gone.keys() | new.keys()}:
        sides = [
            {place: kernels for (kind, place), kernels in side.items() if (kind, _outermost(place)) == (by, outer)}
            for side in (gone, new)
        ]
        if sides[0].keys() == sides[1].keys():
            rows += [_moved(by, place, sides[0][place], sides[1][place]) for place in sides[0]]
        else:  # time also moved between places, so it is reported for the outermost place around them
            rows.append(_moved(by, outer, *(_merged(side.values()) for side in sides)))
    told = [r for r in rows if min(r["before_ns"], r["after_ns"]) >= NEGLIGIBLE_STEP_SHARE * step_ns]
    return sorted(told, key=lambda row: (-max(row["before_ns"], row["after_ns"]), row["place"]))


_Kernels = dict[str, tuple[float, float]]
"""Name of a kernel to its time (ns) and count per step."""
_Placed = dict[tuple[str, str], _Kernels]
"""Kernels by kind of place and place."""


def _outermost(place: str) -> str:
    return place.partition("/")[0]


def _placed(side: pl.DataFrame) -> _Placed:
    result: _Placed = {}
    for name, *places, ns, count in side.select("name", *PLACED, "ns", "count").iter_rows():
        known = ((by, place) for by, place in zip(PLACED, places, strict=True) if place)
        key = next(known, None)
        if key is not None:
            total, times = result.setdefault(key, {}).get(name, (0.0, 0.0))
            result[key][name] = (total + ns, times + count)
    return result


def _on_one_side_only(side: _Placed, other_side: _Placed) -> _Placed:
    """The kernels of one side that the other side does not have at the same place."""
    result: _Placed = {}
    for key, kernels in side.items():
        theirs = other_side.get(key, {})
        alone = {name: value for name, value in kernels.items() if name not in theirs}
        if alone:
            result[key] = alone
    return result


def _merged(places: Iterable[_Kernels]) -> _Kernels:
    result: _Kernels = {}
    for kernels in places:
        for name, (ns, count) in kernels.items():
            total, times = result.get(name, (0.0, 0.0))
            result[name] = (total + ns, times + count)
    return result


def _moved(by: str, place: str, gone: _Kernels, new: _Kernels) -> dict[str, Any]:
    return {
        "by": by,
        "place": place,
        "from": _most_first(gone),
        "to": _most_first(new),
        "before_ns": sum(ns for ns, _ in gone.values()),
        "after_ns": sum(ns for ns, _ in new.values()),
        "before_count": sum(count for _, count in gone.values()),
        "after_count": sum(count for _, count in new.values()),
    }


def _most_first(kernels: Mapping[str, tuple[float, float]]) -> list[str]:
    ordered: Iterable[tuple[str, tuple[float, float]]] = sorted(
        kernels.items(), key=lambda item: (-item[1][0], item[0])
    )
    return [name for name, _ in ordered]
