"""Programs of several ranks that nobody annotated, recorded by jobs.py: one of them as a rank of torchrun.

    torchrun --nproc-per-node 2 tests/gpu/job_programs.py NAME --out FOLDER
    torchrun --nproc-per-node 2 tests/gpu/job_programs.py --reference NAME... --out FOLDER

The first runs one program and writes FOLDER/NAME.rankR.json: time of a step, and what is true of the program. The
second runs several without thence: each plain, for the time of a step, and each under torch.profiler, whose
collectives it counts (FOLDER/NAME.referenceR.json). With ``--device cpu`` all of it runs small, over Gloo.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import documented_parser

if __name__ == "__main__":
    OPTIONS = documented_parser(__doc__)
    OPTIONS.add_argument("names", nargs="+")
    OPTIONS.add_argument("--out", type=Path, required=True)
    OPTIONS.add_argument("--device", default="cuda")
    OPTIONS.add_argument("--reference", action="store_true")
    GIVEN = OPTIONS.parse_args()

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from job_faults import FAULTS, FAULTY_STEPS, faulty
from job_turns import Turns
from small_llama import WORDS, Block, Llama

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, SETTLING = 15, 5
"""Steps of a program, and those of them that are not timed."""
LAYERS = 4
EXPERT_LAYERS = 3
MICROBATCHES = 8


@dataclass(frozen=True)
class Place:
    """Which rank this process is, and on what.

    Attributes:
        small: whether sizes are such that a CPU is done at once.
    """

    rank: int
    ranks: int
    device: torch.device
    small: bool

    def model(self, layers: int = LAYERS) -> Llama:
        """The Llama that needs no package but torch."""
        torch.manual_seed(0)
        sizes = (64, 4, 96) if self.small else (1024, 16, 2816)
        return Llama(layers, *sizes).to(self.device, torch.bfloat16)

    def tokens(self, batch: int = 8, length: int = 512) -> torch.Tensor:
        """Words of one batch, others on each rank."""
        torch.manual_seed(self.rank)
        shape = (2, 16) if self.small else (batch, length)
        return torch.randint(0, WORDS, shape).to(self.device)

    def mesh(self, *shape: int, names: tuple[str, ...]) -> Any:
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)


@dataclass(frozen=True)
class Program:
    """One training program.

    Attributes:
        step: trains once; its argument is the number of the step.
        truth: what is known of it without measuring.
    """

    step: Callable[[int], object]
    truth: dict[str, Any] = field(default_factory=dict)


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(words).view(-1, WORDS).float(), words.view(-1))


def hugging_face(at: Place) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64 if at.small else 1024,
        intermediate_size=96 if at.small else 2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=WORDS,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).to(at.device, torch.bfloat16)


def sharded(at: Place, mesh: Any) -> Program:
    """A Llama of Hugging Face under FSDP2, every layer a unit."""
    from torch.distributed.fsdp import fully_shard

    model = hugging_face(at)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(_number: int) -> None:
        ids = at.tokens()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


def fsdp2(at: Place) -> Program:
    return sharded(at, at.mesh(at.ranks, names=("shard",)))


def hsdp(at: Place) -> Program:
    """Two replicas of shards on half of the ranks each; of two ranks, replicas alone."""
    return sharded(at, at.mesh(2, at.ranks // 2, names=("replicate", "shard")))


def ddp(at: Place) -> Program:
    model = nn.parallel.DistributedDataParallel(at.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(_number: int) -> None:
        loss = loss_of(model, at.tokens())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


def tensor_parallel(at: Place) -> Program:
    """Tensor parallel with sequence parallel: between the layers each rank has a part of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = at.mesh(at.ranks, names=("tp",))
    model = at.model()
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True)
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    norm = SequenceParallel(use_local_output=True)
    plan: dict[str, Any] = {
        "input_norm": norm,
        "post_norm": norm,
        "self_attn": whole,
        "mlp": whole,
        **{f"self_attn.{name}_proj": columns for name in ("q", "k", "v")},
        **{f"mlp.{name}_proj": columns for name in ("gate", "up")},
        "self_attn.o_proj": rows,
        "mlp.down_proj": rows,
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    ends: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(0)
    ids = torch.randint(0, WORDS, (2, 16) if at.small else (8, 512)).to(at.device)

    def step(_number: int) -> None:
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


class Stage(nn.Module):
    """The same work on every stage, enough of it that the GPU and not the host decides how long it takes."""

    def __init__(self, at: Place) -> None:
        super().__init__()
        sizes = (64, 4, 96) if at.small else (2048, 16, 5632)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(1 if at.small else 2))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def pipeline(at: Place, schedule_of: Any) -> Program:
    """A stage on every rank."""
    from torch.distributed.pipelining import PipelineStage

    torch.manual_seed(0)
    module = Stage(at).to(at.device, torch.bfloat16)
    stage = PipelineStage(module, at.rank, at.ranks, at.device)
    schedule = schedule_of(stage, MICROBATCHES, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    shape = (MICROBATCHES, 16, 64) if at.small else (8 * MICROBATCHES, 1024, 2048)
    x = torch.randn(shape, device=at.device, dtype=torch.bfloat16)

    def step(_number: int) -> None:
        if at.rank == 0:
            schedule.step(x)
        elif at.rank == at.ranks - 1:
            schedule.step(target=x, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    waits = at.ranks - 1
    neighbours = (at.rank > 0) + (at.rank < at.ranks - 1)
    truth = {
        "stages": at.ranks,
        "microbatches": MICROBATCHES,
        "bubble_share": waits / (MICROBATCHES + waits),
        # Of each neighbour: activations of every microbatch one way, gradients the other way.
        "messages_per_step": 2 * MICROBATCHES * neighbours,
    }
    return Program(step, truth)


def pipeline_gpipe(at: Place) -> Program:
    from torch.distributed.pipelining import ScheduleGPipe

    return pipeline(at, ScheduleGPipe)


def pipeline_1f1b(at: Place) -> Program:
    from torch.distributed.pipelining import Schedule1F1B

    return pipeline(at, Schedule1F1B)


class Exchange(torch.autograd.Function):
    """Tokens go to the ranks of their experts; in the backward pass gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.splits = (sent, received)
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        sent, received = ctx.splits
        out = gradients[0].new_empty(sum(sent), gradients[0].shape[1])
        dist.all_to_all_single(out, gradients[0].contiguous(), sent, received)
        return out, None, None


class Experts(nn.Module):
    """A layer with one expert on every rank; each token goes to one of them."""

    def __init__(self, ranks: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, ranks, bias=False)
        self.expert = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort()
        counts = torch.bincount(chosen, minlength=self.router.out_features)
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts)
        sent, received = counts.tolist(), others.tolist()
        done = self.expert(Exchange.apply(x[order], sent, received))
        back = Exchange.apply(done, received, sent)
        return x + weight[:, None] * torch.zeros_like(x).index_copy(0, order, back)


def mixture_of_experts(at: Place) -> Program:
    """Experts by rank; routers are the same everywhere, so their gradients are summed."""
    torch.manual_seed(0)
    hidden, tokens = (32, 64) if at.small else (1024, 8192)
    layers = nn.Sequential(*(Experts(at.ranks, hidden) for _ in range(EXPERT_LAYERS)))
    layers.to(at.device, torch.bfloat16)
    shared = [layer.router.weight for layer in layers if isinstance(layer, Experts)]
    # Routers that learn would send others to each expert in every step, and no two runs move the same.
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.0)
    torch.manual_seed(at.rank)
    x = torch.randn(tokens, hidden, device=at.device, dtype=torch.bfloat16)

    def step(_number: int) -> None:
        layers(x).square().mean().backward()
        for weight in shared:
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()

    # Counts, tokens there and back, and gradients of both ways, but for those of the first layer's input.
    exchanges = 5 * EXPERT_LAYERS - 1
    per_step = {"all_to_all": exchanges, "all_reduce": EXPERT_LAYERS}
    return Program(step, {"collectives_per_step": per_step})


PROGRAMS: dict[str, Callable[[Place], Program]] = {
    one.__name__: one
    for one in (*(fsdp2, ddp, tensor_parallel, pipeline_gpipe, mixture_of_experts, hsdp, pipeline_1f1b),)
}


def made(name: str, at: Place) -> Program:
    """A program by its name."""
    if name in FAULTS:
        step, truth = faulty(name, at.rank, at.ranks, at.device, at.model, 16 if at.small else 1024)
        return Program(step, truth)
    return PROGRAMS[name](at)


def run(name: str, at: Place) -> dict[str, Any]:
    """Run a program to its end: its truth, and ms of a step."""
    program = made(name, at)
    steps = FAULTY_STEPS if name in FAULTS else STEPS
    begin = 0.0
    for number in range(steps):
        if number == SETTLING:
            settle(at)
            begin = time.perf_counter()
        program.step(number)
    settle(at)
    took = (time.perf_counter() - begin) / (steps - SETTLING) * 1e3
    facts = {"program": name, "rank": at.rank, "ranks": at.ranks, "steps": steps}
    return {**facts, "step_ms": round(took, 4), **program.truth}


def settle(at: Place) -> None:
    if at.device.type == "cuda":
        torch.cuda.synchronize()


def profiled(name: str, at: Place) -> dict[str, Any]:
    """Run a program under torch.profiler: its collectives, as the profiler describes them.

    With TEARDOWN_CUPTI=1 every second profile of a process holds no kernels (torch 2.11), so that it is not set.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if at.device.type == "cuda" else []
    with profile(activities=activities) as found:
        facts = run(name, at)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return {"profiled_step_ms": facts["step_ms"], **described(events)}


DESCRIBED = (*("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size"), "Process Group Ranks")
"""What torch.profiler says of a collective, and is compared."""


def described(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The collectives of a profile: how often kernels moved what; without a GPU, how often Gloo was called."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    moved: Counter[str] = Counter()
    for event in kernels:
        said = event.get("args", {})
        if "Collective name" in said:
            facts = [said.get(key) for key in DESCRIBED]
            # torch 2.11 calls even exchanges so, too.
            if facts[0] == "all_to_allv" and said.get("In split size") == "[]":
                facts[0] = "all_to_all"
            moved[json.dumps(facts)] += 1
    return {
        "kernels": len(kernels),
        "nccl_kernels": sum("nccl" in event["name"].lower() for event in kernels),
        "gloo": Counter(event["name"] for event in events if "gloo:" in event.get("name", "")),
        "collectives": [[*json.loads(key), count] for key, count in sorted(moved.items())],
    }


def references(names: list[str], at: Place, out: Path) -> None:
    """All programs plain, then all under torch.profiler, which may leave a process slower."""
    plain: dict[str, dict[str, Any]] = {}
    for pass_of in (run, profiled):
        for name in names:
            begin = time.perf_counter()
            try:
                facts = pass_of(name, at)
            except Exception:  # noqa: BLE001 - the other programs still say something
                print(f"{name}: {traceback.format_exc()[-1500:]}", flush=True)
                continue
            gc.collect()
            plain.setdefault(name, {}).update(facts)
            text = json.dumps(plain[name])
            (out / f"{name}.reference{at.rank}.json").write_text(text)
            if at.rank == 0:
                took = time.perf_counter() - begin
                print(f"  {name}: {pass_of.__name__} {took:.1f} s", flush=True)


def main() -> None:
    """One rank."""
    given = GIVEN
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if given.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    at = Place(rank, ranks, device, given.device == "cpu")
    if {"fsdp2", "hsdp"} & set(given.names):
        import transformers  # noqa: F401 - before the turn, as it takes long
    turns = Turns.mine()
    turns.take(rank)
    if given.reference:
        references(given.names, at, given.out)
    else:
        facts = run(given.names[0], at)
        (given.out / f"{given.names[0]}.rank{rank}.json").write_text(json.dumps(facts))
        print(json.dumps(facts), flush=True)
    turns.leave(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
