"""``python -m thence``, and the command ``thence``."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from thence.errors import MissingRequirement
from thence.memory_limits import check_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_READING = (
    "report", "explain", "convert", "flame", "programs", "collectives", "ranks", "streams", "compile", "idle",
    "roofline", "memory", "steps", "whatif", "check", "sql",
)  # fmt: skip
"""Verbs that read their inputs in this process, as one trace."""
_ENDINGS = (".json", ".json.gz")
_MIN_BYTES = 4 << 20
"""Smallest size on disk of a trace for which decoding processes may be worth starting."""
_BETWEEN_COLLECTIONS = 100_000
"""Allocated objects between garbage collections. Modules, classes and columns are not garbage, and with Python's
default of 700 the collector took a tenth of a short run."""


def run() -> None:
    """Runs the command line. Ctrl-C, also while modules are still being imported, exits without a traceback."""
    gc.set_threshold(_BETWEEN_COLLECTIONS)
    if sys.argv[1:2] != ["record"]:  # record passes its environment on to another program
        # NumPy's OpenBLAS would start a thread for each core, but thence does no linear algebra.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        if sys.argv[1:2] != ["record"]:
            check_memory()
        with reading_ahead(sys.argv[1:]):
            from thence.cli import main

            main()
    except MissingRequirement as error:  # before the command line, which prints errors, could be imported
        sys.exit(_refused(error))
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as shells say it
    finally:
        gc.freeze()  # skips the garbage collection at interpreter exit


@contextmanager
def reading_ahead(arguments: Sequence[str]) -> Iterator[None]:
    """Starts other processes that decode the one large trace that a command line names, and ends them at the end."""
    name = _large_trace(arguments)
    if name is None:
        yield
        return
    from thence.readers.kineto import early_start

    early_start.begin(name)
    try:
        yield
    finally:
        early_start.forget()


def _large_trace(arguments: Sequence[str]) -> str | None:
    """The one large trace that a command line names; None if it names none or several."""
    if not arguments or (arguments[0] not in _READING and not arguments[0].endswith(_ENDINGS)):
        return None
    large = [n for n in arguments if n.endswith(_ENDINGS) and _size(n) >= _MIN_BYTES]
    if len(large) != 1:
        return None
    try:
        check_memory(large[0], _size(large[0]))
    except MissingRequirement:  # the reader says so
        return None
    return large[0]


def _refused(error: MissingRequirement) -> int:
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"thence: {error}\n")
    return error.exit_code


def _size(name: str) -> int:
    """The size of a file on disk in bytes; 0 if the name is not a file or its size cannot be read."""
    with suppress(OSError, ValueError):
        path = Path(name)
        return path.stat().st_size if path.is_file() else 0
    return 0


if __name__ == "__main__":
    run()
