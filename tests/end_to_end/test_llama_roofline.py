"""FLOP of a training step of a Llama, eager, in checkpoints, compiled, captured and recorded, by the closed form."""

from __future__ import annotations

import shutil
import tarfile
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import DATA, run_thence

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = DATA / "torch" / "llama"
LAYERS, WIDTH, KEYS, INNER, WORDS = 3, 1040, 208, 2824, 4099
TOKENS, LENGTH = 3 * 391, 391

# Forward and two gradients of each product; attention of the pairs below the diagonal, 1 + 2.5 times.
PRODUCT = 2 * TOKENS * WIDTH * INNER
PROJECTIONS = 2 * TOKENS * WIDTH * (2 * WIDTH + 2 * KEYS)
SCORES = 4 * 3 * (LENGTH * (LENGTH + 1) // 2) * WIDTH
MODEL = {
    "attention": LAYERS * (3 * PROJECTIONS + 3.5 * SCORES),
    "mlp": LAYERS * 3 * 3 * PRODUCT,
    "head": 3 * 2 * TOKENS * WIDTH * WORDS,
}
# A checkpoint computes its layer again, but for the last product, whose result no gradient needs.
RECOMPUTED = LAYERS * (PROJECTIONS + SCORES + 2 * PRODUCT)


def of_a_step(trace: thence.Trace, by: str = "kernel") -> tuple[pl.DataFrame, int]:
    """The roofline of the typical steps, and their number."""
    part = trace.typical
    return part.roofline(by).rows, part.tables.places["step_row"].drop_nulls().n_unique()  # type: ignore[arg-type]


def flop(trace: thence.Trace) -> float:
    rows, steps = of_a_step(trace)
    return float(rows["flop"].sum()) / steps


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> thence.Trace:
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(LLAMA / "recorded.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return thence.open(folder / "llama")


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of the replays, in a folder without the labels."""
    return shutil.copy(LLAMA / "captured.json.gz", tmp_path_factory.mktemp("replays"))


def test_eager_steps() -> None:
    trace = thence.open(LLAMA / "eager.json.gz")
    assert flop(trace) == pytest.approx(sum(MODEL.values()), rel=1e-9)
    (steps,) = trace.roofline().steps.iter_rows(named=True)
    assert (
        steps["mfu"] == steps["hfu"] == pytest.approx(steps["flop"] / 989.4e12 / (steps["duration_ns"] / 1e9), rel=1e-3)
    )
    assert steps["known_share"] == 1


def test_recomputation_is_told_apart() -> None:
    trace = thence.open(LLAMA / "checkpoints.json.gz")
    assert flop(trace) == pytest.approx(sum(MODEL.values()) + RECOMPUTED, rel=1e-9)
    (steps,) = trace.roofline().steps.iter_rows(named=True)
    assert steps["recomputed_flop"] == pytest.approx(steps["steps"] * RECOMPUTED, rel=1e-9)
    assert steps["mfu"] / steps["hfu"] == pytest.approx(1 - RECOMPUTED / (sum(MODEL.values()) + RECOMPUTED), rel=1e-6)


def test_compiled_steps() -> None:
    """Inductor pads the products of the head to a multiple of 8."""
    found = flop(thence.open(LLAMA / "compiled.json.gz"))
    assert sum(MODEL.values()) <= found <= 1.001 * sum(MODEL.values())


def test_replays_without_labels_have_no_flop_and_the_reason(replays: Path) -> None:
    found = thence.open(replays).roofline("kernel")
    assert found.totals["flop_modelled_ns"] == 0
    assert found.totals["flop"] is None
    assert found.reasons["code"][0] == "no_operator"
    assert "thence label --eager" in found.reasons["text"][0]


def test_replays_have_the_flop_of_their_capture_and_of_an_eager_run(replays: Path) -> None:
    trace = thence.open(replays)
    for labelled in (
        trace.label(LLAMA / "captured_labels.json.gz"),
        trace.label(eager=thence.open(LLAMA / "captured_eager.json.gz")),
    ):
        assert labelled.roofline().totals["flop"] == pytest.approx(3 * sum(MODEL.values()), rel=1e-9)
    assert of_a_step(trace.label(LLAMA / "captured_labels.json.gz"), "op")[0]["name"].null_count() == 0


def test_a_labelled_file_keeps_the_operators(replays: Path, tmp_path: Path) -> None:
    target = tmp_path / "labelled.json.gz"
    done = run_thence("label", replays, "--eager", LLAMA / "captured_eager.json.gz", "-o", target)
    assert done.returncode == 0, done.stderr
    assert thence.open(target).roofline().totals["flop"] == pytest.approx(3 * sum(MODEL.values()), rel=1e-9)


def test_a_recorded_graph_has_the_flop_of_the_model_and_its_modules(recorded: thence.Trace) -> None:
    assert flop(recorded) == pytest.approx(sum(MODEL.values()), rel=1e-9)
    rows, steps = of_a_step(recorded, "module")
    names = rows["name"].cast(pl.String)
    for module, expected in MODEL.items():
        of_module = rows.filter(names.str.contains(rf"(^|\.){module}(\.|$)"))
        assert float(of_module["flop"].sum()) / steps == pytest.approx(expected, rel=1e-9), module
