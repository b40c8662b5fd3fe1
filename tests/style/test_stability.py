"""docs/stability.md says what is so, and files of earlier versions open."""

from __future__ import annotations

import importlib
import re
import tarfile
from pathlib import Path

import polars as pl
import pytest

import thence
from helpers import DATA
from thence.cli.output import SCHEMAS
from thence.model.formats import GRAPH_LABELS_VERSION, RECORDING_VERSION
from thence.store import layout

PAGE = (Path(thence.__file__).parents[2] / "docs" / "stability.md").read_text(encoding="utf-8")
KEPT = DATA / "kept"


def table(heading: str) -> list[list[str]]:
    """Cells of the rows of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_schemas_and_versions_are_those_of_the_code() -> None:
    assert {verb.strip("`"): int(schema) for verb, schema in table("JSON")} == SCHEMAS
    versions = {row[0].split(" (")[0]: int(row[1]) for row in table("Files")}
    assert versions == {
        "recording": RECORDING_VERSION, "store": layout.VERSION, "labels of CUDA graphs": GRAPH_LABELS_VERSION,
    }  # fmt: skip


def test_names_are_those_that_modules_export() -> None:
    for module, names in table("Python"):
        exported = importlib.import_module(module.strip("`")).__all__
        assert re.findall(r"`(\w+)`", names) == sorted(exported), module


def test_what_is_experimental_says_so_at_its_name() -> None:
    for name, _ in table("Experimental"):
        module, _, verb = name.strip("`").partition(" ")
        said = (
            importlib.import_module(f"thence.cli.{verb}").command.help
            if verb
            else importlib.import_module(module).__doc__
        )
        assert "xperimental" in str(said), name


def test_every_version_has_a_kept_file() -> None:
    kept = {path.name.partition(".")[0] for path in KEPT.iterdir()} - {"ORIGIN"}
    newer = {f"recording-{version}" for version in range(2, RECORDING_VERSION + 1)}  # 1: tests/data/recording
    assert kept == newer | {f"store-{version}" for version in range(1, layout.VERSION + 1)}


@pytest.mark.parametrize("name", ["recording-2", "recording-3", "recording-4", "store-1"])
def test_files_of_each_version_open_with_what_was_written(name: str, tmp_path: Path) -> None:
    path = KEPT / name
    if name.startswith("store"):
        with tarfile.open(f"{path}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
        path = tmp_path / "job.store"
    trace = thence.open(path)
    rows = trace.activities.sort("start").select(pl.col("name", "label").cast(pl.String), "duration").rows()
    assert rows == [("gemm", "forward", 500), ("gemm", "forward", 1000), ("gemm_backward", "backward", 1500)]
    totals = trace.report("label").rows.select(pl.col("name").cast(pl.String), "total_ns").rows()
    assert dict(totals) == {"forward": 1500, "backward": 1500}
    assert trace.meta.warnings == ()
