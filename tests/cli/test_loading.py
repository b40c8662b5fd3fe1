"""How the command line is loaded."""

from __future__ import annotations

import gc

import thence.cli
from thence.__main__ import loaded


def test_garbage_is_collected_again_once_the_command_line_is_loaded() -> None:
    try:
        assert loaded() is thence.cli.main
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
