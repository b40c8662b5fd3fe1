"""A recorded job that several analyses are asked about."""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING

import pytest

from helpers import DATA

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def late_in_backward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, of which rank 1 sleeps in its backward pass; unpacked once, so that `read_once` reads it once."""
    folder = tmp_path_factory.mktemp("late")
    with tarfile.open(DATA / "recording" / "late_in_backward.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "late_in_backward"
