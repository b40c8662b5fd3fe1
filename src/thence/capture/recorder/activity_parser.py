"""Decodes a buffer of CUPTI activity records into NumPy columns, without a Python loop over the records.

A buffer holds records of several kinds one after the other, and all records of one kind have the same size.
So a run of records of one kind is found by comparing every n-th word. Where kinds alternate, the size of each
record gives the beginning of the next one, and such a chain is followed for all its records together:

- A record begins at a word whose low half is the number of a known kind, and the word after the record is
  such a word again, or the end. Few words other than the beginnings of records meet both conditions.
- For each of these candidates, the word after its record is known. Mostly every candidate is reached from
  another one: then all of them are in the chain. Otherwise pointer jumping is used: the table of successors
  is squared a few times, so that Python takes one step for 32 records, and then the records in between are
  filled in. Candidates that the chain does not reach are no records and drop out.

A chain ends at the first record of a kind that was not met before; libcupti is queried for its size.
Buffers are larger than a processor core's own cache, so both the search and the copying go piece by piece.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.capture.cuda.cupti import CuptiError
from thence.capture.cuda.layouts import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.capture.cuda.cupti import Cupti

Columns = dict[str, np.ndarray[Any, Any]]
"""Records of one kind: an array for each field of `layouts.LAYOUTS`."""

_Words = np.ndarray[Any, Any]
"""A buffer, or a part of it, as uint64: records begin at words (ACTIVITY_RECORD_ALIGNMENT is 8)."""
_Places = np.ndarray[Any, Any]
"""Indices of words at which records begin."""

_LOW_HALF = 0xFFFFFFFF  # of a word: the record's kind
_FIRST_LOOK = 64
"""Records of a run that are compared first; four times as many each time after that."""
_LONG_WORDS = 1 << 14
"""After a run shorter than this many words, the chain is followed: its cost does not grow with the number of runs."""
_SQUARINGS = 5
_PIECE_WORDS = 1 << 16
"""Words that are searched for a chain together."""
_PIECE_RECORDS = 1 << 11
"""Records that are copied together."""


class ActivityParser:
    """Reads buffers of one libcupti.

    Attributes:
        unknown: number of records that were skipped because their layout is not known, by kind.
    """

    def __init__(self, cupti: Cupti) -> None:
        self._cupti = cupti
        self._steps: dict[int, int] = {}  # words of a record, by its kind
        self.unknown: dict[int, int] = {}

    def read(self, address: int, valid_bytes: int) -> Iterator[tuple[int, Columns]]:
        """Yields the kind and the columns of the records in a buffer, as copies, the records of a kind in order.

        A record that is cut off ends the buffer.

        Args:
            address: of the buffer.
            valid_bytes: how much of it CUPTI filled.

        Raises:
            CuptiError: libcupti finds something in it that is not a record. The records before it are
                yielded first.
        """
        words = np.ctypeslib.as_array((ctypes.c_uint64 * (valid_bytes // 8)).from_address(address))
        places_of: dict[tuple[int, int], list[_Places]] = {}
        trouble: CuptiError | None = None
        try:
            self._walk(words, address, places_of)
        except CuptiError as error:
            trouble = error
        for (kind, step), pieces in places_of.items():
            places = np.concatenate(pieces)
            dtype = _dtype(kind, step)
            if dtype is None:
                self.unknown[kind] = self.unknown.get(kind, 0) + len(places)
            else:
                yield kind, _columns(words, dtype, places)
        if trouble is not None:
            raise trouble

    def _walk(self, words: _Words, address: int, places_of: dict[tuple[int, int], list[_Places]]) -> None:
        """Collects in `places_of` the beginnings of records, by their kind and size in words."""
        begin = 0
        while begin < len(words):
            kind = int(words[begin] & _LOW_HALF)
            step = self._step(kind, address, begin, len(words))
            count = _run(words[begin:], kind, step)
            if count == 0:
                return  # a record that is cut off
            places_of.setdefault((kind, step), []).append(begin + step * np.arange(count))
            begin += step * count
            follows = step * count < _LONG_WORDS
            while follows and begin < len(words):
                chain, length = _chain(words[begin : begin + _PIECE_WORDS], self._steps)
                for kind, places in chain.items():
                    places_of.setdefault((kind, self._steps[kind]), []).append(begin + places)
                begin += length
                follows = length > 0

    def _step(self, kind: int, address: int, begin: int, end: int) -> int:
        """Size in words of a record of this kind, queried from libcupti once."""
        step = self._steps.get(kind)
        if step is not None:
            return step
        following = self._cupti.next_record(address, 8 * end, address + 8 * begin)
        if following is None:
            return end - begin  # the last record: the rest of the buffer, which may be larger than the record
        self._steps[kind] = step = max(1, (following - address) // 8 - begin)
        return step


@functools.cache
def _dtype(kind: int, step: int) -> np.dtype[Any] | None:
    """The dtype of those fields of a record that are read; None if its layout is not known."""
    layout = LAYOUTS.get(kind)
    if layout is None or 8 * step < layout.smallest:
        return None
    ends = {name: offset + np.dtype(kind).itemsize for name, (offset, kind) in layout.later.items()}
    later = {name: layout.later[name] for name, end in ends.items() if end <= 8 * step}
    fields = layout.fields | later
    offsets, formats = zip(*fields.values(), strict=True)
    size = max(layout.smallest, *(ends[name] for name in later)) if later else layout.smallest
    return np.dtype({"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": size})


def _columns(words: _Words, dtype: np.dtype[Any], places: _Places) -> Columns:
    """The fields of the records at these places."""
    # One item at every word, so that records are copied whole, not field by field.
    count = (8 * len(words) - dtype.itemsize) // 8 + 1
    everywhere = np.ndarray((count,), f"V{dtype.itemsize}", words, 0, (8,))
    columns = {name: np.empty(len(places), dtype[name]) for name in dtype.names or ()}
    for begin in range(0, len(places), _PIECE_RECORDS):
        piece = slice(begin, begin + _PIECE_RECORDS)
        records = everywhere[places[piece]].view(dtype)
        for name, column in columns.items():
            column[piece] = records[name]
    return columns


def _run(words: _Words, kind: int, step: int) -> int:
    """Number of complete records of this kind that follow one another from the beginning."""
    limit = len(words) // step
    count, look = 0, _FIRST_LOOK
    while count < limit:
        compared = min(look, limit - count)
        kinds = np.ndarray((compared,), "<u4", words, 8 * step * count, (8 * step,))
        other = np.flatnonzero(kinds != kind)
        if len(other):
            return count + int(other[0])
        count += compared
        look *= 4
    return count


def _chain(words: _Words, steps: dict[int, int]) -> tuple[dict[int, _Places], int]:
    """The beginnings of the records of each kind, and the word at which the chain from word 0 stops.

    It stops after the last word, or earlier: at a kind that is not known, at a record that is cut off,
    or at the record before one of these.
    """
    end = len(words)
    kinds = words.astype(np.uint32)  # their low halves
    begins = {}
    possible = np.zeros(end + 1, dtype=bool)
    possible[end] = True
    for kind, step in steps.items():
        of_kind = kinds == kind
        if step <= end and of_kind.any():
            begins[kind] = of_kind[: end + 1 - step]
            possible[:end] |= of_kind
    begins = {k: np.flatnonzero(some & possible[steps[k] :]) for k, some in begins.items()}
    if not begins:
        return {}, 0
    places = np.concatenate(list(begins.values()))
    following = np.concatenate([some + steps[kind] for kind, some in begins.items()])
    led_to = np.zeros(end + 1, dtype=bool)
    led_to[0] = True
    led_to[following] = True
    # If each is word 0 or reached from another, the way back from each ends at word 0: all are in the chain.
    if led_to[places].all():
        return begins, int(following.max(initial=0))
    reached = _reached(places, following, end)
    cuts = np.cumsum([len(some) for some in begins.values()])[:-1]
    chain = {kind: some[on_it] for (kind, some), on_it in zip(begins.items(), np.split(reached, cuts), strict=True)}
    return chain, int(following[reached].max(initial=0))


def _reached(places: _Places, following: _Places, end: int) -> np.ndarray[Any, Any]:
    """Which of these places the chain from word 0 reaches; `following` is the word after the record at each."""
    none = len(places)
    rows = np.full(end + 1, none, dtype=np.intp)  # by word
    rows[places] = np.arange(none)
    jumps = [np.append(rows[following], none)]
    for _ in range(_SQUARINGS):
        jumps.append(jumps[-1][jumps[-1]])
    anchors, row = [], int(rows[0])
    while row != none:
        anchors.append(row)
        row = int(jumps[-1][row])
    on_chain = np.array(anchors, dtype=np.intp)
    for jump in jumps[-2::-1]:
        on_chain = np.concatenate([on_chain, jump[on_chain]])
    reached = np.zeros(none + 1, dtype=bool)
    reached[on_chain] = True
    return reached[:none]
