"""Checks whether a trace is sound, so that results computed from it hold: one module for each family of rules."""
