"""The first sentences of a comparison: how the step changed, and what caused it.

The cause is searched for among the rows whose difference is more than noise and has the sign of the total. The
explained part of the total is the row's share of it; if the row's difference is larger than the total, because others
compensate for it, it is the inverse of that share. Among the causes that explain nearly as much as the best, the
most informative kind is named: a change with a name of its own (`signs`), idle time by cause, exposed communication,
labels, modules, source lines, HLO instructions, operators, kernels, idle time, busy time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.diff.estimates import MOST_RUNS
from thence.analysis.diff.paths import PARTS
from thence.analysis.diff.sample import ALL, BUSY, COMMUNICATION, IDLE, UNATTRIBUTED
from thence.analysis.diff.signs import signs
from thence.model.kernel_names import clip, short_names
from thence.model.thresholds import EXPLAINING_SHARE, NEARLY_BEST_SHARE, PATH_INSIDE_SHARE
from thence.units import format_ns, signed_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from thence.analysis.diff.signs import Sign

_TOLD = ("slower", "faster", "new", "gone")
_NAMED_CAUSE, _IDLE_CAUSE = "cause", "idle cause"
_ORDER = (
    *(_NAMED_CAUSE, _IDLE_CAUSE, COMMUNICATION, "label", "module"),
    *("source", "hlo", "op"),
    *("kernel", IDLE, BUSY),
)
"""Kinds of causes, the most informative first."""
_MORE = 5
_LONGEST = 100


@dataclass(frozen=True, slots=True)
class _Cause:
    kind: str
    text: str
    explained: float
    depth: int = 0


def explain(
    total: Mapping[str, Any],
    rows: pl.DataFrame,
    moved: Sequence[Mapping[str, Any]],
    kernels: tuple[pl.DataFrame, pl.DataFrame],
    known_share: float | None = None,
) -> tuple[str, ...]:
    """Sentences about a comparison, the most important first.

    Args:
        total: the row of the step, as `Row.to_json` returns it.
        rows: as `Diff.rows`.
        moved: as `moved_time` returns it.
        kernels: kernels of both sides, as `kernels_of` returns them.
        known_share: share of a step by which runs of the same program are known to differ, for sides of one run;
            None if the noise between runs was measured.
    """
    found = signs(*kernels)
    head = _head(total, known_share)
    certain = _without_own_parts(rows.filter(pl.col("verdict").is_in(_TOLD)))
    if total["verdict"] in _TOLD:
        causes = _causes(total["difference_ns"], rows, certain, found)
        named = [cause.text for cause in causes[:1]] or ["no single row explains it"]
        others = [f"also: {cause.text}" for cause in causes[1:_MORE]]
    else:
        named = [_undecided(total) if known_share is None else _too_little(total, known_share)]
        certainly = [sign.text for sign in found[:1]]
        certainly += [text for text in [_largest(certain)] if text is not None]
        if certainly:
            beyond = "but certainly" if found or known_share is None else "but more than runs differ by:"
            named.append(f"{beyond} {certainly[0]}")
        others = [f"also: {text}" for text in (*certainly[1:], *(s.text for s in found[1:]))]
    return (f"{head}: {'; '.join(named)}", *others, *_moved_texts(moved))


def _without_own_parts(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows without those of single paths that also have a row for the path and all paths that begin with it.

    Time can move between a path and the paths inside it, so only their sum is named.
    """
    whole = rows.filter(pl.col("name").str.ends_with(PARTS))
    heads = whole.select("by", name=pl.col("name").str.strip_suffix(PARTS))
    return rows.join(heads, on=["by", "name"], how="anti", maintain_order="left")


def signed_ns(ns: float) -> str:
    """A difference of times with its sign, such as ``+0.8 ms``."""
    return f"{'+' if ns >= 0 else '-'}{format_ns(abs(ns))}"


def _head(total: Mapping[str, Any], known_share: float | None) -> str:
    """The times of the step and their difference; ``known_share`` as `explain` takes it, None for several runs."""
    times = f"step {format_ns(total['before_ns'])} -> {format_ns(total['after_ns'])}"
    if total["difference_share"] is None:
        return times
    change = signed_share(total["difference_share"])
    if total["low_share"] is None:
        return f"{times} ({change}, interval unknown: a single step per side does not show the noise)"
    if known_share is not None:
        percent = f"{100 * known_share:.0f} %"
        beyond = total["verdict"] in _TOLD
        than = f", more than the {percent} by which runs of one program differ" if beyond else ""
        return f"one run per side: {times} ({change}{than})"
    low, high = (f"{100 * total[key]:+.1f}" for key in ("low_share", "high_share"))
    return f"{times} ({change}, 95 % interval {low} to {high} %)"


def _too_little(total: Mapping[str, Any], known_share: float) -> str:
    """Why the step of single runs is not called different."""
    if total["low_share"] is not None and abs(total["difference_share"] or 0.0) > known_share:
        return "unknown, because the steps within the runs vary as much; give several runs per side"
    return (
        f"unknown, because runs of one program differ by up to {100 * known_share:.0f} %; give several runs per side "
        "(--before, --after)"
    )


