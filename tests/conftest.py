"""What holds for all tests: a cache of their own, and property tests with the same few examples in every run.

A thorough run asks for more and new examples. Tests that ask many things of the same recordings share what was read.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

with contextlib.suppress(ImportError):  # environments that run a few tests have no hypothesis
    from hypothesis import settings

    settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
    settings.register_profile("thorough", max_examples=100, deadline=None)
    settings.load_profile("thorough" if os.environ.get("THENCE_THOROUGH") else "quick")


MAX_KEPT = 6
"""Traces that stay in memory for `read_once`, the last ones used."""
DATA = Path(__file__).parent / "data"
_traces: OrderedDict[str, Any] = OrderedDict()


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recordings of tests/data are read and attributed once for `thence.open` and all commands run in here.

    For tests of what is said about a trace; what reads it has its own. Other files are read each time, as they change.
    """
    import thence
    from thence import opening

    really = opening.open_trace
    defaults = inspect.signature(really).parameters

    def opened(*inputs: Any, progress: Any = None, **options: Any) -> Any:
        paths = [Path(path) for path in inputs if isinstance(path, str | Path)]
        if len(paths) < len(inputs) or not all(path.is_relative_to(DATA) for path in paths):
            return really(*inputs, **options, **({"progress": progress} if progress else {}))
        given = {name: value for name, value in options.items() if value != defaults[name].default}
        key = repr((paths, sorted(given.items())))
        if key not in _traces:
            _traces[key] = really(*inputs, **options)
        _traces.move_to_end(key)
        while len(_traces) > MAX_KEPT:
            _traces.popitem(last=False)
        return _traces[key]

    monkeypatch.setattr(opening, "open_trace", opened)
    monkeypatch.setattr(thence, "open", opened)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what thence remembers between calls out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
