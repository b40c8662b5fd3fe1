"""Plotly figures that add a static SVG to a notebook, for viewers that run no scripts."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thence.writers.page.figure_svg import figure_svg

if TYPE_CHECKING:
    import plotly.graph_objects as go

_LIVE, _HTML, _STATIC = "application/vnd.plotly.v1+json", "text/html", "image/svg+xml"


def pictured(figure: go.Figure) -> go.Figure:
    """The figure, which a notebook stores as SVG in addition to Plotly's own format."""
    return _class()(figure)


@cache
def _class() -> type[go.Figure]:
    """The subclass of Plotly's Figure, defined lazily because it imports Plotly."""
    import plotly.graph_objects as go

    class Picture(go.Figure):  # type: ignore[misc]
        """A figure that notebooks store as Plotly's JSON and as SVG."""

        def _repr_mimebundle_(self, *arguments: Any, **options: Any) -> dict[str, Any]:
            bundle = dict(super()._repr_mimebundle_(*arguments, **options))
            if _LIVE in bundle:
                # Viewers that run no scripts (GitHub) prefer HTML to SVG, and would show nothing.
                bundle.pop(_HTML, None)
            return {**bundle, _STATIC: figure_svg(self)}

        def _ipython_display_(self) -> None:
            bundle = self._repr_mimebundle_()
            if bundle.keys() == {_STATIC}:  # Plotly's renderer opens a browser or writes a file
                super()._ipython_display_()
                return
            import_module("IPython.display").display(bundle, raw=True)

    return Picture
