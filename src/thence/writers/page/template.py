"""Fills page templates, and has the pieces of HTML that pages share."""

from __future__ import annotations

import re
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from thence.writers.text.merged_sentences import merged
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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


def scrolled(html: str, title: str) -> str:
    """An HTML table in an element that scrolls if the table is too wide."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">{html}</div>'


def notes(texts: Iterable[str], kind: str = "") -> str:
    """Sentences as an HTML list, those about several inputs merged; empty without any."""
    items = "".join(f"<li>{escape(printable(text))}</li>" for text in merged(texts))
    return f'<ul class="{f"notes {kind}".strip()}">{items}</ul>' if items else ""


def _file(name: str) -> str:
    return (resources.files("thence.writers.page") / "templates" / name).read_text("utf-8")
