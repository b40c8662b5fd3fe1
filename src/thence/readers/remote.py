"""Inputs that are not local paths: URLs of object stores and other protocols of fsspec (extra ``thence[remote]``).

A file is read as a stream. An input that its reader needs on disk, such as the folder of a recording, is first
copied to a temporary folder. The protocol's package finds credentials and endpoints by itself.
"""

from __future__ import annotations

import io
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from thence.errors import InputError, MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thence.units import Bytes

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_BLOCK_BYTES = 8 << 20  # of one request
_CHANGED = ("mtime", "LastModified", "last_modified", "updated", "created", "ETag", "etag")
"""Keys under which protocols report when a file changed, or another value that changes with the file."""


def is_url(name: str) -> bool:
    """Whether an input is a URL, such as ``s3://bucket/run``; it need not exist."""
    return _URL.match(name) is not None


def _filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, and its path there.

    Raises:
        MissingRequirement: fsspec, or the package for its protocol, is not installed.
        InputError: the protocol is unknown, or its file system cannot be reached.
    """
    protocol = url.partition("://")[0]
    try:
        import fsspec
    except ImportError as error:
        raise MissingRequirement(f"{url}: URLs need fsspec: pip install 'thence[remote]'") from error
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        advice = f"pip install {package}" if package else str(error)
        raise MissingRequirement(f"{url}: fsspec needs another package to read {protocol}://: {advice}") from error
    except Exception as error:
        raise InputError(url, f"cannot be reached ({_one_line(error)})") from error
    return filesystem, path


@contextmanager
def _answering(url: str) -> Iterator[None]:
    """Raises any error of a protocol within the block as `InputError`."""
    try:
        yield
    except (InputError, MissingRequirement):
        raise
    except FileNotFoundError as error:
        raise InputError(url, "no such file or directory") from error
    except Exception as error:
        raise InputError(url, f"cannot be read ({_one_line(error)})") from error


def is_folder(url: str) -> bool:
    """Whether a URL names a folder."""
    filesystem, path = _filesystem(url)
    with _answering(url):
        return bool(filesystem.isdir(path))


def urls_within(url: str, patterns: Sequence[str] = ("*",)) -> list[str]:
    """URLs of the files in a folder and all its subfolders whose names match one of several globs.

    Raises:
        InputError: the folder does not exist, or cannot be listed.
    """
    filesystem, path = _filesystem(url)
    with _answering(url):
        names = [str(filesystem.unstrip_protocol(file)) for file in filesystem.find(path)]
    return sorted(name for name in names if any(Path(name).match(glob) for glob in patterns))


def matching_urls(url: str) -> list[str]:
    """URLs of the files that a glob matches."""
    filesystem, path = _filesystem(url)
    with _answering(url):
        matches = filesystem.glob(path, detail=True)
        files = (name for name, info in matches.items() if info.get("type") == "file")
        return sorted(str(filesystem.unstrip_protocol(name)) for name in files)


@contextmanager
def open_url(url: str) -> Iterator[tuple[io.BufferedReader, Bytes]]:
    """A file as a stream, and its size; 0 if that is unknown.

    Raises:
        InputError: there is no such file, or it may not be read.
    """
    filesystem, path = _filesystem(url)
    with _answering(url):
        size = filesystem.size(path)
        opened = filesystem.open(path, "rb", block_size=_BLOCK_BYTES)
    with opened, io.BufferedReader(cast("Any", opened), _BLOCK_BYTES) as stream:
        yield stream, int(size or 0)


@contextmanager
def fetched(url: str) -> Iterator[Path]:
    """A temporary local copy of a file or folder, removed at the end of the block.

    Raises:
        InputError: the file or folder does not exist, or cannot be copied.
    """
    filesystem, path = _filesystem(url)
    with tempfile.TemporaryDirectory(prefix="thence-") as name:
        target = Path(name) / (Path(path).name or "input")
        with _answering(url):
            if filesystem.isdir(path):
                _copy_folder(filesystem, path, target)
            else:
                filesystem.get_file(path, str(target))
        yield target


def _copy_folder(filesystem: Any, path: str, target: Path) -> None:
    root = path.rstrip("/") + "/"
    for file in filesystem.find(path):
        within = Path(str(file).removeprefix(root))
        if within.is_absolute() or ".." in within.parts:
            continue  # the names are untrusted: write nothing outside of the target folder
        (target / within).parent.mkdir(parents=True, exist_ok=True)
        filesystem.get_file(file, str(target / within))


def state_of(url: str) -> tuple[Bytes, str, int]:
    """Total size in bytes, last change as the protocol reports it, and number of the files at a URL (file or folder).

    Raises:
        InputError: the file or folder does not exist.
    """
    filesystem, path = _filesystem(url)
    with _answering(url):
        folder = filesystem.isdir(path)
        infos = filesystem.find(path, detail=True).values() if folder else [filesystem.info(path)]
    changed = max((str(_changed(info)) for info in infos), default="")
    return sum(int(info.get("size") or 0) for info in infos), changed, len(infos)


def _changed(info: dict[str, Any]) -> object:
    return next((info[key] for key in _CHANGED if info.get(key) is not None), "")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
