"""Parts of whatif.py: programs whose parts can be made shorter, longer or none, and the list of changes.

The list was fixed before any run; pauses, rests, freed and uneven were added later, before theirs, and so were the
programs whose recordings by thence are the source (RECORDED), with twelve changes; full, with two more, was added after
the first run of these. Each change is made to the program itself and asked of thence; `Pair.meaning` is the row of the
answer that says the same: where the program no longer launches a kernel, its host work is gone, too.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

ITEM_WAITS, ITEM_COPIES = 2.0, 1.0
"""Values of the part item: the step ends with item(), or with the same copy that nobody waits for; 0: neither."""
_WIDTH, _TOKENS = 768, 512
_LAYERS, _BATCH = 6, 4
_SHARDED_LAYERS, _SHARDED_BATCH = 4, 12  # what FSDP2 adds on the host is by layer
_LONG_BATCH = 16
"""Of a model whose steps are so long on the device that the host is as far ahead as the queue of launches allows."""


@dataclass(frozen=True)
class Pair:
    """A change of a program, and what is asked of thence.

    Attributes:
        part: of the program; none: nothing is changed, a control.
        left: what is left of it.
        action, text: asked of thence.
        meaning: part of the answer that it is compared with; empty: there is one.
    """

    part: str
    left: float
    action: str
    text: str
    meaning: str = ""


@dataclass(frozen=True)
class Planned:
    """A program: what limits it, us of its parts, steps between two synchronizations, and its changes."""

    limit: str
    times: dict[str, float]
    steps: int
    pairs: tuple[Pair, ...]


def _times(**parts: float) -> dict[str, float]:
    all_parts = ("load", "rest", "attention", "mlp", "side", "python", "item", "late")
    none = dict.fromkeys(all_parts, 0.0)
    return {**none, "reduce": 1.0, **parts}


_HOST = "with host work"
_NONE = Pair("none", 1, "scale", "cause:loader=1")
_LOADER = (Pair("load", 0, "free", "cause:loader"), Pair("load", 0.5, "scale", "cause:loader=0.5"))
_NO_WAIT = Pair("item", ITEM_COPIES / ITEM_WAITS, "no-wait", "item")
_PARTS = (
    Pair("attention", 0, "free", "label:^attention$", _HOST),
    Pair("attention", 0.5, "scale", "label:^attention$=0.5", "kernels"),
    Pair("mlp", 0, "free", "label:^mlp$", _HOST),
    Pair("mlp", 2, "scale", "label:^mlp$=2", "kernels"),
    Pair("side", 0, "free", "label:^side$", _HOST),
    Pair("side", 2, "scale", "label:^side$=2", "kernels"),
    Pair("python", 0, "free", "label:^host_part$", _HOST),
)
_SIX = (*_PARTS, *_LOADER, _NONE)
_OF_TWO = (Pair("reduce", 0, "free", "collective:all-reduce", "with waiting"), _LOADER[0], _PARTS[0], _PARTS[3], _NONE)

ONE: dict[str, Planned] = {
    "gpu": Planned(
        "device", _times(load=500, attention=400, mlp=500, side=600, python=10, item=ITEM_WAITS), 8, (*_SIX, _NO_WAIT)
    ),
    "mixed": Planned(
        "both", _times(load=1500, attention=200, mlp=120, side=400, python=60, item=ITEM_WAITS), 8, (*_SIX, _NO_WAIT)
    ),
    "host": Planned(
        "host", _times(load=2000, attention=20, mlp=20, side=15, python=200, item=ITEM_WAITS), 8, (*_SIX, _NO_WAIT)
    ),
    "overlap": Planned("device", _times(load=400, attention=400, mlp=700, side=660, python=5), 8, _SIX),
    "model": Planned(
        "device", _times(load=4000, attention=1, item=ITEM_WAITS), 4, (*_LOADER, _NO_WAIT, _PARTS[0], _NONE)
    ),
    "pauses": Planned(
        "host",
        _times(load=3000, attention=20, mlp=20, side=15, item=ITEM_WAITS),
        8,
        (*_LOADER, _PARTS[0], _NO_WAIT, _NONE),
    ),
    "rests": Planned(
        "host",
        _times(rest=3000, attention=20, mlp=20, side=15, item=ITEM_WAITS),
        8,
        (Pair("rest", 0, "free", "cause:loader"), Pair("rest", 0.5, "scale", "cause:loader=0.5"), _NONE),
    ),
    "freed": Planned(
        "both",
        _times(load=300, attention=500, mlp=20, side=20, python=20, item=ITEM_WAITS),
        8,
        (*_PARTS[:2], _LOADER[0], _NO_WAIT, _NONE),
    ),
}
"""Programs on one GPU. model is a training step of GPT-2 of Hugging Face's transformers. Of the last three the host
decides: beside one long pause, in which it works or sleeps, and as soon as attention is free."""
RECORDED: dict[str, Planned] = {
    "gpu": Planned(
        "device",
        _times(load=500, attention=400, mlp=500, side=600, python=10, item=ITEM_WAITS),
        8,
        (_PARTS[0], _PARTS[3], _NO_WAIT, _NONE),
    ),
    "mixed": Planned(
        "both",
        _times(load=1500, attention=200, mlp=120, side=400, python=60, item=ITEM_WAITS),
        8,
        (_LOADER[0], _PARTS[6], _PARTS[0], _NONE),
    ),
    "model": Planned(
        "device",
        _times(load=4000, attention=1, item=ITEM_WAITS),
        8,
        (Pair("load", 0, "free", "source:busy", _HOST), _NO_WAIT, _NONE),
    ),
    "ahead": Planned(
        "device",
        _times(load=4000, attention=1),
        8,
        (_LOADER[0], Pair("attention", 0, "free", "module:attn", _HOST), _NONE),
    ),
    "rests": Planned(
        "host",
        _times(rest=3000, attention=20, mlp=20, side=15, item=ITEM_WAITS),
        8,
        (Pair("rest", 0, "free", "source:load", _HOST), Pair("rest", 0.5, "scale", "cause:loader=0.5"), _NONE),
    ),
    "full": Planned("device", _times(load=100, attention=400, mlp=500), 60, (_PARTS[0], _PARTS[3], _NONE)),
}
"""Programs that ``thence record`` records, without a word of thence in them; ranges are NVTX ranges. The host of ahead,
a training step of the model with larger batches, waits for the device only where the model itself copies a number. That
of full waits only where the queue of launches is full, after some 25 of 60 steps."""
TWO: dict[str, Planned] = {
    "fsdp2": Planned("device", _times(load=12000, attention=1, item=ITEM_WAITS), 4, (*_LOADER, _NO_WAIT, _NONE)),
    "late": Planned(
        "device",
        _times(load=300, attention=400, mlp=300, side=400, late=2500, item=ITEM_WAITS),
        8,
        (Pair("late", 0, "on-time", "rank:1"), *_OF_TWO[1:]),
    ),
    "exposed": Planned("device", _times(load=300, attention=400, mlp=300, side=600, item=ITEM_WAITS), 8, _OF_TWO),
    "uneven": Planned(
        "both",
        _times(load=800, attention=500, mlp=100, side=100, late=1500, item=ITEM_WAITS),
        8,
        (Pair("late", 0, "on-time", "rank:1"), *_OF_TWO[1:]),
    ),
}
"""Programs on two GPUs. fsdp2 is a training step of GPT-2 with fewer layers and larger batches, sharded. Of the last,
the host of a late rank decides as soon as attention is free."""


def changed(times: dict[str, float], pair: Pair) -> dict[str, float]:
    """The parts of a program with a change."""
    return times if pair.part == "none" else times | {pair.part: times[pair.part] * pair.left}


def busy(us: float) -> None:
    """Keeps the thread busy."""
    until = time.perf_counter_ns() + int(us * 1000)
    while time.perf_counter_ns() < until:
        pass


class Program:
    """A step on this process's GPU: a loader, six blocks on two streams, an optimizer, item() at the end or not.

    Args:
        nvtx: whether parts are NVTX ranges, which a recording holds, instead of those of torch.profiler, and whether
            each step ends with a step of torch.optim, by which a recording knows steps.
    """

    def __init__(self, *, nvtx: bool = False) -> None:
        import torch
        from torch.profiler import record_function

        self.torch = torch
        self.named: Any = torch.cuda.nvtx.range if nvtx else record_function
        self.nvtx = nvtx
        self.optimizer: Any = None
        if nvtx:
            weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
            weight.grad = torch.zeros_like(weight)
            self.optimizer = torch.optim.SGD([weight], lr=0.0)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        torch.manual_seed(0)
        self.x = torch.randn(512, 512, device="cuda")
        self.weight = self.x / 50
        self.large = torch.randn(4096, 4096, device="cuda")
        self.side = torch.cuda.Stream()
        self.moved = torch.ones(1 << 24, device="cuda")
        self.little = torch.ones(1, device="cuda")
        self.kept = torch.empty((), pin_memory=True)
        self.warm_up(500)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(10**8)
        end.record()
        torch.cuda.synchronize()
        self.cycles = 10**8 / begin.elapsed_time(end) / 1e3

    def warm_up(self, ms: float) -> None:
        """Keeps the GPU busy with matrix products, until its clocks are those of work."""
        until = time.perf_counter_ns() + ms * 1e6
        while time.perf_counter_ns() < until:
            self.torch.mm(self.large, self.large)
            self.torch.cuda.synchronize()

    def together(self) -> None:
        """Waits until nothing is left to do on all ranks."""
        self.torch.cuda.synchronize()
        if self.world > 1:
            self.torch.distributed.barrier()
            self.torch.cuda.synchronize()

    def spin(self, us: float) -> None:
        """Keeps a stream busy with one kernel, or with none."""
        if us:
            self.torch.cuda._sleep(int(us * self.cycles))

    def step(self, times: dict[str, float], name: str) -> None:
        """One step."""
        with self.outermost(name):
            self.load(times)
            y = self.x
            for _ in range(6):
                y = self.block(times, y)
            with self.named("optimizer"):
                for _ in range(10):
                    y = y.add(1)
            if times["item"] == ITEM_WAITS:
                y[0, 0].item()
            elif times["item"]:
                self.kept.copy_(y[0, 0], non_blocking=True)
            if self.optimizer is not None:
                self.optimizer.step()

    def outermost(self, name: str) -> Any:
        """The range of a step; a recording knows steps by the optimizer."""
        return nullcontext() if self.nvtx else self.named(name)

    def load(self, times: dict[str, float]) -> None:
        """The loader, and what makes rank 1 late."""
        with self.named("load"):
            if times["rest"]:
                time.sleep(times["rest"] / 1e6)
            busy(times["load"])
        if self.rank == 1 and times["late"]:
            with self.named("late"):
                busy(times["late"])

    def block(self, times: dict[str, float], y: Any) -> Any:
        """Attention, then mlp beside the side stream, each of which waits for the other."""
        torch, named = self.torch, self.named
        main = torch.cuda.current_stream()
        y = y * 1.0 + 1
        with named("attention"):
            self.spin(times["attention"])
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        ready.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(ready)
            with named("side"):
                self.spin(times["side"])
            done.record()
        y = y @ self.weight
        with named("mlp"):
            self.spin(times["mlp"])
        with named("host_part"):
            busy(times["python"])
        main.wait_event(done)
        if self.world > 1:  # what is left without it is the call, of next to nothing
            torch.distributed.all_reduce(self.moved if times["reduce"] else self.little)
        return y


class Model(Program):
    """A training step of a small language model, with labelled attention; sharded by FSDP2 over several ranks.

    Args:
        nvtx: as of `Program`.
        long: whether it has so large batches that the host is ahead of the device.
    """

    def __init__(self, *, nvtx: bool = False, long: bool = False) -> None:
        super().__init__(nvtx=nvtx)
        torch = self.torch
        self.with_attention = True
        self.layers, batch = (_LAYERS, _BATCH) if self.world == 1 else (_SHARDED_LAYERS, _SHARDED_BATCH)
        batch = _LONG_BATCH if long else batch
        self.tokens = torch.randint(0, 1000, (batch, _TOKENS), device="cuda")
        self.model, blocks, attentions, self.loss = self._made()
        self.model.cuda()
        for attention in attentions:
            attention.forward = self._labelled(attention.forward)
        if self.world > 1:
            from torch.distributed.fsdp import fully_shard

            for block in blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def _made(self) -> tuple[Any, list[Any], list[Any], Any]:
        """A model, its blocks, their attention, and the function that gives the loss."""
        torch = self.torch
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError:
            print("transformers is not installed: the model is of torch.nn", flush=True)
            layers = [
                torch.nn.TransformerEncoderLayer(_WIDTH, 12, 4 * _WIDTH, batch_first=True) for _ in range(self.layers)
            ]
            model = torch.nn.Sequential(torch.nn.Embedding(1000, _WIDTH), *layers, torch.nn.Linear(_WIDTH, 1000))
            entropy = torch.nn.functional.cross_entropy
            attentions = [layer.self_attn for layer in layers]
            return (
                model,
                layers,
                attentions,
                lambda: entropy(self.model(self.tokens).flatten(0, 1), self.tokens.flatten()),
            )
        config = GPT2Config(
            vocab_size=1000, n_positions=_TOKENS, n_embd=_WIDTH, n_layer=self.layers, n_head=12,
            use_cache=False,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        blocks = list(model.transformer.h)
        attentions = [block.attn for block in blocks]
        return (model, blocks, attentions, lambda: self.model(self.tokens, labels=self.tokens).loss)

    def _labelled(self, forward: Any) -> Any:
        """Attention under its label, which does nothing where the step asks for none."""
        others = 1

        def labelled(hidden: Any, *args: Any, **options: Any) -> Any:
            nonlocal others
            with self.named("attention"):
                if not self.with_attention:
                    return (hidden, *[None] * others)
                result = forward(hidden, *args, **options)
            others = len(result) - 1
            return result

        return labelled

    def step(self, times: dict[str, float], name: str) -> None:
        """One step. Gradients stay, so that the optimizer does the same without attention."""
        self.with_attention = bool(times["attention"])
        with self.outermost(name):
            self.load(times)
            loss = self.loss()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.world > 1)
            if times["item"] == ITEM_WAITS:
                loss.item()
            elif times["item"]:
                self.kept.copy_(loss.detach(), non_blocking=True)
