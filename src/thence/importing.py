"""Imports in a process whose program is not thence's: to notice those of the program, and to make our own.

`before_import` calls a function when the import of a module begins, `when_imported` when it is complete, through one
finder in ``sys.meta_path``. The functions are called on the importing thread, inside the import, and their exceptions
are raised there.

`own_imports` is for thence's imports in the middle of a program. A script's folder is the first entry of ``sys.path``,
so a file ``queue.py`` beside the script would otherwise be executed by thence, in programs that never import it.

`later_modules` makes stand-ins for modules of thence that most runs do not need.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.machinery import FrozenImporter, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

JAX_ON_CUDA = frozenset({"jax_cuda12_plugin", "jax_cuda13_plugin", "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"})
"""Modules that JAX imports when it looks for GPUs."""
_LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120 - pathlib would delay every start of Python
"""Folder of Python's standard library."""
_IMPORTED_BY_US = sys.stdlib_module_names | {"numpy"}
"""Top-level modules that the recorder imports, besides thence's."""


def import_is_complete(name: str) -> bool:
    """Whether a module is in ``sys.modules`` and its import has ended."""
    module = sys.modules.get(name)
    return module is not None and not _is_initialising(module)


def jax_uses_cuda() -> bool:
    """Whether JAX has looked for GPUs in this process."""
    return any(name in sys.modules for name in JAX_ON_CUDA)  # `isdisjoint` would go through all modules, each time


def torch_is_being_imported() -> bool:
    """Whether the import of torch has begun and not ended."""
    return _is_initialising(sys.modules.get("torch"))


def before_import(name: str, function: Callable[[], object]) -> Callable[[], None]:
    """Registers a function to call whenever a module that is not in ``sys.modules`` yet is looked up.

    Returns:
        a function that removes the registration.
    """
    return _watcher.wait(_watcher.before, name, function)


def when_imported(name: str, function: Callable[[Any], object]) -> Callable[[], None]:
    """Calls a function once with a module: now if its import is complete, or else as soon as it is.

    If the import has already begun, its completion is noticed when the program imports another module afterwards.

    Returns:
        a function that removes the registration.
    """
    if import_is_complete(name):
        function(sys.modules[name])
        return lambda: None
    return _watcher.wait(_watcher.after, name, function)


def _is_initialising(module: object) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def later_modules(packages: Mapping[str, str]) -> dict[str, Any]:
    """Stand-ins for modules, by name, each of which imports its module when one of the module's names is used.

    Args:
        packages: for each package the names of its modules; ``module:name`` gives a module another name.
    """
    entries = ((package, *entry.partition(":")[::2]) for package, names in packages.items() for entry in names.split())
    return {name or module: _Later(f"{package}.{module}") for package, module, name in entries}


class _Later:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._module), name)


class _Watcher:
    """A finder that observes imports.

    For a module in ``after`` it returns the spec of `PathFinder`, whose loader it makes call the functions; other
    modules it leaves to the other finders.

    Attributes:
        before: functions to call when the import of a module begins, by the module's name.
        after: functions to call when the import of a module is complete, by the module's name.
    """

    def __init__(self) -> None:
        self.before: dict[str, list[Callable[..., object]]] = {}
        self.after: dict[str, list[Callable[..., object]]] = {}

    def wait(
        self, waiting: dict[str, list[Callable[..., object]]], name: str, function: Callable[..., object]
    ) -> Callable[[], None]:
        waiting.setdefault(name, []).append(function)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

        def no_longer() -> None:
            functions = waiting.get(name, [])
            if function in functions:
                functions.remove(function)
            if not functions:
                waiting.pop(name, None)

        return no_longer

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        for complete in [imported for imported in tuple(self.after) if import_is_complete(imported)]:
            self._complete(complete)
        for function in tuple(self.before.get(name, ())):
            function()
        if name not in self.after:
            return None
        spec = PathFinder.find_spec(name, path)
        loader: Any = spec.loader if spec else None
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._complete(name, module)

        loader.exec_module = exec_module
        return spec

    def _complete(self, name: str, module: Any = None) -> None:
        for function in self.after.pop(name, ()):
            function(sys.modules.get(name, module))


_watcher = _Watcher()


@contextmanager
def own_imports() -> Iterator[None]:
    """Has the imports of the block, on this thread, find the standard library and installed packages only.

    A module of the program that has the name of one that thence imports (``queue.py`` beside the script) is neither
    executed nor used by thence, and the program's own imports find it afterwards, as if thence had imported nothing.
    """
    hidden = _take_modules(_belongs_to_program)
    before = set(sys.modules)
    finder = _OwnFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        forget_own(before)
        sys.modules.update(hidden)


