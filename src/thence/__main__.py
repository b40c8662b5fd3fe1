"""``python -m thence``, and the command ``thence``."""

import sys

__all__ = ["run"]


def run() -> None:
    """Runs the command line; Ctrl-C while it is still being loaded ends it without a traceback."""
    try:
        from thence.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    run()
