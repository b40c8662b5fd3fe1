"""Pages made of files: a template names the files and the texts that it is filled with."""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["as_data", "filled"]

_PLACE = re.compile(r"\{\{([a-z_. ]+)\}\}")
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def filled(name: str, texts: Mapping[str, str]) -> str:
    """A template with its files and texts in place; what is in a text is never looked at again.

    Args:
        name: of a file in ``templates``. ``{{file look.css}}`` in it stands for another file there, ``{{title}}``
            for the text of that name.
        texts: ready for the place where they go: HTML, or JSON of `as_data`.
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