def own_path() -> list[str]:
    """``sys.path`` with the standard library first, and without the folder of the script."""
    folders = _script_folders()
    path = [entry for entry in sys.path if isinstance(entry, str) and entry not in folders]
    return sorted(path, key=lambda entry: not _is_library(entry))


def forget_own(before: set[str]) -> None:
    """Removes modules from ``sys.modules`` whose names the program would find elsewhere; thence keeps using them.

    Args:
        before: the modules that had been imported before thence imported its own.
    """
    new = {name.partition(".")[0] for name in sys.modules.keys() - before} - {"thence"}
    ours = {name for name in new if name not in before and _is_found_elsewhere(name)}
    _take_modules(lambda name, _module: name in ours)


def _take_modules(wanted: Callable[[str, ModuleType | None], bool]) -> dict[str, ModuleType]:
    """Removes top-level modules and everything below them from ``sys.modules``, and returns them by name."""
    modules = dict(sys.modules)
    top = {name for name, module in modules.items() if "." not in name and wanted(name, module)}
    taken = {name: loaded for name, loaded in modules.items() if top and name.partition(".")[0] in top}
    for name in taken:
        del sys.modules[name]
    return taken


def _belongs_to_program(name: str, module: ModuleType | None) -> bool:
    """Whether a module is the program's, although thence imports another one of that name."""
    if name not in _IMPORTED_BY_US:
        return False
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return False
    folder, base = os.path.split(file)
    if name in sys.stdlib_module_names:
        return not _is_library(folder)
    return (os.path.dirname(folder) if base == "__init__.py" else folder) in _script_folders()  # noqa: PTH120


def _is_found_elsewhere(name: str) -> bool:
    """Whether ``import name`` of the program would find another file than the module of that name."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None or spec.origin in {None, "built-in", "frozen"}:
        return False
    # When Python starts, the folder of the script is not in sys.path yet; it becomes the first entry.
    elsewhere = PathFinder.find_spec(name, [*_script_folders(), *sys.path])
    return elsewhere is not None and elsewhere.origin != spec.origin


def _is_library(folder: str) -> bool:
    """Whether a folder, or archive, is a part of the standard library, and not of installed packages."""
    inside = folder == _LIBRARY or folder.startswith(os.path.join(_LIBRARY, ""))  # noqa: PTH118
    return (inside and "-packages" not in folder[len(_LIBRARY) :]) or folder.endswith(_ARCHIVE)


_ARCHIVE = "python{}{}.zip".format(*sys.version_info)


def python_options(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The one-letter options of a Python command line, without those that take a value, and what follows them.

    Args:
        arguments: after the interpreter.

    Returns:
        the letters, and either ``-c`` or ``-m`` with what follows, or the script and its arguments.
    """
    letters, rest = "", list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        argument = rest.pop(0)
        if argument == "--check-hash-based-pycs":
            del rest[:1]
        for place, letter in enumerate(argument) if not argument.startswith("--") else ():
            if letter in "cm":
                value = argument[place + 1 :]
                return letters, [f"-{letter}", *([value] if value else []), *rest]
            if letter in "WX":
                if place == len(argument) - 1:
                    del rest[:1]
                break
            letters += letter.strip("-")
    return letters, rest


def _script_folders() -> frozenset[str]:
    """The folders that Python puts first in ``sys.path`` for the program."""
    folders = {"", *_FOLDER_AT_START}
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(main, str) and getattr(sys.modules["__main__"], "__spec__", None) is None:
        folders.add(os.path.dirname(main))  # noqa: PTH120
    return frozenset(folders)


def _folder_at_start() -> Iterator[str]:
    """The folder of the script, or for ``-m`` the current one, when the process began."""
    _, rest = python_options(sys.orig_argv[1:])
    if sys.flags.safe_path or not rest or rest[0] == "-c":
        return
    with suppress(OSError):  # the current directory was removed
        script = os.path.realpath(rest[0])
        folder = script if os.path.isdir(script) else os.path.dirname(script)  # noqa: PTH112, PTH120
        yield os.getcwd() if rest[0] == "-m" else folder  # noqa: PTH109


_FOLDER_AT_START = frozenset(_folder_at_start())


class _OwnFinder:
    """A finder that looks for the top-level modules that one thread imports in `own_path`, and nowhere else."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._path = own_path()

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        if path is not None or get_ident() != self._thread:
            return None
        if name in sys.builtin_module_names or FrozenImporter.find_spec(name) is not None:
            return None
        spec = PathFinder.find_spec(name, self._path)
        others = (finder for finder in sys.meta_path if finder not in {self, PathFinder})
        while spec is None and (finder := next(others, None)) is not None:
            spec = finder.find_spec(name, None)  # such as that of an editable installation
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return spec
