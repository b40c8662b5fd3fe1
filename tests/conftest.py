"""What holds for all tests: a cache of their own, and property tests with the same few examples in every run.

A thorough run asks for more and new examples.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

with contextlib.suppress(ImportError):  # environments that run a few tests have no hypothesis
    from hypothesis import settings

    settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
    settings.register_profile("thorough", max_examples=100, deadline=None)
    settings.load_profile("thorough" if os.environ.get("THENCE_THOROUGH") else "quick")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what thence remembers between calls out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
