"""Programs are watched in both ways in which modules and lines can be known."""

from __future__ import annotations

import pytest

from launching import Watched


@pytest.fixture(params=["events", "stack"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How modules and lines are known, in every program of the test."""
    name: str = request.param
    monkeypatch.setattr(Watched, "by_stack", name == "stack")
    return name
