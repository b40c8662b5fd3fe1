"""Places of allocations from the stacks in a snapshot, whose lines are those that were executed.

Each event has a list of its own, innermost frame first, and lists share their frames. So equal lists are found first,
and everything else is done once for each distinct stack.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.model.graph_labels import FRAME_SEPARATOR
from thence.model.own_code import OwnCode, packages_shown
from thence.model.phases import POSITIONS, Phase, Position
from thence.readers.memory_snapshot.tape import DICT, NOTHING, Tape

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Cells = NDArray[np.uint32]
    Int64 = NDArray[np.int64]

_AT_ONCE = 1 << 22
"""Frames that are compared at once."""
_MAX_FRAMES = 256
"""Innermost frames of a stack; the others are left out."""
_LONGEST = 1000
"""Characters of a file or function."""
_MAX_TEXT = 64_000_000
"""Characters of all distinct stacks; the stacks of a snapshot with more are left out, and their lines kept."""
_MAX_ANNOTATIONS = 1_000_000  # with more, none is used
_DEEPEST = 20
"""Annotations that are open at once; those in them are left out."""
_OPERATOR = re.compile(r"at::_ops::(\w{1,200})::")
_ALLOCATE = ("empty", "resize_")
"""Operators that allocate for the operator that calls them."""
_MAX_DISTINCT = 2_000_000
_PHASES = (Phase.FORWARD, Phase.OPTIMIZER, Phase.BACKWARD, Phase.RECOMPUTE)
"""Phases that stacks show, each of which hides those before it; forward only in a program that differentiates."""
_PYTHON = (".py", ">")
"""Ends of the files of Python frames."""


def places_of(tape: Tape, dicts: Cells, name: str) -> dict[str, pl.Series]:
    """Places of events or blocks, but for labels: the columns source, position, stack, op and phase.

    Args:
        dicts: the dict of each event or block.

    Raises:
        DamagedInput: it has far more different frames than a program has lines.
    """
    stacks, number = _distinct_stacks(tape, tape.field(dicts, "frames"))
    parts = _parts(tape.counts(stacks))
    frames_of_parts = [np.unique(tape.all_elements(stacks[begin:end])[0]) for begin, end in parts]
    known = np.unique(np.concatenate([np.zeros(0, np.uint32), *frames_of_parts]))
    if len(known) > _MAX_DISTINCT:
        raise DamagedInput(name, f"holds more than {_MAX_DISTINCT:,} different frames")
    kinds = _FrameKinds.of(tape, known)
    pieces = [_of_stacks(kinds, _Stacks.of(tape, known, stacks[begin:end])) for begin, end in parts]
    differentiates = any(part.engine for part in pieces)
    operators = list(dict.fromkeys(op for op in kinds.op if op is not None))
    numbers = {op: i for i, op in enumerate(operators)}
    op_of_frame = np.array([*(-1 if op is None else numbers[op] for op in kinds.op), -1], np.int64)  # the last: of -1
    source, op, phase = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(part, column) for part in pieces)])
        for column in ("source", "op", "phase")
    )
    if not differentiates:
        phase = np.where(phase == _PHASES.index(Phase.FORWARD), -1, phase)
    whole = [text for part in pieces for text in part.stack]
    if sum(len(text) for text in whole if text is not None) > _MAX_TEXT:
        whole = [None] * len(whole)
    position = pl.Series([Position.LINE.value, None], dtype=pl.Enum(POSITIONS))
    columns = {
        "source": _texts_at(kinds.texts, source),
        "position": position.gather((source < 0).astype(np.int64)),
        "stack": pl.Series(whole, dtype=pl.String).cast(pl.Categorical()),
        "op": _texts_at(operators, op_of_frame[op]),
        "phase": _texts_at([phase.value for phase in _PHASES], phase),
    }
    return {column: values.gather(number) for column, values in columns.items()}


def labels_of(
    tape: Tape, dicts: Cells, times_us: Int64, device: int, annotations: Cells, in_history: NDArray[np.bool_]
) -> pl.Series:
    """What the program noted: ``torch.cuda.memory._set_memory_metadata``, else the annotations that were open.

    ``record_function`` annotates a history if it was begun with ``global_record_annotations``. The annotations do not
    say of which thread they are, so those of all threads count.

    Args:
        dicts: the dict of each event.
        times_us: time of each event.
        device: whose events they are.
        annotations: dicts of the annotations.
        in_history: which events have a time.
    """
    noted, number = _noted(tape, tape.field(dicts, "user_metadata"))
    times, paths = _open_annotations(tape, annotations, device)
    place = np.searchsorted(times, times_us, "right")
    by_time = pl.Series([None, *paths], dtype=pl.String).cast(pl.Categorical()).gather(np.where(in_history, place, 0))
    of_dict = noted.gather(number)
    return of_dict.zip_with(of_dict.is_not_null(), by_time)


@dataclass(frozen=True)
class _Stacks:
    """Distinct stacks, innermost frame first.

    Attributes:
        frame: of each entry: number of the distinct frame.
        stack: of each entry: number of the stack.
        count: of stacks.
    """

    frame: Int64
    stack: Int64
    count: int

    @classmethod
    def of(cls, tape: Tape, known: Cells, stacks: Cells) -> _Stacks:
        """The frames of lists, numbered by their places in ``known``."""
        frames, counts = tape.all_elements(stacks)
        return cls(np.searchsorted(known, frames), np.repeat(np.arange(len(stacks)), counts), len(stacks))

    def innermost(self, kind: NDArray[np.bool_]) -> Int64:
        """The innermost frame of a kind in each stack; -1 for none."""
        innermost = np.full(self.count, -1)
        places = np.flatnonzero(kind[self.frame])[::-1]  # of several, the last one that is written stays
        innermost[self.stack[places]] = self.frame[places]
        return innermost

    def having(self, kind: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which stacks have a frame of a kind."""
        having = np.zeros(self.count, np.bool_)
        having[self.stack[kind[self.frame]]] = True
        return having


