"""Imported when Python starts with THENCE_RECORD set: this process then records itself from its first use of a GPU.

``thence.pth``, which is installed beside this file, imports it, and so does the sitecustomize of ``thence record``.
It stands outside of the package because ``sys.path`` is sorted before anything of the package is imported.
"""

import os
import sys


def _watch() -> None:
    path, before = sys.path[:], set(sys.modules)
    library = os.path.dirname(os.__file__)  # noqa: PTH120 - pathlib is not cheap
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


try:
    _watch()
except Exception as error:  # noqa: BLE001 - the program comes first
    sys.stderr.write(f"thence: process {os.getpid()} is not recorded: {error!r}\n")
