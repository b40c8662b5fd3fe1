"""The stack frames of an HLO module: source files, lines and functions of its instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.hlo import FRAMES, Frame

if TYPE_CHECKING:
    from thence.readers.jax.protos.hlo_pb2 import OpMetadata, StackFrameIndexProto

__all__ = ["FRAMES", "Frame", "FrameTable"]

_NOWHERE = Frame("", 0, 0, "")


class FrameTable:
    """Collects the stack frames of one module while it is decoded.

    StackFrameIndexProto keeps frames as a tree: location and parent, both 1-based, 0 is none. (Text
    dumps of XLA print every parent one too high; the protos are right.) Old modules have only one
    file and line per instruction (OpMetadata): these become frames without a parent, numbered after
    the recorded frames, so that a frame number identifies the source in both cases.
    """

    def __init__(self, index: StackFrameIndexProto) -> None:
        files, functions, locations = index.file_names, index.function_names, index.file_locations
        places = [
            Frame(
                files[place.file_name_id - 1] if 0 < place.file_name_id <= len(files) else "",
                place.line,
                place.column,
                functions[place.function_name_id - 1]
                if 0 < place.function_name_id <= len(functions)
                else "",
            )
            for place in locations
        ]
        self.frames: list[Frame] = []
        self.parents: list[int] = []
        count = len(index.stack_frames)
        for frame in index.stack_frames:
            location = frame.file_location_id
            self.frames.append(places[location - 1] if 0 < location <= len(places) else _NOWHERE)
            self.parents.append(frame.parent_frame_id if 0 < frame.parent_frame_id <= count else 0)
        self._recorded = count
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
                "file": [f.file for f in self.frames],
                "line": [f.line for f in self.frames],
                "column": [f.column for f in self.frames],
                "function": [f.function for f in self.frames],
                "stack": self._equal_stacks(),
            },
            schema=FRAMES,
        )

    def _equal_stacks(self) -> list[int]:
        """For each frame, the number of the first frame with an equal stack."""
        first: dict[tuple[Frame, int], int] = {}
        result = [0] * len(self.frames)
        for start in range(len(self.frames)):
            chain: list[int] = []
            number = start + 1
            while number and not result[number - 1] and len(chain) <= len(self.frames):
                chain.append(number)
                number = self.parents[number - 1]
            for number in reversed(chain):
                parent = self.parents[number - 1]
                key = (self.frames[number - 1], result[parent - 1] if parent else 0)
                result[number - 1] = first.setdefault(key, number)
        return result
