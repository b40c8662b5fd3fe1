"""Base class of `Trace` with the methods that draw charts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

    from thence.analysis.collectives.communication import Collectives
    from thence.analysis.flame.flame import Flame
    from thence.analysis.programs.compilation import Compilation
    from thence.analysis.programs.programs import Programs
    from thence.analysis.streams import Streams
    from thence.analysis.summary import Summary
    from thence.analysis.timelines.overview import Overview
    from thence.model.places import By, FlameBy
    from thence.writers.charts.chart import Chart

_FLAME_FRAMES = 300
"""Frames of the flame graph of a notebook."""


class Pictures(ABC):
    """Methods that draw the results of the analyses of a trace.

    Each returns a `Chart`, which shows itself in notebooks, has its numbers as a frame (``to_frame()``), and is written
    by ``save("chart.svg")`` or ``save("chart.html")``.
    """

    @abstractmethod
    def overview(self) -> Overview:
        """Every stream over time."""

    @abstractmethod
    def summary(self, by: By = "kernel") -> Summary:
        """GPU time by one kind of place."""

    @abstractmethod
    def flame(self, by: FlameBy | None = None) -> Flame:
        """GPU time as a flame graph."""

    @abstractmethod
    def streams(self) -> Streams:
        """What ran on which stream."""

    @abstractmethod
    def collective_times(self, warm_up: str = "heuristic", *, late: bool = True) -> Collectives:
        """Sizes, bandwidths and waits of collectives."""

    @abstractmethod
    def program_times(self, warm_up: str = "heuristic") -> Programs:
        """Executions of XLA programs."""

    @abstractmethod
    def spread(self, warm_up: str = "heuristic") -> pl.DataFrame:
        """How much durations vary."""

    @abstractmethod
    def compile_times(self, autotuning: str = "block") -> Compilation:
        """Compile time by phase."""

    def plot_timeline(self) -> Chart:
        """Every stream over time."""
        from thence.writers.charts.results import timeline_chart

        return timeline_chart(self.overview())

    def plot_by(self, by: By = "kernel", top: int = 15) -> Chart:
        """The ``top`` largest rows of ``summary(by)``."""
        from thence.writers.charts.results import by_chart

        return by_chart(self.summary(by), top)

    def plot_flame(self, by: FlameBy | None = None) -> Chart:
        """The flame graph; ``thence flame`` writes a page with zoom, search and filters."""
        from thence.writers.flame.chart import flame_chart

        return flame_chart(self.flame(by).largest(_FLAME_FRAMES))

    def plot_streams(self) -> Chart:
        """Time of each stream by group of kernels."""
        from thence.writers.charts.results import groups_chart

        return groups_chart(self.streams())

    def plot_concurrency(self) -> Chart:
        """How long one, two or more streams of each device were busy at once."""
        from thence.writers.charts.results import concurrency_chart

        return concurrency_chart(self.streams())

    def plot_bandwidth(self) -> Chart:
        """Bus bandwidth of collectives against message size."""
        from thence.writers.charts.results import bandwidth_chart

        return bandwidth_chart(self.collective_times())

    def plot_waits(self) -> Chart:
        """How long collectives waited for the last of their devices."""
        from thence.writers.charts.results import waits_chart

        return waits_chart(self.collective_times())

    def plot_wait_histogram(self) -> Chart:
        """Histogram of the times that collectives waited."""
        from thence.writers.charts.results import wait_histogram_chart

        return wait_histogram_chart(self.collective_times())

    def plot_wait_sizes(self) -> Chart:
        """How long collectives waited, against message size."""
        from thence.writers.charts.results import wait_sizes_chart

        return wait_sizes_chart(self.collective_times())

    def plot_last_arrivals(self) -> Chart:
        """How long the others waited for each device that arrived last, and the waits that no device caused."""
        from thence.writers.charts.results import last_arrivals_chart

        return last_arrivals_chart(self.collective_times())

    def plot_programs(self) -> Chart:
        """Active and idle time of XLA programs."""
        from thence.writers.charts.results import programs_chart

        return programs_chart(self.program_times())

    def plot_spread(self) -> Chart:
        """Spread of durations against their mean, for each computation."""
        from thence.writers.charts.results import spread_chart

        return spread_chart(self.spread())

    def plot_compile(self) -> Chart:
        """Compile time by phase."""
        from thence.writers.charts.results import compile_chart

        return compile_chart(self.compile_times())
