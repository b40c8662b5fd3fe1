"""`Inside`: the public object for an in-kernel profile of one launch."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from thence.inside.decoding import Decoded, decode
from thence.inside.files import load
from thence.inside.summary import InsideSummary, summarize
from thence.inside.timeline import merged, standalone
from thence.writers.timelines.write import write_timeline

if TYPE_CHECKING:
    import os

    import polars as pl

    from thence.inside.description import Description


@dataclass(frozen=True)
class Inside:
    """An in-kernel profile of one kernel launch.

    Attributes:
        decoded: traces and ranges; see `thence.inside.decoding.Decoded` for their columns.
        path: of the file that holds the buffer.
    """

    decoded: Decoded
    path: str

    @property
    def description(self) -> Description:
        """The description of the buffer: layout, names and launch."""
        return self.decoded.description

    @property
    def traces(self) -> pl.DataFrame:
        """One row for each warp, warpgroup or block that was traced."""
        return self.decoded.traces

    @property
    def ranges(self) -> pl.DataFrame:
        """One row for each range or instant."""
        return self.decoded.ranges

    @property
    def events(self) -> pl.DataFrame:
        """One row for each event as recorded."""
        return self.decoded.events

    @property
    def notes(self) -> tuple[str, ...]:
        """What was estimated, or is not known, as sentences."""
        return self.decoded.notes

    @property
    def warnings(self) -> tuple[str, ...]:
        """What could not be read, as sentences."""
        return self.decoded.warnings

    def summary(self) -> InsideSummary:
        """Count, total and percentiles of every range; SMs, tail and imbalance.

        Raises:
            MissingData: nothing was traced.
        """
        return summarize(self.decoded)

    def write(self, path: str | os.PathLike[str], merge: Any = None, launch: int | None = None) -> tuple[str, ...]:
        """Writes a timeline for a viewer, in the format that the ending of the path selects.

        Args:
            path: ending in .pftrace, .json, .json.gz or .parquet; replaced if it exists.
            merge: a `thence.Trace` recorded at the same time, which is written as well, with the
                ranges under the kernel's slice.
            launch: index, in order of start from 0, of the launch of the kernel in ``merge`` that this
                profile is of; needed if several launches match the buffer.

        Returns:
            Sentences about how the clocks were aligned.

        Raises:
            UsageError: the ending is that of no format.
            MissingData: the trace has no such launch, or several launches match.
            ThenceError: the file cannot be written.
        """
        parts = [(self.path, self.decoded)]
        timeline = standalone(parts) if merge is None else merged(merge.timeline(), parts, launch)
        write_timeline(timeline, path)
        return tuple(timeline.notes)

    def _repr_html_(self) -> str:
        return f"<div><p>{escape(self.path)}</p>{self.summary()._repr_html_()}</div>"


def open_inside(path: str | os.PathLike[str], clock_ghz: float | None = None) -> Inside:
    """Reads a buffer of in-kernel events with its description.

    Args:
        path: of an .npz file, or of an .npy file with its description in a .json file next to it.
        clock_ghz: SM clock, for buffers that do not record it.

    Raises:
        thence.InputError: the file is missing, of no known format, or damaged beyond reading.
    """
    words, description = load(path)
    return Inside(decode(words, description, clock_ghz, str(path)), str(path))
