# ruff: noqa: INP001 - a folder of its own on PYTHONPATH, no package
"""Python imports this module at its start, in every process that ``thence record`` starts.

Its folder is first on PYTHONPATH, so that it is found by Pythons without ``thence.pth``, too. It also runs the
sitecustomize that Python would have imported without it.
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


if os.environ.get("THENCE_RECORD"):
    try:
        import _thence_startup  # noqa: F401 - a second import, after that of thence.pth, does nothing
    except ImportError as error:
        sys.stderr.write(f"thence: {sys.executable} is not recorded: thence is not installed for it ({error})\n")
_chain()
