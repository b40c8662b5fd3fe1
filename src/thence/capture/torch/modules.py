"""Notes which PyTorch module is being called, by its path in the outermost module.

Paths are those of ``named_modules``: ``model.layers.3.self_attn``, without parts for the wrappers that FSDP, DDP,
torch.compile, PEFT, checkpointing and DeepSpeed put around modules. A module with two paths gets the first. Modules
outside of the first model that was called have the class of their own outermost module before their path:
``Discriminator.layers.0``.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from thence.capture.boundaries.places import MODULE, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thence.capture.boundaries.places import Places
    from thence.capture.torch.threads import Common, Thread, Threads

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "DeepSpeedEngine": "module",
    "BaseTuner": "model",
}
"""Classes that wrap one module, and the attribute that holds it."""
_BASE = "base_model"
"""The attribute of PEFT's models, whose classes have many names, that holds a tuner (`LoraModel`)."""
_MAX_SEARCHES = 100
"""How often modules that are not known yet are searched for in the models, for each class and module around it: a
program may make a new module for every call."""


class ModuleListener(Protocol):
    """Is called for modules outside of all other modules, and for errors."""

    def outermost(self, thread: Thread, module: Any, frame: Any) -> None:
        """Handle the call of a module outside of all other modules on its thread."""

    def outermost_ended(self, thread: Thread) -> None:
        """Handle the end of such a call."""

    def failed(self, error: BaseException) -> None:
        """Handle an internal error, after which nothing is followed any longer."""


class ModulePaths:
    """Places of modules.

    Args:
        places: gives numbers to them.
        named: called with the address and the number of each module that gets a place; with 0 when it is freed.
    """

    def __init__(self, places: Places, named: Callable[[int, int], None] = lambda _address, _number: None) -> None:
        self._places = places
        self._named = named
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._roots: dict[str, weakref.ref[Any]] = {}
        self._whole: set[int] = set()
        self._searched: dict[tuple[int, type], int] = {}

    def number(self, module: Any, around: int) -> int:
        """The place of a module that is called inside the module at place `around`, or outside of all modules (0)."""
        number = self._numbers.get(id(module))
        return number if number is not None else self._new(module, around)

    def path(self, number: int) -> str | None:
        """The path of a place: empty for the first model itself, None for the place of no module."""
        return "" if number in self._whole else self._places[number].name

    def get(self, module: Any) -> int | None:
        """The place of a module; None if it has no place yet."""
        return self._numbers.get(id(module))

    def _new(self, module: Any, around: int) -> int:
        if around:  # made after the model around it was named, or in no attribute of it
            parent = self._places[around]
            name = self._path_in_models(module, around) or f"{parent.name}.{class_name(module)}"
            self._keep(module, self._places.number(Place(MODULE, around, name, class_name(module))))
        else:
            self._name_all(module)
        return self._numbers[id(module)]

    def _path_in_models(self, module: Any, around: int) -> str | None:
        """The path of a module that was added to a model after the model had been named; None if none holds it."""
        searched = self._searched.get((around, type(module)), 0)
        self._searched[around, type(module)] = searched + 1
        if searched >= _MAX_SEARCHES:
            return None
        for prefix, ref in self._roots.items():
            root = ref()
            for path, part in paths(root) if root is not None else ():
                if part is module and path:
                    return prefix + path
        return None

    def _name_all(self, root: Any) -> None:
        """Name every module of a model that is called outside of all other modules."""
        inside = {id(part) for _, part in paths(root)}
        for prefix, ref in tuple(self._roots.items()):
            if (other := ref()) is None or id(other) in inside:  # a part that was called before the whole
                del self._roots[prefix]
        name = class_name(root)
        prefix = ""
        if len(inside) > 1:  # a single module, such as a loss, gets no number
            prefix = self._register(root, name)
            name = prefix.removesuffix(".") or name
        whole = self._places.number(Place(MODULE, 0, name, class_name(root)))
        above = {"": whole}
        if len(inside) > 1 and not prefix:
            self._whole.add(whole)
        named: set[int] = set()
        for path, module in paths(root):
            if id(module) in named:
                continue
            named.add(id(module))
            if path not in above:
                # Paths in the first model begin with its parts, as in named_modules, not with its own name.
                parent = above.get(path.rpartition(".")[0], whole)
                around = parent if prefix or parent != whole else 0
                place = Place(MODULE, around, prefix + path, class_name(module))
                above[path] = self._places.number(place)
            self._keep(module, above[path])

    def _register(self, root: Any, name: str) -> str:
        """The prefix of the paths in a model; empty for the first model."""
        kinds = [class_name(other) for ref in self._roots.values() if (other := ref()) is not None]
        number = kinds.count(name)
        prefix = f"{name}_{number}." if number else f"{name}." if kinds else ""
        while prefix in self._roots:
            number += 1
            prefix = f"{name}_{number}."
        self._roots[prefix] = weakref.ref(root)
        return prefix

    def _keep(self, module: Any, number: int) -> None:
        key = id(module)
        self._numbers[key] = number
        self._named(key, number)

        def gone(_ref: object) -> None:  # another object may get the same id
            self._numbers.pop(key, None)
            self._alive.pop(key, None)
            self._named(key, 0)

        self._alive[key] = weakref.ref(module, gone)


