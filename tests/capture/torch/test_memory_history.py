"""A recording keeps the history of PyTorch's allocator, and leaves that of the program as it was."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from thence.capture.torch.memory_history import MAX_ENTRIES, MemoryHistory
from thence.model.formats import MEMORY_FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OURS = {"enabled": "all", "context": None, "stacks": "python", "max_entries": MAX_ENTRIES}


class Torch:
    """PyTorch as far as a history needs it: what it was asked for, and whether it keeps one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self.enabled = False
        self.initialised = True
        self.observers: list[Callable[..., None]] = []
        torch, cuda = ModuleType("torch"), ModuleType("torch.cuda")
        core = SimpleNamespace(
            _cuda_isHistoryEnabled=lambda: self.enabled, _cuda_attach_out_of_memory_observer=self.observers.append
        )
        self.memory = SimpleNamespace(
            _record_memory_history=self.record, _snapshot=lambda: {"segments": [], "device_traces": [[len(self.asked)]]}
        )
        self.calls: list[Any] = []
        vars(cuda).update(memory=self.memory, is_initialized=lambda: self.initialised, _queued_calls=self.calls)
        vars(torch).update(cuda=cuda, _C=core)
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setitem(sys.modules, "torch.cuda", cuda)

    def record(self, enabled: str | None = "all", **named: Any) -> None:
        self.asked.append({"enabled": enabled} | named)
        self.enabled = enabled is not None


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


def test_it_is_kept_without_stacks_written_and_switched_off(torch: Torch, tmp_path: Path) -> None:
    original = torch.memory._record_memory_history
    history = MemoryHistory()
    history.begin(lambda: tmp_path)
    assert torch.asked == [OURS]
    history.end()
    assert torch.asked == [OURS, {"enabled": None}]
    assert torch.memory._record_memory_history == original
    assert [path.name for path in tmp_path.iterdir()] == [MEMORY_FILE]
    assert pickle.loads((tmp_path / MEMORY_FILE).read_bytes())["device_traces"] == [[1]]


def test_a_history_that_the_program_keeps_is_left_as_it_is(torch: Torch, tmp_path: Path) -> None:
    torch.memory._record_memory_history(max_entries=7)
    history = MemoryHistory()
    history.begin(lambda: tmp_path)
    history.end()
    assert torch.asked == [{"enabled": "all", "max_entries": 7}]
    assert torch.enabled
    assert (tmp_path / MEMORY_FILE).is_file()


def test_what_the_program_asks_for_later_is_obeyed(torch: Torch, tmp_path: Path) -> None:
    history = MemoryHistory()
    history.begin(lambda: tmp_path)
    torch.memory._record_memory_history(context="all")
    history.end()
    assert torch.asked == [OURS, {"enabled": "all", "context": "all"}]
    assert torch.enabled


def test_it_waits_until_the_program_initialises_cuda(torch: Torch, tmp_path: Path) -> None:
    torch.initialised = False
    history = MemoryHistory()
    history.begin(lambda: tmp_path)
    assert torch.asked == []
    ((keep, _),) = torch.calls
    keep()
    assert torch.asked == [OURS]
    history.end()


def test_it_is_not_begun_after_its_end(torch: Torch, tmp_path: Path) -> None:
    torch.initialised = False
    history = MemoryHistory()
    history.begin(lambda: tmp_path)
    history.end()
    ((keep, _),) = torch.calls
    keep()
    assert torch.asked == []
    assert not list(tmp_path.iterdir())


def test_the_first_failure_is_written_at_once(torch: Torch, tmp_path: Path) -> None:
    history = MemoryHistory()
    history.begin(lambda: tmp_path)
    (observer,) = torch.observers
    observer(0, 1 << 40, 10, 20)
    assert (tmp_path / MEMORY_FILE).is_file()
    (tmp_path / MEMORY_FILE).unlink()
    observer(0, 1 << 40, 10, 20)
    assert not list(tmp_path.iterdir())
    history.forked()
    history.end()
    assert torch.enabled, "a child leaves the history to its parent"


@pytest.mark.parametrize("broken", ["_record_memory_history", "_snapshot"])
def test_what_fails_is_told_and_does_not_harm(
    torch: Torch, tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_arguments: Any, **_named: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support this")

    setattr(torch.memory, broken, fail)
    history = MemoryHistory()
    history.begin(lambda: tmp_path)
    history.end()
    assert not list(tmp_path.iterdir())
    assert "cudaMallocAsync" in caplog.text