@dataclass(frozen=True)
class _FrameKinds:
    """What is known of distinct frames.

    Attributes:
        texts: ``file.py:12 function``.
        own, python: of the user's own code; of Python.
        op: operator that the frame is a call of, for those that do not only allocate; None for others.
        engine, recompute, optimizer, module: frames of the autograd engine, of a checkpoint that is run again, of an
            optimizer's step, and of the call of a module.
    """

    texts: list[str]
    own: NDArray[np.bool_]
    python: NDArray[np.bool_]
    op: list[str | None]
    engine: NDArray[np.bool_]
    recompute: NDArray[np.bool_]
    optimizer: NDArray[np.bool_]
    module: NDArray[np.bool_]

    @classmethod
    def of(cls, tape: Tape, frames: Cells) -> _FrameKinds:
        """The kinds of frames, each of which is looked at once."""
        texts = _Texts(tape.texts)
        lines = tape.integers(tape.field(frames, "line"))[0]
        files, file = np.unique(tape.text_numbers(tape.field(frames, "filename")), return_inverse=True)
        names, name = np.unique(tape.text_numbers(tape.field(frames, "name")), return_inverse=True)
        paths, functions = [texts[i] for i in files.tolist()], [texts[i] for i in names.tolist()]
        own_code = OwnCode.of(installed=packages_shown(paths))
        is_python = _are(paths, lambda path: path.endswith(_PYTHON))
        ops = [_operator(function) for function in functions]
        named = zip(file.tolist(), lines.tolist(), name.tolist(), strict=True)
        of_checkpoint = _are(paths, lambda path: path.endswith("torch/utils/checkpoint.py"))
        of_module = _are(paths, lambda path: path.endswith("torch/nn/modules/module.py"))
        return cls(
            [f"{paths[i]}:{line} {functions[j]}" for i, line, j in named],
            (_are(paths, own_code) & is_python)[file],
            is_python[file],
            [ops[i] for i in name.tolist()],
            _are(functions, lambda function: function.startswith("torch::autograd::Engine::evaluate_function"))[name],
            of_checkpoint[file] & _are(functions, lambda function: function in ("recompute_fn", "unpack_hook"))[name],
            _are(paths, lambda path: path.endswith("torch/optim/optimizer.py"))[file],
            of_module[file] & _are(functions, lambda function: function == "_call_impl")[name],
        )


def _are(texts: list[str], rule: Callable[[str], bool]) -> NDArray[np.bool_]:
    return np.array([rule(text) for text in texts], np.bool_)


def _operator(function: str) -> str | None:
    """The operator that a function of C++ is the call of; overloads are part of its name, as in C++."""
    match = _OPERATOR.match(function)
    return None if match is None or match[1].startswith(_ALLOCATE) else f"aten::{match[1]}"


@dataclass(frozen=True)
class _Found:
    """What some stacks show.

    Attributes:
        source, op: frame of the line, and of the operator; -1 for none.
        phase: number in `_PHASES`; -1 for none.
        engine: whether one of them is of the autograd engine.
        stack: the Python frames of each, outermost first; None without one.
    """

    source: Int64
    op: Int64
    phase: Int64
    engine: bool
    stack: list[str | None]


def _of_stacks(kinds: _FrameKinds, stacks: _Stacks) -> _Found:
    # The innermost frame of the user's own code, else of Python. Frames of C++ say nothing of the program's lines.
    own, python = stacks.innermost(kinds.own), stacks.innermost(kinds.python)
    engine = stacks.having(kinds.engine)
    phase = np.full(stacks.count, -1)
    shown = (stacks.having(kinds.module), stacks.having(kinds.optimizer), engine, stacks.having(kinds.recompute))
    for number, has in enumerate(shown):
        phase[has] = number
    op = stacks.innermost(np.array([op is not None for op in kinds.op], np.bool_))
    return _Found(np.where(own < 0, python, own), op, phase, bool(engine.any()), _joined(kinds, stacks))


