"""Idle time of the devices: its gaps, the cause of each nanosecond, and the place that it is named by."""
