"""What holds for all tests: a cache of their own, and property tests with the same few examples in every run.

A thorough run asks for more and new examples. Tests that ask many things of the same recordings share what was read.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

if "PYTEST_XDIST_WORKER" in os.environ:
    # A process for each core: threads of Polars would wait for each other. tests/cli/test_same_bytes.py has several.
    os.environ.setdefault("POLARS_MAX_THREADS", "1")

with contextlib.suppress(ImportError):  # environments that run a few tests have no hypothesis
    from hypothesis import settings

    most = 5 if os.environ.get("THENCE_FEW") else 25
    settings.register_profile("quick", max_examples=most, deadline=None, derandomize=True)
    settings.register_profile("thorough", max_examples=100, deadline=None)
    settings.load_profile("thorough" if os.environ.get("THENCE_THOROUGH") else "quick")


MAX_KEPT = 12
"""Traces that stay in memory for `read_once`, the last ones used."""
DATA = Path(__file__).parent / "data"
READ_ONCE = ("analysis", "attribution", "cli", "end_to_end", "writers")
"""Folders of tests that ask traces and do not test how they are read: `read_once` holds in all of them."""
STARTS = ("store/test_parquet_check.py", "readers/test_parquet_probe.py")
"""Tests of how processes are started, and that they cannot be."""
_traces: OrderedDict[str, Any] = OrderedDict()


def pytest_collection_finish() -> None:
    """Thousands of tests and their modules are no garbage: Python's own limits collect them again and again.

    That took an eighth of the CPU time of the tests.
    """
    gc.set_threshold(100_000)
    gc.collect()
    gc.freeze()


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files are read and attributed once for `thence.open` and all commands run in here.

    No process of its own tries Parquet tables first. For tests of what is said about a trace; what reads it has its
    own.
    """
    import thence
    from thence import opening
    from thence.readers import parquet_probe
    from untried_tables import PassingChild

    really = opening.open_trace
    defaults = inspect.signature(really).parameters

    def opened(*inputs: Any, progress: Any = None, **options: Any) -> Any:
        paths = [Path(path) for path in inputs if isinstance(path, str | Path)]
        if len(paths) < len(inputs) or not all(path.exists() for path in paths):
            return really(*inputs, **options, **({"progress": progress} if progress else {}))
        given = {name: value for name, value in options.items() if value != defaults[name].default}
        key = repr(([_content(path) for path in paths], sorted(given.items())))
        if key not in _traces:
            _traces[key] = really(*inputs, **options)
        _traces.move_to_end(key)
        while len(_traces) > MAX_KEPT:
            _traces.popitem(last=False)
        return _traces[key]

    monkeypatch.setattr(parquet_probe, "_started", PassingChild)
    # In this order: the first use of `thence.open` takes what `opening` holds then, which is put back afterwards.
    monkeypatch.setattr(thence, "open", opened)
    monkeypatch.setattr(opening, "open_trace", opened)


def _content(path: Path) -> object:
    """What tells one content of an input from another; files of tests/data do not change.

    Labels and annotations are found beside an input, and those of a profiler's folder beside the folder.
    """
    if path.is_relative_to(DATA):
        return path
    given, path = path, path.absolute()
    files = [*path.parent.iterdir(), *path.parent.parent.iterdir(), *(path.rglob("*") if path.is_dir() else ())]
    states = ((file, file.stat()) for file in sorted({path, *files}) if file.is_file())
    return given, [(str(file), state.st_ino, state.st_size, state.st_mtime_ns) for file, state in states]


@pytest.fixture(autouse=True)
def _forked_children(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that try tables and that answer SQL are forks, which have imported Polars already.

    Not where the start of them is tested.
    """
    if sys.platform == "win32" or request.path.relative_to(DATA.parent).as_posix() in STARTS:
        return
    import forking
    from thence.cli import bounded_query
    from thence.readers import parquet_probe

    monkeypatch.setattr(parquet_probe, "subprocess", forking.Processes(forking.POLARS))
    monkeypatch.setattr(bounded_query, "subprocess", forking.Processes(forking.EVERYTHING))


@pytest.fixture(autouse=True)
def _read_once_in_rooms(request: pytest.FixtureRequest) -> None:
    """Not in a test that patches something: what it reads could be another's then."""
    room = request.path.relative_to(DATA.parent).parts[0]
    if room in READ_ONCE and "monkeypatch" not in inspect.signature(request.function).parameters:
        request.getfixturevalue("read_once")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what thence remembers between calls out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
