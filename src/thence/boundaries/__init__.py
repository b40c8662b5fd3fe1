"""Where a program is while it launches: modules, lines, phases and steps, each at one moment of CUPTI's counter.

CUPTI numbers the launches of a process with one counter, and every kernel record holds its number. A boundary
is a moment at which the program enters or leaves such a place, with the counter as it stands then. A kernel
belongs to the boundary with the greatest counter below its own, so launches need not be recorded.
"""
