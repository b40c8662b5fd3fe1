"""The version of thence, for what writes it into files; below everything that does."""

__version__ = "0.1.0"
