"""Training loops of libraries that people use, recorded as they are: what is attributed, and what recording costs.

    python tests/gpu/real_programs.py list
    python tests/gpu/real_programs.py run NAME          # one program, as its library's examples write it
    python tests/gpu/real_programs.py record OUT [NAME ...] [--python PYTHON]      # on a GPU, 40 s a program
    python tests/gpu/real_programs.py check OUT         # anywhere, with thence's requirements

record: each program runs once alone and once under `thence record`, with the same seed; a program whose library is
not installed is named. The times of its steps are noted by a hook of the optimizer (PyTorch) or by the loop (JAX), in
both runs. OUT/NAME is the recording, OUT/programs.json the exit codes and the times.
check: for each recording the share of GPU time with a module, a line, a phase, an HLO op, the steps, the causes of
idle time, and what `thence check` says, beside the median times of a step.

Models have random weights and data is made up: nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support import documented_parser, end, judge

STEPS = 40
SETTLED = 15
"""Steps that are left out of a median: compiling, warming up."""
ON_GPU = "REAL_PROGRAMS_ON_CPU" not in os.environ
"""Programs are tried without a GPU by setting the variable: in float32, not recorded."""
TIMES: list[float] = []
"""When the steps of this process ended, s."""


def llama(layers: int = 4) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def tokenizer() -> Any:
    """A tokenizer of 1,000 made-up words, as `transformers` wants one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(996))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def texts(number: int, words: int) -> list[str]:
    import random

    chosen = random.Random(0)
    return [" ".join(f"w{chosen.randrange(996)}" for _ in range(words)) for _ in range(number)]


def trl_sft(out: str) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"text": texts(8 * STEPS, 120)})
    options = SFTConfig(
        output_dir=out,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        max_length=128,
        report_to=[],
        save_strategy="no",
        bf16=ON_GPU,
        logging_steps=10,
    )
    SFTTrainer(model=llama(), args=options, train_dataset=data, processing_class=tokenizer()).train()


def short_rewards(completions: list[str], **_: Any) -> list[float]:
    """More for shorter completions."""
    return [-float(len(completion)) for completion in completions]


def trl_grpo(out: str) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    data = Dataset.from_dict({"prompt": texts(4 * STEPS, 12)})
    folder = f"{out}.model"
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    options = GRPOConfig(
        output_dir=out,
        max_steps=STEPS // 2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        beta=0.04,
        report_to=[],
        save_strategy="no",
        bf16=ON_GPU,
        logging_steps=10,
    )
    GRPOTrainer(model=folder, reward_funcs=short_rewards, args=options, train_dataset=data).train()


def _sequences(number: int) -> list[dict[str, Any]]:
    import torch

    torch.manual_seed(0)
    made = torch.randint(3, 1000, (number, 128))
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in made]


def hf_trainer(out: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=1000, n_positions=256))
    options = TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        report_to=[],
        save_strategy="no",
        bf16=ON_GPU,
        dataloader_num_workers=2,
    )
    rows = _sequences(16 * STEPS)
    Trainer(model=model, args=options, train_dataset=rows, eval_dataset=rows[:64]).train()


def accelerate_loop(out: str) -> None:  # noqa: ARG001 - as its siblings
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loader = torch.utils.data.DataLoader(_sequences(16 * STEPS), batch_size=8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def peft_lora(out: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    model = get_peft_model(llama(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    options = TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        bf16=ON_GPU,
        gradient_checkpointing=True,
    )
    Trainer(model=model, args=options, train_dataset=_sequences(8 * STEPS)).train()


def timm_vit(out: str) -> None:  # noqa: ARG001 - as its siblings
    import timm
    import timm.optim
    import timm.scheduler
    import torch
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.utils import ModelEmaV3, NativeScaler

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, drop_path_rate=0.1).cuda()
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=STEPS)
    mix = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10)
    lossy, scaler, average = SoftTargetCrossEntropy(), NativeScaler(), ModelEmaV3(model, decay=0.99)
    images, labels = torch.randn(32, 3, 224, 224).cuda(), torch.randint(0, 10, (32,)).cuda()
    for step in range(STEPS):
        mixed, targets = mix(images.clone(), labels)
        with torch.amp.autocast("cuda", dtype=torch.float16):
            loss = lossy(model(mixed), targets)
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        average.update(model, step=step)
        schedule.step(step)


def _sentence_model() -> Any:
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    folder = Path(os.environ["REAL_PROGRAMS_SCRATCH"]) / "bert"
    BertModel(
        BertConfig(vocab_size=1000, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536)
    ).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    word = models.Transformer(str(folder), max_seq_length=64)
    return SentenceTransformer(modules=[word, models.Pooling(384)])


def sentence_encode(out: str) -> None:  # noqa: ARG001 - as its siblings
    model = _sentence_model().cuda()
    sentences = texts(256, 40)
    for _ in range(STEPS):
        model.encode(sentences, batch_size=64)
        TIMES.append(time.perf_counter())


