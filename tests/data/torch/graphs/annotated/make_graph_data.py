"""Writes graph_data_torch-2.15.pkl with ``torch.cuda.export_graph_data`` of torch 2.15.0, without a GPU.

    python make_graph_data.py graph_data_torch-2.15.pkl

torch's own `CUDAGraph.get_graph_data` runs; the driver's answers are those of the capture in graph_truth_rank0.json
(nodes, types, edges), with the kernel names and launch shapes of its replay in torch-2.12_graph_replay_rank0, mangled
as the driver returns them where block_labels.json has the mangled name.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda import _graph_annotations, graphs

HERE = Path(__file__).parent
TRUTH = json.loads((HERE.parent / "graph_truth_rank0.json").read_text())
REPLAY = HERE.parents[1] / "torch-2.12_graph_replay_rank0.json.gz"
MANGLED = {
    kernel["demangled"]: kernel["name"]
    for kernel in json.loads((HERE.parent / "block_labels.json").read_text())["kernels"]
}
LOW = 0xFFFFFFFF
FIRST_HANDLE = 0x5000
TYPES = graphs._cuda_driver.CUgraphNodeType
RAN: dict[int, dict[str, Any]] = {}
for event in json.loads(gzip.decompress(REPLAY.read_bytes()))["traceEvents"]:
    if event.get("cat") == "kernel":
        RAN[event["args"]["graph node id"] & LOW] = event
(EXECUTABLE,) = {event["args"]["graph node id"] >> 32 for event in RAN.values()}
NODES = {FIRST_HANDLE + 16 * i: node for i, node in enumerate(TRUTH["nodes"])}
HANDLES = {node["id"]: handle for handle, node in NODES.items()}


def parameters(handle: int) -> tuple[Any, Any]:
    event = RAN[NODES[handle]["id"] & LOW]
    names = "gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"
    shape = dict(zip(names, [*event["args"]["grid"], *event["args"]["block"]], strict=True))
    name = MANGLED.get(event["name"], event["name"])
    shared = event["args"]["shared memory"]
    return SUCCESS_OF_DRIVER, SimpleNamespace(**shape, sharedMemBytes=shared, func=name)


def edges(_graph: int, numEdges: int) -> tuple[Any, ...]:  # noqa: N803 - the name in cuda.bindings
    pairs = [(HANDLES[a], HANDLES[b]) for a, b in TRUTH["edges"]]
    if not numEdges:
        return (SUCCESS, None, None, None, len(pairs))
    plain = SimpleNamespace(from_port=0, to_port=0, type=0)
    return SUCCESS, [a for a, _ in pairs], [b for _, b in pairs], [plain] * len(pairs), len(pairs)


SUCCESS = graphs._cuda_runtime.cudaError_t.cudaSuccess
SUCCESS_OF_DRIVER = graphs._cuda_driver.CUresult.CUDA_SUCCESS
graphs._cuda_runtime = SimpleNamespace(
    cudaError_t=graphs._cuda_runtime.cudaError_t,
    cudaGraphGetNodes=lambda _graph, numNodes: (SUCCESS, list(NODES), len(NODES)),  # noqa: ARG005, N803
    cudaGraphNodeGetToolsId=lambda handle: (SUCCESS, NODES[handle]["id"]),
    cudaGraphGetEdges=edges,
    cudaGraphExecGetId=lambda _executable: (SUCCESS, EXECUTABLE),
)
graphs._cuda_driver = SimpleNamespace(
    CUgraphNodeType=TYPES,
    CUresult=graphs._cuda_driver.CUresult,
    cuGraphKernelNodeGetParams=parameters,
    cuFuncGetName=lambda name: (SUCCESS_OF_DRIVER, name.encode()),
)
_graph_annotations._is_tools_id_unavailable = lambda: False
_graph_annotations._get_node_type = lambda handle: TYPES(NODES[handle]["type"])


class Captured:
    """What `get_graph_data` uses of a CUDAGraph."""

    _instantiate_graph_data = None
    _caching_graph_data = False

    def raw_cuda_graph(self) -> int:
        return 1

    def raw_cuda_graph_exec(self) -> int:
        return 2

    get_graph_data = graphs.CUDAGraph.get_graph_data


assert torch.__version__.startswith("2.15.0")
torch.cuda.export_graph_data(sys.argv[1])(Captured())  # type: ignore[arg-type]
