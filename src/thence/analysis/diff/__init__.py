"""Comparison of two sides of runs: what changed, and whether it is more than noise."""
