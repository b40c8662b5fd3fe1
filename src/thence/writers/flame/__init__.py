"""Flame graphs as folded stacks, speedscope documents and SVG images."""
