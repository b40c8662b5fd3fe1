"""Compiled training steps on a GPU: does every kernel have its module, line and phase, and are they right?

    python tests/gpu/compiled.py record OUT [VARIANT ...]     on the GPU, without Polars
    python tests/gpu/compiled.py check OUT                    anywhere

Each variant records three steps of a small Llama in a process of its own: eager, compiled as a whole and by the
block, into CUDA graphs (reduce-overhead), each with a cold cache and a warm one, and with a cache that was filled
without thence. ``record`` prints how many kernels were recorded; ``check`` how much of the GPU time has a module, a
line and a phase, the reasons for the rest, and whether every module has as many matrix multiplications in each
phase as in the eager run. With ``hf``, of Hugging Face's Llama, too, where transformers is installed.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support import documented_parser, end, judge

STEPS, WARM_UP = 3, 4
GEMM = re.compile(r"gemm|nvjet|cutlass|splitk|cublas", re.IGNORECASE)
VARIANTS = {
    "eager": "",
    "default-cold": "default",
    "default-warm": "default",
    "blocks-cold": "blocks",
    "blocks-warm": "blocks",
    "graphs-cold": "reduce-overhead",
    "graphs-warm": "reduce-overhead",
    "before-fill": "default",
    "before": "default",
}
"""Of each variant how it is compiled; those whose names begin alike share a cache."""
HF = {"hf-eager": "", "hf-default": "default", "hf-graphs": "reduce-overhead"}


def hugging_face() -> Any:
    """The same size of Hugging Face's."""
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found,unused-ignore]

    from small_llama import HEADS, HIDDEN, INNER, LAYERS, WORDS

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            intermediate_size=INNER,
            vocab_size=WORDS,
            use_cache=False,
        )
    )


def run(folder: Path, variant: str) -> None:
    """One variant, in this process."""
    fills = variant == "before-fill"
    if not fills:
        import thence
        from thence.capture.marks import captured_nodes
    import torch
    from torch._dynamo.utils import counters

    from small_llama import BATCH, LENGTH, WORDS, Llama

    torch.manual_seed(0)
    how = (VARIANTS | HF)[variant]
    model = (hugging_face() if variant.startswith("hf") else Llama()).to("cuda", torch.bfloat16)
    called: Any = model
    if how == "blocks":
        for layer in model.layers:
            layer.compile()
    elif how:
        called = torch.compile(model, mode=None if how == "default" else how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(0, WORDS, (BATCH, LENGTH), device="cuda")

    def step() -> None:
        output = called(words)
        logits = getattr(output, "logits", output)
        loss = torch.nn.functional.cross_entropy(logits.view(-1, WORDS).float(), words.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    begin = time.perf_counter()
    if how != "reduce-overhead" or fills:
        for _ in range(WARM_UP):
            step()
    torch.cuda.synchronize()
    if fills:
        print(f"{variant}: filled in {time.perf_counter() - begin:.0f} s")
        return
    # CUDA graphs are captured while it records: that is when their nodes get their places.
    steps = STEPS + (WARM_UP if how == "reduce-overhead" else 0)
    with thence.record(folder / variant) as recording:
        for _ in range(steps):
            step()
            recording.step()
        torch.cuda.synchronize()
    print(
        f"{variant}: {recording.counts.get('kernels', 0)} kernels in {steps} steps, "
        f"{captured_nodes()}, "
        f"{counters['stats'].get('unique_graphs', 0)} graphs, "
        f"{sum(counters['graph_break'].values())} breaks, "
        f"{counters['inductor'].get('fxgraph_cache_hit', 0)} cache hits, "
        f"{time.perf_counter() - begin:.0f} s"
    )


def record(folder: Path, variants: list[str]) -> None:
    """Every variant in a process of its own, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    for variant in variants:
        cache = folder / "caches" / variant.split("-")[0]
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(folder / "caches" / "triton"),
        }
        command = [sys.executable, __file__, "run", str(folder), variant]
        failed = subprocess.run(command, env=environment, check=False).returncode
        if failed:
            print(f"{variant}: exit {failed}", flush=True)


def check(folder: Path) -> None:
    """What the recordings say."""
    truth: dict[str, Any] = {}
    for variant in (*VARIANTS, *HF):
        if not (folder / variant).is_dir():
            continue
        import polars as pl

        import thence

        trace = thence.open(folder / variant)
        frame = pl.concat([trace.tables.gpu.select("name", "duration"), trace.tables.places], how="horizontal")
        total = frame["duration"].sum() or 1
        print(f"\n{variant}: {frame.height} activities, {total / 1e6:.2f} ms")
        for kind in ("module", "source", "phase", "op"):
            known = frame.filter(pl.col(kind).is_not_null())["duration"].sum()
            absent = (
                frame.filter(pl.col(kind).is_null())
                .group_by(f"{kind}_rule")
                .agg(share=pl.col("duration").sum() / total)
                .sort("share", descending=True)
            )
            reasons = ", ".join(f"{code} {100 * share:.1f} %" for code, share in absent.rows())
            print(f"  {kind}: {100 * known / total:.1f} % {reasons}")
        gemms = frame.filter(pl.col("name").cast(pl.String).str.contains(f"(?i){GEMM.pattern}"))
        counted = collections.Counter(gemms.select("module", "phase").cast(pl.String).iter_rows())
        steps = max(STEPS + (WARM_UP if "graphs" in variant else 0), 1)
        each = {key: count / steps for key, count in counted.items()}
        eager = truth.setdefault(variant.split("-")[0] == "hf", each)
        different = (
            sorted(
                (key, eager.get(key, 0), each.get(key, 0))
                for key in eager.keys() | each.keys()
                if eager.get(key, 0) != each.get(key, 0)
            )
            if None not in {part for key in (*eager, *each) for part in key}
            else "some unknown"
        )
        print(f"  multiplications a step: {sum(each.values()):.1f}, in {len(each)} modules and phases")
        judge(not different, f"against the eager run: {different or 'equal, module by module'}")


def main() -> None:
    options = documented_parser(__doc__)
    options.add_argument("verb", choices=("record", "check", "run"), help="run: one variant, in this process")
    options.add_argument("folder", type=Path, help="of the recordings")
    options.add_argument("variants", nargs="*", metavar="VARIANT", help="all but hf without it")
    given = options.parse_args()
    rest = given.variants
    if given.verb == "run":
        run(given.folder, rest[0])
    elif given.verb == "record":
        chosen = [*VARIANTS] if not rest else [n for n in (*VARIANTS, *HF) if n.split("-")[0] in rest]
        record(given.folder, chosen)
    else:
        check(given.folder)
        end()


if __name__ == "__main__":
    main()
