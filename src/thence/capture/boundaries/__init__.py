"""Where a program is while it launches: the modules, lines, phases and steps, with CUPTI's counter at each change.

CUPTI numbers the launches of a process with one counter, and every kernel record holds the number of its launch. A
boundary is a moment at which a thread enters or leaves a place (a module, line, phase or step), with the value of the
counter at that moment. A kernel belongs to the boundary with the greatest counter below its own number, so launches
need not be recorded.
"""
