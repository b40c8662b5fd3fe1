"""Places of allocations from the stacks in a snapshot, whose lines are those that were executed.

Each event has a list of its own, innermost frame first, and lists share their frames. So equal lists are found first,
and everything else is done once for each distinct stack.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.graph_labels import FRAME_SEPARATOR
from thence.model.own_code import OwnCode, packages_shown
from thence.model.phases import POSITIONS, Position
from thence.readers.memory_snapshot.tape import DICT, NOTHING, Tape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Cells = NDArray[np.uint32]
    Int64 = NDArray[np.int64]

_AT_ONCE = 1 << 22
"""Frames that are compared at once."""
_MOST_FRAMES = 256
"""Innermost frames of a stack; the others are left out."""
_LONGEST = 1000
"""Characters of a file or function."""
_MOST_TEXT = 64_000_000
"""Characters of all distinct stacks; the stacks of a snapshot with more are left out, and their lines kept."""
_PYTHON = (".py", ">")
"""Ends of the files of Python frames."""


def places_of(tape: Tape, dicts: Cells) -> dict[str, pl.Series]:
    """The place columns of the tables of memory for events or blocks: source, position, stack and label.

    Args:
        tape: the snapshot.
        dicts: the dict of each event or block.
    """
    stacks, number = _distinct_stacks(tape, tape.field(dicts, "frames"))
    frames, counts = tape.all_elements(stacks)
    known, of_frame = np.unique(frames, return_inverse=True)
    texts, own, python = _frame_texts(tape, known)
    first = np.cumsum(counts) - counts
    stack = np.repeat(np.arange(len(stacks)), counts)
    depth = np.arange(len(frames)) - np.repeat(first, counts)
    chosen = np.full(len(stacks), -1)
    # The innermost frame of the user's own code, else of Python, else any: the last one that is written stays.
    for kind in (np.ones(len(known), np.bool_), python, own):
        at = np.flatnonzero(kind[of_frame])[::-1]
        chosen[stack[at]] = of_frame[at]
    source = pl.Series([*texts, None], dtype=pl.String).gather(np.where(chosen < 0, len(texts), chosen))
    kept = np.flatnonzero(python[of_frame] & (depth < _MOST_FRAMES))
    whole = _joined(texts, of_frame[kept], stack[kept], len(stacks))
    position = pl.Series([Position.LINE.value], dtype=pl.Enum(POSITIONS)).new_from_index(0, len(stacks))
    nowhere = pl.Series([None], dtype=pl.Enum(POSITIONS))
    columns = {
        "source": source.cast(pl.Categorical()),
        "position": position.zip_with(source.is_not_null(), nowhere),
        "stack": whole.cast(pl.Categorical()),
    }
    gathered = {name: column.gather(number) for name, column in columns.items()}
    return gathered | {"label": _labels(tape, tape.field(dicts, "user_metadata"))}


def _distinct_stacks(tape: Tape, lists: Cells) -> tuple[Cells, Int64]:
    """One list of each distinct stack, and for each list the number of its stack."""
    distinct, of_list = np.unique(lists, return_inverse=True)
    keys = np.zeros((len(distinct), 2), np.uint64)
    lengths = tape.counts(distinct)
    for begin, end in _parts(lengths):
        keys[begin:end] = _hashes(*tape.all_elements(distinct[begin:end]))
    packed = np.ascontiguousarray(keys).view([("low", np.uint64), ("high", np.uint64)]).reshape(-1)
    _, first, number = np.unique(packed, return_index=True, return_inverse=True)
    same = _equal(tape, distinct, distinct[first][number], lengths)
    # Lists that only have the same hash were made for that; each is then a stack of its own.
    others = np.flatnonzero(~same)
    number[others] = len(first) + np.arange(len(others))
    return np.concatenate((distinct[first], distinct[others])), number[of_list]


def _parts(lengths: Int64) -> list[tuple[int, int]]:
    """Ranges of lists that have together about as many elements as are compared at once."""
    total = np.cumsum(lengths)
    cuts = np.searchsorted(total, np.arange(_AT_ONCE, int(lengths.sum()), _AT_ONCE)) + 1
    return list(pairwise(np.unique([0, *cuts.tolist(), len(lengths)]).tolist()))


def _hashes(elements: Cells, counts: Int64) -> NDArray[np.uint64]:
    """Two hashes of each list: sums of its elements, each mixed with its place."""
    first = np.cumsum(counts) - counts
    place = (np.arange(len(elements)) - np.repeat(first, counts)).astype(np.uint64)
    mixed = elements.astype(np.uint64) + (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    found = np.zeros((len(counts), 2), np.uint64)
    has = counts > 0
    for column, factor in enumerate((0xBF58476D1CE4E5B9, 0x94D049BB133111EB)):
        value = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(factor)
        value ^= value >> np.uint64(32)
        if has.any():
            found[has, column] = np.add.reduceat(value, first[has])
    return found


def _equal(tape: Tape, lists: Cells, others: Cells, lengths: Int64) -> NDArray[np.bool_]:
    """Whether pairs of lists have equal elements."""
    equal: NDArray[np.bool_] = lengths == tape.counts(others)
    for begin, end in _parts(lengths):
        part = np.arange(begin, end)[equal[begin:end]]
        one, counts = tape.all_elements(lists[part])
        other, _ = tape.all_elements(others[part])
        differing = np.repeat(part, counts)[one != other]
        equal[differing] = False
    return equal


def _frame_texts(tape: Tape, frames: Cells) -> tuple[list[str], NDArray[np.bool_], NDArray[np.bool_]]:
    """Distinct frames as ``file.py:12 function``, which are of the user's own code, and which of Python."""
    files = tape.text_numbers(tape.field(frames, "filename"))
    names = tape.text_numbers(tape.field(frames, "name"))
    lines = tape.integers(tape.field(frames, "line"))[0]
    texts = _Texts(tape.texts)
    written = [
        f"{texts[file]}:{line} {texts[name]}"
        for file, line, name in zip(files.tolist(), lines.tolist(), names.tolist(), strict=True)
    ]
    distinct = np.unique(files)
    paths = [texts[file] for file in distinct.tolist()]
    own_code = OwnCode.of(installed=packages_shown(paths))
    python = np.array([path.endswith(_PYTHON) for path in paths], np.bool_)
    own = np.array([own_code(path) for path in paths], np.bool_) & python
    row = np.searchsorted(distinct, files)
    return written, own[row], python[row]


