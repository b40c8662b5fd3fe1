"""Decides whether two sides may be compared: checks whether anything but the program differed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import polars as pl

from thence.model.thresholds import (
    COMMON_KERNELS_SHARE,
    GPU_CLOCK_SHARE,
    MAX_OTHER_GRIDS_SHARE,
    OTHER_GRIDS_SHARE,
    SAME_BYTES_SHARE,
)
from thence.units import format_bytes, format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from thence.analysis.diff.sample import Conditions


class Recorded(Protocol):
    """A run and the conditions under which it was recorded, such as a `thence.analysis.diff.sample.Sample`."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what was read."""

    @property
    def conditions(self) -> Conditions:
        """The conditions of the run."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason why two sides cannot be compared.

    Attributes:
        code: duplicate, unsound, gpu, clocks, world_size, format, profiler_options or shapes.
        text: one sentence: what is different, on which side.
    """

    code: str
    text: str

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it."""
        return {"code": self.code, "text": self.text}


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A condition that could not be compared, because not every input records it.

    Attributes:
        code: gpu, clocks or shapes, as in `Refusal`.
        text: one sentence.
    """

    code: str
    text: str

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it."""
        return {"code": self.code, "text": self.text}


def refusals(before: Sequence[Recorded], after: Sequence[Recorded]) -> tuple[Refusal, ...]:
    """The reasons why two sides cannot be compared; runs are compared with the first run whose value is known."""
    runs = [*before, *after]
    differences = [
        *_duplicates(before, "before"),
        *_duplicates(after, "after"),
        *_unsound(runs),
        *(refusal for check in _CHECKS for refusal in check(runs)),
        *_shapes(before, after),
    ]
    return tuple(differences)


def _name(sample: Recorded) -> str:
    first, *others = sample.inputs or ("a trace",)
    return f"{first} and {len(others)} more" if others else first


def _duplicates(side: Sequence[Recorded], name: str) -> Iterator[Refusal]:
    seen: dict[tuple[object, ...], Recorded] = {}
    for sample in side:
        other = seen.get(sample.conditions.identity)
        seen[sample.conditions.identity] = sample
        if other is not None:
            yield Refusal(
                "duplicate", f"{_name(sample)} is the same recording as {_name(other)}: it is one run {name}, not two"
            )


def _unsound(runs: Sequence[Recorded]) -> Iterator[Refusal]:
    for sample in runs:
        if sample.conditions.unsound is not None:
            yield Refusal("unsound", f"{_name(sample)}: {sample.conditions.unsound}")


def _differing(
    runs: Sequence[Recorded], code: str, what: str, value: Callable[[Conditions], object]
) -> Iterator[Refusal]:
    """Yields one refusal for the first run whose known value differs from the first known value."""
    known = [(sample, value(sample.conditions)) for sample in runs]
    known = [(sample, values) for sample, values in known if values]
    for sample, values in known[1:]:
        if values != known[0][1]:
            yield Refusal(
                code, f"{what}: {_shown(known[0][1])} in {_name(known[0][0])}, {_shown(values)} in {_name(sample)}"
            )
            return


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _gpus(runs: Sequence[Recorded]) -> Iterator[Refusal]:
    yield from _differing(runs, "gpu", "different GPUs", lambda c: c.gpus)


def _clocks(runs: Sequence[Recorded]) -> Iterator[Refusal]:
    for name in sorted({name for sample in runs for name in sample.conditions.clocks}):
        yield from _differing(runs, "clocks", f"different {name}", partial(_clock, name))


def _ranks(runs: Sequence[Recorded]) -> Iterator[Refusal]:
    yield from _differing(runs, "world_size", "different world sizes", lambda c: c.world_size)
    yield from _differing(runs, "world_size", "different numbers of ranks", lambda c: c.ranks)
    yield from _differing(runs, "world_size", "different numbers of GPUs", lambda c: c.devices)


def _formats(runs: Sequence[Recorded]) -> Iterator[Refusal]:
    yield from _differing(runs, "format", "recorded by different profilers", lambda c: c.formats)


def _options(runs: Sequence[Recorded]) -> Iterator[Refusal]:
    """Compares options of the profiler. Missing options count as off: Kineto writes only those that are on."""
    for name in sorted({name for sample in runs for name in sample.conditions.options}):
        yield from _differing(
            runs, "profiler_options", f"different values of the profiler option {name}", partial(_option, name)
        )


def _option(name: str, conditions: Conditions) -> str:
    value = conditions.options.get(name, "")
    return "off" if value in ("0", "False", "false", "") else value


def _clock(name: str, conditions: Conditions) -> str | None:
    return conditions.clocks.get(name)


_CHECKS: tuple[Callable[[Sequence[Recorded]], Iterator[Refusal]], ...] = (_gpus, _clocks, _ranks, _formats, _options)


def _shapes(before: Sequence[Recorded], after: Sequence[Recorded]) -> Iterator[Refusal]:
    """Yields a refusal if inputs have other shapes: the kernels that both sides ran in equal number have other grids.

    If the bytes copied to the device differ too, a small difference of the grids suffices. Only the first run of
    each side is compared.
    """
    left, right = (side[0].conditions for side in (before, after))
    if left.grids.is_empty() or right.grids.is_empty():
        return
    differing, common = _grid_difference(left.grids, right.grids)
    sizes = [c.copied_bytes for c in (left, right)]
    copies_differ = min(sizes) > 0 and abs(sizes[1] - sizes[0]) > SAME_BYTES_SHARE * sizes[0]
    if common < COMMON_KERNELS_SHARE:
        return
    share = format_share(differing, 1)
    if differing > (MAX_OTHER_GRIDS_SHARE if copies_differ else OTHER_GRIDS_SHARE):
        copied = (
            f", and {format_bytes(sizes[0])} per step are copied to the device in one, {format_bytes(sizes[1])} in "
            "the other"
            if copies_differ
            else ""
        )
        yield Refusal(
            "shapes",
            f"inputs of different shapes: the same kernels ran equally often, but with different grids in {share} of "
            f"their time{copied} ({_name(before[0])}, {_name(after[0])})",
        )


def _grid_difference(before: pl.DataFrame, after: pl.DataFrame) -> tuple[float, float]:
    """For kernels that ran equally often on both sides: the share of their time with other grids, and of all time."""
    counts = [
        side.group_by("kernel").agg(
            count=pl.col("count").sum().round(2),
            total=pl.col("ns").sum(),
            grids=pl.concat_str("grid", pl.lit(" "), pl.col("count").round(2)).sort().str.join(","),
        )
        for side in (before, after)
    ]
    both = counts[0].join(counts[1], on=["kernel", "count"])
    common = float(both["total"].sum())
    whole = float(before["ns"].sum())
    if common <= 0 or whole <= 0:
        return 0.0, 0.0
    differing = float(both.filter(pl.col("grids") != pl.col("grids_right"))["total"].sum())
    return differing / common, common / whole


def not_checked(before: Sequence[Recorded], after: Sequence[Recorded]) -> tuple[NotChecked, ...]:
    """The conditions that not every input records, so that they cannot be compared."""
    runs = [*before, *after]
    unchecked = []
    if any(not sample.conditions.gpus for sample in runs):
        unchecked.append(NotChecked("gpu", "not every input names the GPU it ran on"))
    if any(not sample.conditions.clocks for sample in runs):
        text = "the inputs do not state the clock rates of the GPUs"
        unchecked.append(NotChecked("clocks", f"{text}{_one_factor(before[0], after[0])}"))
    if any(sample.conditions.grids.is_empty() for sample in runs):
        unchecked.append(NotChecked("shapes", "not every input has the grids of its kernels"))
    return tuple(unchecked)


def _one_factor(before: Recorded, after: Recorded) -> str:
    """A hint that a clock changed, if all kernels that both sides ran equally differ by one factor; else empty."""
    joined = before.conditions.grids.join(after.conditions.grids, on=["kernel", "grid", "count"])
    joined = joined.filter(pl.col("ns") > 0, pl.col("ns_right") > 0)
    if joined.height < 8:
        return ""
    ratios = (joined["ns_right"] / joined["ns"]).sort()
    low, middle, high = (float(ratios.quantile(q) or 1.0) for q in (0.25, 0.5, 0.75))
    if abs(middle - 1) < 0.03 or high - low > GPU_CLOCK_SHARE * abs(middle - 1):
        return ""
    return (
        f"; but all kernels that both sides ran equally often take {middle:.3f} times as long (half of them from "
        f"{low:.3f} to {high:.3f} times), which suggests a different clock or power limit"
    )
