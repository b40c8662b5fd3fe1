"""Fills page templates: a template has placeholders for other files and for texts."""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLACE = re.compile(r"\{\{([a-z_. ]+)\}\}")
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def filled(name: str, texts: Mapping[str, str]) -> str:
    """A template with its placeholders replaced. Placeholders within a text or an included file are not replaced.

    Args:
        name: name of a file in ``templates``. In it, ``{{file look.css}}`` is replaced by the file of that name in
            the same folder, ``{{title}}`` by the text of that name.
        texts: texts that are safe where they are inserted: HTML, or JSON from `as_data`.
    """
    pieces = []
    for number, piece in enumerate(_PLACE.split(_file(name))):
        kind, _, file = piece.partition(" ")
        if number % 2 == 0:
            pieces.append(piece)
        elif kind == "file":
            pieces.append(_file(file).rstrip("\n"))
        else:
            pieces.append(texts[piece])
    return "".join(pieces)


def as_data(document: str) -> str:
    """A JSON document with every character escaped that could end the script element around it."""
    return document.translate(_ESCAPES)


def _file(name: str) -> str:
    return (resources.files("thence.writers.page") / "templates" / name).read_text("utf-8")
