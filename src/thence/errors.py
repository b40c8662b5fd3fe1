"""Every error that thence raises on purpose.

ThenceError                 exit code 2
 +-- InputError             a path that cannot be read at all
 |    +-- UnknownFormat     the bytes are no format that thence reads
 |    +-- DamagedInput      the format is known, its content cannot be read
 +-- MissingData            the trace is valid, but lacks data that the analysis needs
 +-- Contradiction          figures that cannot be: a defect of thence, or damage that no reader has seen
 +-- MissingRequirement     something that is not installed, or too old
 +-- UsageError             the request is invalid for any input
      +-- WrongArgument     an argument of a Python call; a ValueError as well

A message names the file, says what was expected, and what to do; of a URL it leaves out the credentials. Only
``thence.cli`` prints them.
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
    """The content is none of the formats that thence reads."""


class DamagedInput(InputError):
    """The format was recognised, but nothing of its content could be read."""


class MissingData(ThenceError):
    """The trace does not hold what was asked for; the message says how to record it."""


class Contradiction(ThenceError):
    """Figures of a trace contradict each other; the message says which. None of them is given."""


class MissingRequirement(ThenceError):
    """A library, driver or permission is missing; the message says how to get it."""


class UsageError(ThenceError):
    """The request makes no sense as it stands, whatever the input."""


class WrongArgument(UsageError, ValueError):
    """An argument of a Python call makes no sense: also what Python itself would raise."""
