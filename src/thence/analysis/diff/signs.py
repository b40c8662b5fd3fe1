"""Signs, in kernels and operators, of changes with a common name: a compiler, an attention backend, a precision."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.kernel_groups import groups_of_names

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Sign", "signs"]

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
    (
        "memory-efficient attention",
        re.compile(r"(?i)fmha_cutlass|cutlassF|cutlassB|fmha|efficient"),
    ),
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
    found = [_inductor(sides), _precision(sides), _backend(sides), *_waits(sides)]
    return [sign for sign in found if sign is not None]


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
        f"{word}: {counts[0]:.0f} -> {counts[1]:.0f} kernels a step are made by Inductor, "
        f"{launched[0]:.0f} -> {launched[1]:.0f} kernels in all"
    )
    return Sign(text, _time(sides[1]) - _time(sides[0]))


def _of_group(side: pl.DataFrame, group: str) -> pl.DataFrame:
    names = side["name"].unique()
    return side.filter(
        pl.col("name").is_in(names.filter(groups_of_names(names) == group).implode())
    )


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
    found = [_main_word(part, words) for part in parts]
    if found[0] is None or found[1] is None or found[0] == found[1]:
        return None
    return found[0], found[1], _time(parts[1]) - _time(parts[0])


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
    found = []
    for op in sorted(_WAITING_OPS & (counts[0].keys() | counts[1].keys())):
        before, after = (count.get(op, 0.0) for count in counts)
        if abs(after - before) >= 0.5:
            text = f"the host waits for the GPU in {op}, {before:.3g} -> {after:.3g} times a step"
            found.append(Sign(text, 0.0, idle=True))
    return found
