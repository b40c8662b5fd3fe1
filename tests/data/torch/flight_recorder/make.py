"""Makes the flight recorders of this folder: torchrun --nproc-per-node 4 make.py gloo.

With two GPUs: torchrun --nproc-per-node 2 make.py nccl.

gloo: calls in groups of a 2 by 2 mesh and in "experts" (ranks 0 to 2), in a function step, three times.
nccl: the same with NCCL, and a CUDA graph of four layers that is captured and replayed under torch.profiler; the trace
of the replays is written to replay_rank<rank>.json.gz, a trace of an eager run to eager_rank<rank>.json.gz.
"""

import os
import sys
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

BACKEND = sys.argv[1]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = "cpu" if BACKEND == "gloo" else f"cuda:{RANK}"


def ones(*size, dtype=torch.float32):
    return torch.ones(*size, dtype=dtype, device=DEVICE)


def layer(group, size):
    members = dist.get_world_size(group)
    dist.all_reduce(ones(size, dtype=torch.bfloat16), group=group)
    dist.all_gather_into_tensor(
        ones(members * size, dtype=torch.bfloat16), ones(size, dtype=torch.bfloat16), group=group
    )
    dist.reduce_scatter_tensor(
        ones(size, dtype=torch.bfloat16), ones(members * size, dtype=torch.bfloat16), group=group
    )


def step(mesh, experts):
    dist.all_reduce(ones(1024))
    for number in range(4):
        layer(mesh["tp"].get_group(), 64 * (number + 1))
    dist.all_reduce(ones(96), group=mesh["dp"].get_group())
    if RANK in (0, 1, 2)[:WORLD]:
        dist.broadcast(ones(5, dtype=torch.int64), 0, group=experts)


def main():
    if DEVICE != "cpu":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(BACKEND)
    shape = (2, 2) if WORLD == 4 else (1, WORLD)
    mesh = init_device_mesh(DEVICE.partition(":")[0], shape, mesh_dim_names=("dp", "tp"))
    experts = dist.new_group([0, 1, 2][:WORLD], group_desc="experts")
    for _ in range(3):
        step(mesh, experts)
    if BACKEND == "nccl":
        profiled(mesh, experts)
    dump = c10d._dump_fr_trace if BACKEND == "gloo" else c10d._dump_nccl_trace
    Path(f"{BACKEND}_fr_trace_{RANK}").write_bytes(dump())
    dump = c10d._dump_fr_trace_json if BACKEND == "gloo" else c10d._dump_nccl_trace_json
    Path(f"{BACKEND}_fr_trace_{RANK}.json").write_bytes(dump())
    dist.barrier()
    dist.destroy_process_group()


def profiled(mesh, experts):
    from torch.profiler import profile

    with profile() as eager:
        step(mesh, experts)
        torch.cuda.synchronize()
    eager.export_chrome_trace(f"eager_rank{RANK}.json.gz")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(4):
            layer(mesh["tp"].get_group(), 64 * (number + 1))
    torch.cuda.synchronize()
    with profile() as replays:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    replays.export_chrome_trace(f"replay_rank{RANK}.json.gz")


if __name__ == "__main__":
    main()
