"""Hooks into JAX."""
