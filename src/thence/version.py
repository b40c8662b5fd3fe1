"""The version of thence, in a module of its own, so that every module that writes it into files can import it."""

__version__ = "0.2.0"
