"""Writers of results as self-contained HTML pages."""
