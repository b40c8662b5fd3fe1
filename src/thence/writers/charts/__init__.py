"""Charts: their description, their drawing as SVG, and the charts of thence's results."""
