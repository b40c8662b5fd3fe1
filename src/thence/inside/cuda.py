r"""In-kernel profiles of CUDA C++ kernels: CuPy RawKernel, NVRTC, nvcc, PyTorch's extensions.

    from thence.inside import cuda

    profile = cuda.Profile(source, block=256)        # source uses THENCE_KERNEL(), THENCE_RANGE("load") ...
    kernel = cupy.RawKernel(profile.source, "scale")
    launch = profile.launch(grid)                    # a buffer for this launch
    kernel((grid,), (256,), (x, y, *launch.arguments))
    profile.save("scale.npz")                        # then: thence inside scale.npz

The comment at the top of ``thence_inside.cuh`` describes how to instrument a kernel. `Profile` finds the
names in the source, computes the sizes of the buffers, and checks before a launch that they fit on the
device.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thence.errors import UsageError
from thence.inside.description import HEADER_WORDS, Description
from thence.inside.launches import Launches, arrays_of, three
from thence.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.inside.launches import Launch

HEADER = Path(__file__).with_name("thence_inside.cuh")
"""Path of the header, for compilers that take an include folder."""

SCOPES = {"block": 1, "warpgroup": 2, "warp": 3}
"""Scopes of a trace, and their numbers in the records."""

_SCOPE_THREADS = {"block": 1024, "warpgroup": 128, "warp": 32}
_STATIC_SHARED_BYTES = 48 * 1024
"""Most static shared memory that a kernel can declare; more must be dynamic (CUDA programming guide)."""

_NAMED = re.compile(r'\bTHENCE_(?:RANGE|BEGIN|END|INSTANT)\s*\(\s*"((?:[^"\\\n]|\\.)*)"\s*\)')
_OWN_STAGING = re.compile(r"\bTHENCE_KERNEL_IN\s*\(")
_MAX_NAMES = 1 << 28


def names_in(source: str) -> tuple[str, ...]:
    """Names in ``THENCE_RANGE("...")`` and the other macros, each once, in order of appearance.

    Raises:
        UsageError: a name has a backslash or a control character.
    """
    names = tuple(dict.fromkeys(_NAMED.findall(source)))
    _check_names(names)
    return names


class Profile(Launches):
    """An instrumented kernel: its source with the header, and its launches.

    Attributes:
        source: the source to compile: definitions, header, and the kernel's own source.
        names: names of ranges and instants; the index of a name is its id.
        launches: the launches, in the order in which `launch` was called.
    """

    def __init__(
        self,
        source: str,
        *,
        block: int | Sequence[int],
        scope: str = "warp",
        capacity: int = 64,
        kernel: str = "",
        names: Sequence[str] = (),
        staged: bool = True,
        shared_bytes_used: int = 0,
        overhead_cycles: float | None = None,
    ) -> None:
        """Prepare a kernel's source.

        Args:
            source: CUDA C++ source of a kernel whose last parameters are ``THENCE_PARAMETERS`` and
                whose first statement is ``THENCE_KERNEL();``.
            block: threads of a block at launch; determines the size of the shared memory.
            scope: the thread group whose first thread records: "block", "warpgroup" (128 threads)
                or "warp".
            capacity: events that fit into one trace; a range has two. Further events are only counted.
            kernel: name of the kernel, for the report.
            names: further names, of ranges in files that the source includes.
            staged: events are staged in shared memory and copied at the end of the kernel. False:
                they are written to global memory directly, for kernels that have no shared memory
                left or that record more than some dozens of events.
            shared_bytes_used: shared memory of the kernel itself, static and dynamic.
            overhead_cycles: cycles for recording one event. None: measured once for each device, if
                CuPy is installed.

        Raises:
            UsageError: a number is out of range, or a name is not allowed.
        """
        super().__init__()
        if scope not in SCOPES:
            raise UsageError(f"scope={scope!r}: a trace belongs to a {', a '.join(SCOPES)}.")
        if not 1 <= capacity <= 1 << 24:
            raise UsageError(f"capacity={capacity}: between 1 and 2**24 events fit into a trace.")
        self.names = tuple(dict.fromkeys((*names_in(source), *names)))
        _check_names(self.names)
        self._block = three(block, "block")
        self._scope, self._capacity, self._kernel = scope, capacity, kernel
        self._staged, self._shared_bytes_used = staged, shared_bytes_used
        self._own_staging = bool(_OWN_STAGING.search(source))
        self._overhead_cycles = overhead_cycles
        shape = self.describe(1)  # raises for an impossible block
        self._check_static(shape)
        self.source = f"{self.definitions}{HEADER.read_text()}\n#line 1\n{source}"

    @property
    def definitions(self) -> str:
        """The preprocessor definitions that must precede the header."""
        names = ", ".join(f'"{name}"' for name in self.names)
        threads = int(np.prod(self._block))
        defined = {
            "THENCE_NAMES": names,
            "THENCE_CAPACITY": self._capacity,
            "THENCE_SCOPE": SCOPES[self._scope],
            "THENCE_THREADS": threads,
            "THENCE_STAGING": int(self._staged),
        }
        return "".join(f"#define {k} {v}\n" for k, v in defined.items() if v != "")

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that the events of one block take; 0 where they are not staged.

        Launch a kernel that uses ``THENCE_KERNEL_IN(pointer)`` with this much more dynamic memory.
        """
        return self.describe(1).shared_bytes if self._staged else 0

    def describe(self, grid: int | Sequence[int], device: int = 0) -> Description:
        """The description of the buffer of a launch with ``grid``.

        Raises:
            UsageError: the grid is larger than CUDA allows, or a dimension is below 1.
        """
        threads = int(np.prod(self._block))
        traces = 1 if self._scope == "block" else -(-threads // _SCOPE_THREADS[self._scope])
        return Description(
            names=self.names,
            grid=three(grid, "grid"),
            block=self._block,
            traces_per_block=traces,
            capacity=self._capacity,
            kernel=self._kernel,
            device=device,
            overhead_cycles=self._overhead_cycles,
        )

    def launch(self, grid: int | Sequence[int], arrays: str = "cupy") -> Launch:
        """A zeroed buffer on the current device for one launch with ``grid``.

        If the kernel is launched with more blocks than ``grid``, the further blocks record nothing.

        Args:
            grid: blocks, one to three dimensions.
            arrays: "cupy" or "torch": the library that allocates the buffer, on its current device.

        Raises:
            UsageError: the events do not fit into the device's shared or global memory.
            MissingRequirement: the library is not installed, or sees no GPU.
        """
        library = arrays_of(arrays)
        description = self.describe(grid, library.device())
        description.check(library.limits(), staged=self._staged, shared_bytes_used=self._shared_bytes_used)
        buffer = library.zeros(description.words)
        arguments = (buffer, library.scalar(description.blocks))
        overhead = functools.partial(_measured_overhead, staged=self._staged)
        return self._launched(library, description, arguments, overhead)

    def _check_static(self, shape: Description) -> None:
        if not self._staged or self._own_staging or shape.shared_bytes <= _STATIC_SHARED_BYTES:
            return
        fits = _STATIC_SHARED_BYTES // (shape.shared_bytes // self._capacity)
        raise UsageError(
            f"{self._capacity:,} events for each of {shape.traces_per_block} traces take"
            f" {format_bytes(shape.shared_bytes)}; THENCE_KERNEL() declares at most"
            f" {format_bytes(_STATIC_SHARED_BYTES)}. A capacity of {fits:,} fits, or give dynamic"
            " shared memory with THENCE_KERNEL_IN(pointer), or pass staged=False."
        )


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not name or '"' in name or "\\" in name or not name.isprintable():
            raise UsageError(
                f"{name!r} is not a valid range name: use printable characters without quotes or backslashes."
            )
    if len(names) >= _MAX_NAMES:
        raise UsageError(f"{len(names):,} names: fewer than {_MAX_NAMES:,} fit into a record.")


_CALIBRATION = """
extern "C" __global__ void thence_calibration(THENCE_PARAMETERS) {
    THENCE_KERNEL();
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
        THENCE_BEGIN("event");
        THENCE_END("event");
    }
}
"""


def event_overhead(repeats: int = 5, *, staged: bool = True) -> float:
    """Cycles that recording one event takes on the current device, measured with CuPy.

    This is the median distance of two events without work between them, in a loop. Only the last of
    ``repeats`` launches counts, when the kernel's instructions are in the instruction cache.

    Args:
        repeats: number of launches.
        staged: whether events go to shared memory, else to global memory.

    Raises:
        MissingRequirement: CuPy is not installed, or sees no GPU.
    """
    import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]

    profile = Profile(_CALIBRATION, block=32, overhead_cycles=0.0, staged=staged)
    kernel = cupy.RawKernel(profile.source, "thence_calibration")
    for _ in range(repeats):
        launch = profile.launch(1)
        kernel((1,), (32,), launch.arguments)
    clocks = launch.words()[HEADER_WORDS + 1 :: 2]
    return float(np.median(clocks[1::2] - clocks[::2]))  # correct across a wrap: uint32 subtraction


@functools.cache
def _overhead_on(device: int, *, staged: bool) -> float:
    import cupy

    with cupy.cuda.Device(device):
        return event_overhead(staged=staged)


def _measured_overhead(device: int, *, staged: bool) -> float | None:
    """The overhead on a device, or None where CuPy, which measures it, is not installed."""
    return _overhead_on(device, staged=staged) if importlib.util.find_spec("cupy") else None
