"""Names for the kernels of a CUDA graph: run it on a machine with an NVIDIA GPU and PyTorch.

    python examples/torch_cuda_graph_labels.py
    thence label replay.json.gz --labels labels.json -o labelled.json.gz
    thence report labelled.json.gz --by label

The graph holds forward and backward of two layers. Its replay is one call, so the profiler sees
kernels that nobody launched; labels.json says which layer each of them was captured for.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

import thence

layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(2)).cuda()
x = torch.randn(512, 1024, device="cuda")


def step() -> None:
    """Forward and backward of everything."""
    y = x
    for i, layer in enumerate(layers):
        with thence.mark(f"layer{i}", width=1024):
            y = torch.nn.functional.gelu(layer(y))
    with thence.mark("loss"):
        loss = y.square().mean()
    loss.backward()  # belongs to the marks of its forward


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    step()  # warm up
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()

with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
profiler.export_chrome_trace("replay.json.gz")
thence.save_labels("labels.json")
print("replay.json.gz and labels.json are written")
