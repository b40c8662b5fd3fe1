"""In-kernel profiles of Pallas kernels for Mosaic GPU, recorded by JAX's own on-device profiler.

    with thence.inside.pallas(profile_space=16) as profile:
        y = f(x)                          # the first call of f: kernels are instrumented when compiled
        y = f(y)                          # every execution is recorded, on every device
    profile.save("kernel.npz")            # then: thence inside kernel.npz

The ranges are the ``jax.named_scope`` blocks inside the kernel. JAX's profiler is switched on with
its public parameters, ``plgpu.CompilerParams(profile_space=..., profile_dir=...)``. Within the
``with`` block, ``plgpu.kernel`` gets these parameters, and so does each ``pl.pallas_call`` that is
given ``plgpu.CompilerParams`` (jax before 0.11 compiles such calls to Mosaic GPU kernels). For a
kernel made in another way, pass ``compiler_params=profile.params(...)`` yourself.

JAX writes the events of a compiled kernel into a file whose name it chooses at compile time, so it
keeps the events of only one of several executions and devices. The ``with`` block therefore replaces
``ProfilerSpec.dump``, takes each buffer that JAX passes to it, one at a time, and removes the file.

A function that ``jax.jit`` compiled before the block stays as it is: its kernels are not profiled
(``jax.clear_caches()`` makes it compile again). A function compiled inside the block stays
instrumented afterwards; its buffers are then discarded. JAX does not report which device a buffer
comes from; with several devices, ``launch["device"]`` of the description states this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.errors import MissingRequirement, UsageError
from thence.inside.description import Description
from thence.inside.files import save_each
from thence.inside.launches import launch_facts, three

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from thence.inside.decoding import Decoded

_HEADER_WORDS = 3  # of JAX's traces: globaltimer, %smid, words used
_SCOPE_THREADS = {"WARP": 32, "WARPGROUP": 128}
_COUNT_WITHOUT_HEADER = (0, 8, 0)
"""The first jax version in which the word count in a trace's header excludes the header itself."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """One execution of one kernel on one device: the words of its buffer and their description."""

    words: np.ndarray[Any, np.dtype[np.uint32]]
    description: Description

    def decode(self) -> Decoded:
        """Traces, ranges and events in ns, or in cycles of an unknown clock; see `thence.inside.decoding`."""
        from thence.inside.decoding import decode  # imports Polars: not at the start of a program

        return decode(self.words, self.description)


class PallasProfile:
    """The profile that ``with thence.inside.pallas() as profile`` returns.

    Attributes:
        executions: executions of all kernels on all devices, in the order in which JAX passed
            their buffers on.
    """

    def __init__(self, compiler_params: type[Any], parameters: dict[str, Any]) -> None:
        self.executions: list[Execution] = []
        self._compiler_params = compiler_params
        self._parameters = parameters

    def params(self, compiler_params: Any = None, **others: Any) -> Any:
        """``plgpu.CompilerParams`` that switch JAX's profiler on.

        Args:
            compiler_params: the kernel's parameters; their profiler settings are kept if they have
                a ``profile_space`` already.
            others: further fields to set.
        """
        given = compiler_params if compiler_params is not None else self._compiler_params()
        if getattr(given, "profile_space", 0):
            return dataclasses.replace(given, **others)
        return dataclasses.replace(given, **self._parameters, **others)

    def decode(self) -> list[Decoded]:
        """Every execution, decoded."""
        return [execution.decode() for execution in self.executions]

    def save(self, path: str | Path) -> list[Path]:
        """Write every execution into a file: ``path`` for one, ``path-0`` ... for several.

        Raises:
            UsageError: no kernel was profiled.
        """
        if not self.executions:
            raise UsageError(
                "No kernel was profiled. Only Mosaic GPU kernels that are compiled inside the "
                "block are profiled: call jax.clear_caches() before it, and use plgpu.kernel as an attribute of its"
                " module, or give it compiler_params=profile.params()."
            )
        return save_each(path, ((execution.words, execution.description) for execution in self.executions))


