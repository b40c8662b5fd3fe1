"""Timelines for viewers and pages: lanes, bins, counters, and details of single activities."""
