"""Predicts the gain of changes to a program, and finds its critical path, by replaying a graph of the recording."""
