"""HLO ops in command buffers of programs that ran on GPUs, against the same programs without command buffers.

``expected.json`` in each archive was counted in a recording without command buffers, from kernels' names and sizes, by
the ranges of thunks around their launches: see ``tests/data/jax/cut_programs.py``.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from helpers import DATA
from thence.attribution.attribute import attribute
from thence.attribution.xla import command_buffers
from thence.readers.recording.read import read

if TYPE_CHECKING:
    from pathlib import Path

    from thence.model.tables import Tables

PROGRAMS = sorted(path.name.removesuffix(".tar.xz") for path in (DATA / "jax" / "programs").glob("*.tar.xz"))
LATE, FOREIGN = ("late", "ffi_in_graph")  # recorded after the creation; with a foreign function in its graph
TURNS = 8  # of the loop in while_in_graph
CONDITION = {
    "jit_step/loop_compare_fusion": ("loop_compare_fusion", (1, 1, 1), (1, 1, 1)),
    "jit_step/while.9": ("decision", (), ()),
}
"""What XLA runs in a graph alone: whether there is another turn, which on the host it knows beforehand."""


@dataclass(frozen=True)
class Program:
    """A recording, and what each HLO op ran in it by the recording without command buffers."""

    tables: Tables
    expected: dict[str, Counter[Any]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    folder = tmp_path_factory.mktemp("programs")
    return {name: opened(folder / name, name) for name in PROGRAMS}


def opened(folder: Path, name: str) -> Program:
    with tarfile.open(DATA / "jax" / "programs" / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    told = json.loads((folder / "expected.json").read_bytes())
    expected = {
        op: Counter({(kernel, tuple(grid), tuple(block)): times for kernel, grid, block, times in ran})
        for op, ran in told["ops"].items()
    }
    if name == "while_in_graph":
        turns = told["executions"]["jit_step"] * (TURNS + 1)
        expected |= {op: Counter({ran: turns}) for op, ran in CONDITION.items()}
    return Program(read(str(folder / "recording"), lambda _done: None), expected)


def ran_by(tables: Tables) -> tuple[dict[str, Counter[Any]], Counter[str]]:
    """What each HLO op ran, and by which rules what ran in graphs was found."""
    found = attribute(tables)
    rows = found.gpu.select(
        "kind", "grid", "block", "graph", pl.col("name", "hlo").cast(pl.String),
        rule=found.places["hlo_rule"].cast(pl.String),
        program=found.programs["name"].cast(pl.String).gather(found.gpu["program"].cast(pl.UInt32)),
    )  # fmt: skip
    ran: dict[str, Counter[Any]] = {}
    for kind, grid, block, _, name, hlo, _, program in rows.drop_nulls("hlo").iter_rows():
        what: Any = (name, tuple(grid or ()), tuple(block or ()))
        if re.match(r"set_\w+_condition$|Memcpy DtoH", name):
            what = ("decision", (), ())
        elif kind != "kernel" or name.startswith(("memcpy", "memset")):
            what = ("copy", (), ())
        ran.setdefault(f"{program}/{hlo}", Counter())[what] += 1
    return ran, Counter(rows.filter(pl.col("graph").is_not_null())["rule"].to_list())


@pytest.mark.parametrize("name", PROGRAMS)
def test_ops_run_what_they_run_without_command_buffers(programs: dict[str, Program], name: str) -> None:
    ran, rules = ran_by(programs[name].tables)
    assert ran == programs[name].expected
    found_by = "hlo_thunk_number" if name == LATE else "hlo_creation"
    # A sort, and what a library runs in graphs whose creation was not recorded, are known by their order.
    assert set(rules) <= {found_by, "hlo_library_order"}
    assert rules[found_by] > (0.75 if name == LATE else 0.95) * rules.total()


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in (LATE, FOREIGN)])
def test_so_it_is_where_the_creation_of_graphs_was_not_recorded(
    programs: dict[str, Program], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_buffers, "creations", lambda *_arguments: {})
    ran, rules = ran_by(programs[name].tables)
    assert ran == programs[name].expected
    assert "hlo_creation" not in rules
    assert rules["hlo_thunk_number"] > 0.9 * rules.total()


def test_a_graph_with_a_foreign_function_is_known_by_its_creation_alone(
    programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many kernels the function captured is nowhere else, so nothing in the graph is placed, rightly or falsely."""
    monkeypatch.setattr(command_buffers, "creations", lambda *_arguments: {})
    program = programs[FOREIGN]
    ran, rules = ran_by(program.tables)
    assert not any(found - program.expected[op] for op, found in ran.items())
    assert rules == {"command_buffer_no_fit": 26}, "two launches of a graph of 13 nodes"


def test_graphs_are_found_that_were_created_after_collectives_copied_memory(programs: dict[str, Program]) -> None:
    """The copies stand in the program's own range, before XLA's ranges around the commands; one of these is the copy
    that an asynchronous start has in a child graph, between its neighbours in the schedule."""
    tables = programs["two_devices"].tables
    host = tables.host.with_columns(pl.col("name").cast(pl.String)).with_row_index("row")
    copies = host.filter(pl.col("name").str.starts_with("cuMemcpyHtoDAsync"))
    around = copies["parent"].cast(pl.UInt32)
    assert host["name"].gather(around).str.starts_with("XlaModule:").all()
    built = host.filter(pl.col("name").str.starts_with("cuGraphInstantiate"))
    assert copies["start"].min() < built["start"].min()  # type: ignore[operator]
    _, rules = ran_by(tables)
    assert set(rules) == {"hlo_creation"}
