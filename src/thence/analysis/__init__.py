"""Analyses: pure functions from an attributed trace to frozen result objects. They never print."""
