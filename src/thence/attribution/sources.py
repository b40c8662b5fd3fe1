"""Places of the kind ``source``: from Python frames, files of Triton kernels, and stacks at the capture of a graph.

A frame is written ``file.py(12): function``, a place ``file.py:12 Block.forward``. The meaning of the line number
depends on the producer (column ``position`` of host): profilers that trace calls write the line on which the
function begins, other producers the line that was executed. If only the function is certain, the frame is written
``file.py(): function`` and the place ``file.py function``.

Profilers that trace calls write the bare name of a function. The class of a ``forward`` is that of the module
call around it, if there is nothing between the two but frames of PyTorch's own ``nn.Module.__call__``. A
``forward`` that modules of several classes share, or that was called in another way, is named without a class.

Files of kernels: torch._inductor records ``kernel_file`` and other values with each launch (triton_heuristics.py). If
the file is on this machine, because the program was compiled here, it is searched for the line on which the kernel is
defined; nothing else of it is used or shown. The file may have been replaced since the recording, but its name holds
a hash of its content, by which the compiler itself identifies the content.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.columns import mask_of, row_numbers
from thence.model.graph_labels import FRAME_SEPARATOR
from thence.model.intervals import NO_ROW, chain_to
from thence.model.json_fields import decoded, field
from thence.model.names import distinct_names
from thence.model.phases import Position

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.model.arrays import Int64, Mask
    from thence.model.own_code import OwnCode


# ---- Python frames


_PROFILED_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d*)\): (?P<function>.*)", re.DOTALL)
_CALLS_FORWARD = re.compile(r"(?:^|/)torch/nn/modules/module\.py$")
_FORWARD = "forward"
_NUMBERED = re.compile(r"_\d+$")  # Block_0 is the first module of class Block


@dataclass(frozen=True)
class Frames:
    """The host rows that are Python frames.

    Attributes:
        place: Categorical ``file.py:12 function``, null where the row is not a frame with a file.
        own: rows that are frames of the user's code.
        installed: rows that are frames of the standard library or of installed packages.
        unlined: rows that are frames without a line.
    """

    place: pl.Series
    own: Mask
    installed: Mask
    unlined: Mask


def file_of_frame(name: str) -> str:
    """The file of a frame ``file.py(12): function``; empty for a name of another form."""
    match = _PROFILED_FRAME.fullmatch(name)
    return match["file"] if match else ""


def parse_frames(host: pl.DataFrame, own: OwnCode) -> Frames:
    """Parses the place of each host row that is a Python frame.

    Args:
        host: columns name, category and parent of `thence.model.tables.HOST`.
    """
    python = mask_of(host["category"] == "python")
    names = host["name"]
    if not python.any():
        nothing = pl.Series([None], dtype=pl.Categorical()).new_from_index(0, host.height)
        return Frames(nothing, python, python, python)
    used = distinct_names(names.filter(pl.Series(python)))
    parsed = [_PROFILED_FRAME.fullmatch(name) for name in used.cast(pl.String).to_list()]
    pairs = sorted(zip(used.to_physical().to_list(), parsed, strict=True), key=lambda pair: pair[0])
    frames = {code: match for code, match in pairs if match}
    code = names.to_physical().fill_null(0).to_numpy().astype(np.int64)
    is_frame = python & np.isin(code, list(frames)) & names.is_not_null().to_numpy()
    of_user = is_frame & np.isin(code, [c for c, match in frames.items() if own(match["file"])])
    unlined = is_frame & np.isin(code, [c for c, match in frames.items() if not match["line"]])
    classes = _classes(host, code, is_frame, frames)
    texts = [_function(match, classes.get(c)) for c, match in frames.items()]
    number = np.full(len(code), NO_ROW, np.int64)
    number[is_frame] = np.searchsorted(np.array(list(frames), np.int64), code[is_frame])
    rows = pl.Series(number).cast(pl.UInt32, strict=False)
    place = pl.Series(texts, dtype=pl.String).cast(pl.Categorical()).gather(rows)
    return Frames(place, of_user, is_frame & ~of_user, unlined)


def _function(match: re.Match[str], of_class: str | None) -> str:
    function = f"{of_class}.{match['function']}" if of_class else match["function"]
    line = f":{match['line']}" if match["line"] else ""
    return f"{match['file']}{line} {function}"


def _classes(host: pl.DataFrame, code: Int64, is_frame: Mask, frames: dict[int, re.Match[str]]) -> dict[int, str]:
    """The class of each ``forward`` whose class is certain, by the code of the frame's name."""
    forwards = [c for c, match in frames.items() if match["function"] == _FORWARD]
    callers = [c for c, match in frames.items() if _CALLS_FORWARD.search(match["file"])]
    if not forwards:
        return {}
    parent = row_numbers(host["parent"])
    rows = np.flatnonzero(is_frame & np.isin(code, forwards))
    between = is_frame & np.isin(code, callers)
    around = chain_to(parent, parent[rows], ~between)
    module = mask_of(host["category"] == "module")
    known = (around != NO_ROW) & module[around]
    calls = pl.DataFrame({"code": code[rows], "name": host["name"].gather(np.where(known, around, 0))})
    distinct = (
        calls.filter(pl.Series(known))
        .unique()
        .with_columns(of_class=pl.col("name").cast(pl.String).str.replace(_NUMBERED.pattern, ""))
        .group_by("code")
        .agg(pl.col("of_class").unique())
    )
    return {c: names[0] for c, names in distinct.iter_rows() if len(names) == 1 and names[0]}


