"""Shortens names to a width by leaving out the parts that distinguish them least; different names stay different.

Long names of one table share most of their parts: ``sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize...`` and
``..._tn_n_tilesize...`` differ in two letters in the middle. From each long name one run of characters, or both
ends, are left out: the part whose words occur in most of the other names.

Places in source files (``/home/user/project/train.py:12 Trainer.step``) lose the outermost folders first, then the
end of the function's name; file and line stay.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, cast

import numpy as np
import polars as pl

from thence.model.own_code import SOURCE_PLACE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

_WORDS = re.compile(r"[A-Za-z]+|[0-9]+|[^A-Za-z0-9]")
_LONGEST = 4096
"""Characters of a name that are examined."""
_MIN_WIDTH = 8
_SHARED = 0.01
"""Weight of a word that every name has. So of two runs of such words, the one with fewer words is left out."""
_MUCH_LESS = 0.5
_MIN_FUNCTION = 3
"""Characters of a function's name, with the space before it, below which the name is left out."""
_START = 0.6
"""Share of the width that the start of a name gets if several runs have the same weight."""


def fitted(names: Sequence[str], width: int, lines: int = 1) -> list[str]:
    """Names that fit into a column, in the same order; different ones stay different.

    Args:
        width: characters of a line; fewer than 8 count as 8.
        lines: lines of a name, broken between its words where that is possible. File and line of a place in a source
            file stand on one.
    """
    line = max(width, _MIN_WIDTH)
    width = line * lines
    distinct = list(dict.fromkeys(names))
    short = _shortened(distinct, width, line)
    # In the second round the words are weighed within each group of equal results, so that the words which all
    # names of the group have in common hardly count.
    for _ in range(2):
        groups = _equal(short)
        if not groups:
            break
        for group in groups:
            short |= _shortened(group, width, line)
    return [numbered[name] for numbered in (_numbered(short, width),) for name in names]


def narrowed(names: pl.Series, width: int) -> pl.Series:
    """Names of at most so many characters; different names stay different."""
    text = names.cast(pl.String)
    long = text.filter(text.str.len_chars() > width).unique(maintain_order=True)
    ending = pl.format("…#{}", pl.int_range(1, pl.len() + 1))
    short = long.to_frame("long").select(
        "long", short=pl.concat_str(pl.col("long").str.head(width - ending.str.len_chars()), ending)
    )
    return text.replace(short["long"], short["short"])


def affordable(names: pl.Series, uses: npt.NDArray[np.int64], max_text: int, max_text_per_use: int) -> pl.Series:
    """Distinct names, narrowed as far as is needed to write each of them once for each of its uses.

    Formats store a name once and refer to it from any number of rows, so a few long names can make texts of
    thousands of times the input's size.

    Args:
        names: distinct texts.
        uses: of each name, shape (n,).
        max_text: characters of all names together, each written out for each use.
        max_text_per_use: characters allowed in addition for each use: more than real names have on average.

    Returns:
        ``names`` itself, or narrowed names.
    """
    for width in (0, 4000, 1000, 100, 40):  # 0: in full
        short = narrowed(names, width) if width else names
        characters = short.str.len_chars().fill_null(0).to_numpy().astype(np.int64)
        written = int((characters * uses).sum())
        if written <= max(max_text + max_text_per_use * int(uses.sum()), int(characters.sum())):
            break
    return short


def _shortened(names: Sequence[str], width: int, line: int) -> dict[str, str]:
    """Each name with one run left out, if it is too long."""
    if max(map(len, names), default=0) <= line:
        return {name: name for name in names}
    long = (name for name in names if len(name) > line)
    places = {name: text for name in long if (text := _short_place(name, width, line)) is not None}
    uses = Counter(places.values())  # equal ones differ in what is left out
    places = {name: text for name, text in places.items() if uses[text] == 1}
    once = cast("dict[str, str]", {}).setdefault  # names share most words: each is kept once
    words = {
        name: [once(word, word) for word in _WORDS.findall(name[:_LONGEST])] for name in names if name not in places
    }
    uses = Counter(word for of_name in words.values() for word in set(of_name))
    cut = {name: _cut(parts, uses, len(words), width) for name, parts in words.items()}
    return places | cut


def _short_place(name: str, width: int, line: int) -> str | None:
    """A place in a source file without its outermost folders and, if need be, the end of the function's name.

    None if the name is no such place, or its file and line do not fit.

    Args:
        width: characters of all lines.
        line: characters of one line, into which file and line must fit.
    """
    match = SOURCE_PLACE.fullmatch(name)
    if match is None or len(match["file"]) > line:
        return None
    folder, file, function = match["folder"] or "", match["file"], match["name"] or ""
    folders = folder.split("/")[:-1]
    for first in range(len(folders) + 1):
        outer = "…/" if first else ""
        text = outer + "".join(f"{part}/" for part in folders[first:]) + file
        if len(text) <= line and len(text + function) <= width:
            return text + function
    room = width - len(file)
    if len(function) <= room:
        return file + function
    return file + (f"{function[: room - 1]}…" if room > _MIN_FUNCTION else "")


def _cut(words: Sequence[str], uses: Mapping[str, int], names: int, width: int) -> str:
    """The text of the words without the run of least weight, or without both ends if these weigh much less."""
    text = "".join(words)
    length = len(text) - width + 1  # characters to leave out, one of them for the ellipsis
    if length <= 1:
        return text
    weight = np.array([_SHARED + math.log(names / uses[word]) for word in words])
    # Equal weights stay equal in whatever order they are added.
    before = np.concatenate([[0.0], np.cumsum(weight)]).round(6)
    word_at = np.repeat(np.arange(len(words)), [len(word) for word in words])
    reached = before[word_at + 1]  # weight of all words up to that of each character
    passed = before[word_at]
    cuts = reached[length - 1 :] - passed[: len(text) - length + 1]
    far = np.abs(np.arange(len(cuts)) - _START * width)
    start = int(np.lexsort((far, cuts))[0])
    kept = width - 2  # between two ellipses
    ends = reached[: len(text) - kept - 1] + before[-1] - passed[kept + 1 :]
    middle = 1 + int(ends.argmin())
    if ends.min() < _MUCH_LESS * cuts[start]:
        return f"…{text[middle : middle + kept]}…"
    return f"{text[:start]}…{text[start + length :]}"


def _equal(short: Mapping[str, str]) -> list[list[str]]:
    """Groups of different names that were shortened to the same text."""
    groups: dict[str, list[str]] = {}
    for name, text in short.items():
        groups.setdefault(text, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _numbered(short: Mapping[str, str], width: int) -> dict[str, str]:
    """The texts, with a number at the end of those that are still equal to another."""
    taken = set(short.values())
    result = dict(short)
    for group in _equal(short):
        for number, name in enumerate(group[1:], 2):
            result[name] = _free(short[name], number, taken, width)
            taken.add(result[name])
    return result


def _free(text: str, number: int, taken: Iterable[str], width: int) -> str:
    """The text with a number at its end that makes it different from all texts in ``taken``."""
    while True:
        ending = f"#{number}"
        candidate = text[: width - len(ending)] + ending
        if candidate not in taken:
            return candidate
        number += 1
