"""Predicts the gain of changes to a program, and finds its critical path, by simulating a graph of the recording."""
