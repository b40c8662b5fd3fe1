"""Sentences about several inputs that say the same, merged."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from thence.model.tables import named_inputs

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_ALIKE = 3
"""Most sentences about one input each that differ only in names of files and in numbers, and are all shown."""
_NAMES_AND_NUMBERS = re.compile(r"\S*/\S*|\S+\.[A-Za-z]\S*|\d[\d.,]*")


def merged(texts: Iterable[str]) -> list[str]:
    """The texts in their order, each once; ``A: text`` and ``B: text`` become ``A, B: text``.

    If there are more than three names, the first two are given, and the number of the others. Of more than three
    texts that differ only in files and numbers the first is given, followed by the names of the other inputs. Only
    output for people is merged; ``--format json`` has every text.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for text in dict.fromkeys(texts):
        name, colon, said = text.partition(": ")
        key = (colon, said) if colon else (colon, text)
        names.setdefault(key, []).append(name)
    alike: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for (colon, said), names_of in names.items():
        shape = _NAMES_AND_NUMBERS.sub("#", said) if colon else said
        alike.setdefault((colon, shape), []).append((named_inputs(names_of), f"{colon}{said}"))
    return [text for (colon, _), group in alike.items() for text in _group(group, bool(colon))]


def _group(group: list[tuple[str, str]], of_inputs: bool) -> list[str]:  # noqa: FBT001 - one place
    """The sentences of one shape, or the first of many, which names the other inputs."""
    if not of_inputs:
        return [said for _, said in group]
    (first, said), *more = group
    if len(group) <= _MAX_ALIKE:
        return [f"{name}{text}" for name, text in group]
    return [f"{first}{said}; likewise {named_inputs([name for name, _ in more])}"]
