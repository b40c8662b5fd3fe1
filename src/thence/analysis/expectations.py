"""Expectations about streams: ``GEMM>=2``, ``communication==1``, ``communication!=GEMM``.

``GROUP>=N``, ``GROUP==N`` and ``GROUP<=N`` state on how many different streams of one device the
kernels of a group ran; ``GROUP!=GROUP`` states that no stream of a device ran kernels of both. An
expectation is checked on every device that ran the group (or both groups) and must hold on each. If
no device ran the group, or the trace has no stream ids, the expectation cannot be judged; this
does not count as a pass.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_COUNTED: dict[str, Callable[[int, int], bool]] = {">=": operator.ge, "==": operator.eq, "<=": operator.le}
_FORM = re.compile(r"\s*([^=<>!]+?)\s*(>=|==|<=|!=)\s*([^=<>!]+?)\s*")


@dataclass(frozen=True, slots=True)
class _Expectation:
    """One expectation, parsed.

    Attributes:
        text: as the user wrote it.
        group: group whose streams are counted.
        sign: one of >=, ==, <=, !=.
        count: expected number of streams, at least 1; 0 for !=.
        other: the other group of !=; None otherwise.
    """

    text: str
    group: str
    sign: str
    count: int = 0
    other: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """The result of checking one expectation.

    Attributes:
        expect: the expectation as the user wrote it.
        ok: whether it holds; None if that cannot be judged.
        streams: streams of the deciding device on which kernels of the group ran. The deciding device is the
            first one on which the expectation fails, else the first one that was judged.
        reason: one sentence.
        devices: for each device judged: rank, device, streams, ok; for != also other_streams.
    """

    expect: str
    ok: bool | None
    streams: tuple[int, ...]
    reason: str
    devices: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The check as the command line prints it with ``--format json``."""
        return {
            "expect": self.expect,
            "streams": list(self.streams),
            "ok": self.ok,
            "reason": self.reason,
            "devices": list(self.devices),
        }

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FAILED", None: "cannot be judged"}[self.ok]
        return f"{verdict}: {self.expect}: {self.reason}"


def parse_expectation(text: str, groups: Sequence[str]) -> _Expectation:
    """Parses an expectation.

    Args:
        text: such as ``GEMM>=2``; group names may be written in any case.
        groups: names of all existing groups.

    Raises:
        UsageError: the syntax is wrong, or no group has that name.
    """
    match = _FORM.fullmatch(text)
    if not match:
        raise UsageError(f"cannot read the expectation {text!r}: write GROUP>=N, GROUP==N, GROUP<=N or GROUP!=GROUP")
    name, sign, right = match.groups()
    group = _group_named(name, groups, text)
    if sign == "!=":
        other = _group_named(right, groups, text)
        if other == group:
            raise UsageError(f"{text}: the group is the same on both sides; name two different groups")
        return _Expectation(text, group, sign, other=other)
    if not (right.isascii() and right.isdecimal() and len(right) < 10 and int(right)):
        raise UsageError(f"{text}: expected a number of streams, 1 or more, after {sign}")
    return _Expectation(text, group, sign, count=int(right))


def _group_named(name: str, groups: Sequence[str], text: str) -> str:
    if name in groups:
        return name
    alike = [group for group in groups if group.casefold() == name.casefold()]
    if len(alike) != 1:
        raise UsageError(
            f"{text}: there is no group {name!r}; choose one of {', '.join(groups)}, or define it with "
            "--group NAME=REGEX"
        )
    return alike[0]


def judge(expectation: _Expectation, rows: pl.DataFrame) -> Check:
    """Checks an expectation on every device that ran its groups.

    Args:
        expectation: the expectation to check.
        rows: rank, device, stream (null where the trace does not record it) and group of all activities,
            each combination at least once.
    """
    wanted = [name for name in (expectation.group, expectation.other) if name is not None]
    relevant = rows.filter(pl.col("group").cast(pl.String).is_in(wanted))
    missing = [name for name in wanted if not (relevant["group"] == name).any()]
    if missing:
        absent = f"the trace has no kernels of the group {' or '.join(missing)}"
        return Check(expectation.text, None, (), absent)
    if relevant["stream"].null_count():
        return Check(expectation.text, None, (), "the trace does not say on which streams kernels ran")
    devices = [
        verdict
        for (rank, device), activities in relevant.group_by("rank", "device", maintain_order=True)
        if (verdict := _on_device(expectation, activities, {"rank": rank, "device": device}))
    ]
    if not devices:
        reason = f"no device ran kernels of both {' and '.join(wanted)}"
        return Check(expectation.text, None, (), reason)
    devices.sort(key=lambda verdict: (verdict["rank"], verdict["device"]))
    failed = [verdict for verdict in devices if not verdict["ok"]]
    decided = failed[0] if failed else devices[0]
    reason = _reason(expectation, decided, len(failed), len(devices))
    return Check(expectation.text, not failed, tuple(decided["streams"]), reason, tuple(devices))


def _on_device(expectation: _Expectation, activities: pl.DataFrame, place: dict[str, Any]) -> dict[str, Any] | None:
    """The verdict on one device; None if it did not run both groups of a ``!=`` expectation."""
    streams = _streams(activities, expectation.group)
    if expectation.other is None:
        ok = _COUNTED[expectation.sign](len(streams), expectation.count)
        return place | {"streams": streams, "ok": ok}
    others = _streams(activities, expectation.other)
    if not streams or not others:
        return None
    return place | {"streams": streams, "other_streams": others, "ok": not {*streams} & {*others}}


def _streams(activities: pl.DataFrame, group: str) -> list[int]:
    return sorted(activities.filter(pl.col("group") == group)["stream"].unique().to_list())


def _reason(expectation: _Expectation, decided: dict[str, Any], failed: int, judged: int) -> str:
    where = f"rank {decided['rank']} GPU {decided['device']}"
    text = f"{expectation.group} ran on {_streams_text(decided['streams'])}"
    if expectation.other is not None:
        text += f", {expectation.other} on {_streams_text(decided['other_streams'])}"
    text += f" of {where}"
    if judged > 1:
        passed = judged - failed
        text += f"; the expectation holds on {passed} of {judged} GPUs"
    return text


def _streams_text(streams: list[int]) -> str:
    return f"stream{'s' if len(streams) != 1 else ''} {', '.join(map(str, streams))}"
