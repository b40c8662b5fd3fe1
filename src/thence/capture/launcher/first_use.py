"""In a process with THENCE_RECORD set: begins to record when something is about to use a GPU.

``thence record`` sets the variable to JSON, ``{"directory": ..., "options": {...}}`` with the attributes of
`RecordOptions`. Users may set it themselves, to such JSON or to the directory alone.

Importing a framework does not mean using a GPU: PyTorch is recorded from the moment at which it
initialises CUDA, JAX from the moment at which it looks for its CUDA plugin, other libraries from their
import. So processes that only manage others load neither libcupti nor anything else, and can fork. A
library that PyTorch imports during its own import, such as cuda.bindings, does not start a recording.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

from thence.capture.session.notes import REFUSED, UNSEEN, leave_note
from thence.errors import UsageError
from thence.importing import (
    JAX_ON_CUDA,
    before_import,
    own_imports,
    python_options,
    torch_is_being_imported,
    when_imported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SETTINGS = "THENCE_RECORD"
"""Environment variable: the directory, or JSON of directory and options."""
_PTH = "thence.pth"
_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")  # noqa: PTH100, PTH118, PTH120
"""Folder that ``thence record`` puts first on PYTHONPATH."""

_TORCH = "torch.cuda"
_AT_IMPORT = JAX_ON_CUDA | frozenset(
    {
        "cupy",
        "numba.cuda",
        "pycuda",
        "cuda.bindings",
        "cuda.cuda",
        "warp",
        "tensorflow",
        "paddle",
        "tensorrt",
        "onnxruntime",
    }
)
_PYTHON = re.compile(r"pythonw?[\d.]*t?|pypy[\d.]*")
_IGNORING = {"I": "PYTHONPATH", "E": "PYTHONPATH", "S": "sitecustomize"}
"""Options of Python, and what they make it ignore."""
_USERS_OF_NVTX = frozenset({"torch", "jaxlib", "cupy", "numba", "nvtx", "tensorflow"})


@functools.cache
def _collect_nvtx() -> None:
    # Here and below: a process that uses no GPU imports nothing of the recorder.
    from thence.capture.cuda.nvtx import collect_nvtx

    collect_nvtx()  # NVTX reads its variable at its first use, which may come before CUDA's


def _on_torch_imported(torch_cuda: Any, begin: Callable[[], None]) -> None:
    # torch calls `begin` when it initialises CUDA, also in a child that was forked before that.
    when_initialised = getattr(torch_cuda, "_lazy_call", None)
    if when_initialised is None:
        begin()
    else:
        when_initialised(begin)


def install() -> None:
    """Watch imports, and record with the directory and options of the environment variable."""
    try:
        directory, options = settings_of(os.environ[SETTINGS])
    except UsageError as error:
        sys.stderr.write(f"thence: process {os.getpid()} is not recorded: {error}\n")
        return
    begun: set[int] = set()

    def begin(options: dict[str, Any] = options) -> None:
        if os.getpid() not in begun:
            begun.add(os.getpid())
            _begin(directory, options)

    def begin_at_import(name: str) -> None:
        if torch_is_being_imported():
            return
        if name in JAX_ON_CUDA:
            begin(_for_jax(options))
            _record_launches()
        else:
            begin()

    for name in _USERS_OF_NVTX if options.get("nvtx", True) else ():
        before_import(name, _collect_nvtx)
    for name in _AT_IMPORT:
        before_import(name, functools.partial(begin_at_import, name))
    when_imported(_TORCH, lambda torch_cuda: _on_torch_imported(torch_cuda, begin))
    if _STARTUP in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # ``thence record`` reads the notes
        when_imported("subprocess", lambda module: _watch_children(module.Popen, directory))


def settings_of(value: str) -> tuple[str, dict[str, Any]]:
    """Directory and options that the variable states; the options are examined when a recording begins.

    Processes that this one starts write to the same directory, wherever they run: a relative one is made absolute in
    the environment.

    Raises:
        UsageError: it is neither a path nor such JSON.
    """
    document: Any = {"directory": value, "options": {}}
    if value.lstrip().startswith("{"):
        try:
            document = {"options": {}, **json.loads(value)}
        except ValueError as error:
            raise UsageError(f"{SETTINGS} is not JSON: {error}; state a directory, or {_FORM}") from None
    directory, options = document.get("directory"), document["options"]
    if not (isinstance(directory, str) and directory and isinstance(options, dict)) or len(document) > 2:
        raise UsageError(f"{SETTINGS} is {value!r}; state a directory, or {_FORM}")
    absolute = os.path.abspath(directory)  # noqa: PTH100
    if directory != absolute:
        given = json.dumps({"directory": absolute, "options": options})
        os.environ[SETTINGS] = given if options or absolute.startswith("{") else absolute
    return absolute, options


_FORM = '{"directory": "run", "options": {"sampling": {"every": 100}}} with the attributes of RecordOptions'


def why_unseen(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Why a Python that is started in this way does not record itself; None if it does, and for other programs."""
    if not command or not _PYTHON.fullmatch(os.path.basename(command[0])):  # noqa: PTH119
        return None
    letters, _ = python_options(command[1:])
    by_pth = "S" not in letters and _has_pth(command[0], environment.get("PATH", os.defpath))
    for letter in sorted(set(letters) & set(_IGNORING)) if not by_pth else ():
        return (
            f"python -{letter} ignores {_IGNORING[letter]}, through which thence record reaches a Python process; "
            f"start it without -{letter}"
        )
    if not by_pth and _STARTUP not in environment.get("PYTHONPATH", "").split(os.pathsep):
        lacking = "PYTHONPATH"
    elif SETTINGS not in environment:
        lacking = SETTINGS
    else:
        return None
    return (
        f"Python was started with an environment that lacks the {lacking} that thence record has set; pass "
        f"PYTHONPATH and {SETTINGS} on to it"
    )


