"""Mutated inputs of every format end in a result or in one sentence, within limits of time and memory.

`make fuzz` goes on for hours; `run.py` says how to run one case again.
"""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING

import pytest

import forking
import thence
from fuzz.batches import RUN
from fuzz.formats import FORMATS, Format
from fuzz.mutations import damaged, mutated
from fuzz.run import ALONE

if TYPE_CHECKING:
    from pathlib import Path

CASES, SEED, THROUGH_VERBS = 100, 1, 50
SOON = ("sqlite", "xplane", "recording", "arrow", "parquet")
"""Formats of which 50 cases reach every refusal of damage that 200 reach; they cost most, and have half as many.

`make fuzz` and its workflow try other cases for hours.
"""
FEW = ("mosaic", "flashinfer", "proton", "summaries", "history")
"""Formats whose every case goes through a verb: a quarter of the cases does."""


@pytest.mark.skipif(sys.platform == "win32", reason="limits are those of POSIX")
@pytest.mark.parametrize("of", FORMATS, ids=[of.name for of in FORMATS])
def test_no_input_does_harm(of: Format, tmp_path: Path) -> None:
    cases = CASES // 4 if of.name in FEW else CASES // 2 if of.name in SOON else CASES
    options = {"--cases": cases, "--every": min(THROUGH_VERBS, cases // 2), "--seed": SEED}
    arguments = [word for name, value in options.items() for word in (name, str(value))]
    environment = os.environ | {"POLARS_MAX_THREADS": "1", "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = forking.run([str(RUN), of.name, *arguments], env=environment, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr[-1500:]).decode()
    assert done.stderr.count(b"\nat ") + 1 == cases
    assert f"{cases} cases from 0, seed {SEED}, 0 failed".encode() in done.stdout


@pytest.mark.parametrize("of", FORMATS, ids=[of.name for of in FORMATS])
def test_seeds_are_small_and_sound(of: Format, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is mutated is read without the mutation, or all cases would be refused at once."""
    folder = tmp_path_factory.mktemp(of.name)
    path = of.write(of.seed(), folder)
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 300_000
    if of.name == "store":
        assert thence.open(path).report().sum_ns > 0
    elif of.name not in ("hlo", *ALONE):
        from thence.readers.registry import read

        tables = read([str(folder if of.name == "recording" else path)])
        held = len(tables.graph_labels) + len(tables.flight_records) + len(tables.inspector_records)
        assert tables.gpu.height + tables.host.height + tables.memory.height + held > 0


def test_mutations_change_something() -> None:
    tree = {"a": [1, 2.5, "x", None, {"b": b"bytes"}], "c": True}
    changed = [repr(mutated(tree, random.Random(i))) for i in range(200)]
    assert sum(text != repr(tree) for text in changed) > 150
    assert len(set(changed)) > 100
    assert tree == {"a": [1, 2.5, "x", None, {"b": b"bytes"}], "c": True}
    assert len({damaged(b"0123456789" * 5, random.Random(i)) for i in range(200)}) > 100
