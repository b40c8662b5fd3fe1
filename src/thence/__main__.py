"""``python -m thence``, and the command ``thence``."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["loaded", "run"]


def run() -> None:
    """Runs the command line; Ctrl-C while it is still being loaded ends it without a traceback."""
    try:
        main = loaded()
    except KeyboardInterrupt:
        sys.exit(130)
    main()


def loaded() -> Callable[[], None]:
    """Imports the command line; modules are no garbage, so they are never looked through for any."""
    gc.disable()
    from thence.cli import main

    gc.freeze()
    gc.enable()
    return main


if __name__ == "__main__":
    run()
