"""Makes the files of this folder, with two GPUs and NCCL's Inspector plugin: torchrun --nproc-per-node 2 make.py OUT.

NCCL_PROFILER_PLUGIN names the plugin, built from ext-profiler/inspector of NCCL's sources. It writes one file for each
process to OUT/inspector. OUT/eager_rank<rank>.json.gz and OUT/replay_rank<rank>.json.gz are traces of torch.profiler:
collectives of several kinds and sizes in two groups, one by one and ten in a row, and replays of a CUDA graph of them.
OUT/made_rank<rank>.json lists the calls that the eager run and one replay make: kind, group, bytes as NCCL counts them.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import profile

OUT = Path(sys.argv[1])
os.environ |= {
    "NCCL_INSPECTOR_ENABLE": "1",
    "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "100",
    "NCCL_INSPECTOR_DUMP_DIR": str(OUT / "inspector"),
}
os.environ.setdefault("NCCL_INSPECTOR_DUMP_VERBOSE", "1")
RANK = int(os.environ["RANK"])
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
CALLS = [(KINDS[n % 5], "pair" if n % 3 == 2 else "world", 4096 << (n % 7), n % 2 == 0) for n in range(20)]
"""Kind, group, elements of a rank, whether these are bfloat16 (else float32)."""
BYTES = [{"kind": k, "group": g, "bytes": n * (2 if half else 4)} for k, g, n, half in CALLS]


def tensors():
    made = []
    for _, _, count, half in CALLS:
        options = {"dtype": torch.bfloat16 if half else torch.float32, "device": f"cuda:{RANK}"}
        made.append([torch.ones(count, **options), torch.ones(2 * count, **options)])
    return made


def call(number, one, two, groups):
    kind, name, _, _ = CALLS[number]
    group = groups[name]
    if kind == "all_reduce":
        dist.all_reduce(one, group=group)
    elif kind == "all_gather":
        dist.all_gather_into_tensor(two, one, group=group)
    elif kind == "reduce_scatter":
        dist.reduce_scatter_tensor(one, two, group=group)
    elif kind == "broadcast":
        dist.broadcast(one, 0, group=group)
    else:
        dist.reduce(one, 0, group=group)


def run(data, groups, pause):
    for number, (one, two) in enumerate(data):
        call(number, one, two, groups)
        if pause:
            torch.cuda.synchronize()
            time.sleep(0.004)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", device_id=torch.device(f"cuda:{RANK}"))
    groups = {"world": dist.group.WORLD, "pair": dist.new_group([0, 1], group_desc="pair")}
    data = tensors()
    for _ in range(2):
        run(data, groups, pause=True)
    dist.barrier()
    with profile() as eager:
        run(data, groups, pause=True)
        for number in range(10):
            call(number, *data[number], groups)
        torch.cuda.synchronize()
    eager.export_chrome_trace(str(OUT / f"eager_rank{RANK}.json.gz"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(6):
            call(number, *data[number], groups)
            data[19][0].add_(1)
    torch.cuda.synchronize()
    dist.barrier()
    with profile() as replays:
        for _ in range(4):
            graph.replay()
            torch.cuda.synchronize()
            time.sleep(0.01)
    replays.export_chrome_trace(str(OUT / f"replay_rank{RANK}.json.gz"))
    made = {"eager": BYTES + BYTES[:10], "replay": BYTES[:6], "pid": os.getpid()}
    (OUT / f"made_rank{RANK}.json").write_text(json.dumps(made))
    time.sleep(0.1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
