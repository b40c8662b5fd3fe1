"""Writers of results as self-contained HTML pages and Plotly figures."""