def _has_pth(python: str, path: str) -> bool:
    """Whether a Python is that of this process, and ``thence.pth`` is installed for it; of others it is not known."""
    folders = path.split(os.pathsep) if os.path.basename(python) == python else [""]  # noqa: PTH119
    paths = [os.path.join(folder, python) for folder in folders]  # noqa: PTH118
    interpreter = next((file for file in paths if os.access(file, os.X_OK)), python)
    if os.path.dirname(os.path.abspath(interpreter)) != os.path.dirname(sys.executable):  # noqa: PTH100, PTH120
        return False
    return any(os.path.isfile(os.path.join(folder, _PTH)) for folder in sys.path)  # noqa: PTH113, PTH118


def _watch_children(popen: Any, directory: str) -> None:
    """Leaves a note if a Python process that this process starts does not record itself."""
    original, stated = popen.__init__, set()

    def starts(self: Any, args: Any, *more: Any, **named: Any) -> None:
        environment = named.get("env")
        command = args if isinstance(args, list | tuple) else ()
        with suppress(Exception):  # arguments of kinds that Popen refuses
            words = [os.fsdecode(word) for word in command]
            reason = why_unseen(words, os.environ if environment is None else environment)
            if reason is not None and reason not in stated:
                stated.add(reason)
                leave_note(directory, UNSEEN, reason)
        original(self, args, *more, **named)

    popen.__init__ = wraps(original)(starts)


def _for_jax(options: dict[str, Any]) -> dict[str, Any]:
    """The options with which a recording begins for JAX: launches are recorded at once, unless the user set the option.

    In a program that also uses PyTorch the options stay as they are, because its hooks need the counter of launches.
    """
    if options.get("launches") is None and "torch" not in sys.modules:
        return {**options, "launches": True}
    return options


def _record_launches() -> None:
    """Have a recording that began with another framework record launches from here on, for JAX."""
    from thence.capture.recorder.recorder import running

    recorder = running()
    if recorder is not None:
        recorder.xla_is_used()


def _begin(directory: str, options: dict[str, Any]) -> None:
    """Start a recording that lasts to the end of the process; never raises."""
    try:
        with own_imports():
            from thence.capture.recorder.options import options_of
            from thence.capture.session.record import record

        record(directory, options_of(options)).start()
    except Exception as error:  # noqa: BLE001 - the program comes first
        sys.stderr.write(f"thence: process {os.getpid()} is not recorded: {error}\n")
        sys.stderr.flush()
        leave_note(directory, REFUSED, str(error))
