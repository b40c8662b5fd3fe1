"""What knowing modules and lines costs a training step: with hooks of autograd's nodes, and by their numbers.

    python benchmarks/backward_numbers.py [--rounds 15] [--layers 8]

No GPU: a small Llama of Hugging Face on one thread of the CPU, where each operator of ATen that would launch a kernel
calls the compiled probe back, as CUPTI would. In one process by turns: plain, with calls alone, with modules, and with
modules and lines, each with hooks (``THENCE_BACKWARD=hooks``) and by number. Figures are CPU ms of one step's forward,
backward and optimizer, each the least of all steps, as other work on the machine only ever adds; then what the three
add to the plain ones, and what writing the rows of a step takes another thread. Needs PyTorch, transformers and a C++
compiler.
"""

from __future__ import annotations

import itertools
import os
import time
from types import SimpleNamespace
from typing import Any

from command_line import documented_parser

SETTLING, TIMED = 4, 10
OFF, ON = 0, 1
ALONE = ("plain", "calls")
WAYS = tuple(f"{what}, by {back}" for what in ("modules", "modules, lines") for back in ("hooks", "numbers"))
VIEWS = """
view t transpose permute reshape expand slice select unsqueeze squeeze as_strided detach empty empty_like empty_strided
alias _unsafe_view split narrow chunk linear matmul to contiguous unbind item resize_ reshape_as view_as expand_as
zeros ones full _to_copy clone zeros_like ones_like arange detach_ set_ result_type is_nonzero
"""
"""Operators that launch nothing, or only by others."""
SOURCE = r"""
#include <ATen/record_function.h>
#include <string>
#include <unordered_set>
typedef void (*Callback)(void *, int, uint32_t, const void *);
struct Data { int site; const char *name; const void *none[4]; uint32_t context; uint64_t *data; uint32_t number; };
static Callback callback;
static uint32_t number = 1;
static int64_t launches;
static bool on;
static const std::unordered_set<std::string> views = {VIEWS};

static void call(uint32_t function) {
  Data data{};
  data.number = ++number;
  callback(nullptr, 2, function, &data);
  data.site = 1;
  callback(nullptr, 2, function, &data);
}
static int version(int *) { call(1); return 0; }
static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction &function) {
  const char *name = function.name();
  if (!strncmp(name, "aten::", 6) && !views.count(name + 6)) {
    launches++;
    if (on) call(2);
  }
  return nullptr;
}
void install(int64_t address) {
  callback = (Callback)address;
  at::addGlobalCallback(at::RecordFunctionCallback(begins).scopes({at::RecordScope::FUNCTION}));
}
int64_t telling() { return (int64_t)&version; }
int64_t count() { return launches; }
void launch(bool yes) { on = yes; }
"""


def emulated() -> Any:
    """The operators that launch, as an extension."""
    from torch.utils.cpp_extension import load_inline

    views = ", ".join(f'"{name}"' for name in VIEWS.split())
    return load_inline(
        "launching_operators",
        cpp_sources=SOURCE.replace("VIEWS", views),
        functions=["install", "telling", "count", "launch"],
    )


class Bench:
    """The model, and the probe."""

    def __init__(self, layers: int) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from thence.capture.boundaries.probe import choose_probe

        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.ids = torch.randint(0, 64, (1, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.probe = choose_probe()
        if self.probe.compiled is None:
            raise SystemExit("the compiled probe is not built: pip install -e . with a C compiler")
        self.operators = emulated()
        self.operators.install(self.probe.callback)
        self.log = self.probe.log(self.operators.telling())

    def step(self) -> tuple[float, float, float]:
        """CPU time of the forward, the backward pass and the optimizer, in ms."""
        times = [time.thread_time_ns()]
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        times.append(time.thread_time_ns())
        loss.backward()
        times.append(time.thread_time_ns())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.thread_time_ns())
        first, second, third = ((b - a) / 1e6 for a, b in itertools.pairwise(times))
        return first, second, third

    def launches(self) -> int:
        """Of one step."""
        before = self.operators.count()
        self.step()
        return self.operators.count() - before

    def steps(self, way: str) -> tuple[list[tuple[float, float, float]], float]:
        """Parts of some steps, and the time that writing the rows of one took."""
        from thence.capture.boundaries.places import Places
        from thence.capture.torch.hooks import Hooks

        self.operators.launch(OFF if way == "plain" else ON)
        if way in ALONE:
            self.step()
            return [self.step() for _ in range(TIMED)], self.written() / TIMED
        what, back = way.split(", by ")
        os.environ["THENCE_BACKWARD"] = back
        self.log.stack_reader = self.probe.compiled
        lines = "lines" in what
        options = SimpleNamespace(modules=True, lines=lines, own=("transformers",))
        hooks = Hooks(self.log, Places(), options)
        hooks.start()
        for _ in range(SETTLING):
            self.step()
        self.written()
        found = [self.step() for _ in range(TIMED)]
        writing = self.written() / TIMED
        if hooks.way_back()["by"] != back:
            raise SystemExit(f"the backward pass was followed by {hooks.way_back()}")
        hooks.stop()
        self.written()
        if hooks.said():
            raise SystemExit(str(hooks.said()))
        return found, writing

    def written(self) -> float:
        """Take what waits; CPU time in ms."""
        begin = time.thread_time_ns()
        self.log.take()
        spent = (time.thread_time_ns() - begin) / 1e6
        self.probe.take_calls()
        return spent


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    bench = Bench(given.layers)
    for _ in range(SETTLING):
        bench.step()
    steps: dict[str, list[tuple[float, float, float]]] = {way: [] for way in (*ALONE, *WAYS)}
    writing = dict.fromkeys(steps, float("inf"))
    for _ in range(given.rounds):
        for way, before in steps.items():
            found, spent = bench.steps(way)
            before.extend(found)
            writing[way] = min(writing[way], spent)
    print(f"{bench.launches()} launches a step, n = {given.rounds * TIMED} steps each")
    print(f"{'':28} forward backward optimizer    added  writing")
    least = {way: [min(part) for part in zip(*parts, strict=True)] for way, parts in steps.items()}
    added = {way: sum(parts) - sum(least["plain"]) for way, parts in least.items()}
    for way, parts in least.items():
        each = " ".join(f"{part:8.2f}" for part in parts)
        print(f"  {way:25} {each} {added[way]:+9.2f} {writing[way]:8.2f}")
    for what in ("modules", "modules, lines"):
        hooks, numbers = (f"{what}, by {back}" for back in ("hooks", "numbers"))
        share = (least[numbers][1] - least["calls"][1]) / (least[hooks][1] - least["calls"][1])
        print(f"  {what}: numbers / hooks of what is added {added[numbers] / added[hooks]:.2f}, "
              f"of what is added to calls in the backward pass {share:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