@contextlib.contextmanager
def pallas(profile_space: int = 16, *, scope: str = "warpgroup", bounds_check: bool = True) -> Iterator[PallasProfile]:
    """Profile the Pallas kernels for Mosaic GPU that are compiled within the block.

    Args:
        profile_space: size of a trace in ranges. There is room for one range fewer, and JAX's own
            range "Init" takes one of these. Each range takes 16 bytes of shared memory (before
            jax 0.10.0 twice that, for twice as many ranges). After the last event, one thread
            copies the whole space: 1.7 us for 16 ranges on an H200, so give no more than the
            kernel needs.
        scope: the thread group whose first thread records: "warpgroup", or "warp" since jax 0.10.1.
        bounds_check: ranges that do not fit are left out, where jax can check this (since 0.11.1).
            Otherwise they overwrite the kernel's shared memory: give enough room.

    Raises:
        UsageError: ``profile_space`` is below 1, or another block is active.
        MissingRequirement: jax has no Mosaic GPU, or does not support an option that was given.
    """
    if profile_space < 1:
        raise UsageError(f"profile_space={profile_space}: it must have room for at least one range.")
    jax, pl, plgpu, profiler = _modules()
    parameters = _parameters(plgpu, profile_space, scope, bounds_check=bounds_check)
    profile = PallasProfile(plgpu.CompilerParams, parameters)
    taker = _Taker(profile, jax)
    with contextlib.ExitStack() as stack:
        if not _ACTIVE.acquire(blocking=False):
            raise UsageError("thence.inside.pallas() is active already: blocks cannot be nested.")
        stack.callback(_ACTIVE.release)
        stack.callback(taker.close)
        stack.enter_context(_replaced(profiler.ProfilerSpec, "dump", taker.dump))
        stack.enter_context(_replaced(jax.debug, "callback", taker.callback))
        kernel = _with_params(plgpu.kernel, profile, lambda _: True)
        call = _with_params(pl.pallas_call, profile, lambda given: isinstance(given, plgpu.CompilerParams))
        stack.enter_context(_replaced(plgpu, "kernel", kernel))
        stack.enter_context(_replaced(pl, "pallas_call", call))
        yield profile
        jax.effects_barrier()  # waits for the callbacks that are still to deliver buffers


_ACTIVE = threading.Lock()  # held while a block is active: it replaces attributes of JAX's modules


class _Taker:
    """Replaces the functions of JAX that write its profiler's output."""

    def __init__(self, profile: PallasProfile, jax: Any) -> None:
        self._profile: PallasProfile | None = profile
        self._lock = threading.Lock()
        self._callback = jax.debug.callback
        self._version = tuple(jax.__version_info__)
        self._devices = jax.local_device_count()
        self._taken: int | None = None

    def close(self) -> None:
        """Stop taking buffers. Compiled functions still call `dump` after the block."""
        with self._lock:
            self._profile = None

    def callback(self, function: Callable[..., None], *args: Any, **options: Any) -> Any:
        """Replaces ``jax.debug.callback``: JAX's dump_profile is called for one buffer at a time.

        dump_profile opens a file of the same name for every execution and gives up if the file
        exists, so with two devices at the same time one buffer would be lost.
        """
        if getattr(function, "__name__", "") != "dump_profile":
            return self._callback(function, *args, **options)

        @functools.wraps(function)
        def dump_profile(*buffers: Any) -> None:
            with self._lock:
                if self._profile is not None:
                    function(*buffers)

        return self._callback(dump_profile, *args, **options)

    @property
    def dump(self) -> Callable[..., None]:
        """A replacement for ``ProfilerSpec.dump(self, buffer, f, grid, block)``."""

        def dump(spec: Any, buffer: Any, f: Any, grid: Sequence[int], block: Sequence[int]) -> None:
            path = Path(f.name)
            path.unlink(missing_ok=True)  # so that the next execution can open it
            if self._profile is None:
                return
            # <kernel>-<ns>-trace.json; files of raw Mosaic kernels lack the kernel's name
            kernel = path.name.rsplit("-", 2)[0] if path.name.count("-") >= 2 else ""
            moments = launch_facts("taken_ns")
            launch = {"jax": ".".join(map(str, self._version)), **moments}
            if self._taken is not None and self._devices == 1:
                launch["previous_ns"] = self._taken
            self._taken = moments["taken_ns"]
            if self._devices > 1:
                launch["device"] = f"one of {self._devices}; jax does not say which"
            description = describe_mosaic(
                spec, grid=grid, block=block, kernel=kernel, version=self._version, launch=launch
            )
            words = np.array(buffer, dtype=np.uint32).reshape(-1)
            self._profile.executions.append(Execution(words, description))

        return dump


