"""The HLO of the XLA programs that a recorded process runs, kept beside its recording.

JAX tells of every compilation (`jax.monitoring`), and its client lists the executables that are alive, with
their optimized modules: schedule and source lines included. So no flag has to be set before XLA starts,
nothing else is dumped, and executables that came out of a compilation cache, or were compiled before the
recording began, have their HLO too.

A module gets another number when it leaves the CUDA plugin, so the number cannot tell which program of the
recording it is. Where several have one name, the thread and moment of the compilation do:
`thence.model.formats.COMPILED_INDEX` has them.
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

__all__ = ["XlaPrograms"]

_COMPILED = "/jax/core/compile/backend_compile_duration"
"""Event of jax.monitoring (jax/_src/dispatch.py) when an executable is there, on the compiling thread."""
_NOT_RECORDED = frozenset({"cpu"})
_UNFIT = re.compile(r"[^\w.-]+")
_LONGEST_NAME = 120
_LOG = logging.getLogger("thence.recorder")


@dataclass(frozen=True)
class _Module:
    """One module: its name, bytes (HloModuleProto), and the compilation it came from, if that was seen."""

    name: str
    content: bytes
    thread: int | None
    ended_ns: int | None


class XlaPrograms:
    """Collects the modules of one process; nothing here ever raises.

    Args:
        ignored: platforms of JAX whose programs are left out.
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
        """Take what is there and has not been taken; listen from now on, once JAX has been imported."""
        if self._ended:
            return
        if not self._listening and "jax._src" in sys.modules:
            self._listen()
        self._take(latest=False)

    def end(self) -> None:
        """Take what is left; listen no more."""
        self.look()
        self._ended = True

    def forked(self) -> None:
        """This is a child process now: what was compiled is its parent's."""
        self._ended = True

    def save(self, folder: Path) -> None:
        """Write the modules that are not yet on disk.

        Args:
            folder: of the recording.
        """
        try:
            with self._writing:
                self._save(folder / HLO_FOLDER)
        except OSError as error:
            self._complain(f"the HLO of XLA programs cannot be written: {error.strerror or error}")

    def _listen(self) -> None:
        """JAX itself may still be being imported: this module of it needs no other."""
        self._listening = True
        try:
            monitoring = importlib.import_module("jax._src.monitoring")
            monitoring.register_event_duration_secs_listener(self._compiled)
        except Exception as error:  # noqa: BLE001 - as below
            self._complain(f"JAX does not tell of what it compiles: {error!r}")

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
        """Take modules of new executables; the latest one is that of this thread's compilation."""
        ended = time.time_ns()
        try:
            with self._lock:
                for executables in self._executables():
                    for place, executable in enumerate(executables):
                        self._take_one(executable, ended if latest and place == 0 else None)
        except Exception as error:  # noqa: BLE001 - internals of another project, and the program comes first
            self._complain(f"the HLO of XLA programs cannot be had from this JAX: {error!r}")

    def _executables(self) -> Iterator[list[Any]]:
        """Of each platform, newest first; none before the program itself has made JAX look for GPUs."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        # Not by its functions: they take a lock that the thread at hand can hold already.
        found = tuple(getattr(bridge, "_backends", {}).values())
        clients = {id(client): client for client in found}
        for client in clients.values():
            if client.platform not in self._ignored:
                yield client.live_executables()

    def _take_one(self, executable: Any, ended_ns: int | None) -> None:
        # The address alone could be that of an executable that is gone.
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
        name = _UNFIT.sub("_", module.name)[:_LONGEST_NAME]
        file = f"{number:05}.{name}{HLO_ENDING}"
        atomic_write(folder / file, module.content)
        self._index.append(
            {
                "file": file,
                "name": module.name,
                "thread": module.thread,
                "ended_ns": module.ended_ns,
            }
        )

    def _complain(self, message: str) -> None:
        if not self._complained:
            self._complained = True
            _LOG.warning("thence: %s", message)
