"""The public names, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import thence
from thence import errors

HEAVY = {"polars", "numpy", "rich", "msgspec", "isal", "click", "pandas", "torch", "jax"}


def test_dir_lists_exactly_the_public_names() -> None:
    assert sorted(dir(thence)) == sorted([*thence.__all__, "inside", "integrations", "jax", "torch"])
    assert len(set(thence.__all__)) == len(thence.__all__)


def test_every_public_name_exists_and_is_documented() -> None:
    for name in thence.__all__:
        value = getattr(thence, name)
        assert isinstance(value, str) or value.__doc__, name


def test_the_modules_for_frameworks_can_be_imported_without_the_frameworks() -> None:
    code = (
        "import sys, thence.torch, thence.jax, thence.integrations; from thence.torch import label_collectives; "
        "assert thence.torch is sys.modules['thence.torch'] and thence.jax.on_stream; "
        "assert not {'torch', 'jax', 'polars'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for module in (thence.torch, thence.jax):
        assert all(getattr(module, name).__doc__ for name in module.__all__)


def test_every_error_is_public() -> None:
    assert set(errors.__all__) <= set(thence.__all__)
    for name in errors.__all__:
        assert issubclass(getattr(thence, name), thence.ThenceError)


def test_a_name_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = thence.nonsense


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from thence import *", names)
    assert set(thence.__all__) <= set(names)


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(thence.__file__).parent / "py.typed").exists()


def test_importing_the_package_imports_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import thence; "
        "print(time.perf_counter() - start); print(*{m.split('.')[0] for m in sys.modules})"
    )
    seconds = []
    for _ in range(5):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        time_taken, modules = run.stdout.splitlines()
        seconds.append(float(time_taken))
        assert not HEAVY & set(modules.split())
    with capsys.disabled():
        print(f"\nimport thence: {1000 * min(seconds):.1f} ms (150 ms wanted)")  # noqa: T201 - a time is shown, it fails no test


def test_help_of_the_command_line_imports_no_tables() -> None:
    code = (
        "import sys\nfrom thence.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(*{m.split('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"polars", "numpy", "rich"} & set(run.stderr.split())
