"""Inputs behind URLs are what they are as files, and what is missing is said in a sentence."""

from __future__ import annotations

import gzip
import sys
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import DATA, FSDP, PAIR, assert_same_tables, output, shared, unzipped, written
from stores import InProcess, stored
from thence.credentials import without_credentials
from thence.errors import InputError, MissingRequirement
from thence.readers.remote import fetched, is_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RECORDING = DATA / "recording" / "two_ranks"
XPLANE = DATA / "jax" / "streams_default.xplane.pb"


@pytest.fixture
def memory() -> Iterator[Any]:
    """A file system of fsspec that is in memory."""
    fsspec = pytest.importorskip("fsspec")
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/", recursive=True)


def test_what_is_a_url() -> None:
    assert is_url("s3://bucket/run")
    assert is_url("gs://bucket/run/*.json")
    assert not is_url("C://run")
    assert not is_url("run/trace.json")
    assert not is_url("/tmp/a://b")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:word@host/run", "https://host/run"),
        ("ftp://token@host:21/run", "ftp://host:21/run"),
        ("https://me:w@rd@host/run", "https://host/run"),
        ("https://host/run@3/a.json", "https://host/run@3/a.json"),
        ("https://host/a.json?X-Amz-Signature=0f1e&part=2", "https://host/a.json?X-Amz-Signature=...&part=2"),
        ("az://c/a.json?sv=2024&sig=Zm9v%3D", "az://c/a.json?sv=2024&sig=..."),
        ("cannot read 'https://me:word@host/a' twice", "cannot read 'https://host/a' twice"),
        ("/data/me:word@host/run", "/data/me:word@host/run"),
    ],
)  # fmt: skip
def test_only_credentials_are_left_out(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_an_error_names_the_url_without_its_password() -> None:
    error = InputError("s3://me:word@host/run", "cannot be read (s3://me:word@host/run: 403)")
    assert error.path == "s3://host/run"
    assert str(error) == "s3://host/run: cannot be read (s3://host/run: 403)"


def test_without_fsspec_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    _, told = output(capsys, "report", "s3://bucket/run", code=2)
    assert told == "thence: s3://bucket/run: URLs need fsspec: pip install 'thence[remote]'\n"


def test_a_protocol_without_its_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingRequirement, match="pip install s3fs"):
        thence.open("s3://bucket/run")


def test_a_file_is_the_same_as_on_disk(memory: Any) -> None:
    memory.pipe_file("/run/rank0.json.gz", FSDP[0].read_bytes())
    memory.pipe_file("/run/rank1.json", unzipped(FSDP[1]))
    for url, path in (("memory://run/rank0.json.gz", FSDP[0]), ("memory://run/rank1.json", FSDP[1])):
        assert_same_tables(thence.open(url).recorded, shared(path).recorded)


def test_folders_and_globs(memory: Any, tmp_path: Path) -> None:
    for rank in range(2):
        memory.pipe_file(f"/run/deep/rank{rank}.json.gz", FSDP[rank].read_bytes())
    memory.pipe_file("/run/notes.txt", b"no trace")
    expected = shared(*FSDP[:2])
    for url in ("memory://run", "memory://run/deep/rank*.json.gz"):
        assert_same_tables(thence.open(url).recorded, expected.recorded)
    with pytest.raises(InputError, match="no file matches"):
        thence.open("memory://run/*.sqlite")
    with pytest.raises(InputError, match="no such file"):
        thence.open("memory://run/rank9.json")
    assert not list(tmp_path.iterdir())


def test_recordings_and_what_needs_a_disk(memory: Any) -> None:
    memory.put(str(RECORDING), "/job", recursive=True)
    memory.pipe_file(f"/{XPLANE.name}", XPLANE.read_bytes())
    for url, path in (("memory://job", RECORDING), (f"memory://{XPLANE.name}", XPLANE)):
        found = thence.open(url)
        assert_same_tables(found.recorded, shared(path).recorded)
        assert found.meta.inputs[0].startswith("memory://")


def test_file_urls(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    path = written(tmp_path / "rank3.json", PAIR)
    trace = thence.open(f"file://{path}")
    assert trace.tables.gpu.height == 2
    assert trace.tables.gpu["rank"].unique().to_list() == [3]


def test_a_store_of_urls_is_resumed_and_refreshed(memory: Any, tmp_path: Path) -> None:
    files = [written(tmp_path / f"rank{rank}.json", PAIR, distributedInfo={"rank": rank}) for rank in range(2)]
    for file in files:
        memory.pipe_file(f"/run/{file.name}", file.read_bytes())
    stored(tmp_path / "s", ["memory://run"])
    workers = InProcess()
    stored(tmp_path / "s", ["memory://run"], workers)
    assert workers.asked == []
    memory.pipe_file("/run/rank1.json", files[1].read_bytes() + b" ")
    stored(tmp_path / "s", ["memory://run"], workers)
    assert workers.asked == ["rank1.json"]
    expected = thence.open(files).report("rank").rows
    assert thence.open(tmp_path / "s").report("rank").rows.equals(expected)


def test_a_password_is_used_and_neither_shown_nor_stored(
    memory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "memory://me:letmein@run/rank0.json.gz"
    small = gzip.compress(written(tmp_path / "small.json", PAIR).read_bytes())
    memory.pipe_file("/me:letmein@run/rank0.json.gz", small[:-4])  # a warning names it
    outputs = (
        *output(capsys, "report", url),
        *output(capsys, "report", url, "--format", "json"),
        *output(capsys, "check", url, code=1),
        *output(capsys, "report", url + "9", code=2),
    )
    page = tmp_path / "page.html"
    output(capsys, "report", url, "-o", str(page))
    memory.copy("/me:letmein@run/rank0.json.gz", "/me:changed@run/rank0.json.gz")
    for password in ("letmein", "changed"):
        stored(tmp_path / "s", [f"memory://me:{password}@run/rank0.json.gz"])
    assert len(list((tmp_path / "s" / "ranks").iterdir())) == 1
    files = [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
    assert "memory://run/rank0.json.gz" in outputs[0] + outputs[2]
    assert not [text for text in outputs if "letmein" in text]
    assert not [path.name for path in (page, *files) if b"letmein" in path.read_bytes()]


def test_a_recording_behind_a_url_is_stored_process_by_process(memory: Any, tmp_path: Path) -> None:
    memory.put(str(RECORDING), "/job", recursive=True)
    workers = InProcess()
    done = stored(tmp_path / "s", ["memory://job"], workers)
    assert len(workers.asked) == 2
    assert [entry.ranks for entry in done.manifest.entries] == [(0,), (1,)]


def test_names_from_elsewhere_leave_no_folder(memory: Any) -> None:
    memory.pipe_file("/evil/recording.json", b"{}")
    original = memory.find
    memory.find = lambda path, **more: [*original(path, **more), "/evil/../../outside.txt"]
    try:
        with fetched("memory://evil") as copy:
            assert [p.name for p in copy.rglob("*")] == ["recording.json"]
            assert not (copy.parent.parent / "outside.txt").exists()
    finally:
        del memory.find
