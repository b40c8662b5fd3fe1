"""Writers of results as text, mostly for a terminal."""
