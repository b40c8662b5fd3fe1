"""Flame graphs as folded stacks and speedscope documents."""
