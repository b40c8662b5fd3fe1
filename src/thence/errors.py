"""Every error that thence raises on purpose.

ThenceError                 exit code 2
 +-- InputError             a path that cannot be read at all
 |    +-- UnknownFormat     the content is in no format that thence reads
 |    +-- DamagedInput      the format is known, but the content cannot be read
 +-- MissingData            the trace is valid, but lacks data that the analysis needs
 +-- Contradiction          figures contradict each other: a defect of thence, or damage that no reader noticed
 +-- MissingRequirement     something is not installed, or is too old
 +-- UsageError             the request is invalid for any input
      +-- WrongArgument     an argument of a Python call is invalid; also a ValueError

A message names the file, and says what was expected and what to do. Credentials in URLs are left out of it. Only
``thence.cli`` prints messages.
"""

from __future__ import annotations

from thence.credentials import without_credentials

__all__ = [
    "Contradiction",
    "DamagedInput",
    "InputError",
    "MissingData",
    "MissingRequirement",
    "ThenceError",
    "UnknownFormat",
    "UsageError",
    "WrongArgument",
]


class ThenceError(Exception):
    """Base of all errors of thence; the message is a sentence for the user."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(without_credentials(message))


class InputError(ThenceError):
    """An input that cannot be read.

    Attributes:
        path: the input as the user named it, without credentials.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = without_credentials(path)


class UnknownFormat(InputError):
    """The content is in none of the formats that thence reads."""


class DamagedInput(InputError):
    """The format was recognised, but nothing of its content could be read."""


class MissingData(ThenceError):
    """The trace lacks data that the analysis needs; the message says how to record it."""


class Contradiction(ThenceError):
    """Figures of a trace contradict each other; the message says which. No result is returned."""


class MissingRequirement(ThenceError):
    """A library, driver or permission is missing; the message says how to get it."""


class UsageError(ThenceError):
    """The request is invalid for any input."""


class WrongArgument(UsageError, ValueError):
    """An argument of a Python call is invalid. Also a `ValueError`, as Python itself would raise."""
