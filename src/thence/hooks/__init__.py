"""Hooks into PyTorch and JAX in a program that is recorded."""
