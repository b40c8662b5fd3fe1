"""Files that users give thence by mistake: one sentence says what they are, and what to do instead."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

import thence
from helpers import STACK, unzipped, written
from thence.errors import MissingData, UnknownFormat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def tar(content: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        member = tarfile.TarInfo("rank0.json")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def zipped(content: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("rank0.json", content)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "made", "expected"),
    [
        ("a.json.xz", lzma.compress, r"compressed with xz; decompress it first \(xz -dk\)"),
        ("a.json.bz2", bz2.compress, r"compressed with bzip2; decompress it first \(bunzip2 -k\)"),
        ("a.tar", tar, "is a tar archive"),
        ("a.tar.gz", lambda content: gzip.compress(tar(content)), "is a tar archive"),
        ("a.zip", zipped, "is a zip archive, but not of nsys-jax"),
        ("a.json", lambda content: content.decode().encode("utf-16"), "is UTF-16"),
    ],
)
def test_a_trace_in_another_wrapping(tmp_path: Path, name: str, made: Callable[[bytes], bytes], expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(made(unzipped(STACK)[:100_000]))
    with pytest.raises(UnknownFormat, match=expected):
        thence.open(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json.zst", b"\x28\xb5\x2f\xfd\x04\x00", "Zstandard"),  # RFC 8878, 3.1.1
        ("a.json.lz4", b"\x04\x22\x4d\x18\x64\x40\xa7", "LZ4"),  # lz4_Frame_format.md
        ("a.json.gz", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git lfs pull"),
        ("a.json", b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "is an HTML page"),
        (
            "host.trace.json",
            b'{"displayTimeUnit":"ns","metadata":{"highres-ticks":true},"traceEvents":[{}]}',
            r"name the \.xplane\.pb",
        ),
        (
            "a_cuda_gpu_kern_sum.csv",
            b"Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n",
            "--report cuda_gpu_trace --format csv",
        ),
        ("a.ncu-rep", b"\x00\x01", "report of Nsight Compute"),
        ("a.qdstrm", b"\x00\x01", "QdstrmImporter"),
        ("a.pftrace", b"\x0a\x02\x50\x01", "thence writes and does not read"),
        (
            "snapshot.pickle",
            pickle.dumps({"segments": [], "device_traces": [[]], "allocator_settings": {}}),
            "snapshot of PyTorch's memory allocator",
        ),
        ("a.bin", b"\x00\x01", r"no format that thence reads; expected one of: torch\.profiler"),
    ],
)
def test_other_files(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnknownFormat, match=expected):
        thence.open(path)


def test_json_of_another_program(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "FEE", "pid": 1, "tid": 1, "ts": 1, "dur": 2, "name": "f"}
    trace = thence.open(written(tmp_path / "viztracer.json", [event]))
    with pytest.raises(MissingData, match=r"none of 1 event is of torch\.profiler"):
        trace.report()