def _undecided(total: Mapping[str, Any]) -> str:
    if total["verdict"] == "same":
        return "the same"
    if total["more_runs"] is None:
        return "cannot be distinguished from noise"
    more = total["more_runs"]
    if more >= MOST_RUNS:
        return f"cannot be distinguished from noise, not even with {MOST_RUNS:,} runs per side"
    needed = "runs per side are" if more > 1 else "run per side is"
    return f"cannot be distinguished from noise; about {more:,} more {needed} needed"


def _causes(difference: float, rows: pl.DataFrame, certain: pl.DataFrame, found: Sequence[Sign]) -> list[_Cause]:
    """The causes of a difference of the step, at most one of each kind; the first is the one to name."""
    if not difference:
        return []
    causes = [*_of_rows(difference, certain), *_of_signs(difference, rows, found)]
    causes = [cause for cause in causes if cause.explained >= EXPLAINING_SHARE]
    if not causes:
        return []
    best = max(cause.explained for cause in causes)
    near = [cause for cause in causes if cause.explained >= NEARLY_BEST_SHARE * best]
    ordered = sorted(near, key=lambda cause: _ORDER.index(cause.kind))
    ordered = [_innermost(group) for _, group in groupby(ordered, key=lambda cause: cause.kind)]
    rest = sorted((cause for cause in causes if cause not in near), key=lambda cause: -cause.explained)
    chosen: dict[str, _Cause] = {}
    for cause in (*ordered, *rest):
        chosen.setdefault(cause.kind, cause)
    return [*chosen.values()]


def _innermost(causes: Iterable[_Cause]) -> _Cause:
    """The cause to name among causes of one kind: the innermost of those that explain nearly as much as the best."""
    ranked = sorted(causes, key=lambda cause: -cause.explained)
    close = [cause for cause in ranked if cause.explained >= PATH_INSIDE_SHARE * ranked[0].explained]
    return max(close, key=lambda cause: cause.depth)


def _explained(part: float, whole: float) -> float:
    """How much of a difference a part of it explains, from 0 to 1 (see the module docstring)."""
    share = part / whole
    if share <= 0:
        return 0.0
    return min(share, 1 / share)


def _of_rows(difference: float, certain: pl.DataFrame) -> Iterator[_Cause]:
    for row in certain.iter_rows(named=True):
        if row["name"] == UNATTRIBUTED or row["by"] not in _ORDER:
            continue
        yield _Cause(_kind(row), _text(row), _explained(row["difference_ns"], difference), _depth(row))


def _depth(row: Mapping[str, Any]) -> int:
    nested = row["by"] in ("label", "module")
    return str(row["name"]).removesuffix(PARTS).count("/") if nested else 0


def _kind(row: Mapping[str, Any]) -> str:
    of_idle = row["by"] == IDLE and row["name"] != ALL
    return _IDLE_CAUSE if of_idle else str(row["by"])


def _of_signs(difference: float, rows: pl.DataFrame, found: Sequence[Sign]) -> Iterator[_Cause]:
    idle = rows.filter(pl.col("by") == IDLE, pl.col("name") == ALL)["difference_ns"]
    grown = float(idle.sum())
    for sign in found:
        ns = grown if sign.idle else sign.difference_ns
        what = "idle " if sign.idle else ""
        yield _Cause(_NAMED_CAUSE, f"{sign.text} ({what}{signed_ns(ns)})", _explained(ns, difference))


def _text(row: Mapping[str, Any]) -> str:
    """The text of a row, such as ``label forward/attention +0.8 ms``, with its verdict, relative change and counts."""
    name = "" if row["name"] == ALL else f" {clip(row['short_name'], _LONGEST)}"
    what = "exposed communication" if row["by"] == COMMUNICATION else f"{row['by']}{name}"
    parts = [f"{what} {signed_ns(row['difference_ns'])}"]
    if row["verdict"] in ("new", "gone"):
        parts.append(f"({row['verdict']})")
    elif row["difference_share"] is not None:
        parts.append(f"({signed_share(row['difference_share'])})")
    counts = row["before_count"], row["after_count"]
    if row["verdict"] not in ("new", "gone") and abs(counts[1] - counts[0]) >= 0.5:
        parts.append(f"[{counts[0]:.4g} -> {counts[1]:.4g} times per step]")
    return " ".join(parts)


def _largest(certain: pl.DataFrame) -> str | None:
    """The text of the row with the largest certain difference; among similar ones, of the most informative kind."""
    known = [r for r in certain.iter_rows(named=True) if r["name"] != UNATTRIBUTED]
    if not known:
        return None
    best = max(abs(row["difference_ns"]) for row in known)
    near = [row for row in known if abs(row["difference_ns"]) >= NEARLY_BEST_SHARE * best]
    return _text(min(near, key=lambda r: (_ORDER.index(_kind(r)), -abs(r["difference_ns"]))))


def _moved_texts(moved: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = short_names({name for row in moved[:_MORE] for name in (*row["from"], *row["to"])})

    def text(kernels: Sequence[str]) -> str:
        more = f" and {len(kernels) - 1} more" if len(kernels) > 1 else ""
        return f"{clip(names[kernels[0]], _LONGEST)}{more}"

    for row in moved[:_MORE]:
        yield (
            f"moved in {row['by']} {clip(row['place'], _LONGEST)}: {text(row['from'])} "
            f"({format_ns(row['before_ns'])}) -> {text(row['to'])} ({format_ns(row['after_ns'])})"
        )
