"""Joins labels of captured CUDA graphs to the activities of their replays."""