def sentence_training(out: str) -> None:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses

    model = _sentence_model()
    data = Dataset.from_dict({"anchor": texts(32 * STEPS, 20), "positive": texts(32 * STEPS, 20)})
    options = SentenceTransformerTrainingArguments(
        output_dir=out, max_steps=STEPS, per_device_train_batch_size=32, report_to=[], save_strategy="no", bf16=ON_GPU
    )
    SentenceTransformerTrainer(
        model=model, args=options, train_dataset=data, loss=losses.MultipleNegativesRankingLoss(model)
    ).train()


def lightning_resnet(out: str) -> None:
    import pytorch_lightning as lightning
    import torch
    import torchvision

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torchvision.models.resnet18(num_classes=10)

        def training_step(self, batch: Any, _: int) -> Any:
            images, labels = batch
            loss = torch.nn.functional.cross_entropy(self.net(images), labels)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(1024, 3, 64, 64), torch.randint(0, 10, (1024,)))
    loader = torch.utils.data.DataLoader(data, batch_size=64, num_workers=2, shuffle=True)
    lightning.Trainer(
        max_steps=STEPS,
        default_root_dir=out,
        accelerator="auto",
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Classifier(), loader, torch.utils.data.DataLoader(data, batch_size=64))


def geometric_gcn(out: str) -> None:  # noqa: ARG001 - as its siblings
    import torch
    from torch_geometric.data import Data
    from torch_geometric.nn import GCNConv

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(128, 256), GCNConv(256, 16)

        def forward(self, graph: Any) -> Any:
            hidden = self.first(graph.x, graph.edge_index).relu()
            return self.second(torch.nn.functional.dropout(hidden, training=self.training), graph.edge_index)

    torch.manual_seed(0)
    graph = Data(x=torch.randn(20000, 128), edge_index=torch.randint(0, 20000, (2, 200000))).cuda()
    labels, model = torch.randint(0, 16, (20000,)).cuda(), Net().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3 * STEPS):
        model.train()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(graph), labels).backward()
        optimizer.step()


def flax_training(out: str) -> None:  # noqa: ARG001 - as its siblings
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen as nn
    from flax.training.train_state import TrainState

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.SelfAttention(num_heads=8)(nn.LayerNorm()(x))
            x = x + y
            return x + nn.Dense(512)(nn.gelu(nn.Dense(2048)(nn.LayerNorm()(x))))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            x = nn.Embed(1000, 512)(ids)
            for _ in range(4):
                x = Block()(x)
            return nn.Dense(1000)(x)

    ids = jax.random.randint(jax.random.key(0), (8, 128), 0, 1000)
    model = Model()
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(1), ids), tx=optax.adamw(1e-3))

    @jax.jit
    def train_step(state: Any, ids: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> Any:
            logits = state.apply_fn(params, ids)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    for _ in range(3 * STEPS):
        state, loss = train_step(state, ids)
        jnp.asarray(loss).block_until_ready()
        TIMES.append(time.perf_counter())


def numpyro_nuts(out: str) -> None:  # noqa: ARG001 - as its siblings
    import jax
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    x = jax.random.normal(jax.random.key(0), (5000, 20))
    y = (x @ jax.random.normal(jax.random.key(1), (20,)) > 0).astype(float)

    def regression(x: Any, y: Any) -> None:
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([20]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)

    sampler = MCMC(NUTS(regression, max_tree_depth=6), num_warmup=50, num_samples=50, progress_bar=False)
    for seed in range(6):
        sampler.run(jax.random.key(seed), x, y)
        TIMES.append(time.perf_counter())


def equinox_mlp(out: str) -> None:  # noqa: ARG001 - as its siblings
    import equinox
    import jax
    import jax.numpy as jnp
    import optax

    model = equinox.nn.MLP(256, 10, 1024, 4, key=jax.random.key(0))
    x, y = (jax.random.normal(jax.random.key(1), (512, 256)), jax.random.randint(jax.random.key(2), (512,), 0, 10))
    rule = optax.adam(1e-3)
    state = rule.init(equinox.filter(model, equinox.is_array))

    @equinox.filter_jit
    def step(model: Any, state: Any) -> tuple[Any, Any, Any]:
        def loss_of(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()

        loss, gradients = equinox.filter_value_and_grad(loss_of)(model)
        updates, state = rule.update(gradients, state, model)
        return equinox.apply_updates(model, updates), state, loss

    for _ in range(3 * STEPS):
        model, state, loss = step(model, state)
        jnp.asarray(loss).block_until_ready()
        TIMES.append(time.perf_counter())


def torchtitan_llama(out: str) -> None:
    """Its own entry point with its configuration for debugging, beside a tokenizer and texts where that wants them."""
    assets = Path(out, "tests", "assets")
    (assets / "c4_test").mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(assets / "tokenizer")
    lines = (json.dumps({"text": text}) for text in texts(4000, 400))
    (assets / "c4_test" / "data.json").write_text("\n".join(lines))
    os.chdir(out)
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    sys.argv = ["train", "--module", "llama3", "--config", "llama3_debugmodel", "--training.steps", str(STEPS)]
    sys.argv += ["--training.seq_len", "256", "--training.local_batch_size", "8"]
    from torchtitan.train import main

    main()


PROGRAMS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "trl_sft": (trl_sft, ("trl", "datasets")),
    "trl_grpo": (trl_grpo, ("trl", "datasets")),
    "hf_trainer": (hf_trainer, ("transformers", "accelerate")),
    "accelerate_loop": (accelerate_loop, ("accelerate",)),
    "peft_lora": (peft_lora, ("peft",)),
    "timm_vit": (timm_vit, ("timm",)),
    "sentence_encode": (sentence_encode, ("sentence_transformers",)),
    "sentence_training": (sentence_training, ("sentence_transformers", "datasets")),
    "lightning_resnet": (lightning_resnet, ("pytorch_lightning", "torchvision")),
    "geometric_gcn": (geometric_gcn, ("torch_geometric",)),
    "flax_training": (flax_training, ("flax", "optax")),
    "numpyro_nuts": (numpyro_nuts, ("numpyro",)),
    "equinox_mlp": (equinox_mlp, ("equinox", "optax")),
    "torchtitan_llama": (torchtitan_llama, ("torchtitan", "torchdata", "datasets")),
}
"""The programs, with the modules that each needs."""


def run(name: str) -> None:
    """Run one program; write when its steps ended to the file that REAL_PROGRAMS_TIMES names."""
    function, needs = PROGRAMS[name]
    if "torch" in sys.modules or not {"flax", "numpyro", "equinox"} & set(needs):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: TIMES.append(time.perf_counter()))
    try:
        function(str(Path(os.environ["REAL_PROGRAMS_SCRATCH"]) / name))
    finally:
        Path(os.environ["REAL_PROGRAMS_TIMES"]).write_text(json.dumps(TIMES))