def _texts_at(texts: list[str], numbers: Int64) -> pl.Series:
    """Texts by number as names; null for -1."""
    names = pl.Series([*texts, None], dtype=pl.String).cast(pl.Categorical())
    return names.gather(np.where(numbers < 0, len(texts), numbers))


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
    hashes = np.zeros((len(counts), 2), np.uint64)
    has = counts > 0
    for column, factor in enumerate((0xBF58476D1CE4E5B9, 0x94D049BB133111EB)):
        value = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(factor)
        value ^= value >> np.uint64(32)
        if has.any():
            hashes[has, column] = np.add.reduceat(value, first[has])
    return hashes


def _equal(tape: Tape, lists: Cells, others: Cells, lengths: Int64) -> NDArray[np.bool_]:
    """Whether pairs of lists have equal elements."""
    equal: NDArray[np.bool_] = lengths == tape.counts(others)
    for begin, end in _parts(lengths):
        part = np.arange(begin, end)[equal[begin:end]]
        elements, counts = tape.all_elements(lists[part])
        other, _ = tape.all_elements(others[part])
        differing = np.repeat(part, counts)[elements != other]
        equal[differing] = False
    return equal


class _Texts:
    """Texts of a snapshot by number, as tables can hold them; shortened if they are very long."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __getitem__(self, number: int) -> str:
        if number < 0:
            return "?"
        return self._texts[number][:_LONGEST].encode("utf-8", "replace").decode()


def _joined(kinds: _FrameKinds, stacks: _Stacks) -> list[str | None]:
    """The Python frames of each stack, outermost first; None for stacks without one, and for all if too long."""
    kept = np.flatnonzero(kinds.python[stacks.frame])
    stack = stacks.stack[kept]
    first = np.flatnonzero(np.diff(stack, prepend=-1))
    depth = np.arange(len(kept)) - np.repeat(first, np.diff([*first.tolist(), len(kept)]))
    kept = kept[depth < _MAX_FRAMES][::-1]
    lengths = np.array([len(text) for text in kinds.texts] or [0], np.int64)
    texts: list[str | None] = [None] * stacks.count
    if int(lengths[stacks.frame[kept]].sum()) > _MAX_TEXT:
        return texts
    frames = pl.Series(kinds.texts, dtype=pl.String).gather(stacks.frame[kept])
    table = pl.DataFrame({"stack": stacks.stack[kept], "frame": frames})
    for number, text in (
        table.group_by("stack", maintain_order=True).agg(pl.col("frame").str.join(FRAME_SEPARATOR)).rows()
    ):
        texts[number] = text
    return texts


def _noted(tape: Tape, cells: Cells) -> tuple[pl.Series, Int64]:
    """Distinct notes as names, and the number of that of each cell: a text, or a dict of a few values."""
    distinct, number = tape.distinct(cells)
    texts = _Texts(tape.texts)
    numbers = tape.text_numbers(distinct).tolist()
    names: list[str | None] = [texts[text] or None if text >= 0 else None for text in numbers]
    for place in np.flatnonzero(distinct & 7 == DICT).tolist():
        names[place] = _label_of_dict(tape, distinct[place])
    return pl.Series(names, dtype=pl.String).cast(pl.Categorical()), number


def _label_of_dict(tape: Tape, cell: np.uint32) -> str | None:
    single = np.array([cell], np.uint32)
    fields: dict[str, Any] = {}
    for key in tape.keys(cell):
        value = tape.field(single, key)
        numbers, is_number = tape.integers(value)
        text = int(tape.text_numbers(value)[0])
        if text >= 0 or is_number[0]:
            fields[key] = _Texts(tape.texts)[text] if text >= 0 else int(numbers[0])
        elif value[0] != NOTHING:
            fields[key] = "..."
    return json.dumps(fields)[:_LONGEST] if fields else None


def _open_annotations(tape: Tape, annotations: Cells, device: int) -> tuple[Int64, list[str | None]]:
    """Times at which annotations of a device begin or end, and the path of those that are open from then on."""
    if not 0 < len(annotations) <= _MAX_ANNOTATIONS:
        return np.zeros(0, np.int64), []
    annotations = annotations[tape.integers(tape.field(annotations, "device"))[0] == device]
    times = tape.integers(tape.field(annotations, "time_us"))[0]
    order = np.argsort(times, kind="stable")
    texts = _Texts(tape.texts)
    names = tape.text_numbers(tape.field(annotations, "name"))[order].tolist()
    stages = tape.text_numbers(tape.field(annotations, "stage"))[order].tolist()
    opened: list[int] = []
    paths: list[str | None] = []
    for name, stage in zip(names, stages, strict=True):
        if texts[stage] == "START" and len(opened) < _DEEPEST:
            opened.append(name)
        elif texts[stage] == "END" and name in opened:
            del opened[len(opened) - 1 - opened[::-1].index(name)]
        paths.append("/".join([texts[i] for i in opened]) or None)
    return times[order], paths
