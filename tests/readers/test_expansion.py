"""No small file fills the memory: what decompresses to too much is refused, with the way out."""

from __future__ import annotations

import gzip
import lzma
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest

import thence
from helpers import kernel, written
from recording_data import kernel as recorded
from recording_data import written as recording
from thence.cli import main
from thence.errors import DamagedInput, UsageError
from thence.model.column_file import encode
from thence.readers.expansion import Expansion, TooLarge
from thence.readers.jax.hlo_dump import hlo_dump_modules
from thence.readers.recording.folder import SCHEMAS
from thence.readers.source import Source

if TYPE_CHECKING:
    from pathlib import Path

ALWAYS = 64 << 20


def zipped_to(path: Path, head: bytes, size: int) -> Path:
    """A gzip file of a beginning and as many equal bytes."""
    with gzip.open(path, "wb", compresslevel=9) as stream:
        stream.write(head)
        for _ in range(size >> 20):
            stream.write(b"n" * (1 << 20))
    return path


def test_a_ratio_is_accepted_and_64_mib_always() -> None:
    cap = Expansion(10)
    cap.check("x", 1, ALWAYS)
    cap.check("x", ALWAYS, 10 * ALWAYS)
    with pytest.raises(TooLarge, match=r"^x: m: decompresses to more than 10 times .*--max-expansion"):
        cap.check("x", ALWAYS, 10 * ALWAYS + 1, "m")
    with pytest.raises(UsageError):
        Expansion(0)


def test_a_gzipped_bomb_is_refused_unless_it_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = zipped_to(tmp_path / "trace.sqlite.gz", b"SQLite format 3\0", 66 << 20)
    with pytest.raises(TooLarge, match="max_expansion="):
        thence.open(path)
    with pytest.raises(DamagedInput) as allowed:
        thence.open(path, max_expansion=5000)
    assert not isinstance(allowed.value, TooLarge)  # it was read, and is no database
    for options, told in (((), "--max-expansion"), (("--max-expansion", "5000"), "database")):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(path), *options])
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
    with Source.open(str(zipped_to(tmp_path / "small.gz", b"", 50 << 20))) as source:
        assert sum(len(part) for part in iter(lambda: source.read(1 << 22), b"")) == 50 << 20


def test_labels_beside_a_trace_are_left_out_where_they_are_too_large(tmp_path: Path) -> None:
    written(tmp_path / "trace.json", [kernel(1, 10, 5)])
    head = b'{"format": "thence.graph-labels", "version": 1, "notes": ["'
    zipped_to(tmp_path / "labels.json.gz", head, 66 << 20)
    trace = thence.open(tmp_path / "trace.json")
    assert trace.tables.gpu.height == 1
    assert any("decompresses to more than" in text for text in trace.meta.warnings)


def test_xz_and_zip_and_parquet(tmp_path: Path) -> None:
    module = tmp_path / "a.hlo.pb.xz"
    module.write_bytes(lzma.compress(bytes(66 << 20), preset=1))
    with pytest.raises(TooLarge):
        hlo_dump_modules(str(module))

    member = "nvtx_gpu_proj_trace/trace.parquet"
    zeros = tmp_path / "zeros.zip"
    with zipfile.ZipFile(zeros, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, bytes(66 << 20))
    with pytest.raises(TooLarge, match=member):
        thence.open(zeros)

    rows = 1_000_000  # 10 columns of 8 bytes in a few hundred
    frame = pl.DataFrame({f"c{i}": pl.repeat(1, rows, dtype=pl.Int64, eager=True) for i in range(10)})
    frame.write_parquet(tmp_path / "rows.parquet", row_group_size=rows)
    many = tmp_path / "rows.zip"
    with zipfile.ZipFile(many, "w") as archive:
        archive.write(tmp_path / "rows.parquet", member)
    with pytest.raises(TooLarge):
        thence.open(many)


def test_parts_of_a_recording_that_claim_many_rows(tmp_path: Path) -> None:
    folder = recording(tmp_path / "host-rank0-1", {"kernels": [[recorded()]]})
    assert thence.open(folder).tables.gpu.height == 1
    rows = 1 << 19
    columns = {name: np.ones(rows, np.int64) for name in SCHEMAS["kernels"]}
    for number in (2, 3):
        content = encode(columns)
        assert len(content) < 10_000
        (folder / f"kernels-{number:06}.npz").write_bytes(content)
    with pytest.raises(TooLarge):
        thence.open(folder)


def test_an_arrow_part_that_ends_its_reader_is_damaged(tmp_path: Path) -> None:
    tables = {"kernels": [[recorded()], [recorded(start=1_000_100, end=1_000_200)]]}
    folder = recording(tmp_path / "host-rank0-1", tables, version=2)
    assert thence.open(folder).tables.gpu.height == 2
    part = folder / "kernels-000002.arrow"
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2])
    trace = thence.open(folder)
    assert trace.tables.gpu.height == 1
    assert any("part 2 is damaged" in text for text in trace.meta.warnings)
