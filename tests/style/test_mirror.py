"""The tests of a module are found by its path: the folders of tests are those of the package."""

from __future__ import annotations

from pathlib import Path

import thence

PACKAGE = Path(thence.__file__).parent
TESTS = Path(__file__).parents[1]
NO_ROOMS = {"browser", "data", "end_to_end", "fuzz", "gpu", "questions", "style", "support"}


def test_tests_mirror_the_tree() -> None:
    folders = {
        path.relative_to(TESTS).parent for path in TESTS.rglob("test_*.py")
    } - {Path(name) for name in NO_ROOMS}  # fmt: skip
    assert [folder for folder in sorted(folders) if not (PACKAGE / folder).is_dir()] == []
    assert not list(TESTS.glob("test_*.py")), "a test file belongs to a folder"
