"""Finds which ranks of a job make the others wait, since which step, and why."""
