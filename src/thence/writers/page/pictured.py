"""Figures that carry a static picture, so that a notebook shows them where nothing runs."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thence.writers.page.figure_svg import figure_svg

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["pictured"]

_LIVE, _HTML, _STATIC = "application/vnd.plotly.v1+json", "text/html", "image/svg+xml"


def pictured(figure: go.Figure) -> go.Figure:
    """The figure with an SVG beside Plotly's own form, in notebooks."""
    return _class()(figure)


@cache
def _class() -> type[go.Figure]:
    """Plotly's class with another form for notebooks; made when Plotly is first needed."""
    import plotly.graph_objects as go

    class Picture(go.Figure):  # type: ignore[misc]
        """A figure that notebooks keep as Plotly's JSON and as SVG."""

        def _repr_mimebundle_(self, *arguments: Any, **options: Any) -> dict[str, Any]:
            bundle = dict(super()._repr_mimebundle_(*arguments, **options))
            if _LIVE in bundle:
                # Where scripts do not run (GitHub), HTML would come before the picture and show nothing.
                bundle.pop(_HTML, None)
            return {**bundle, _STATIC: figure_svg(self)}

        def _ipython_display_(self) -> None:
            bundle = self._repr_mimebundle_()
            if bundle.keys() == {_STATIC}:  # figures go to a browser or a file
                super()._ipython_display_()
                return
            import_module("IPython.display").display(bundle, raw=True)

    return Picture
