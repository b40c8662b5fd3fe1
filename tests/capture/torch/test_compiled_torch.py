"""Compiled code of the PyTorch that is installed: what its launches are made of, and that nothing else changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

STEP = Path(__file__).parents[2] / "support" / "compiled_step.py"
THENCE = "+thence"


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """A step without thence, one with it, one with its cache, and one with a cache filled without it."""
    without, with_it = (str(tmp_path_factory.mktemp(name)) for name in ("without", "with"))
    command = [without, with_it + THENCE, with_it + THENCE, without + THENCE]
    done = subprocess.run([sys.executable, STEP, *command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    results = map(json.loads, done.stdout.splitlines())
    return dict(zip(("plain", "cold", "warm", "before"), results, strict=True))


def test_results_caches_and_graphs_are_what_they_are_without_it(steps) -> None:
    plain = steps["plain"]
    assert plain["keys"]
    for name, step in steps.items():
        assert step["digest"] == plain["digest"], name
        assert step["keys"] == plain["keys"], name
        assert (step["breaks"], step["graphs"]) == (0, 1), name
        if name != "plain":
            assert (step["again"], step["recompiled"]) == (plain["digest"], 1), name
    assert [steps[name]["hits"] for name in ("plain", "cold", "warm", "before")] == [0, 0, 2, 2]


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_every_multiplication_has_the_layer_that_its_shapes_tell(steps, cache) -> None:
    launches = steps[cache]["launches"]
    # up and head forward; head: gradients of weight and input; up: gradient of its weight.
    assert [(truth, phase) for truth, _, _, phase, _ in launches] == [
        ("up", "forward"),
        ("head", "forward"),
        *(("head", "backward"),) * 2,
        ("up", "backward"),
    ]
    line = {"up": steps[cache]["line"], "head": steps[cache]["line"] + 1}
    for truth, module, op, _, at in launches:
        assert module == truth
        assert op == "aten.mm"
        assert int(at.split()[0]) == line[truth]
    assert steps[cache]["notes"] == []


def test_a_cache_filled_before_tells_the_forward_and_says_what_it_lacks(steps) -> None:
    launches = steps["before"]["launches"]
    assert [(truth, module, phase) for truth, module, _, phase, _ in launches if phase == "forward"] == [
        ("up", "up", "forward"),
        ("head", "head", "forward"),
    ]
    assert {module for _, module, _, phase, _ in launches if phase == "backward"} == {None}
    assert len(launches) == 5
    (note,) = steps["before"]["notes"]
    assert "filled without thence" in note
