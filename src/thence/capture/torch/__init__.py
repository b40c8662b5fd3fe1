"""Hooks into PyTorch."""
