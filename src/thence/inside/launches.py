"""Launches of instrumented kernels: the buffer of each launch on its device, and its description.

Each launch gets a zeroed buffer of its own on the current device of CuPy or PyTorch, so that events of
different launches and devices do not mix. Only reading the events waits for the device and copies the
buffer to the host.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from thence.errors import MissingRequirement, UsageError
from thence.inside.description import Limits
from thence.inside.files import save, save_each

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thence.inside.decoding import Decoded
    from thence.inside.description import Description

Triple = tuple[int, int, int]


class Arrays(Protocol):
    """A library that owns device memory."""

    def zeros(self, words: int) -> Any:
        """A zeroed array of ``words`` 32-bit words on the current device."""

    def words(self, array: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The array's words on the host; waits for the work that was queued on the device before."""

    def limits(self) -> Limits:
        """Limits of the current device."""

    def device(self) -> int:
        """Index of the current device."""

    def scalar(self, value: int) -> Any:
        """``value`` as a kernel argument of 32 bits."""


class _CuPy:
    def __init__(self) -> None:
        try:
            import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError as error:
            raise MissingRequirement(
                "CuPy is not installed: pip install cupy-cuda13x, or pass arrays='torch'."
            ) from error
        self._cupy: Any = cupy

    def zeros(self, words: int) -> Any:
        return self._cupy.zeros(words, dtype=np.uint32)

    def words(self, array: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
        with array.device:
            self._cupy.cuda.get_current_stream().synchronize()
            array.device.synchronize()  # the kernel may have run on another stream
            return np.asarray(array.get(), dtype=np.uint32)

    def limits(self) -> Limits:
        attributes = self._cupy.cuda.Device().attributes
        free, _ = self._cupy.cuda.runtime.memGetInfo()
        return Limits(
            shared_memory_bytes=int(attributes["MaxSharedMemoryPerBlockOptin"]),
            global_memory_bytes=int(free),
            threads_per_block=int(attributes["MaxThreadsPerBlock"]),
        )

    def device(self) -> int:
        return int(self._cupy.cuda.Device().id)

    def scalar(self, value: int) -> Any:
        return np.uint32(value)


class _Torch:
    def __init__(self) -> None:
        try:
            import torch  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise MissingRequirement("PyTorch is not installed: pip install torch, or pass arrays='cupy'.") from error
        if not torch.cuda.is_available():
            raise MissingRequirement("PyTorch sees no GPU: torch.cuda.is_available() is false.")
        self._torch: Any = torch

    def zeros(self, words: int) -> Any:
        return self._torch.zeros(words, dtype=self._torch.int32, device="cuda")

    def words(self, array: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
        self._torch.cuda.synchronize(array.device)
        host: np.ndarray[Any, np.dtype[np.int32]] = array.cpu().numpy()
        return host.view(np.uint32)

    def limits(self) -> Limits:
        properties = self._torch.cuda.get_device_properties(self._torch.cuda.current_device())
        free, _ = self._torch.cuda.mem_get_info()
        # Older PyTorch lacks the opt-in limit; then use 48 KiB, which every device since 2010 has.
        shared = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
        return Limits(shared_memory_bytes=int(shared), global_memory_bytes=int(free))

    def device(self) -> int:
        return int(self._torch.cuda.current_device())

    def scalar(self, value: int) -> Any:
        return value


_LIBRARIES: dict[str, Callable[[], Arrays]] = {"cupy": _CuPy, "torch": _Torch}


def arrays_of(library: str) -> Arrays:
    """Access to device memory through ``"cupy"`` or ``"torch"``.

    Raises:
        UsageError: ``library`` is another name.
        MissingRequirement: the library is not installed, or sees no GPU.
    """
    if library not in _LIBRARIES:
        libraries = " or ".join(map(repr, _LIBRARIES))
        raise UsageError(f"arrays={library!r}: device memory comes from {libraries}.")
    return _LIBRARIES[library]()


class Launch:
    """One launch: its buffer on the device, and the events in the buffer afterwards.

    Create it right before the kernel is launched: the time of creation locates the launch in a trace
    of the program.

    Attributes:
        arguments: arguments to pass to the kernel after its own.
        buffer: the device array, of 32-bit words; None once the words are on the host.
    """

    def __init__(
        self,
        arrays: Arrays,
        description: Description,
        arguments: tuple[Any, ...],
        overhead: Callable[[int], float | None],
        before: Launch | None = None,
    ) -> None:
        self.arguments = arguments
        self.buffer: Any = arguments[0]
        self._arrays = arrays
        self._described = description
        self._facts = launch_facts("host_ns")
        if before is not None:
            before._facts["next_ns"] = self._facts["host_ns"]  # noqa: SLF001 - of this class
        self._overhead = overhead
        self._words: np.ndarray[Any, np.dtype[np.uint32]] | None = None

    @property
    def description(self) -> Description:
        """Layout, names and launch. The first access measures ``overhead_cycles`` if it is not given."""
        if self._described.overhead_cycles is None:
            self._described = dataclasses.replace(
                self._described, overhead_cycles=self._overhead(self._described.device)
            )
        return dataclasses.replace(self._described, launch={**self._described.launch, **self._facts})

    def words(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The buffer as uint32 words on the host. The first call waits for the device."""
        if self._words is None:
            # Triton's buffers end in a spare record, to which blocks beyond the grid write.
            self._words = self._arrays.words(self.buffer)[: self._described.words]
            self._facts |= launch_facts("taken_ns")
            self.buffer = None
            self.arguments = ()
        return self._words

    def decode(self) -> Decoded:
        """Traces, ranges and events in nanoseconds; see `thence.inside.decoding`."""
        from thence.inside.decoding import decode  # imports Polars: not at the start of a program

        return decode(self.words(), self.description)

    def save(self, path: str | Path) -> Path:
        """Write buffer and description into one .npz that ``thence inside`` reads."""
        words = self.words()
        save(path, words, self.description)
        return Path(path)


class Launches:
    """The launches of one instrumented kernel.

    Attributes:
        launches: the launches, in the order in which `launch` was called.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._last: Launch | None = None

    def save(self, path: str | Path) -> list[Path]:
        """Write every launch into a file: ``path`` for one, ``path-0`` ... for several.

        Raises:
            UsageError: nothing was launched.
        """
        if not self.launches:
            raise UsageError("Nothing was launched: call launch() and pass its arguments to the kernel.")
        return save_each(path, ((launch.words(), launch.description) for launch in self.launches))

    def _launched(
        self,
        arrays: Arrays,
        description: Description,
        arguments: tuple[Any, ...],
        overhead: Callable[[int], float | None],
    ) -> Launch:
        """A new launch; its host time is stored in the previous launch as ``next_ns``."""
        launch = Launch(arrays, description, arguments, overhead, self._last)
        self._last = launch
        self.launches.append(launch)
        return launch


def launch_facts(moment: str) -> dict[str, Any]:
    """Facts that identify a launch among the launches of its kernel in a trace recorded at the same time.

    Args:
        moment: key for the current time: "host_ns" before the launch, "taken_ns" after it.

    Returns:
        The current Unix time in ns (CLOCK_REALTIME, like CUPTI's times) under ``moment``, and the
        process id under "pid".
    """
    return {moment: time.time_ns(), "pid": os.getpid()}


def three(dimensions: int | Sequence[int], what: str) -> Triple:
    """One to three dimensions, filled up to three with 1.

    Raises:
        UsageError: there are none or more than three dimensions, or one is below 1.
    """
    given = (dimensions,) if isinstance(dimensions, int) else tuple(dimensions)
    if not 1 <= len(given) <= 3 or any(n < 1 for n in given):
        raise UsageError(f"{what}={dimensions!r}: one to three integers of at least 1 are expected.")
    x, y, z = (*(int(n) for n in given), 1, 1)[:3]
    return (x, y, z)
