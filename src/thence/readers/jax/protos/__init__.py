"""Minimal definitions of the public protos that XLA's files are written in (see README.md)."""
