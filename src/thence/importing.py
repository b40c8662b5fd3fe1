"""Calls functions when the program imports a module, through one finder in ``sys.meta_path``.

`before_import` calls a function when the import of a module begins, `when_imported` when it is complete. The
functions are called on the importing thread, inside the import, and their exceptions are raised there.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec

__all__ = [
    "JAX_ON_CUDA",
    "before_import",
    "import_is_complete",
    "jax_uses_cuda",
    "torch_is_being_imported",
    "when_imported",
]

JAX_ON_CUDA = frozenset(
    {"jax_cuda12_plugin", "jax_cuda13_plugin", "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"}
)
"""Modules that JAX imports when it looks for GPUs."""


def import_is_complete(name: str) -> bool:
    """Whether a module is in ``sys.modules`` and its import has ended."""
    module = sys.modules.get(name)
    return module is not None and not _is_initialising(module)


def jax_uses_cuda() -> bool:
    """Whether JAX has looked for GPUs in this process."""
    return not JAX_ON_CUDA.isdisjoint(sys.modules)


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
        self,
        waiting: dict[str, list[Callable[..., object]]],
        name: str,
        function: Callable[..., object],
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

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: object = None
    ) -> ModuleSpec | None:
        for complete in [one for one in tuple(self.after) if import_is_complete(one)]:
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
