"""Recordings that training loops make of themselves; the classes of the libraries are stand-ins."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import polars as pl
import pytest

from recorder_programs import Copies, description, rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STAND_INS = """
import types
from types import SimpleNamespace

def package(name, **names):
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(names)

package("transformers", TrainerCallback=type("TrainerCallback", (), {}))
package("pytorch_lightning", Callback=type("Callback", (), {}))

def batch():
    launch("one")
    launch("two")
    time.sleep(0.001)
"""
TRAINER = """
from thence.integrations.transformers import ThenceCallback
import transformers
callback = ThenceCallback(OUT)
assert isinstance(callback, transformers.TrainerCallback)
callback.on_train_begin(None, None, None, model=None)
for _ in range(5):
    batch()
    callback.on_step_end(None, None, None, model=None)
callback.on_train_end(None, None, None, model=None)
logged = callback.logged
"""
LIGHTNING = """
from thence.integrations.lightning import Thence
sent = []
logger = SimpleNamespace(log_metrics=lambda scalars, step: sent.append((scalars, step)))
trainer = SimpleNamespace(global_step=0, loggers=[logger])
callback = Thence(OUT)
assert isinstance(callback, sys.modules["pytorch_lightning"].Callback)
callback.on_train_start(trainer, None)
for number in range(10):  # two batches a step of the optimizer
    if number % 2:
        batch()
        trainer.global_step += 1
    callback.on_train_batch_end(trainer, None, None, None, number)
callback.on_train_end(trainer, None)
logged = callback.logged
assert sent == [(logged.scalars, 5)]
"""
LOOP = """
from thence.integrations import Training
with Training(OUT) as training:
    for _ in range(5):
        batch()
        training.step()
logged = None
"""


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    """Runs programs in which what the summary needs was imported before."""
    with Copies("import json, polars, thence.opening, thence.trace", tmp_path_factory.mktemp("copies")) as programs:
        yield programs


@pytest.mark.parametrize("loop", [TRAINER, LIGHTNING, LOOP], ids=["transformers", "lightning", "loop"])
def test_five_steps_are_recorded_and_summed_up(tmp_path: Path, copies: Copies, loop: str) -> None:
    out = tmp_path / "run"
    body = STAND_INS + loop + "print(json.dumps(logged and logged.scalars))"
    *said, printed = copies.program(body, out).splitlines()
    if loop is not LOOP:
        scalars = json.loads(printed)
        assert scalars["thence/steps"] == 5
        assert scalars["thence/step_ms"] > 1  # it sleeps for so long
        assert scalars["thence/gpu_busy_ms"] == pytest.approx(1e-5)  # two kernels of 5 ns
    # Without the first, or without steps that took longer than typical ones.
    assert re.match(r"thence: (5 steps|[1-4] steps? \(of 5\)) of ", said[0])
    assert said[-1] == f"thence: recorded 10 kernels of this process. See all: thence report {out}"
    steps = rows(out).group_by(pl.col("step").cast(pl.String)).len()
    assert dict(steps.iter_rows()) == {f"step {step}": 2 for step in range(5)}
    assert description(out)["finished"]


def test_a_schedule_records_the_steps_that_it_names_and_other_ranks_say_nothing(tmp_path: Path, copies: Copies) -> None:
    loop = LOOP.replace("Training(OUT)", "Training(OUT, schedule=thence.Schedule(skip=1, active=2, repeat=1))")
    assert copies.program(STAND_INS + "os.environ['RANK'] = '1'" + loop, tmp_path / "run") == ""
    assert sorted(rows(tmp_path / "run")["step"].cast(pl.String)) == ["step 1", "step 1", "step 2", "step 2"]


def test_what_cannot_be_recorded_is_said_once_and_the_training_goes_on(tmp_path: Path, copies: Copies) -> None:
    absent = "os.environ['THENCE_LIBCUPTI'] = '/no/libcupti.so'"
    (line,) = copies.program(STAND_INS + absent + LOOP, tmp_path / "run").splitlines()
    assert line.startswith("thence: the training is not recorded, and goes on: ")
    assert "/no/libcupti.so" in line
    assert "thence doctor" in line
    assert not (tmp_path / "run").exists(), "nothing was there before"


def test_beside_another_recording_of_the_process_that_one_goes_on_alone(tmp_path: Path, copies: Copies) -> None:
    body = "thence.record(OUT).start()" + LOOP.replace("Training(OUT)", "Training(OUT.parent / 'other')")
    said = copies.program(STAND_INS + body, tmp_path / "run")
    assert "already being recorded" in said
    assert str(tmp_path / "run") in said
    assert rows(tmp_path / "run").height == 10


def test_a_training_that_fails_is_recorded_without_a_summary(tmp_path: Path, copies: Copies) -> None:
    failing = LOOP.replace("        training.step()", "        training.step()\n    raise KeyError('theirs')")
    body = "def main():" + failing.replace("\n", "\n    ") + "\ntry: main()\nexcept KeyError as error: print(error)\n"
    assert copies.program(STAND_INS + body, tmp_path / "run") == "'theirs'\n"
    assert description(tmp_path / "run")["finished"]
