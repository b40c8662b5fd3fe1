"""A part of a trace: its rows, and the windows of time in which its idle time counts."""
