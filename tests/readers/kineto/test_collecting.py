"""Columns of pieces become those of the file, however many rows the first pieces let expect."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tests.helpers import event, kernel, launch

from thence.readers.kineto import collecting
from thence.readers.kineto.collecting import collected
from thence.readers.kineto.events import decode


def events(count: int) -> list[dict[str, Any]]:
    """Kernels, launches and named ops: names and threads come back in later pieces, in another order."""
    made = []
    for number in range(count):
        made.append(kernel(number, 10 * number, name=f"kernel {number % 3}"))
        made.append(launch(number, 10 * number, tid=number % 4))
        triton = {"kernel_file": f"/k{number % 2}.py"} if number % 5 == 4 else {}
        made.append(event("cpu_op", f"op {-number % 7}", 10 * number, 1, tid=(count - number) % 4, args=triton))
    return made


def numbered(columns: dict[str, Any]) -> dict[str, list[Any]]:
    """The rows of each column, with names and lanes as they are instead of their numbers."""
    names, lanes = [*columns["names"], None], columns["lanes"]
    of_names = ("gpu.name", "host.name", "host.kernel", "host.metadata")
    rows = {}
    for key, values in columns.items():
        if key in of_names:
            rows[key] = [names[number] for number in values]
        elif key.endswith(".lane"):
            rows[key] = [tuple(lanes[number]) for number in values]
        elif isinstance(values, np.ndarray):
            rows[key] = values.tolist()
    return rows


@pytest.mark.parametrize("expected", [0, 1, 7.5, 1e9], ids=["unknown", "few", "right", "too many"])
def test_pieces_give_the_columns_of_the_whole(expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "_FIRST_ROWS", 1)
    whole = events(60)
    sizes = (3, 90, 0, 1, 40, 5, 41)  # the first piece says little of the others
    ends = np.cumsum(sizes).tolist()
    pieces = [decode(json.dumps(whole[end - size : end]).encode()) for size, end in zip(sizes, ends, strict=True)]
    ticks: list[None] = []
    found = collected(pieces, lambda: ticks.append(None), expected)
    assert len(ticks) == len(sizes)
    assert found["events"] == len(whole)
    rows = numbered(found)
    assert rows["gpu.name"] == [e["name"] for e in whole if e["cat"] == "kernel"]
    on_host = [e for e in whole if e["cat"] != "kernel"]
    assert rows["host.name"] == [e["name"] for e in on_host]
    assert rows["host.lane"] == [(e["pid"], e["tid"]) for e in on_host]
    files = [e["args"].get("kernel_file") for e in on_host]
    assert [said and json.loads(said)["kernel_file"] for said in rows["host.metadata"]] == files
    assert rows["gpu.grid"] == [[-1, -1, -1]] * 60


def test_decoding_processes_start_without_polars() -> None:
    code = "import sys, thence.readers.kineto.decoding; sys.exit('polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
