"""The first sentences of a comparison: how the step changed, and what caused it.

The cause is searched for among the rows whose difference is more than noise and has the sign of the total. The
explained part of the total is the row's share of it; if the row's difference is larger than the total, because others
compensate for it, it is the inverse of that share. Among the causes that explain nearly as much as the best, the
most informative kind is named: a change with a name of its own (`signs`), idle time by cause, exposed communication,
labels, modules, source lines, HLO instructions, operators, kernels, idle time, busy time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.diff.estimates import MAX_RUNS, PARTS
from thence.analysis.diff.sample import ALL, BUSY, COMMUNICATION, IDLE, UNATTRIBUTED
from thence.analysis.grouping.kernel_groups import groups_of_names
from thence.model.kernel_names import clip, short_names
from thence.model.thresholds import EXPLAINING_SHARE, NEARLY_BEST_SHARE, PATH_INSIDE_SHARE
from thence.units import format_ns, signed_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


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
    difference_ns: float = 0.0
    low_ns: float | None = None
    high_ns: float | None = None
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
    all_signs = signs(*kernels)
    head = _head(total, known_share)
    certain = _without_own_parts(rows.filter(pl.col("verdict").is_in(_TOLD)))
    if total["verdict"] in _TOLD:
        causes = _causes(total["difference_ns"], rows, certain, all_signs)
        named = [cause.text for cause in causes[:1]] or ["no single row explains it"]
        others = [f"also: {cause.text}" for cause in causes[1:_MORE]]
    else:
        named = [_undecided(total) if known_share is None else _too_little(total, known_share)]
        certainly = [sign.text for sign in all_signs[:1]]
        certainly += [text for text in [_largest(certain)] if text is not None]
        if certainly:
            beyond = "but certainly" if all_signs or known_share is None else "but more than runs differ by:"
            named.append(f"{beyond} {certainly[0]}")
        others = [f"also: {text}" for text in (*certainly[1:], *(s.text for s in all_signs[1:]))]
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
    if total["low_share"] < -1:
        return f"{times} ({change}, interval unknown: the runs of a side vary by more than the step itself)"
    low, high = (f"{100 * total[key]:+.1f}" for key in ("low_share", "high_share"))
    return f"{times} ({change}, 95 % interval {low} to {high} %)"


def _too_little(total: Mapping[str, Any], known_share: float) -> str:
    """Why the step of single runs is not called different."""
    if abs(total["difference_share"] or 0.0) > known_share:
        why = "" if total["low_share"] is None else ", because the steps within the runs vary as much"
        return f"unknown{why}; give several runs per side"
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
    if more >= MAX_RUNS:
        return f"cannot be distinguished from noise, not even with {MAX_RUNS:,} runs per side"
    needed = "runs per side are" if more > 1 else "run per side is"
    return f"cannot be distinguished from noise; about {more:,} more {needed} needed"


def _causes(difference: float, rows: pl.DataFrame, certain: pl.DataFrame, all_signs: Sequence[Sign]) -> list[_Cause]:
    """The causes of a difference of the step, at most one of each kind; the first is the one to name."""
    if not difference:
        return []
    causes = [*_of_rows(difference, certain), *_of_signs(difference, rows, all_signs)]
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
    """The cause to name among causes of one kind: the innermost of those that explain as much as the best.

    The difference of a path inside that lies within the interval of the best may be all of it: what the rest of the
    best adds is then noise. So the path inside is named, which says more.
    """
    ranked = sorted(causes, key=lambda cause: -cause.explained)
    best = ranked[0]
    return max((cause for cause in ranked if _explains_as_much(cause, best)), key=lambda cause: cause.depth)


def _explains_as_much(cause: _Cause, best: _Cause) -> bool:
    if cause.explained >= PATH_INSIDE_SHARE * best.explained:
        return True
    return best.low_ns is not None and best.high_ns is not None and best.low_ns <= cause.difference_ns <= best.high_ns


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
        ns = row["difference_ns"]
        interval = row["low_ns"], row["high_ns"]
        yield _Cause(_kind(row), _text(row), _explained(ns, difference), ns, *interval, _depth(row))


def _depth(row: Mapping[str, Any]) -> int:
    nested = row["by"] in ("label", "module")
    return str(row["name"]).removesuffix(PARTS).count("/") if nested else 0


def _kind(row: Mapping[str, Any]) -> str:
    of_idle = row["by"] == IDLE and row["name"] != ALL
    return _IDLE_CAUSE if of_idle else str(row["by"])


def _of_signs(difference: float, rows: pl.DataFrame, all_signs: Sequence[Sign]) -> Iterator[_Cause]:
    idle = rows.filter(pl.col("by") == IDLE, pl.col("name") == ALL)["difference_ns"]
    grown = float(idle.sum())
    for sign in all_signs:
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
    best = max((row["difference_ns"] for row in known), key=abs)
    near = [cause for cause in _of_rows(best, certain) if cause.explained >= NEARLY_BEST_SHARE]
    first = min(_ORDER.index(cause.kind) for cause in near)
    return _innermost(cause for cause in near if cause.kind == _ORDER[first]).text


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


_INDUCTOR = re.compile(r"^triton_\w*fused_|^triton_(?:tem|for)_")
_PRECISIONS = (
    ("FP8", re.compile(r"(?i)e4m3|e5m2|fp8")),
    ("TF32", re.compile(r"(?i)tf32|s1688(?:gemm|fprop|dgrad|wgrad)?(?!\w*bf16)")),
    ("BF16", re.compile(r"(?i)bf16|bfloat16")),
    ("FP16", re.compile(r"(?i)f16|h16816|hgemm|__half|\bhalf\b|s884")),
    ("FP64", re.compile(r"(?i)d884|dgemm|f64")),
    ("FP32", re.compile(r"(?i)sgemm|simt|f32f32_f32f32|_f32_|ffma")),
)
_BACKENDS = (
    ("cuDNN attention", re.compile(r"(?i)cudnn")),
    ("flash attention", re.compile(r"(?i)flash")),
    ("memory-efficient attention", re.compile(r"(?i)fmha_cutlass|cutlassF|cutlassB|fmha|efficient")),
    ("Triton attention", re.compile(r"(?i)triton")),
)
_MAINLY = 0.5
"""Share of a group's time that the kernels matching a word must have for the word to describe the group."""
_APPEARED = (0.01, 0.05)
"""Shares of the kernels' time up to which kernels of Inductor count as absent, and from which they count as present."""
_WAITING_OPS = frozenset(
    {
        *("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"),
        *("aten::equal", "cudaStreamSynchronize", "cudaDeviceSynchronize"),
    }
)
"""Operators in which the host waits until the device has finished all earlier work."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One change.

    Attributes:
        text: what changed, as text for the user.
        difference_ns: difference of the time that the change concerns, per step; 0 if ``idle``.
        idle: whether the change concerns idle time rather than busy time.
    """

    text: str
    difference_ns: float
    idle: bool = False


