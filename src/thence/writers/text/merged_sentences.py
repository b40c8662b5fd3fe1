"""Merges sentences that are the same for several inputs or ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thence.model.tables import named_inputs

if TYPE_CHECKING:
    from collections.abc import Iterable


def merged(texts: Iterable[str]) -> list[str]:
    """The texts in their order, each once; ``A: text`` and ``B: text`` become ``A, B: text``.

    If there are more than three names, the first two are given, and the number of the others. Only output for
    people is merged; ``--format json`` has every text.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for text in dict.fromkeys(texts):
        name, colon, said = text.partition(": ")
        key = (colon, said) if colon else (colon, text)
        names.setdefault(key, []).append(name)
    return [f"{named_inputs(of)}{colon}{said}" if colon else said for (colon, said), of in names.items()]
