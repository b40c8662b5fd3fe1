"""Faults on one rank of a job, a part of job_programs.py: what makes which rank late, since when, and in which line."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from small_llama import WORDS

if TYPE_CHECKING:
    from collections.abc import Callable

SINCE, FAULTY_STEPS = 16, 40
"""The step, counted from 0, from which on a rank is late, and how many there are."""
BATCH, LARGER = 32, 48
"""Samples of a batch, so many that the GPU and not the host decides how long a step takes, and of a larger one."""
LAYER = 2
"""The layer that is late."""
SHORT_MS = 0.1
"""How long the kernel spins on ranks that are in time."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with one rank.

    Attributes:
        what: what it does: sleeps in a pass, spins on the GPU, loads slowly, or takes a larger batch.
        causes: what `thence ranks` may call it.
        ms: how much later the rank is in each step; of a larger batch nobody knows before.
        sharded: FSDP2, else DistributedDataParallel.
    """

    what: str
    causes: tuple[str, ...]
    ms: float | None
    sharded: bool = False


SLEEP_FORWARD, SLEEP_BACKWARD, SPIN_BACKWARD = "sleep forward", "sleep backward", "spin backward"
LOADER, LARGER_BATCH = "loader", "larger batch"
HOST = ("sleep", "host", "operator")
FAULTS = {
    "late_sleep_backward": Fault(SLEEP_BACKWARD, HOST, 50),
    "late_200_ddp": Fault(SLEEP_BACKWARD, HOST, 200),
    "late_200_fsdp2": Fault(SLEEP_BACKWARD, HOST, 200, sharded=True),
    "late_spin_backward": Fault(SPIN_BACKWARD, ("compute",), 20, sharded=True),
    "late_loader": Fault(LOADER, ("loader",), 32),
    "late_batch": Fault(LARGER_BATCH, ("more_work",), None),
    "late_sleep_forward": Fault(SLEEP_FORWARD, HOST, 50, sharded=True),
}


class State:
    """What the program of this rank does wrong now."""

    def __init__(self, fault: Fault, device: torch.device, *, planted: bool) -> None:
        self.fault = fault
        self.planted = planted
        self.late = False
        self.cycles = cycles_of_ms(device) if fault.what == SPIN_BACKWARD else 0.0

    def sleep(self, what: str, parts: int = 1) -> None:
        """Sleep where that is the fault and the rank is late, one of the parts that make up a step's lateness."""
        if self.late and self.fault.what == what and self.fault.ms is not None:
            time.sleep(self.fault.ms / parts / 1e3)

    def spin(self) -> None:
        """Spin on the GPU where that is the fault, for long where the rank is late."""
        if self.cycles:
            ms = self.fault.ms if self.late else None
            torch.cuda._sleep(int(self.cycles * (ms or SHORT_MS)))


def cycles_of_ms(device: torch.device) -> float:
    """How many cycles a spin kernel of 1 ms takes; 0 where there is no GPU."""
    if device.type != "cuda":
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 10_000_000
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / float(begin.elapsed_time(end))


class Late(nn.Module):
    """A layer, and what makes it late."""

    def __init__(self, layer: nn.Module, state: State) -> None:
        super().__init__()
        self.layer = layer
        self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        self.state.sleep(SLEEP_FORWARD)
        return LateBackward.apply(x, self.state) * 1.0


class LateBackward(torch.autograd.Function):
    """Nothing in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: State) -> torch.Tensor:
        ctx.state = state
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.state.sleep(SLEEP_BACKWARD)
        ctx.state.spin()
        return gradients[0] * 1.0, None


class Words(torch.utils.data.Dataset[torch.Tensor]):
    """Samples, each of which takes its part of a batch's lateness where the loader is late."""

    def __init__(self, state: State, rank: int, length: int) -> None:
        torch.manual_seed(rank)
        self.state = state
        self.words = torch.randint(0, WORDS, (64, length))

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        self.state.sleep(LOADER, BATCH)
        return self.words[index % 64]


def faulty(
    name: str, rank: int, ranks: int, device: torch.device, model_of: Callable[[], Any], length: int
) -> tuple[Callable[[int], object], dict[str, Any]]:
    """A program in which one rank is late: its step, and what is true of it; samples have so many words."""
    fault = FAULTS[name]
    planted = ranks - 1
    state = State(fault, device, planted=rank == planted)
    model = wrapped(model_of(), state, device, ranks, sharded=fault.sharded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = Words(state, rank, length)
    batches = iter(torch.utils.data.DataLoader(data, batch_size=BATCH))
    resident = data.words[:BATCH].to(device)
    larger = data.words[:LARGER].to(device)

    def step(number: int) -> None:
        state.late = state.planted and number >= SINCE
        if fault.what == LOADER:
            words = next(batches).to(device)
        elif fault.what == LARGER_BATCH and (state.late or number == 0):
            words = larger  # at first on all ranks: the first use of a shape takes long
        else:
            words = resident
        logits = model(words)
        loss = functional.cross_entropy(logits.view(-1, WORDS).float(), words.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    truth = {"causes": fault.causes, "rank": planted, "since": SINCE, "ms": fault.ms}
    return step, {"fault": truth | {"places": places(fault), "module": module(fault)}}


def wrapped(model: Any, state: State, device: torch.device, ranks: int, *, sharded: bool) -> Any:
    """The model with its late layer, for many ranks."""
    model.layers[LAYER] = Late(model.layers[LAYER], state)
    if not sharded:
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def module(fault: Fault) -> str | None:
    """The module that is late."""
    in_layer = fault.what in (SLEEP_FORWARD, SLEEP_BACKWARD, SPIN_BACKWARD)
    return f"layers.{LAYER}" if in_layer else None


def places(fault: Fault) -> list[list[Any]]:
    """File, function, first and last line of the code in which the fault is; [] where it is in no line."""
    # What runs in a backward pass is known by its own line, or by that of its forward pass.
    backward = (LateBackward.backward, Late.forward)
    late: dict[str, tuple[Any, ...]] = {
        SLEEP_FORWARD: (Late.forward, State.sleep),
        SLEEP_BACKWARD: (*backward, State.sleep),
        SPIN_BACKWARD: (*backward, State.spin),
        LOADER: (Words.__getitem__, State.sleep, faulty),
    }
    found = []
    for function in late.get(fault.what, ()):
        lines, first = inspect.getsourcelines(function)
        found.append(["job_faults.py", function.__qualname__, first, first + len(lines) - 1])
    return found
