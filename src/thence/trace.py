"""The trace as users meet it: tables, attribution and analyses in one object."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.summary import Summary, summarize
from thence.attribution.collectives import described_collectives
from thence.attribution.places import PLACES, attribute
from thence.errors import UsageError
from thence.readers.registry import read

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from thence.model.tables import Meta, Tables

__all__ = ["Trace", "open_trace"]


@dataclass(frozen=True)
class Trace:
    """What one or several ranks did on their GPUs, and where it came from.

    Every table is a Polars frame; ``thence.model.tables`` documents their columns. Frames convert
    with ``.to_pandas()`` (needs pandas and pyarrow) and ``.to_arrow()``.

    Attributes:
        tables: as the readers returned them.
    """

    tables: Tables

    @property
    def gpu(self) -> pl.DataFrame:
        """One row per device activity: kernel, copy or set."""
        return self.tables.gpu

    @property
    def host(self) -> pl.DataFrame:
        """One row per range on a host thread."""
        return self.tables.host

    @property
    def threads(self) -> pl.DataFrame:
        """Names of the host threads."""
        return self.tables.threads

    @property
    def programs(self) -> pl.DataFrame:
        """One row per execution of an XLA program on one device."""
        return self.tables.programs

    @property
    def meta(self) -> Meta:
        """Facts of the whole trace, warnings among them."""
        return self.tables.meta

    @cached_property
    def places(self) -> pl.DataFrame:
        """Where each row of `gpu` came from, in its order: see `thence.attribution.places`."""
        return attribute(self.tables)

    @cached_property
    def collectives(self) -> pl.DataFrame:
        """What each collective kernel moved; ``gpu`` is its row in `gpu`."""
        return described_collectives(self.tables, self.places["launch"])

    @cached_property
    def activities(self) -> pl.DataFrame:
        """`gpu` and `places` side by side: the frame for questions of one's own."""
        return pl.concat([self.gpu, self.places], how="horizontal")

    def summary(self, by: str = "kernel") -> Summary:
        """Totals, and GPU time by kernel, label, module, op, source, step, stream, rank and others.

        Raises:
            UsageError: ``by`` is none of `thence.analysis.summary.BY`.
            MissingData: the trace holds no device activity.
        """
        return summarize(self.tables, self.places, self.collectives, by)

    def sql(self, query: str) -> pl.DataFrame:
        """The answer to an SQL query over the tables gpu, host, places, activities, collectives, threads, programs.

        Example:
            ``trace.sql("select label, sum(duration) as ns from activities group by label order by ns desc")``

        Raises:
            UsageError: the query is no valid SQL, or names something that there is not.
        """
        names = ("gpu", "host", "places", "activities", "collectives", "threads", "programs")
        wanted = {name: getattr(self, name) for name in names if name in query}
        # Categories behave as text in SQL: LIKE and comparisons with literals work.
        frames = {
            name: frame.lazy().with_columns(pl.col(pl.Categorical).cast(pl.String))
            for name, frame in wanted.items()
        }
        try:
            with pl.SQLContext(frames) as context:
                return context.execute(query, eager=True)
        except pl.exceptions.PolarsError as error:
            raise UsageError(f"the query cannot be answered: {error}") from error

    def self_check(self) -> None:
        """Proves what must hold of every trace.

        Raises:
            AssertionError: row references point outside their table, attributed and unattributed
                time do not add up to the whole, or devices are busy for longer than they span.
        """
        rows, ranges = self.gpu.height, self.host.height
        assert self.places.height == rows
        for column in ("parent", "forward"):
            assert self.host[column].drop_nulls().is_between(0, ranges - 1).all()
        assert self.places["launch"].drop_nulls().is_between(0, ranges - 1).all()
        assert self.collectives["gpu"].is_between(0, rows - 1).all()
        if not rows:
            return
        for kind in PLACES:
            assert self.places[f"{kind}_rule"].null_count() == 0
        summary = self.summary()
        assert 0 <= summary.busy_ns <= min(summary.span_ns, summary.sum_ns)
        assert int(summary.rows["total_ns"].sum()) == summary.sum_ns
        for kind, attributed in summary.attributed_ns.items():
            assert attributed + sum(summary.unattributed_ns[kind].values()) == summary.sum_ns

    def _repr_html_(self) -> str:
        from thence.writers.html_table import summary_html

        return summary_html(self.summary())


def open_trace(
    *inputs: str | os.PathLike[str],
    progress: Callable[[str, int, int], None] = lambda _name, _done, _size: None,
) -> Trace:
    """Reads traces: files, directories, globs; several ranks become one trace.

    Args:
        inputs: what to read; the format is told from the content.
        progress: called with the file at hand, the bytes of it consumed, and its size (0 if unknown).

    Raises:
        thence.InputError: an input is missing, of no known format, or damaged beyond reading.
    """
    return Trace(read(inputs, progress))
