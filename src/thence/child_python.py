"""Python processes that thence starts for its own work: they import from where this process imports, and nowhere else.

``python -m`` and ``python -c`` put the current directory first in ``sys.path``. A folder of traces from someone else
may hold a file named json.py or polars.py; a child process started there would run it.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAFE_PATH = "PYTHONSAFEPATH"
# With os.path: pathlib would delay the start of decoding processes.
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120


def command(*arguments: str) -> list[str]:
    """The command that runs this interpreter with arguments, without the current directory in its ``sys.path``.

    Args:
        arguments: such as ``"-m"``, a module, and arguments of the module.
    """
    return [sys.executable, "-P", *arguments]


def environment() -> dict[str, str]:
    """The environment of a child: that of this process, with a PYTHONPATH that lists the folders of its ``sys.path``.

    An empty entry, which stands for the current directory in interactive sessions and under ``python -c``, becomes the
    last one: nothing there takes the place of an installed module.
    """
    entries = [entry for entry in sys.path if isinstance(entry, str)]  # as Python does
    named = [entry for entry in entries if entry]
    path = [*named, *([] if _PACKAGES in named else [_PACKAGES]), *([""] if "" in entries else [])]
    with suppress(FileNotFoundError):  # the current directory was removed
        path = [os.path.join(os.getcwd(), entry) for entry in path]  # noqa: PTH109, PTH118
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


@contextmanager
def safe_path() -> Iterator[None]:
    """Keeps the current directory out of ``sys.path`` of the Python processes that the block starts.

    For `multiprocessing`, whose processes get their command line and environment from Python: it sets PYTHONSAFEPATH
    in the environment of this process during the block. Children receive the ``sys.path`` of this process later on.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SAFE_PATH, None)  # another thread's ingest may have ended before
        else:
            os.environ[_SAFE_PATH] = before