def signs(before: pl.DataFrame, after: pl.DataFrame) -> list[Sign]:
    """The changes of which the kernels and operators of the two sides show signs.

    Args:
        before: as `kernels_of` returns it.
        after: as `kernels_of` returns it.
    """
    sides = before, after
    candidates = [_inductor(sides), _precision(sides), _backend(sides), *_waits(sides)]
    return [sign for sign in candidates if sign is not None]


def _time(side: pl.DataFrame) -> float:
    return float(side["ns"].sum())


def _named(side: pl.DataFrame, pattern: re.Pattern[str]) -> pl.DataFrame:
    names = {name for name in side["name"].unique() if pattern.search(name)}
    return side.filter(pl.col("name").is_in([*names]))


def _inductor(sides: Sequence[pl.DataFrame]) -> Sign | None:
    parts = [_named(side, _INDUCTOR) for side in sides]
    shares = [_time(part) / max(_time(side), 1.0) for part, side in zip(parts, sides, strict=True)]
    if min(shares) > _APPEARED[0] or max(shares) < _APPEARED[1]:
        return None
    counts = [float(part["count"].sum()) for part in parts]
    launched = [float(side["count"].sum()) for side in sides]
    word = "torch.compile" if shares[1] > shares[0] else "no torch.compile"
    text = (
        f"{word}: {counts[0]:.0f} -> {counts[1]:.0f} kernels per step are generated by Inductor, "
        f"{launched[0]:.0f} -> {launched[1]:.0f} kernels in all"
    )
    return Sign(text, _time(sides[1]) - _time(sides[0]))


def _of_group(side: pl.DataFrame, group: str) -> pl.DataFrame:
    names = side["name"].unique()
    return side.filter(pl.col("name").is_in(names.filter(groups_of_names(names) == group).implode()))


def _main_word(side: pl.DataFrame, words: Sequence[tuple[str, re.Pattern[str]]]) -> str | None:
    """The word that describes at least half of the kernels' time, and an empty string; None if there is none."""
    times: dict[str, float] = {}
    for name, ns in side.group_by("name").agg(pl.col("ns").sum()).sort("name").iter_rows():
        word = next((word for word, pattern in words if pattern.search(name)), "")
        times[word] = times.get(word, 0.0) + ns
    best = max(times, key=lambda word: times[word], default="")
    if not best or times[best] < _MAINLY * max(_time(side), 1.0):
        return None
    return best


def _changed_word(
    sides: Sequence[pl.DataFrame], group: str, words: Sequence[tuple[str, re.Pattern[str]]]
) -> tuple[str, str, float] | None:
    parts = [_of_group(side, group) for side in sides]
    main_words = [_main_word(part, words) for part in parts]
    if main_words[0] is None or main_words[1] is None or main_words[0] == main_words[1]:
        return None
    return main_words[0], main_words[1], _time(parts[1]) - _time(parts[0])


def _precision(sides: Sequence[pl.DataFrame]) -> Sign | None:
    changed = _changed_word(sides, "GEMM", _PRECISIONS)
    if changed is None:
        return None
    return Sign(f"precision of matrix products: {changed[0]} -> {changed[1]}", changed[2])


def _backend(sides: Sequence[pl.DataFrame]) -> Sign | None:
    changed = _changed_word(sides, "attention", _BACKENDS)
    if changed is None:
        return None
    return Sign(f"attention backend: {changed[0]} -> {changed[1]}", changed[2])


def _waits(sides: Sequence[pl.DataFrame]) -> list[Sign]:
    """Operators in which the host waits and whose number per step changed; their copies take almost no device time."""
    counts = [dict(side.group_by("op").agg(pl.col("count").sum()).rows()) for side in sides]
    waits = []
    for op in sorted(_WAITING_OPS & (counts[0].keys() | counts[1].keys())):
        before, after = (count.get(op, 0.0) for count in counts)
        if abs(after - before) >= 0.5:
            text = f"the host waits for the GPU in {op}, {before:.3g} -> {after:.3g} times per step"
            waits.append(Sign(text, 0.0, idle=True))
    return waits
