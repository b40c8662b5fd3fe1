"""Results as self-contained HTML pages and Plotly figures."""
