"""The callbacks with the real transformers, Lightning and Accelerate, and what W&B, MLflow and TensorBoard keep.

Each test needs its library; none is a dependency of the tests: `.ci/libraries` installs all of them.

Programs run on the CPU, with a libcupti made for the tests; each call of their model launches a kernel.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import polars as pl
import pytest

from helpers import TORCH
from recorder_programs import PREAMBLE, fake_libraries, rows
from thence.integrations import log

if TYPE_CHECKING:
    from pathlib import Path

MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, labels=None):
        launch("forward_kernel")
        y = self.layer(x)
        return {"loss": (y - labels).pow(2).mean(), "logits": y}

DATA = [{"x": torch.ones(4), "labels": torch.zeros(4)} for _ in range(24)]
"""
TRANSFORMERS = """
import transformers
from thence.integrations.transformers import ThenceCallback

arguments = transformers.TrainingArguments(
    str(OUT.parent / "trainer"), max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
callback = ThenceCallback(OUT)
trainer = transformers.Trainer(Model(), arguments, train_dataset=DATA, callbacks=[callback])
trainer.train()
assert trainer.state.global_step == 5
assert (callback.logged is None) == bool(callback.training.trouble)
"""
LIGHTNING = """
import lightning
from thence.integrations.lightning import Thence

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, batch, _number):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

logger = lightning.pytorch.loggers.CSVLogger(OUT.parent / "logged")
trainer = lightning.Trainer(
    max_steps=5, accumulate_grad_batches=2, accelerator="cpu", callbacks=[Thence(OUT)], logger=logger,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), torch.utils.data.DataLoader(DATA, batch_size=2))
assert trainer.global_step == 5
logger.save()
assert "thence/step_ms" in next(OUT.parent.glob("logged/**/metrics.csv")).read_text()
"""
ACCELERATE = """
import accelerate
from thence.integrations import Training

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
model = Model()
loader = torch.utils.data.DataLoader(DATA[:20], batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
with Training(OUT) as training:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            training.step()
"""


def run(body: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program, which must end with 0."""
    given = {**os.environ, **fake_libraries()}
    command = [sys.executable, "-c", PREAMBLE + body, str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250, env=given)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("library", "body"), [("transformers", TRANSFORMERS), ("lightning", LIGHTNING), ("accelerate", ACCELERATE)]
)
def test_five_steps_of_two_batches_are_recorded(tmp_path: Path, library: str, body: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = run(MODEL + body, tmp_path / "run")
    assert re.search(r"thence: (5 steps|[1-4] steps? \(of 5\)) of ", done.stderr)
    assert f"thence: recorded 10 kernels of this process. See all: thence report {tmp_path / 'run'}" in done.stderr
    steps = rows(tmp_path / "run").group_by(pl.col("step").cast(pl.String)).len()
    assert dict(steps.iter_rows()) == {f"step {step}": 2 for step in range(5)}


def test_without_a_gpu_a_sentence_says_so_and_the_training_goes_on(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    absent = "os.environ['THENCE_LIBCUPTI'] = '/no/libcupti.so'\n"
    done = run(absent + MODEL + TRANSFORMERS, tmp_path / "run")
    assert "thence: the training is not recorded, and goes on: " in done.stderr
    assert not list(tmp_path.glob("run/*"))


RUN = TORCH / "torch_eager_rank0.json.gz"
TRACKERS = """
import sys
import thence.integrations
logged = thence.integrations.log(sys.argv[1])
folder = sys.argv[2]
"""
KEPT = {
    "wandb": """
import wandb
run = wandb.init(project="p", dir=folder, mode="offline")
logged.to_wandb(run)
print("kept", run.summary.get("thence/step_ms"))
run.finish()
""",
    "mlflow": """
import mlflow
mlflow.set_tracking_uri("file://" + folder + "/runs")
mlflow.set_experiment("training")
with mlflow.start_run() as run:
    logged.to_mlflow()
client = mlflow.MlflowClient()
assert [one.path for one in client.list_artifacts(run.info.run_id)] == ["thence.html"]
print("kept", client.get_run(run.info.run_id).data.metrics["thence/step_ms"])
""",
    "tensorboard": """
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter(folder) as writer:
    logged.to_tensorboard(writer, 5)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(folder)
events.Reload()
assert "thence/text_summary" in events.Tags()["tensors"]
[scalar] = events.Scalars("thence/step_ms")
assert scalar.step == 5
print("kept", scalar.value)
""",
}


@pytest.mark.parametrize("library", KEPT)
def test_trackers_keep_the_scalars_and_the_page(tmp_path: Path, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = TRACKERS + KEPT[library]
    command = [sys.executable, "-c", program, str(RUN), str(tmp_path)]
    environment = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    (kept,) = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("kept ")]
    assert float(kept) == pytest.approx(log(RUN).scalars["thence/step_ms"], rel=1e-6)
