"""The stack frames of an HLO module: source files, lines and functions of its instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.fitted_names import affordable
from thence.model.hlo import FRAMES, Frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thence.readers.jax.protos.hlo_pb2 import OpMetadata, StackFrameIndexProto


MAX_TEXT, MAX_TEXT_PER_FRAME = 4_000_000, 500
"""Characters of the files, or of the functions, of all frames of a module: of any number, and more for each frame."""
_NOWHERE = Frame("", 0, 0, "")


class FrameTable:
    """Collects the stack frames of one module while it is decoded.

    StackFrameIndexProto keeps frames as a tree: location and parent, both 1-based, 0 is none. (Text
    dumps of XLA print every parent one too high; the protos are right.) Old modules have only one
    file and line per instruction (OpMetadata): these become frames without a parent, numbered after
    the recorded frames, so that a frame number identifies the source in both cases.
    """

    def __init__(self, index: StackFrameIndexProto) -> None:
        locations = index.file_locations
        used = np.fromiter((frame.file_location_id for frame in index.stack_frames), np.int64)
        uses = np.bincount(used[(used > 0) & (used <= len(locations))], minlength=len(locations) + 1)
        files = _names(index.file_names, [place.file_name_id for place in locations], uses)
        functions = _names(index.function_names, [p.function_name_id for p in locations], uses)
        places = [_NOWHERE] + [
            Frame(
                files[_within(place.file_name_id, files)],
                place.line,
                place.column,
                functions[_within(place.function_name_id, functions)],
            )
            for place in locations
        ]
        self.frames = [places[_within(location, places)] for location in used.tolist()]
        # A frame is stored after its parent. Others would be cycles, or may be, and are cut.
        self.parents = [
            parent if 0 < parent < frame else 0
            for frame, parent in enumerate((f.parent_frame_id for f in index.stack_frames), 1)
        ]
        self._recorded = len(self.frames)
        self._lines: dict[tuple[str, int], int] = {}

    def of(self, metadata: OpMetadata) -> int:
        """Frame number of an instruction's metadata, 0 if it has no source."""
        if 0 < metadata.stack_frame_id <= self._recorded:
            return metadata.stack_frame_id
        if not metadata.source_file:
            return 0
        key = (metadata.source_file, metadata.source_line)
        if key not in self._lines:
            self.frames.append(Frame(*key, 0, ""))
            self.parents.append(0)
            self._lines[key] = len(self.frames)
        return self._lines[key]

    def place(self, frame: int) -> Frame:
        """The frame with a number that `of` returned; an empty frame for 0."""
        return self.frames[frame - 1] if frame else _NOWHERE

    def table(self) -> pl.DataFrame:
        """All frames in the columns of `FRAMES`."""
        return pl.DataFrame(
            {
                "frame": range(1, len(self.frames) + 1),
                "parent": self.parents,
                "file": shared_texts([f.file for f in self.frames]),
                "line": [f.line for f in self.frames],
                "column": [f.column for f in self.frames],
                "function": shared_texts([f.function for f in self.frames]),
                "stack": self._equal_stacks(),
            },
            schema=FRAMES,
        )

    def _equal_stacks(self) -> list[int]:
        """For each frame, the number of the first frame with an equal stack."""
        first: dict[tuple[Frame, int], int] = {}
        result: list[int] = []
        for number, (frame, parent) in enumerate(zip(self.frames, self.parents, strict=True), 1):
            key = (frame, result[parent - 1] if parent else 0)
            result.append(first.setdefault(key, number))
        return result


def shared_texts(texts: Sequence[str | None]) -> pl.Series:
    """A Categorical column in which each distinct text is stored once."""
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    distinct = pl.Series(list(places), dtype=pl.String).cast(pl.Categorical())
    return distinct.gather(pl.Series([places[text] for text in texts], dtype=pl.UInt32))


def _names(names: Sequence[str], of_location: Sequence[int], uses: NDArray[np.int64]) -> list[str]:
    """The names that locations refer to by numbers from 1, as long as their number of uses permits."""
    number = np.array([0, *of_location], np.int64)
    number[(number < 0) | (number > len(names))] = 0
    written = np.bincount(number, uses + 1, len(names) + 1).astype(np.int64)
    distinct = pl.Series(["", *names], dtype=pl.String)
    return affordable(distinct, written, MAX_TEXT, MAX_TEXT_PER_FRAME).to_list()


def _within(number: int, values: Sequence[object]) -> int:
    """The number, or 0 if there is no such value."""
    return number if 0 < number < len(values) else 0
