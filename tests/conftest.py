"""Property tests: the same examples in every run, and few of them, unless a thorough run asks for more and new ones."""

from __future__ import annotations

import contextlib
import os

with contextlib.suppress(ImportError):  # environments that run a few tests have no hypothesis
    from hypothesis import settings

    settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
    settings.register_profile("thorough", max_examples=100, deadline=None)
    settings.load_profile("thorough" if os.environ.get("THENCE_THOROUGH") else "quick")
