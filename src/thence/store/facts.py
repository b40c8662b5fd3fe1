"""Encodes the facts and the soundness of a trace as JSON, decodes them, and merges those of several ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from thence.analysis.soundness.findings import COPIED_RANKS, MISSING_RANKS, Finding, NotChecked, Soundness
from thence.errors import DamagedInput
from thence.model.json_fields import Count, JsonInt64, NotAsWritten, Rank, decoded
from thence.model.losses import Loss
from thence.model.tables import Device, Meta

if TYPE_CHECKING:
    from collections.abc import Sequence

_Value = str | JsonInt64 | float | bool | None
_Fact = _Value | dict[str, _Value] | list[_Value]
_RULES_OF_SEVERAL_RANKS = frozenset({"windows_apart", MISSING_RANKS, COPIED_RANKS})
"""Rules and notes about several ranks, which therefore cannot be judged from a single rank."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of one part in addition to its tables.

    Attributes:
        meta: of its trace.
        soundness: of its trace.
        own, installed: as in `Attributed`.
    """

    meta: Meta
    soundness: Soundness
    own: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()


class _Counters(msgspec.Struct):
    interval_ns: Count | None
    trouble: str | None
    overflowed: Count


class _Stalls(msgspec.Struct):
    period_cycles: Count
    samples: Count
    unplaced: Count
    dropped: Count
    overflows: Count
    missed: Count
    ended: Count
    unseen: Count
    unlooked: Count
    left_out: Count
    trouble: str | None


class _Asked(msgspec.Struct):
    """The facts of which answers ask more than a number or a text, as readers write them."""

    calls: list[str] | None = None
    plain_steps: dict[str, str | Count | None] = {}
    measured_peaks: dict[str, str | float] | None = None
    counters: _Counters | None = None
    counters_left_out: dict[str, str] = {}
    stalls: _Stalls | None = None


class _Group(msgspec.Struct):
    name: str
    description: str
    size: Count | None
    ranks: list[Count] | None


class _Device(msgspec.Struct):
    rank: Rank
    device: Rank
    name: str | None
    memory_bytes: Count | None
    multiprocessors: Count | None
    compute_capability: str | None
    clock_mhz: float | None = None
    node: str | None = None


class _Loss(msgspec.Struct):
    code: str
    input: str
    count: Count
    text: str


class _Meta(msgspec.Struct):
    inputs: tuple[str, ...]
    formats: tuple[str, ...]
    epoch_ns: JsonInt64 | None
    facts: tuple[dict[str, _Fact], ...]
    devices: tuple[_Device, ...]
    process_groups: tuple[dict[str, _Fact], ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    losses: tuple[_Loss, ...]
    ranks_stated: bool


class _Finding(msgspec.Struct):
    code: str
    rank: Rank | None
    device: Rank | None
    count: Count
    span_ns: JsonInt64
    span_share: float
    text: str


class _NotChecked(msgspec.Struct):
    code: str
    text: str


class _Soundness(msgspec.Struct):
    findings: tuple[_Finding, ...]
    notes: tuple[_Finding, ...]
    not_checked: tuple[_NotChecked, ...]


class _Facts(msgspec.Struct):
    meta: _Meta
    soundness: _Soundness
    own: tuple[str, ...]
    installed: tuple[str, ...]


def encode_facts(facts: Facts) -> bytes:
    """The facts as JSON."""
    return msgspec.json.encode(dataclasses.asdict(facts))


def decode_facts(content: bytes | str, path: str) -> Facts:
    """The facts that `encode_facts` wrote.

    Raises:
        DamagedInput: they are not as written.
    """
    try:
        stored = decoded(content, _Facts)
        msgspec.convert(stored.meta.facts, tuple[_Asked, ...])
        msgspec.convert(stored.meta.process_groups, tuple[_Group, ...])
    except (NotAsWritten, msgspec.ValidationError) as error:
        raise DamagedInput(path, f"its facts do not have the structure that thence writes ({error})") from error
    meta, soundness = stored.meta, stored.soundness
    return Facts(
        Meta(
            **_fields(meta)
            | {
                "devices": tuple(Device(**_fields(device)) for device in meta.devices),
                "losses": tuple(Loss(**_fields(loss)) for loss in meta.losses),
            }
        ),
        Soundness(
            tuple(Finding(**_fields(finding)) for finding in soundness.findings),
            tuple(Finding(**_fields(note)) for note in soundness.notes),
            tuple(NotChecked(**_fields(not_checked)) for not_checked in soundness.not_checked),
        ),
        stored.own,
        stored.installed,
    )


def _fields(stored: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(stored, name) for name in stored.__struct_fields__}


def merged_meta(parts: Sequence[Meta]) -> Meta:
    """Facts of all ranks; each distinct warning and note once."""

    def all_of(name: str) -> tuple[Any, ...]:
        return tuple(value for part in parts for value in getattr(part, name))

    def distinct(name: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(all_of(name)))

    return Meta(
        inputs=all_of("inputs"),
        formats=all_of("formats"),
        epoch_ns=next((part.epoch_ns for part in parts if part.epoch_ns is not None), None),
        facts=all_of("facts"),
        devices=all_of("devices"),
        process_groups=all_of("process_groups"),
        warnings=distinct("warnings"),
        notes=distinct("notes"),
        losses=all_of("losses"),
        ranks_stated=all(part.ranks_stated for part in parts),
    )


def merged_soundness(parts: Sequence[Soundness], of_all: Soundness) -> Soundness:
    """The soundness of a job: findings about each rank, and findings about all ranks together.

    Args:
        parts: of single ranks.
        of_all: found by the rules that compare several ranks.
    """
    findings = [finding for part in (*parts, of_all) for finding in part.findings]
    alone = (x for part in parts for x in part.not_checked if x.code not in _RULES_OF_SEVERAL_RANKS)
    return Soundness(
        tuple(sorted(findings, key=lambda finding: -finding.span_share)),
        tuple(
            note
            for notes in (*(part.notes for part in parts), of_all.notes)
            for note in notes
            if notes is of_all.notes or note.code not in _RULES_OF_SEVERAL_RANKS
        ),
        tuple(dict.fromkeys((*alone, *of_all.not_checked))),
    )
