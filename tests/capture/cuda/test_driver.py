"""libcuda through ctypes, with a library made of Python functions in its place."""

from __future__ import annotations

import ctypes

import pytest

from thence.capture.cuda.driver import Driver, KernelNode
from thence.errors import MissingRequirement


class Library:
    """Some functions of libcuda; results go where the arguments point, as in C."""

    def __init__(self) -> None:
        self.names = [ctypes.c_char_p(b"_Z1kv")]
        self.cuStreamGetCaptureInfo_v3 = self.capture_info

    @staticmethod
    def capture_info(stream, status, _number, graph, *rest) -> int:
        assert rest == (None, None, None)
        if stream.value == 9:
            return 900  # a capture that was invalidated
        status._obj.value = 1 if stream.value == 5 else 0
        graph._obj.value = 0x1234
        return 0

    @staticmethod
    def cuGraphGetNodes(graph, handles, count) -> int:  # noqa: N802
        if graph.value != 0x1234:
            return 400
        if handles is None:
            count._obj.value = 2
        else:
            handles[0], handles[1] = 10, 11
        return 0

    @staticmethod
    def cuGraphGetEdges_v2(_graph, first, second, data, count) -> int:  # noqa: N802
        if first is None:
            count._obj.value = 1
        else:
            assert ctypes.sizeof(data) == 8
            first[0], second[0] = 10, 11
        return 0

    @staticmethod
    def cuGraphNodeGetType(node, kind) -> int:  # noqa: N802
        kind._obj.value = {10: 0, 11: 13, 12: 99}[node.value]
        return 0

    @staticmethod
    def cuGraphKernelNodeGetParams_v2(_node, found) -> int:  # noqa: N802
        parameters = found._obj
        assert ctypes.sizeof(parameters) == 72  # as cuda.h has it
        parameters.function = 77
        for i in range(3):
            parameters.grid[i], parameters.block[i] = i + 1, i + 4
        parameters.shared_memory = 256
        return 0

    def cuFuncGetName(self, name, function) -> int:  # noqa: N802
        if function.value != 77:
            return 400
        name._obj.value = self.names[0].value
        return 0

    @staticmethod
    def cuGetErrorString(_code, text) -> int:  # noqa: N802
        text._obj.value = b"invalid resource handle"
        return 0


def test_a_captured_stream_leads_to_its_graph() -> None:
    driver = Driver(Library())
    assert driver.captured_graph(5) == 0x1234
    assert driver.captured_graph(6) is None
    assert driver.captured_graph(9) is None


def test_nodes_edges_types_and_kernels() -> None:
    driver = Driver(Library())
    assert driver.node_count(0x1234) == 2
    assert driver.nodes(0x1234) == [10, 11]
    assert driver.edges(0x1234) == [(10, 11)]
    assert [driver.node_type(node) for node in (10, 11, 12)] == ["kernel", "conditional", "type 99"]
    assert driver.kernel(10) == KernelNode("_Z1kv", (1, 2, 3), (4, 5, 6), 256)


def test_a_refusal_names_the_call_and_what_it_means() -> None:
    with pytest.raises(MissingRequirement, match=r"cuGraphGetNodes.*400.*invalid resource handle"):
        Driver(Library()).node_count(1)


def test_an_older_driver() -> None:
    library = Library()
    del library.cuStreamGetCaptureInfo_v3
    with pytest.raises(MissingRequirement, match=r"older than CUDA 11\.3"):
        Driver(library).captured_graph(5)
    library.cuStreamGetCaptureInfo_v2 = lambda *a: Library.capture_info(*a, None)  # type: ignore[attr-defined]
    assert Driver(library).captured_graph(5) == 0x1234
    with pytest.raises(MissingRequirement, match="no cuGraphChildGraphNodeGetGraph"):
        Driver(library).child_graph(1)


def test_a_name_that_the_driver_cannot_tell_is_none() -> None:
    class Nameless(Library):
        cuFuncGetName = None  # type: ignore[assignment]  # noqa: N815

        def __getattribute__(self, name: str) -> object:
            if name == "cuFuncGetName":
                raise AttributeError
            return super().__getattribute__(name)

    assert Driver(Nameless()).kernel(10).name is None