def describe_mosaic(
    spec: Any,
    *,
    grid: Sequence[int],
    block: Sequence[int],
    version: Sequence[int],
    kernel: str = "",
    launch: dict[str, Any] | None = None,
) -> Description:
    """The description of a buffer of JAX's own profiler.

    Args:
        spec: JAX's ``ProfilerSpec``, after the kernel was lowered: lowering numbers the names.
        grid: blocks of the CUDA grid, as JAX passes it to ``dump``.
        block: threads of a block.
        version: version of jax; before 0.8.0 the word count in a header includes the header's own
            three words.
        launch: further facts of the launch.
    """
    entries = int(spec.entries_per_warpgroup)
    scope = getattr(getattr(spec, "trace_scope", None), "name", "WARPGROUP")
    names = sorted(spec.interned_names, key=spec.interned_names.__getitem__)
    x, y, z = three(tuple(block), "block")
    return Description(
        names=tuple(names),
        grid=three(tuple(grid) or (1,), "grid"),
        block=(x, y, z),
        traces_per_block=x * y * z // _SCOPE_THREADS[scope],
        capacity=(entries - _HEADER_WORDS) // 2,
        kernel=kernel,
        flavour="mosaic" if tuple(version) >= _COUNT_WITHOUT_HEADER else "mosaic-2024",
        words_per_trace=entries,
        launch=launch or {},
    )


def _modules() -> tuple[Any, Any, Any, Any]:
    try:
        import jax  # type: ignore[import-not-found, unused-ignore]
        from jax.experimental import pallas as pl  # type: ignore[import-not-found, unused-ignore]
        from jax.experimental.mosaic.gpu import profiler  # type: ignore[import-not-found, unused-ignore]
        from jax.experimental.pallas import mosaic_gpu as plgpu  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingRequirement(
            f"Pallas for Mosaic GPU is not available ({error}): it needs jax 0.6 or newer, for CUDA."
        ) from error
    return jax, pl, plgpu, profiler


def _parameters(plgpu: Any, profile_space: int, scope: str, *, bounds_check: bool) -> dict[str, Any]:
    """The profiler's fields for ``plgpu.CompilerParams``, as far as this version of jax has them."""
    parameters_of_jax = inspect.signature(plgpu.CompilerParams).parameters
    if "profile_space" not in parameters_of_jax:
        raise MissingRequirement("This version of jax cannot profile Pallas kernels: use jax 0.6 or newer.")
    # JAX opens its file in this folder even after the block, when a folder of our own would be gone.
    parameters: dict[str, Any] = {"profile_space": profile_space, "profile_dir": tempfile.gettempdir()}
    if scope not in ("warp", "warpgroup"):
        raise UsageError(f"scope={scope!r}: a trace belongs to a 'warpgroup' or a 'warp'.")
    if scope == "warp":
        if "profile_trace_scope" not in parameters_of_jax:
            raise MissingRequirement("Traces of warps need jax 0.10.1 or newer.")
        parameters["profile_trace_scope"] = plgpu.TraceScope.WARP
    if bounds_check and "profile_bounds_check" in parameters_of_jax:
        parameters["profile_bounds_check"] = True
    return parameters


def _with_params(
    function: Callable[..., Any], profile: PallasProfile, wanted: Callable[[Any], bool]
) -> Callable[..., Any]:
    """``function``, called with the profile's parameters if ``wanted(compiler_params)`` is true."""

    @functools.wraps(function)
    def call(*args: Any, compiler_params: Any = None, **options: Any) -> Any:
        if wanted(compiler_params):
            compiler_params = profile.params(compiler_params)
        return function(*args, compiler_params=compiler_params, **options)

    return call


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
