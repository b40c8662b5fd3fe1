"""Scalars and page of a run, and what trackers of experiments are given; the trackers are stand-ins."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import thence
from helpers import FSDP, recording, shared, unzipped
from thence.errors import MissingRequirement
from thence.integrations import SCALARS, Logged, log


@pytest.fixture(scope="module")
def logged() -> Logged:
    return log(shared(recording("torch_eager_rank0")))


def test_scalars_are_those_of_the_steps(logged: Logged) -> None:
    marked = set(re.findall(rb'"ProfilerStep#\d+"', unzipped(recording("torch_eager_rank0"))))
    assert logged.scalars["thence/steps"] == len(marked)
    assert logged.scalars["thence/gpu_idle_share"] == pytest.approx(1 - logged.scalars["thence/gpu_busy_share"])
    shares = {name: value for name, value in logged.scalars.items() if name.startswith("thence/phase/")}
    assert set(shares) >= {"thence/phase/forward_share", "thence/phase/backward_share"}
    assert sum(shares.values()) == pytest.approx(1)
    idle = sum(value for name, value in logged.scalars.items() if name.startswith("thence/idle/"))
    assert idle == pytest.approx(logged.scalars["thence/gpu_idle_share"], rel=0.1)  # medians do not add up exactly
    assert logged.scalars["thence/sound"] == 1


def test_every_scalar_is_described_and_has_its_unit_in_its_name(logged: Logged) -> None:
    known = {re.sub("CAUSE|PHASE", "[a-z_]+", name) for name in SCALARS}
    for name in {*logged.scalars, *log(shared(*FSDP[:2])).scalars}:
        assert any(re.fullmatch(pattern, name) for pattern in known), name
        assert name.endswith(("_ms", "_share", "steps", "late_ranks", "sound"))


def test_the_page_of_the_documentation_lists_them_all() -> None:
    page = (Path(thence.__file__).parents[2] / "docs" / "adoption.md").read_text(encoding="utf-8")
    assert [tuple(row) for row in re.findall(r"^\| `(thence/.+?)` \| (.+) \|$", page, re.MULTILINE)] == [
        *SCALARS.items()
    ]


def test_a_trace_and_a_path_are_logged_alike(logged: Logged) -> None:
    assert log(logged.trace).trace is logged.trace
    assert log(recording("torch_eager_rank0")).scalars == logged.scalars


def test_trackers_get_scalars_and_page(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    wandb, mlflow = ModuleType("wandb"), ModuleType("mlflow")
    wandb.Html = lambda page, inject: ("html", page, inject)  # type: ignore[attr-defined]
    mlflow.log_metrics = lambda scalars, run_id: sent.append((scalars, run_id))  # type: ignore[attr-defined]
    mlflow.log_text = lambda text, file, run_id: sent.append((text, file, run_id))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    logged.to_wandb(SimpleNamespace(log=sent.append))
    logged.to_mlflow("id")
    page = logged.page
    assert page.startswith("<!")
    assert sent == [
        {**logged.scalars, "thence/page": ("html", page, False)},
        (logged.scalars, "id"),
        (page, "thence.html", "id"),
    ]
    sent.clear()
    writer = SimpleNamespace(add_scalar=lambda *a: sent.append(a), add_text=lambda *a: sent.append(a))
    logged.to_tensorboard(writer, 7)
    assert sent[:-1] == [(name, value, 7) for name, value in logged.scalars.items()]
    assert sent[-1] == ("thence", "\n".join(f"- {line}" for line in logged.trace.headline.lines), 7)


def test_a_library_that_is_not_there_is_named(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingRequirement, match="pip install wandb"):
        logged.to_wandb(None)
    for module, package in (("transformers", "transformers"), ("lightning", "Lightning")):
        for name in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingRequirement, match=f"{package} is not installed"):
            __import__(f"thence.integrations.{module}")
