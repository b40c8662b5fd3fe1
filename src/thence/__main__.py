"""``python -m thence``, and the command ``thence``."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["reading_ahead", "run"]

_READING = (
    "report", "convert", "flame", "programs", "collectives", "ranks", "streams", "compile", "idle", "steps",
    "whatif", "check", "sql",
)  # fmt: skip
"""Verbs that read their inputs in this process."""
_ENDINGS = (".json", ".json.gz")
_LEAST_BYTES = 4 << 20
"""Of a file that may be worth decoding processes, as it is stored."""
_BETWEEN_COLLECTIONS = 100_000
"""Objects made before garbage is looked for: modules, classes and columns are none, and by Python's own 700 a tenth of
a short run was spent on looking through them."""


def run() -> None:
    """Runs the command line; Ctrl-C while it is still being loaded ends it without a traceback."""
    gc.set_threshold(_BETWEEN_COLLECTIONS)
    if sys.argv[1:2] != ["record"]:  # which hands its environment to another program
        # NumPy starts a thread for each core, for algebra that is not done here.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        with reading_ahead(sys.argv[1:]):
            from thence.cli import main

            main()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        gc.freeze()  # Python would look for garbage once more before it ends


@contextmanager
def reading_ahead(arguments: Sequence[str]) -> Iterator[None]:
    """Has the one large trace that a command line names decoded from now on, by other processes."""
    name = _large_trace(arguments)
    if name is None:
        yield
        return
    from thence.readers.kineto import ahead

    ahead.begin(name)
    try:
        yield
    finally:
        ahead.forget()


def _large_trace(arguments: Sequence[str]) -> str | None:
    """The one large trace that a command line names; None where there are several, or none."""
    if not arguments or (arguments[0] not in _READING and not arguments[0].endswith(_ENDINGS)):
        return None
    large = [n for n in arguments if n.endswith(_ENDINGS) and _size(n) >= _LEAST_BYTES]
    return large[0] if len(large) == 1 else None


def _size(name: str) -> int:
    """Bytes of a file as it is stored; 0 for what is no file, or cannot be looked at."""
    with suppress(OSError, ValueError):
        path = Path(name)
        return path.stat().st_size if path.is_file() else 0
    return 0


if __name__ == "__main__":
    run()