def class_name(module: Any) -> str:
    """The name of a module's class as the user knows it: that of the wrapped module, without the prefix of FSDP2."""
    while (wrapped := _wrapped(module)) is not None:
        module = wrapped[1]
    kinds = type(module).__mro__
    if any(base.__name__ == "FSDPModule" for base in kinds[0].__bases__):
        kinds = kinds[0].__bases__[-1].__mro__
    return kinds[0].__name__


def paths(root: Any) -> Iterator[tuple[str, Any]]:
    """The path of each module in a model, without the parts of wrappers, and the module; outer modules come first.

    A wrapper and the module that it wraps have the same path. A module in two attributes comes twice.
    """
    waiting: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    while waiting:
        path, module = waiting.pop()
        yield path, module
        if id(module) in seen:
            continue
        seen.add(id(module))
        wrapped = _wrapped(module)
        inside = []
        for name, child in module._modules.items():  # noqa: SLF001 - named_modules reads it, too
            if child is not None:
                hidden = wrapped is not None and wrapped[0] == name
                inside.append((path if hidden else f"{path}.{name}" if path else name, child))
        waiting += reversed(inside)


def _wrapped(module: Any) -> tuple[str, Any] | None:
    """Name and value of the attribute that holds the module which a wrapper wraps; None for other modules."""
    children = module._modules  # noqa: SLF001
    for kind in type(module).__mro__:
        name = _WRAPPERS.get(kind.__name__)
        if name is not None and children.get(name) is not None:
            return name, children[name]
        if kind.__name__ == "Module":
            break
    inner = children.get(_BASE)
    return (_BASE, inner) if inner is not None and hasattr(module, "peft_config") else None


class ModuleCalls:
    """Notes the calls of modules: the `Handler` of ``nn.Module._wrapped_call_impl``."""

    def __init__(self, common: Common, threads: Threads, module_paths: ModulePaths, listener: ModuleListener) -> None:
        self._common = common
        self._threads = threads
        self._paths = module_paths
        self._listener = listener

    def enter(self) -> None:
        """Handle a call of a module."""
        thread = self._threads.now
        frame = sys._getframe(2)  # noqa: SLF001 - no other way to the caller's frame
        module = frame.f_locals["self"]
        modules = thread.modules
        place = self._paths.get(module)
        if place is None:
            place = self._paths.number(module, modules[-1] if modules else 0)
        if not modules:
            self._listener.outermost(thread, module, frame)
        modules.append(place)
        if place != thread.module:
            self._common.module(thread, place)

    def leave(self) -> None:
        """Handle the end of a call."""
        thread = self._threads.now
        modules = thread.modules
        if not modules:
            return  # it began before the recording
        modules.pop()
        place = modules[-1] if modules else thread.around
        if place != thread.module:
            self._common.module(thread, place)
        if not modules:
            self._listener.outermost_ended(thread)

    def resume(self) -> None:
        """Do nothing: the function is no generator."""
