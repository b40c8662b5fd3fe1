"""Programs of a job that start together and take turns on the GPUs, a part of jobs.py.

Imports and the making of process groups take most of the time of a short program and no GPU. A program says when it
is ready, waits for its turn without using a GPU, and says when it is done. Signs are empty files in one folder.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER, NAME = "JOB_TURNS", "JOB_TURNS_NAME"
"""In the environment of a program: where the signs are, and what it is called there."""


class Turns:
    """The signs of one program.

    Args:
        folder: where they are; None: nobody waits for anybody.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder = folder
        self._name = name
        if folder is not None:
            folder.mkdir(exist_ok=True)

    @classmethod
    def mine(cls) -> Turns:
        """Those of this process's program."""
        folder = os.environ.get(FOLDER)
        return cls(Path(folder) if folder else None, os.environ.get(NAME, ""))

    def environment(self) -> dict[str, str]:
        """What tells a program of its signs, which are taken away."""
        for sign in ("ready", "turn", "done", "off"):
            self._file(sign).unlink(missing_ok=True)
        return {FOLDER: str(self._folder), NAME: self._name}

    def take(self, rank: int) -> None:
        """Say that the program is ready, and wait for its turn; every rank does."""
        if self._folder is None:
            return
        if rank == 0:
            self._file("ready").touch()
        while not self._file("turn").exists():
            if self._file("off").exists():
                raise SystemExit("the time was up before this program's turn")
            time.sleep(0.01)

    def leave(self, rank: int) -> None:
        """The turn is over."""
        if self._folder is not None and rank == 0:
            self._file("done").touch()

    def give(self) -> None:
        self._file("turn").touch()

    def refuse(self) -> None:
        """There is no turn for it."""
        self._file("off").touch()

    def ready(self) -> bool:
        return self._file("ready").exists()

    def done(self) -> bool:
        return self._file("done").exists()

    def _file(self, sign: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._name}.{sign}"
