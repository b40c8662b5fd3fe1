"""Watches recordings that run as long as their program: summaries of windows, a live view, metrics.

Nothing here runs in a recorded program.
"""
