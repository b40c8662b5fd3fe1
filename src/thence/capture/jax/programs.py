"""Collects the HLO of the XLA programs that a recorded process runs, and writes it next to its recording.

JAX reports every compilation (`jax.monitoring`), and its clients list the live executables with their optimized
modules, which include the schedule and source lines. So no flag has to be set before XLA starts, nothing else is
dumped, and the HLO of executables that were loaded from a compilation cache, or compiled before the recording
began, is collected too.

A module gets a new number when it leaves the CUDA plugin, so the number does not identify its program in the
recording. If several programs have the same name, the thread and time of the compilation tell them apart: they are
in the file `thence.model.formats.COMPILED_INDEX`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thence.atomic_files import atomic_write
from thence.model.formats import COMPILED, COMPILED_INDEX, HLO_ENDING, HLO_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_COMPILED = "/jax/core/compile/backend_compile_duration"
"""Event of jax.monitoring (jax/_src/dispatch.py) after a compilation, on the compiling thread."""
_NOT_RECORDED = frozenset({"cpu"})
_UNFIT = re.compile(r"[^\w.-]+")
_MAX_NAME_LENGTH = 120
_LOG = logging.getLogger("thence.capture.recorder")


@dataclass(frozen=True)
class _Module:
    """One module: its name, bytes (HloModuleProto), and thread and end of its compilation, if that was observed."""

    name: str
    content: bytes
    thread: int | None
    ended_ns: int | None


class XlaPrograms:
    """Collects the modules of one process; its public methods never raise.

    Args:
        ignored: platforms of JAX whose programs are skipped.
    """

    def __init__(self, ignored: frozenset[str] = _NOT_RECORDED) -> None:
        self._ignored = ignored
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._taken: set[tuple[int, object]] = set()
        self._digests: set[bytes] = set()
        self._waiting: deque[_Module] = deque()
        self._index: list[dict[str, Any]] = []
        self._ended = False
        self._listening = False
        self._complained = False

    def look(self) -> None:
        """Collect modules that are new since the last call; register with jax.monitoring once JAX is imported."""
        if self._ended:
            return
        if not self._listening and "jax._src" in sys.modules:
            self._listen()
        self._take(latest=False)

    def end(self) -> None:
        """Collect the remaining modules, and nothing from then on."""
        self.look()
        self._ended = True

    def forked(self) -> None:
        """Collect nothing in this child process: the programs so far are its parent's."""
        self._ended = True

    def save(self, folder: Path) -> None:
        """Write the modules that are not yet on disk."""
        try:
            with self._writing:
                self._save(folder / HLO_FOLDER)
        except OSError as error:
            self._complain(f"the HLO of XLA programs cannot be written: {error.strerror or error}")

    def _listen(self) -> None:
        """Register for events of compilations. ``jax._src.monitoring`` can be imported while JAX itself still is."""
        self._listening = True
        try:
            monitoring = importlib.import_module("jax._src.monitoring")
            monitoring.register_event_duration_secs_listener(self._compiled)
        except Exception as error:  # noqa: BLE001 - as below
            self._complain(f"JAX's compilation events cannot be received: {error!r}")

    def _save(self, folder: Path) -> None:
        if not self._waiting:
            return
        folder.mkdir(exist_ok=True)
        while self._waiting:
            self._write(folder, self._waiting.popleft())
        index = {"format": COMPILED, "version": 1, "modules": self._index}
        atomic_write(folder / COMPILED_INDEX, json.dumps(index, indent=1).encode())

    def _compiled(self, event: str, _seconds: float, **_more: object) -> None:
        if event == _COMPILED and not self._ended:
            self._take(latest=True)

    def _take(self, *, latest: bool) -> None:
        """Collect modules of new executables; with `latest`, the newest is that which this thread has just compiled."""
        ended = time.time_ns()
        try:
            with self._lock:
                for executables in self._executables():
                    for place, executable in enumerate(executables):
                        self._take_one(executable, ended if latest and place == 0 else None)
        except Exception as error:  # noqa: BLE001 - internals of another project, and the program comes first
            self._complain(f"the HLO of XLA programs cannot be read from this version of JAX: {error!r}")

    def _executables(self) -> Iterator[list[Any]]:
        """Live executables of each platform, newest first; none before the program has made JAX look for GPUs."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        # The attribute, because the functions of the module take a lock that this thread may already hold.
        backends = tuple(getattr(bridge, "_backends", {}).values())
        clients = {id(client): client for client in backends}
        for client in clients.values():
            if client.platform not in self._ignored:
                yield client.live_executables()

    def _take_one(self, executable: Any, ended_ns: int | None) -> None:
        # Another executable may have had the same address before.
        key = (id(executable), getattr(executable, "fingerprint", None))
        if key in self._taken and ended_ns is None:
            return
        self._taken.add(key)
        for module in executable.hlo_modules():
            content = module.as_serialized_hlo_module_proto()
            digest = hashlib.blake2b(content, digest_size=16).digest()
            if digest not in self._digests:
                self._digests.add(digest)
                thread = threading.get_native_id() if ended_ns is not None else None
                self._waiting.append(_Module(module.name, content, thread, ended_ns))

    def _write(self, folder: Path, module: _Module) -> None:
        number = len(self._index) + 1
        name = _UNFIT.sub("_", module.name)[:_MAX_NAME_LENGTH]
        file = f"{number:05}.{name}{HLO_ENDING}"
        atomic_write(folder / file, module.content)
        self._index.append({"file": file, "name": module.name, "thread": module.thread, "ended_ns": module.ended_ns})

    def _complain(self, message: str) -> None:
        if not self._complained:
            self._complained = True
            _LOG.warning("thence: %s", message)
