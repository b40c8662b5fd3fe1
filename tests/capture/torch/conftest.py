"""Programs are watched in all ways in which modules and lines can be known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from launching import Watched

if TYPE_CHECKING:
    from pathlib import Path

_BACKWARD = """
import torch
x = torch.randn(3, requires_grad=True)
for _ in range(2):
    y = x * 2
    launch()
    y = y.sin()
    launch()
    y = y.exp()
    launch()
    y = y.sum()
    launch()
    y.backward()
"""


@pytest.fixture(params=["events", "stack", "numbers"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """How modules and lines are known, in every program of the test.

    By events, by the stack with hooks of autograd's nodes, or by the stack and the numbers of these nodes.
    """
    name: str = request.param
    monkeypatch.setattr(Watched, "by_stack", name != "events")
    if name != "numbers":
        monkeypatch.setenv("THENCE_BACKWARD", "hooks")
        return name
    pytest.importorskip("torch")
    program = Watched(_BACKWARD, tmp_path / "backward.py", modules=True)
    if program.hooks.forward_method()["by"] != "stack":
        pytest.skip("stacks cannot be read")
    assert program.hooks.backward_method() == {"by": "numbers", "trouble": None}
    return name
