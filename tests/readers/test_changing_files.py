"""Files that are written to, replaced or deleted while they are read: a right answer or one sentence, never a mix."""

from __future__ import annotations

import gzip
import os
import sqlite3
import tarfile
from contextlib import closing
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import nsight_data
from helpers import DATA
from thence.errors import DamagedInput
from thence.readers.nsight.folder import Folder
from thence.readers.recording import folder as recording_folder
from thence.readers.registry import read
from thence.readers.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from thence.model.tables import Tables

FILES = {
    "trace.json": ("torch/torch_fsdp_rank1.json.gz", "torch/graph_replay_rank0.json.gz"),
    "trace.json.gz": ("torch/torch_fsdp_rank1.json.gz", "torch/graph_replay_rank0.json.gz"),
    "export.sqlite": ("nsight/torch_ddp.sqlite.gz", "nsight/jax_train.sqlite.gz"),
    "host.xplane.pb": ("jax/jax_single.xplane.pb.gz", "jax/jax_fsdp2.xplane.pb.gz"),
    "trace.csv": ("nsight/torch_ddp_cuda_gpu_trace.csv.gz", "nsight/jax_train_cuda_gpu_trace.csv.gz"),
}
"""An input of each format, and another of the same format that takes its place."""


def grows(path: Path, other: bytes) -> None:
    with path.open("ab") as file:
        file.write(other)


def shrinks(path: Path, _other: bytes) -> None:
    os.truncate(path, path.stat().st_size // 2)


def is_written_over(path: Path, other: bytes) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write((other * (size // len(other) + 1))[:size])


def is_replaced(path: Path, other: bytes) -> None:
    new = path.with_name("new")
    new.write_bytes(other)
    new.replace(path)


def is_deleted(path: Path, _other: bytes) -> None:
    path.unlink()


def stored(name: str, which: int) -> bytes:
    content = (DATA / FILES[name][which]).read_bytes()
    return content if name.endswith(".gz") else gzip.decompress(content)


def read_while(path: Path, change: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Reads a file that changes after its first bytes were read."""
    head, changes = Source.head, [change]

    def changing(source: Source) -> bytes:
        first = head(source)
        if changes:
            changes.pop()()
        return first

    monkeypatch.setattr(Source, "head", changing)
    return read([str(path)])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [grows, shrinks, is_written_over])
def test_a_file_that_is_written_to_while_it_is_read_is_refused(
    name: str, change: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(stored(name, 0))
    with pytest.raises(DamagedInput, match="was written to while it was read"):
        read_while(path, lambda: change(path, stored(name, 1)), monkeypatch)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [is_replaced, is_deleted])
def test_a_file_that_is_replaced_or_deleted_while_it_is_read_is_read_as_it_was_or_refused(
    name: str, change: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(stored(name, 0))
    expected = read([str(path)])
    if name == "export.sqlite":  # which SQLite opens by its name
        with pytest.raises(DamagedInput, match="was replaced or deleted before it was read"):
            read_while(path, lambda: change(path, stored(name, 1)), monkeypatch)
        return
    tables = read_while(path, lambda: change(path, stored(name, 1)), monkeypatch)
    assert tables.gpu["name"].to_list() == expected.gpu["name"].to_list()
    assert tables.host.height == expected.host.height


def test_a_file_that_only_gets_another_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FILES:
        path = tmp_path / name
        path.write_bytes(stored(name, 0))
        expected = read([str(path)]).gpu.height
        with monkeypatch.context() as patch:
            renamed = tmp_path / f"renamed-{name}"
            assert read_while(path, lambda p=path, r=renamed: p.rename(r), patch).gpu.height == expected  # type: ignore[misc]


def test_tables_of_a_folder_of_which_one_is_replaced_while_it_is_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = nsight_data.unpacked("torch_ddp", tmp_path)
    folder = tmp_path / "parquet"
    folder.mkdir()
    with closing(sqlite3.connect(database)) as connection:
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "StringIds"):
            frame = pl.read_database(f"select * from {table}", connection, infer_schema_length=None)
            frame.write_parquet(folder / f"{table}.parquet")
    assert read([str(folder)]).gpu.height
    names, frame_of = folder / "StringIds.parquet", Folder.frame

    def changing(tables: Folder, table: str, *columns: Sequence[str]) -> pl.DataFrame:
        is_replaced(names, names.read_bytes())
        return frame_of(tables, table, *columns)

    monkeypatch.setattr(Folder, "frame", changing)
    with pytest.raises(DamagedInput, match="was written to while it was read"):
        read([str(folder)])


@pytest.mark.parametrize("change", [shrinks, is_deleted])
def test_a_part_of_a_recording_that_shrinks_or_disappears_while_it_is_read_is_a_loss(
    change: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(DATA / "recording/late_in_backward.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "late_in_backward"
    expected = read([str(folder)]).gpu.height
    decoded, parts = recording_folder.decode, sorted(folder.rglob("kernels-*"))

    def changing(*arguments: Any) -> Any:
        while parts:
            change(parts.pop(), b"")
        return decoded(*arguments)

    monkeypatch.setattr(recording_folder, "decode", changing)
    tables = read([str(folder)])
    assert tables.gpu.height < expected
    assert {loss.code for loss in tables.meta.losses} >= {"unreadable"}