def _once(command: list[str], out: Path, label: str, limit: float) -> dict[str, Any]:
    times = out / f"{label}.times.json"
    environment = os.environ | {
        "REAL_PROGRAMS_TIMES": str(times),
        "REAL_PROGRAMS_SCRATCH": str(out / "scratch"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    begin = time.perf_counter()
    with (out / f"{label}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, env=environment, stdout=log, stderr=log, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    ended = json.loads(times.read_text()) if times.exists() else []
    settled = ended[min(SETTLED, len(ended) // 3) :]
    steps = [1000 * (b - a) for a, b in itertools.pairwise(settled)]
    return {
        "exit": code,
        "seconds": round(time.perf_counter() - begin, 1),
        "steps": len(ended),
        "median_ms": round(statistics.median(steps), 3) if steps else None,
        "quartiles_ms": [round(q, 3) for q in statistics.quantiles(steps, n=4)] if len(steps) > 3 else None,
    }


def record(out: Path, names: list[str], python: str, limit: float) -> None:
    """Run the programs alone and recorded; write and print the times."""
    (out / "scratch").mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name in names or PROGRAMS:
        lacking = [module for module in PROGRAMS[name][1] if importlib.util.find_spec(module) is None]
        if lacking:
            found[name] = {"not_installed": lacking}
        else:
            command = [python, __file__, "run", name]
            recorder = [python, "-m", "thence", "record", "-o", str(out / name), "--"]
            found[name] = {
                "plain": _once(command, out, f"{name}.plain", limit),
                "recorded": _once([*recorder, *command], out, f"{name}.recorded", limit),
            }
        print(name, json.dumps(found[name]), flush=True)
        (out / "programs.json").write_text(json.dumps(found, indent=1))


def check(out: Path) -> None:
    """Print what is known of each recording."""
    import thence

    runs = json.loads((out / "programs.json").read_text())
    for name, results in runs.items():
        if "not_installed" in results:
            print(f"{name}: not installed: {results['not_installed']}")
            continue
        both = (results["plain"]["exit"], results["recorded"]["exit"])
        judge(both == (0, 0) and (out / name).exists(), f"{name}: exit codes alone and recorded {both}")
        if not (out / name).exists():
            continue
        trace = thence.open(out / name)
        print(f"\n{name}: {json.dumps(results)}")
        for by in ("module", "source", "phase", "hlo", "label"):
            summary = trace.report(by)
            print(f"  {by}: {summary.attributed_ns / max(summary.total_ns, 1):.2%}")


if __name__ == "__main__":
    OPTIONS = documented_parser(__doc__)
    OPTIONS.add_argument("do", choices=("list", "run", "record", "check"))
    OPTIONS.add_argument("where", nargs="?", help="NAME of a program, or folder OUT")
    OPTIONS.add_argument("names", nargs="*", metavar="NAME")
    OPTIONS.add_argument("--python", default=sys.executable, help="the interpreter that runs the programs")
    OPTIONS.add_argument("--limit", type=float, default=90.0, help="seconds that one run may take")
    GIVEN = OPTIONS.parse_args()
    if GIVEN.do == "list":
        print(*PROGRAMS, sep="\n")
    elif GIVEN.do == "run":
        run(GIVEN.where)
    elif GIVEN.do == "record":
        record(Path(GIVEN.where), GIVEN.names, GIVEN.python, GIVEN.limit)
    else:
        check(Path(GIVEN.where))
        end()
