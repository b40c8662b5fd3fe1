"""Idle time of the devices: its gaps, the cause of each nanosecond, and the place in the program that names it."""
