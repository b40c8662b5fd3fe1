"""Which rank a process says that it has."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

from thence.capture.recorder.process_identity import rank_of_process_group

if TYPE_CHECKING:
    import pytest


def test_there_is_no_process_group_while_another_thread_imports_torch_distributed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = types.ModuleType("torch.distributed")
    monkeypatch.setitem(sys.modules, "torch.distributed", half)
    assert rank_of_process_group() is None
    half.is_initialized = lambda: True  # type: ignore[attr-defined]
    half.is_available = lambda: True  # type: ignore[attr-defined]
    half.get_rank = lambda: 3  # type: ignore[attr-defined]
    assert rank_of_process_group() == 3
