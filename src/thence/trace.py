"""The trace as users meet it: tables, attribution and analyses in one object."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import polars as pl

from thence.analysis.alignment import Alignment, align
from thence.analysis.communication import Collectives, collectives
from thence.analysis.compilation import Autotuning, Compilation, compilation
from thence.analysis.programs import Programs, programs
from thence.analysis.summary import Summary, summarize
from thence.analysis.warmup import WarmUp
from thence.attribution.combined import KINDS_OF_PLACES, Attribution, attribution_of
from thence.errors import MissingData, UsageError
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
    def attribution(self) -> Attribution:
        """Everything known about where the device time came from: see `thence.attribution.combined`."""
        return attribution_of(self.tables)

    @property
    def places(self) -> pl.DataFrame:
        """Where each row of `gpu` came from, in its order: label, module, op, source, hlo ... and their rules."""
        return self.attribution.places

    @property
    def collectives(self) -> pl.DataFrame:
        """What each collective kernel moved; ``gpu`` is its row in `gpu`."""
        return self.attribution.collectives

    @cached_property
    def activities(self) -> pl.DataFrame:
        """`gpu` and `places` side by side: the frame for questions of one's own."""
        recorded = self.gpu.drop("program", "hlo")  # places has them by name
        return pl.concat([recorded, self.places], how="horizontal")

    def summary(self, by: str = "kernel") -> Summary:
        """Totals, and GPU time by kernel, label, module, op, source, step, stream, rank and others.

        Raises:
            UsageError: ``by`` is none of `thence.analysis.division.BY`.
            MissingData: the trace holds no device activity.
        """
        return summarize(self.tables, self.attribution, by)

    @cached_property
    def alignment(self) -> Alignment:
        """How far the clocks of the ranks are apart, from the ends of the collectives that they share."""
        return align(self.tables)

    def program_times(self, warm_up: str = "heuristic") -> Programs:
        """Executions, GPU time, idle time and launch latency of XLA programs.

        Args:
            warm_up: which executions to leave out: heuristic, first-compiled or keep.

        Raises:
            MissingData: the trace holds no XLA program.
        """
        if self.programs.is_empty():
            raise MissingData(
                f"{self._inputs}: holds no XLA programs; jax.profiler and nsys-jax record them"
            )
        return programs(self.tables, _choice(WarmUp, warm_up))

    def collective_times(self, warm_up: str = "heuristic") -> Collectives:
        """Sizes, bandwidths, exposed and hidden time, and waits of collectives, on aligned clocks.

        Args:
            warm_up: which executions of XLA programs to leave out: heuristic, first-compiled or keep.

        Raises:
            MissingData: the trace describes no collectives.
        """
        if self.collectives.is_empty():
            raise MissingData(f"{self._inputs}: describes no collectives; one GPU has none")
        tables = dataclasses.replace(self.tables, collectives=self.collectives)
        alignment = self.alignment if len(self.tables.ranks) > 1 else None
        return collectives(tables, _choice(WarmUp, warm_up), alignment)

    def compile_times(self, autotuning: str = "block") -> Compilation:
        """Wall time of compilation by phase.

        Args:
            autotuning: block, or detail to see the phases inside.

        Raises:
            MissingData: the trace holds no compilation.
        """
        if not (self.host["category"] == "compile").any():
            raise MissingData(
                f"{self._inputs}: holds no compilation; nsys-jax records XLA's compile phases"
            )
        return compilation(self.tables, _choice(Autotuning, autotuning))

    @property
    def _inputs(self) -> str:
        return ", ".join(self.meta.inputs)

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
        for kind in KINDS_OF_PLACES:
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


_Choice = TypeVar("_Choice", bound=enum.Enum)


def _choice(choices: type[_Choice], name: str) -> _Choice:
    try:
        return choices(name)
    except ValueError:
        known = ", ".join(str(choice.value) for choice in choices)
        raise UsageError(f"{name!r} is no choice here; choose one of {known}") from None
