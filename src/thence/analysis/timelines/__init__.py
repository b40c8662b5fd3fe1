"""Timelines for viewers and pages: lanes, bins, counters, and what is said of single activities."""
