# ruff: noqa: INP001 - a folder of its own on PYTHONPATH, no package
"""Python imports this module at its start, in every process that ``thence record`` starts.

Its folder is first on PYTHONPATH. It also runs the sitecustomize that Python would have imported
without it.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _chain() -> None:
    """Run the sitecustomize that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is not cheap
    path = [p for p in sys.path if os.path.abspath(p) != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _watch() -> None:
    path, before = sys.path[:], set(sys.modules)
    library = os.path.dirname(os.__file__)  # noqa: PTH120
    # The standard library first: a json.py in a folder of PYTHONPATH is the program's, not ours.
    sys.path.sort(key=lambda p: not p.startswith(library) or "-packages" in p)
    try:
        from thence.capture.launcher import first_use as hooks
        from thence.importing import forget_own
    except ImportError as error:
        sys.stderr.write(f"thence: {sys.executable} is not recorded: thence is not installed for it ({error})\n")
        return
    finally:
        sys.path[:] = path
    forget_own(before)
    hooks.install()


if os.environ.get("THENCE_RECORD"):
    try:
        _watch()
    except Exception as error:  # noqa: BLE001 - the program comes first
        sys.stderr.write(f"thence: process {os.getpid()} is not recorded: {error!r}\n")
_chain()
