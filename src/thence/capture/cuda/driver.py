"""Queries of libcuda through ctypes: what labelling a CUDA graph needs to know during its capture.

Signatures, codes and layouts are those of ``cuda.h``. For some functions CUDA 12.3 and 13 have a newer
version, and the driver exports both; the newer version is used if the driver has it.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

from thence.capture.cuda.cuda_events import call, load_driver
from thence.errors import MissingRequirement

_ACTIVE = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE"""

_TYPES = (
    "kernel",
    "memcpy",
    "memset",
    "host",
    "graph",
    "empty",
    "event_wait",
    "event_record",
    "semaphore_signal",
    "semaphore_wait",
    "mem_alloc",
    "mem_free",
    "batch_mem_op",
    "conditional",
)
"""Names of the values of CUgraphNodeType, from 0 on."""


@dataclass(frozen=True, slots=True)
class KernelNode:
    """The kernel that a kernel node launches.

    Attributes:
        name: mangled name of the function; None if the driver does not report it (before CUDA 12.3).
        grid: blocks in x, y, z.
        block: threads in x, y, z.
        shared_memory: dynamic shared memory per block, bytes.
    """

    name: str | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory: int


class GraphDriver(Protocol):
    """Queries about graphs during capture; handles are integers."""

    def captured_graph(self, stream: int) -> int | None:
        """The CUgraph into which a stream is captured; None while the stream is not being captured."""

    def node_count(self, graph: int) -> int:
        """Number of nodes of a graph."""

    def nodes(self, graph: int) -> list[int]:
        """The nodes of a graph."""

    def edges(self, graph: int) -> list[tuple[int, int]]:
        """The edges of a graph: a node, and a node that depends on it."""

    def node_type(self, node: int) -> str:
        """Kind of node: kernel, memcpy, memset, host, graph, ..."""

    def kernel(self, node: int) -> KernelNode:
        """The kernel that a kernel node launches."""

    def child_graph(self, node: int) -> int:
        """The graph inside a node of type graph."""


class _KernelParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_memory", c_uint),
        ("parameters", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class Driver:
    """The CUDA driver of this process; every call that fails raises `MissingRequirement`."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._names: dict[int, str | None] = {}
        if hasattr(library, "cuStreamGetCaptureInfo_v3"):  # with edge data: CUDA 12.3
            self._info, self._beyond_graph = library.cuStreamGetCaptureInfo_v3, 3
        else:
            self._info = getattr(library, "cuStreamGetCaptureInfo_v2", None)  # CUDA 11.3
            self._beyond_graph = 2
        # Called for each mark or node of a capture, so looked up once.
        self._count = getattr(library, "cuGraphGetNodes", None)
        self._type = getattr(library, "cuGraphNodeGetType", None)
        self._kernel = getattr(library, "cuGraphKernelNodeGetParams_v2", None)  # CUDA 12.0

    def captured_graph(self, stream: int) -> int | None:
        """The CUgraph into which a stream is captured; None while the stream is not being captured."""
        if self._info is None:
            raise MissingRequirement("the NVIDIA driver is older than CUDA 11.3: update it")
        status, number, graph = c_int(), c_uint64(), c_void_p()
        rest = (None,) * self._beyond_graph
        if self._info(c_void_p(stream), byref(status), byref(number), byref(graph), *rest):
            return None  # no capture, or one that is already invalid
        return graph.value if status.value == _ACTIVE else None

    def node_count(self, graph: int) -> int:
        """Number of nodes of a graph."""
        count = c_size_t()
        if self._count is None or self._count(c_void_p(graph), None, byref(count)):
            call(self._library, "cuGraphGetNodes", c_void_p(graph), None, byref(count))
        return count.value

    def nodes(self, graph: int) -> list[int]:
        """The nodes of a graph."""
        count = c_size_t(self.node_count(graph))
        handles = (c_void_p * count.value)()
        if count.value:
            call(self._library, "cuGraphGetNodes", c_void_p(graph), handles, byref(count))
        return [handle or 0 for handle in handles]

    def edges(self, graph: int) -> list[tuple[int, int]]:
        """The edges of a graph: a node, and a node that depends on it."""
        newer = hasattr(self._library, "cuGraphGetEdges_v2")
        name = "cuGraphGetEdges_v2" if newer else "cuGraphGetEdges"
        count = c_size_t()
        nothing = (None,) * (3 if newer else 2)
        call(self._library, name, c_void_p(graph), *nothing, byref(count))
        if not count.value:
            return []
        # The older function fails for graphs with programmatic edges. The edge data, 8 bytes each, is not kept.
        arrays: list[Any] = [(c_void_p * count.value)(), (c_void_p * count.value)()]
        data = [(c_uint64 * count.value)()] if newer else []
        call(self._library, name, c_void_p(graph), *arrays, *data, byref(count))
        return [(a or 0, b or 0) for a, b in zip(*arrays, strict=True)]

    def node_type(self, node: int) -> str:
        """Kind of node: kernel, memcpy, memset, host, graph, ..."""
        kind = c_int()
        if self._type is None or self._type(c_void_p(node), byref(kind)):
            call(self._library, "cuGraphNodeGetType", c_void_p(node), byref(kind))
        return _TYPES[kind.value] if 0 <= kind.value < len(_TYPES) else f"type {kind.value}"

    def kernel(self, node: int) -> KernelNode:
        """The kernel that a kernel node launches."""
        parameters = _KernelParameters()
        if self._kernel is None or self._kernel(c_void_p(node), byref(parameters)):
            call(self._library, "cuGraphKernelNodeGetParams_v2", c_void_p(node), byref(parameters))
        gx, gy, gz = parameters.grid
        bx, by, bz = parameters.block
        name = self._name(parameters.function, parameters.kernel)
        return KernelNode(name, (gx, gy, gz), (bx, by, bz), parameters.shared_memory)

    def child_graph(self, node: int) -> int:
        """The graph inside a node of type graph."""
        graph = c_void_p()
        call(self._library, "cuGraphChildGraphNodeGetGraph", c_void_p(node), byref(graph))
        return graph.value or 0

    def _name(self, function: int | None, kernel: int | None) -> str | None:
        handle = function or kernel or 0
        if handle not in self._names:
            getter = "cuFuncGetName" if function else "cuKernelGetName"  # CUDA 12.3
            name = c_char_p()
            failed = not hasattr(self._library, getter) or getattr(self._library, getter)(byref(name), c_void_p(handle))
            text = None if failed or not name.value else name.value.decode(errors="replace")
            self._names[handle] = text
        return self._names[handle]


@functools.cache
def load() -> Driver:
    """The CUDA driver of this process.

    Raises:
        MissingRequirement: it cannot be loaded.
    """
    return Driver(load_driver())