# ---- Files of Triton kernels


_MAX_FILE_BYTES = 4 << 20
"""Bytes of the largest file that is searched; Inductor's kernels have a few kB."""
KERNEL_FILE, KERNEL_FILE_ABSENT = "kernel_file", "kernel_file_absent"
"""Codes of rules: the line was found; the file is not on this machine, or does not define the kernel."""


def kernel_places(launches: Iterable[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, str]]:
    """The place, such as ``/tmp/torchinductor_me/ab/cab.py:18 triton_poi_fused_add_0``, and the code of the rule.

    Args:
        launches: for each, the name of the kernel and the metadata recorded with it (a JSON object).

    Returns:
        The place and the code by launch; launches that name no file are left out.
    """
    places = {}
    for kernel, metadata in launches:
        file = field(decoded(metadata, dict[str, Any]), "kernel_file", str)
        if file:
            line = _line_of(file, kernel)
            where = file if line is None else f"{file}:{line}"
            places[kernel, metadata] = f"{where} {kernel}", KERNEL_FILE_ABSENT if line is None else KERNEL_FILE
    return places


@lru_cache(maxsize=4096)
def _line_of(file: str, kernel: str) -> int | None:
    """Line, from 1, on which a file defines a function; None if it cannot be determined."""
    path = Path(file)
    if path.suffix != ".py" or not path.is_absolute():
        return None
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
            return None
        content = path.read_bytes()
    except (OSError, ValueError):
        return None
    definition = re.search(rb"^def " + re.escape(kernel.encode()) + rb"\s*\(", content, re.MULTILINE)
    return None if definition is None else content.count(b"\n", 0, definition.start()) + 1


# ---- Stacks at the capture of CUDA graphs


_CAPTURED_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<function>.*)", re.DOTALL)


def with_sources(joined: pl.DataFrame, own: OwnCode) -> pl.DataFrame:
    """Adds the innermost line of the user's own code to rows that have a stack and no source.

    Args:
        joined: rows of `thence.model.tables.GRAPH_PLACES`.
        own: which files are the user's own code; if no line is of these files, the innermost line is used.
    """
    wanted = joined["stack"].is_not_null() & joined["source"].is_null()
    if not wanted.any():
        return joined
    distinct = joined["stack"].filter(wanted).unique()
    places = [_innermost_source(text, own) for text in distinct.cast(pl.String)]
    sources = pl.DataFrame(
        {
            "stack": distinct,
            "found_source": [place for place, _ in places],
            "found_position": [position for _, position in places],
        },
        schema_overrides={"found_source": joined.schema["source"], "found_position": joined.schema["position"]},
    )
    columns = joined.join(sources, on="stack", how="left", maintain_order="left")
    return columns.with_columns(
        source=pl.when(wanted).then("found_source").otherwise("source"),
        position=pl.when(wanted).then("found_position").otherwise("position"),
    ).drop("found_source", "found_position")


def _innermost_source(text: str, own: OwnCode) -> tuple[str | None, str | None]:
    """The place of the innermost own frame, and its `Position`; line 0 stands for the whole function."""
    frames = [match for part in text.split(FRAME_SEPARATOR) if (match := _CAPTURED_FRAME.fullmatch(part))]
    if not frames:
        return None, None
    frame = next((candidate for candidate in reversed(frames) if own(candidate["file"])), frames[-1])
    if frame["line"] == "0":
        return f"{frame['file']} {frame['function']}", Position.FUNCTION.value
    return frame[0], Position.LINE.value
