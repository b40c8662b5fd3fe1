"""``thence convert`` and ``Trace.convert`` from outside: files that are whole or not there."""

from __future__ import annotations

import gzip
import json
import re
from typing import TYPE_CHECKING

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

import thence
from collective_jobs import skewed
from helpers import PAIR, assert_same_tables, opened, run_process, run_thence, written
from thence.cli import convert
from thence.model.places import LANES
from thence.writers.timelines import write as files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    return written(tmp_path / "in.json", PAIR)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_perfetto_trace(trace_path: Path, tmp_path: Path) -> None:
    run = run_thence("convert", trace_path, "-o", tmp_path / "out.pftrace", "--lanes", "label")
    assert (run.returncode, run.stdout) == (0, b"")
    size = (tmp_path / "out.pftrace").stat().st_size
    said = run.stderr.decode()
    assert said.startswith(f"wrote {tmp_path / 'out.pftrace'}: ")
    assert said.endswith(f", {size / 1000:.3f} kB\n")
    trace = protos.Trace.FromString((tmp_path / "out.pftrace").read_bytes())
    assert "train" in {p.track_descriptor.name for p in trace.packet}
    assert names(tmp_path) == ["in.json", "out.pftrace"]


def test_json_plain_and_compressed(trace_path: Path, tmp_path: Path) -> None:
    assert run_thence("convert", trace_path, "-o", tmp_path / "a.json").returncode == 0
    assert run_thence("convert", trace_path, "-o", tmp_path / "a.json.gz").returncode == 0
    plain = (tmp_path / "a.json").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == plain
    assert_same_tables(thence.open(trace_path).recorded, thence.open(tmp_path / "a.json").recorded)


def test_a_folder_of_tables(trace_path: Path, tmp_path: Path) -> None:
    for _ in range(2):
        run = run_thence("convert", trace_path, "-o", f"{tmp_path / 't.parquet'}/", "--force")
        assert run.returncode == 0, run.stderr
    assert {"gpu.parquet", "host.parquet", "meta.json"} <= set(names(tmp_path / "t.parquet"))


def test_an_existing_file_is_replaced_only_by_force(trace_path: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("mine")
    run = run_thence("convert", trace_path, "-o", target)
    assert run.returncode == 2
    assert b"exists already; --force" in run.stderr
    assert target.read_text() == "mine"
    assert run_thence("convert", trace_path, "-o", target, "--force").returncode == 0
    assert json.loads(target.read_text())["traceEvents"]


def test_an_ending_that_says_nothing_is_refused_before_reading(tmp_path: Path) -> None:
    (tmp_path / "unknown.json").write_text("no trace")
    run = run_thence("convert", tmp_path / "unknown.json", "-o", tmp_path / "out.txt")
    assert run.returncode == 2
    assert b"choose one of .pftrace" in run.stderr


def test_a_folder_that_is_not_there(trace_path: Path, tmp_path: Path) -> None:
    run = run_thence("convert", trace_path, "-o", tmp_path / "no" / "out.json")
    assert run.returncode == 2
    assert b"there is no folder" in run.stderr


def test_a_pipe(trace_path: Path) -> None:
    run = run_process("convert", "-", "-o", "-", "--to", "json", stdin=trace_path.read_bytes())
    assert run.returncode == 0
    assert json.loads(run.stdout)["traceEvents"]
    run = run_thence("convert", trace_path, "-o", "-")
    assert len(protos.Trace.FromString(run.stdout).packet) > 10


def test_moved_clocks_are_said(tmp_path: Path) -> None:
    ranks = skewed(tmp_path)
    run = run_thence("convert", *ranks, "-o", tmp_path / "out.pftrace")
    assert run.returncode == 0
    assert b"all times shifted by" in run.stderr
    run = run_thence("convert", *ranks, "-o", tmp_path / "as.pftrace", "--clocks", "recorded")
    assert b"times moved" not in run.stderr


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = opened(tmp_path, PAIR)
    target = tmp_path / "out.pftrace"
    target.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_perfetto", full)
    with pytest.raises(thence.ThenceError) as told:
        trace.convert(target)
    sentence = rf"{re.escape(str(target))}: cannot be written: No space left on device"
    free = rf" \([\d,]+\.\d MB are free in {re.escape(str(tmp_path))}\)"
    assert re.fullmatch(f"{sentence}{free}; what was there is unchanged", str(told.value))
    assert target.read_bytes() == b"before"
    monkeypatch.setattr(files, "write_parquet", full)
    with pytest.raises(thence.ThenceError, match=f"No space left on device{free}; nothing is left"):
        trace.convert(tmp_path / "t.parquet")
    assert names(tmp_path) == ["out.pftrace", "trace.json"]


def test_a_link_to_nothing_as_output_is_told_and_replaced_only_if_asked(tmp_path: Path) -> None:
    written(tmp_path / "trace.json", PAIR)
    link = tmp_path / "out.json"
    link.symlink_to("gone.json")
    done = run_thence("convert", tmp_path / "trace.json", "-o", link)
    assert done.returncode == 2
    assert b"out.json: is a symbolic link to gone.json, which does not exist; --force replaces the link" in done.stderr
    done = run_thence("convert", tmp_path / "trace.json", "-o", link, "--force")
    assert done.returncode == 0
    assert not link.is_symlink()
    assert names(tmp_path) == ["out.json", "trace.json"]


def test_a_table_folder_does_not_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("mine")
    with pytest.raises(thence.UsageError, match="is a file"):
        opened(tmp_path, PAIR).convert(tmp_path / "t.parquet")


def test_a_table_folder_does_not_take_other_files_with_it(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").mkdir()
    (tmp_path / "t.parquet" / "mine").touch()
    with pytest.raises(thence.UsageError, match="holds other files"):
        opened(tmp_path, PAIR).convert(tmp_path / "t.parquet")
    assert names(tmp_path / "t.parquet") == ["mine"]


@pytest.mark.parametrize("wrong", [{"lanes": ("nothing",)}, {"clocks": "mine"}])
def test_choices_that_there_are_not(tmp_path: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(thence.UsageError, match="clocks must be aligned or recorded"):
        opened(tmp_path, PAIR).convert(tmp_path / "out.json", **wrong)


def test_the_command_line_lists_every_lane() -> None:
    (lanes,) = [option for option in convert.command.params if option.name == "lanes"]
    assert tuple(lanes.type.choices) == LANES
