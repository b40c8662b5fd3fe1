"""What is asked here of recordings is asked of the same reading of them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _read_once(read_once: None) -> None:
    """For all tests of this folder."""
