"""Base class of `Trace` with the methods that draw Plotly figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

    from thence.analysis.collectives.communication import Collectives
    from thence.analysis.flame.flame import Flame
    from thence.analysis.programs.compilation import Compilation
    from thence.analysis.programs.programs import Programs
    from thence.analysis.streams import Streams
    from thence.analysis.summary import Summary
    from thence.analysis.timelines.overview import Overview
    from thence.model.places import By, FlameBy


class Pictures(ABC):
    """Methods that draw the results of the analyses of a trace.

    A notebook stores each figure as Plotly's JSON, and as SVG, which GitHub and nbconvert show.
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

    def plot_timeline(self) -> go.Figure:
        """Every stream over time."""
        from thence.writers.page.notebook_figures import pictured
        from thence.writers.page.timeline_figure import timeline_figure

        return pictured(timeline_figure(self.overview()))

    def plot_by(self, by: By = "kernel", top: int = 15) -> go.Figure:
        """The ``top`` largest rows of ``summary(by)``."""
        from thence.writers.page import plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(plots.by_figure(self.summary(by), top))

    def plot_flame(self, by: FlameBy | None = None) -> go.Figure:
        """The flame graph; ``thence flame`` writes a page with search and filters."""
        from thence.writers.page import plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(plots.flame_figure(self.flame(by)))

    def plot_streams(self) -> go.Figure:
        """Time of each stream by group of kernels."""
        from thence.writers.page import plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(plots.groups_figure(self.streams()))

    def plot_concurrency(self) -> go.Figure:
        """How long one, two or more streams of each device were busy at once."""
        from thence.writers.page import plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(plots.concurrency_figure(self.streams()))

    def plot_bandwidth(self) -> go.Figure:
        """Bus bandwidth of collectives against message size."""
        from thence.writers.page import plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(plots.bandwidth_figure(self.collective_times()))

    def plot_waits(self) -> go.Figure:
        """How long collectives waited for the last of their devices."""
        from thence.writers.page import plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(plots.waits_figure(self.collective_times()))

    def plot_wait_histogram(self) -> go.Figure:
        """Histogram of the times that collectives waited."""
        from thence.writers.page import wait_plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(wait_plots.wait_histogram_figure(self.collective_times()))

    def plot_wait_sizes(self) -> go.Figure:
        """How long collectives waited, against message size."""
        from thence.writers.page import wait_plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(wait_plots.wait_sizes_figure(self.collective_times()))

    def plot_last_arrivals(self) -> go.Figure:
        """How long the others waited for each device that arrived last, and the waits that no device caused."""
        from thence.writers.page import plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(plots.last_arrivals_figure(self.collective_times()))

    def plot_programs(self) -> go.Figure:
        """Active and idle time of XLA programs."""
        from thence.writers.page import plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(plots.programs_figure(self.program_times()))

    def plot_spread(self) -> go.Figure:
        """Spread of durations against their mean, for each computation."""
        from thence.writers.page import plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(plots.spread_figure(self.spread()))

    def plot_compile(self) -> go.Figure:
        """Compile time by phase."""
        from thence.writers.page import plots
        from thence.writers.page.notebook_figures import pictured

        return pictured(plots.compile_figure(self.compile_times()))
