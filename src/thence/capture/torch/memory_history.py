"""Keeps the history of PyTorch's memory allocator while a recording runs, and writes it into the recording's folder.

PyTorch's allocator notes each allocation and return itself (``torch.cuda.memory._record_memory_history``): one entry of
a ring for each, without a stack. Walking a stack at each would cost some 2 us; the recording has places of its own. The
history is written as PyTorch's own snapshot, at the end of the recording and when the device is first out of memory.

A program that keeps a history of its own keeps it as it asked for: what it switched on before is not changed, and what
it switches on or off later is obeyed. The recording then has that history. What a recording switched on, it switches
off at its end.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from thence.importing import when_imported
from thence.model.formats import MEMORY_FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_ENTRIES = 500_000
"""Entries of the ring, some 200 bytes each in the allocator, and a kB each while they are written. What was allocated
before the oldest one and is still live is in the snapshot too."""
_RECORD = "_record_memory_history"
_LOG = logging.getLogger("thence.torch")


class MemoryHistory:
    """The history of one recording. Nothing here raises or initialises CUDA."""

    def __init__(self) -> None:
        self._memory: Any = None  # torch.cuda.memory, once the history is kept
        self._original: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None
        self._program_decides = False
        self._folder: Callable[[], Path | None] = lambda: None
        self._failed_once = False
        self._ended = False
        self._no_longer: Callable[[], None] = lambda: None

    def begin(self, folder: Callable[[], Path | None]) -> None:
        """Keep a history from now on, or as soon as the program initialises CUDA.

        Args:
            folder: returns where to write, None as long as there is no folder.
        """
        self._folder = folder
        self._no_longer = when_imported("torch.cuda", self._when_initialised)

    def end(self) -> None:
        """Write the history, and leave PyTorch as the program would have it."""
        self._no_longer()
        self._ended = True
        memory = self._memory
        if memory is None:
            return
        self._write()
        if getattr(memory, _RECORD, None) is self._wrapper:
            setattr(memory, _RECORD, self._original)
        if not self._program_decides and self._original is not None:
            with suppress(Exception):
                self._original(enabled=None)
        self._memory = None

    def forked(self) -> None:
        """Leave the history to the parent of this child process."""
        self._no_longer()
        self._ended, self._memory = True, None

    def _when_initialised(self, torch_cuda: Any) -> None:
        if torch_cuda.is_initialized():
            self._keep()
            return
        # As torch.cuda._lazy_call does, but without its lock, which the initialisation may hold now.
        calls = getattr(torch_cuda, "_queued_calls", None)
        if isinstance(calls, list):
            calls.append((self._keep, []))

    def _keep(self) -> None:
        if self._ended or self._memory is not None:
            return
        try:
            torch = sys.modules["torch"]
            memory = torch.cuda.memory
            self._original = getattr(memory, _RECORD)
            self._program_decides = bool(torch._C._cuda_isHistoryEnabled())  # noqa: SLF001 - no public name
            if not self._program_decides:
                self._original(enabled="all", context=None, stacks="python", max_entries=MAX_ENTRIES)
            torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)  # noqa: SLF001
        except Exception as error:  # noqa: BLE001 - the program comes first
            _LOG.warning("thence: the memory of PyTorch is not recorded: %s", error)
            return
        self._memory = memory
        self._wrapper = self._watching(self._original)
        setattr(memory, _RECORD, self._wrapper)

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """PyTorch's function, which notes that the program called it."""

        @functools.wraps(original)
        def record_memory_history(*arguments: Any, **named: Any) -> Any:
            self._program_decides = True
            return original(*arguments, **named)

        return record_memory_history

    def _out_of_memory(self, _device: int, _asked: int, _allocated: int, _free: int) -> None:
        """PyTorch calls this before it raises; the program may be killed soon."""
        if not self._ended and not self._failed_once:
            self._failed_once = True
            self._write()

    def _write(self) -> None:
        folder = self._folder()
        if folder is None:
            return
        unfinished = folder / f"{MEMORY_FILE}.part"
        try:
            state = self._memory._snapshot()  # noqa: SLF001 - no public name
            with unfinished.open("wb") as stream:
                pickle.dump(state, stream, protocol=4)
            os.replace(unfinished, folder / MEMORY_FILE)  # noqa: PTH105 - pathlib's is the same
        except Exception as error:  # noqa: BLE001 - the program comes first
            _LOG.warning("thence: the history of PyTorch's memory is not written: %s", error)
            with suppress(OSError):
                unfinished.unlink()
