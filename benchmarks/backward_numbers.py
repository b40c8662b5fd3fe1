"""What knowing modules and lines costs a training step: with hooks of autograd's nodes, and by their numbers.

    python benchmarks/backward_numbers.py [--rounds 15] [--layers 8]

No GPU: a small Llama of Hugging Face on one thread of the CPU, where each operator of ATen that would launch a kernel
calls the compiled probe back, as CUPTI would. In one process by turns: plain, with modules alone and with modules and
lines, each with hooks (``THENCE_BACKWARD=hooks``) and by number. The first figure is the median of what a way adds to
the CPU time of the steps without beside it, with quartiles; the second, for a busy machine, what its quickest steps
take above the quickest without. They are of forward, backward and optimizer; writing the rows comes on top.
Needs PyTorch, transformers and a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from types import SimpleNamespace
from typing import Any

SETTLING, TIMED = 6, 4
OFF, ON = 0, 1
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

        from thence.boundaries.probe import choose_probe

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

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, times: int = TIMED) -> float:
        """CPU time of one step, in ms."""
        begin = time.process_time()
        for _ in range(times):
            self.step()
        return (time.process_time() - begin) / times * 1e3

    def plain(self) -> float:
        """CPU time of one step that nobody is told of, in ms."""
        self.operators.launch(OFF)
        self.timed(1)
        return self.timed()

    def launches(self) -> int:
        """Of one step."""
        before = self.operators.count()
        self.step()
        return self.operators.count() - before

    def during(self, *, lines: bool, back: str) -> tuple[float, float, int]:
        """CPU time of one step, and of writing its rows, in ms; and how many rows."""
        from thence.boundaries.places import Places
        from thence.hooks.torch.hooks import Hooks

        os.environ["THENCE_BACKWARD"] = back
        self.log.stack_reader = self.probe.compiled
        options = SimpleNamespace(modules=True, lines=lines, own=("transformers",))
        hooks = Hooks(self.log, Places(), options)
        hooks.start()
        self.timed(SETTLING)
        self.taken()
        spent = self.timed()
        writing, rows = self.taken()
        found = hooks.way_back()
        if found["by"] != back:
            raise SystemExit(f"the backward pass was followed by {found}")
        hooks.stop()
        self.taken()
        if hooks.said():
            raise SystemExit(str(hooks.said()))
        return spent, writing / TIMED, rows // TIMED

    def taken(self) -> tuple[float, int]:
        begin = time.process_time()
        rows = len(self.log.take()["place"])
        spent = (time.process_time() - begin) * 1e3
        self.probe.take_calls()
        return spent, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    bench = Bench(given.layers)
    bench.timed(SETTLING)
    ways = [(lines, back) for lines in (False, True) for back in ("hooks", "numbers")]
    least: dict[Any, float] = {}
    added: dict[Any, list[float]] = {way: [] for way in ["calls", *ways]}
    writing: dict[Any, list[float]] = {way: [] for way in ways}
    rows: dict[Any, int] = {}
    plain = []
    quickest = float("inf")
    for _ in range(given.rounds):
        for way, values in added.items():
            without = bench.plain()
            if way == "calls":
                bench.operators.launch(ON)
                bench.timed(1)
                spent = bench.timed()
                bench.taken()
            else:
                bench.operators.launch(ON)
                spent, wrote, rows[way] = bench.during(lines=way[0], back=way[1])
                writing[way].append(wrote)
            without = (without + (after := bench.plain())) / 2
            quickest = min(quickest, without, after)
            plain.append(without)
            values.append(spent - without)
            least[way] = min(spent, least.get(way, spent))
    median = statistics.median(plain)
    print(
        f"{bench.launches()} launches a step, plain {median:.2f} ms of CPU time, n = {given.rounds}"
    )
    for way, values in added.items():
        low, middle, high = statistics.quantiles(values, n=4)
        name = "calls alone" if way == "calls" else f"modules{', lines' * way[0]}, {way[1]}"
        more = "" if way == "calls" else (
            f"; writing {statistics.median(writing[way]):.2f} ms, {rows[way]} rows"
        )  # fmt: skip
        over = least[way] - quickest
        print(f"  {name:24} {middle:+.2f} ms ({low:+.2f} {high:+.2f}), {middle / median:+.1%}; "
              f"quickest {over:+.2f} ms, {over / quickest:+.1%}{more}")  # fmt: skip
    for lines in (False, True):
        two = (lines, "numbers"), (lines, "hooks")
        medians = [statistics.median(added[way]) for way in two]
        quick = [least[way] - quickest for way in two]
        print(f"  modules{', lines' * lines}: numbers / hooks {medians[0] / medians[1]:.2f}, "
              f"quickest {quick[0] / quick[1]:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
