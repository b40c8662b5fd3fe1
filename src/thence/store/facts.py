"""Encodes the facts and the soundness of a trace as JSON, decodes them, and merges those of several ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from thence.analysis.soundness.findings import MISSING_RANKS, Finding, NotChecked, Soundness
from thence.errors import DamagedInput
from thence.model.losses import Loss
from thence.model.tables import Device, Meta

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Facts", "decode_facts", "encode_facts", "merged_meta", "merged_soundness"]

_Kind = TypeVar("_Kind")
_RULES_OF_SEVERAL_RANKS = frozenset({"windows_apart", MISSING_RANKS})
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


def encode_facts(facts: Facts) -> bytes:
    """The facts as JSON."""
    return msgspec.json.encode(dataclasses.asdict(facts))


def decode_facts(content: bytes | str, path: str) -> Facts:
    """The facts that `encode_facts` wrote.

    Args:
        content: JSON.
        path: for messages.

    Raises:
        DamagedInput: they are not as written.
    """
    try:
        value = msgspec.json.decode(content, type=dict[str, Any])
        return Facts(
            _meta(value["meta"]),
            _soundness(value["soundness"]),
            tuple(map(str, value["own"])),
            tuple(map(str, value["installed"])),
        )
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedInput(
            path, f"its facts do not have the structure that thence writes ({error})"
        ) from error


def _meta(value: dict[str, Any]) -> Meta:
    plain = {
        name: tuple(map(str, value[name])) for name in ("inputs", "formats", "warnings", "notes")
    }
    epoch = value["epoch_ns"]
    return Meta(
        **plain,
        epoch_ns=None if epoch is None else int(epoch),
        facts=tuple(dict(fact) for fact in value["facts"]),
        devices=_each(value["devices"], Device),
        process_groups=tuple(dict(group) for group in value["process_groups"]),
        losses=_each(value["losses"], Loss),
        ranks_stated=bool(value["ranks_stated"]),
    )


def _soundness(value: dict[str, Any]) -> Soundness:
    return Soundness(
        _each(value["findings"], Finding),
        _each(value["notes"], Finding),
        _each(value["not_checked"], NotChecked),
    )


def _each(values: Any, kind: type[_Kind]) -> tuple[_Kind, ...]:
    """JSON objects as instances of a dataclass whose fields hold strings, numbers or None."""
    plain = msgspec.convert(values, list[dict[str, str | int | float | None]])
    return tuple(kind(**fields) for fields in plain)


def merged_meta(parts: Sequence[Meta]) -> Meta:
    """Facts of all ranks; each distinct warning and note once.

    Args:
        parts: of single ranks.
    """

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
