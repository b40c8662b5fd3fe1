"""Attributes device activities to source code. Works on tables; independent of file formats."""