class _Texts:
    """Texts of a snapshot by number, as tables can hold them; shortened if they are very long."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __getitem__(self, number: int) -> str:
        if number < 0:
            return "?"
        return self._texts[number][:_LONGEST].encode("utf-8", "replace").decode()


def _joined(texts: list[str], frames: Int64, stacks: Int64, count: int) -> pl.Series:
    """The Python frames of each stack, outermost first; null for stacks without one, and for all if too long."""
    lengths = np.array([len(text) for text in texts] or [0], np.int64)
    if int(lengths[frames].sum()) > _MOST_TEXT:
        return pl.Series([None], dtype=pl.String).new_from_index(0, count)
    table = pl.DataFrame({"stack": stacks[::-1], "frame": pl.Series(texts, dtype=pl.String).gather(frames[::-1])})
    joined = table.group_by("stack", maintain_order=True).agg(pl.col("frame").str.join(FRAME_SEPARATOR))
    place = np.full(count, len(joined))
    place[joined["stack"].to_numpy()] = np.arange(len(joined))
    return pl.concat([joined["frame"], pl.Series("frame", [None], dtype=pl.String)]).gather(place)


def _labels(tape: Tape, cells: Cells) -> pl.Series:
    """What the program noted with ``torch.cuda.memory._set_memory_metadata``: a text, or a dict of a few values."""
    distinct, number = np.unique(cells, return_inverse=True)
    texts = _Texts(tape.texts)
    names: list[str | None] = [
        texts[text] or None if text >= 0 else None for text in tape.text_numbers(distinct).tolist()
    ]
    for place in np.flatnonzero(distinct & 7 == DICT).tolist():
        names[place] = _label_of_dict(tape, distinct[place])
    return pl.Series(names, dtype=pl.String).cast(pl.Categorical()).gather(number)


def _label_of_dict(tape: Tape, cell: np.uint32) -> str | None:
    one = np.array([cell], np.uint32)
    shape = tape.keys(cell)
    fields: dict[str, Any] = {}
    for key in shape:
        value = tape.field(one, key)
        numbers, is_number = tape.integers(value)
        text = int(tape.text_numbers(value)[0])
        if text >= 0 or is_number[0]:
            fields[key] = _Texts(tape.texts)[text] if text >= 0 else int(numbers[0])
        elif value[0] != NOTHING:
            fields[key] = "..."
    return json.dumps(fields)[:_LONGEST] if fields else None
