"""Agrees with the other ranks of a job on the step of a window that one of them asked for.

The ranks agree through the store of `torch.distributed`, a table of keys that all of them reach. Keys are numbered, and
the first rank to set one decides: its value has a step that lies so far ahead that all ranks read the key before they
begin it. No rank waits for another one, and no collective runs.

The store is asked on a thread of its own, once a second. The thread that launches never waits for the network then, and
neither does the one that takes records, which would lose them if the host with the store did not answer.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_SECONDS = 1.0
"""Time between two looks at the store."""
SECONDS_BETWEEN_REQUESTS = 5.0
"""Windows that were asked for begin at most this often; what asks meanwhile is heard afterwards."""
_MIN_AHEAD = 4
"""Steps by which the hosts of two ranks may be apart, because the host runs ahead of its device."""
_POLLS_AHEAD = 2.5
"""In so much time all ranks have read a key."""
_KEY = "thence/window/"
_MAX_WHY = 500
_MAX_STEP = 1 << 62


class RankRequests:
    """Publishes what asks for a window, and hears what the other ranks published.

    Args:
        record: called with a reason and the step that all ranks record, on a thread of its own.
        step: returns the number of the step that is running.
        store: returns the store of a job with several ranks, and the rank of this process; None for no such job.
    """

    def __init__(
        self,
        record: Callable[[str, int], None],
        step: Callable[[], int],
        store: Callable[[], tuple[Any, int] | None] | None = None,
    ) -> None:
        self._record = record
        self._step = step
        self._find = store or _store_of_job
        self._asked: str | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._round = 0
        self._agreed = -1
        self._agreed_at = -math.inf
        self._answered = 0.0
        self._seen = (0.0, 0)

    def look(self) -> None:
        """Begin once the process has joined a job; called from time to time, on the recorder's thread."""
        if self._thread is None and not self._ended.is_set() and self._find() is not None:
            self._answered = monotonic()
            self._thread = threading.Thread(target=self._work, name="thence-ranks", daemon=True)
            self._thread.start()

    def ask(self, why: str) -> bool:
        """Ask all ranks for a window; returns at once, on any thread and in a handler of signals.

        Returns:
            whether it will be agreed on. Else this process has no other ranks, or their store does not answer.
        """
        if self._thread is None or self._ended.is_set() or self._pid != os.getpid():
            return False
        if monotonic() - self._answered > _POLLS_AHEAD * POLL_SECONDS + SECONDS_BETWEEN_REQUESTS:
            return False
        self._asked = why[:_MAX_WHY]
        return True

    def end(self) -> None:
        """Neither ask nor hear any more. Nothing is waited for: the thread may be waiting for the network."""
        self._ended.set()

    def _work(self) -> None:
        try:
            peers = self._find()
            if peers is None:
                return
            store, rank = peers
            # A connection of its own, so that the program's calls never wait for ours.
            store = store.clone() if hasattr(store, "clone") else store
            self._seen = monotonic(), self._step()
            while not self._ended.wait(POLL_SECONDS) and self._find() is not None:
                self._poll(store, rank)
                self._answered = monotonic()
        except Exception:  # noqa: BLE001 - the job ends, or its store is gone: this rank goes on alone
            return
        finally:
            self._ended.set()

    def _poll(self, store: Any, rank: int) -> None:
        ahead = self._steps_ahead()
        while store.check([self._key()]):
            self._hear(store.get(self._key()))
        if self._asked is None:
            return
        if self._step() < self._agreed:
            self._asked = None  # a window is about to begin: it is the one that was asked for
        elif monotonic() - self._agreed_at >= SECONDS_BETWEEN_REQUESTS:
            why, self._asked = f"rank {rank}: {self._asked}", None
            ours = json.dumps({"step": self._step() + ahead, "why": why}).encode()
            # Sets the key if nobody has, and returns what it is then.
            self._hear(store.compare_set(self._key(), "", ours.decode()))

    def _key(self) -> str:
        return f"{_KEY}{self._round + 1}"

    def _hear(self, value: bytes) -> None:
        self._round += 1
        heard = json.loads(value)
        # Another rank wrote it: it is bounded as any input.
        step, why = min(int(heard["step"]), _MAX_STEP), str(heard["why"])[: _MAX_WHY + 20]
        self._agreed, self._agreed_at = step, monotonic()
        self._record(f"{why} (all ranks from step {step:,} on)", step)

    def _steps_ahead(self) -> int:
        """How many steps begin before all ranks have looked at the store, by the pace since the last look."""
        (before, step), now = self._seen, (monotonic(), self._step())
        self._seen = now
        pace = max(0, now[1] - step) / max(1e-3, now[0] - before)  # steps a second
        return _MIN_AHEAD + math.ceil(pace * _POLLS_AHEAD * POLL_SECONDS)


def _store_of_job() -> tuple[Any, int] | None:
    """The store of `torch.distributed` and this process's rank, if it is initialised with several ranks."""
    distributed = sys.modules.get("torch.distributed")
    internals = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if distributed is None or internals is None or not distributed.is_initialized():
            return None
        if distributed.get_world_size() < 2:
            return None
        return internals._get_default_store(), int(distributed.get_rank())  # noqa: SLF001 - there is no public name
    except Exception:  # noqa: BLE001 - it is being destroyed, or this PyTorch lacks one of these
        return None
