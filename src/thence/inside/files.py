"""Reads and writes buffers of in-kernel events with their descriptions.

name.npz           arrays ``buffer`` (uint32) and ``description`` (uint8: the JSON in UTF-8)
name.npy           only the buffer; its description is in name.json in the same folder
"""

from __future__ import annotations

import os
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.atomic_files import atomic_open
from thence.errors import DamagedInput, InputError, UnknownFormat
from thence.inside.columns import as_words
from thence.inside.description import Description
from thence.readers.source import check_regular, expand
from thence.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.model.arrays import UInt32

_PATTERNS = ("*.npz", "*.npy")
_MAX_DESCRIPTION_BYTES = 16 << 20
_MAX_BUFFER_BYTES = 16 << 30
_ARRAY_HEADER_BYTES = 1 << 16

_DAMAGE = (
    ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError,
    # Raised by zipfile and NumPy for a member without a name, truncated fields and an unclosed header.
    IndexError, struct.error, OverflowError, SyntaxError, tokenize.TokenError, RecursionError, TypeError,
    SystemError,  # raised by Python 3.12's tokenizer when NumPy parses a header with a null byte
)  # fmt: skip


def save(path: str | os.PathLike[str], buffer: Any, description: Description) -> None:
    """Writes a buffer and its description atomically to one file.

    Args:
        path: file name ending in .npz; the file is replaced if it exists.
        buffer: array of 32- or 64-bit integers on the host.

    Raises:
        InputError: ``path`` cannot be written, or has another ending.
        DamagedInput: the buffer is not an array of such integers.
    """
    target = Path(path)
    if target.suffix != ".npz":
        raise InputError(str(target), "in-kernel events are written to files that end in .npz")
    words = as_words(buffer, str(target))
    text = np.frombuffer(description.to_bytes(), np.uint8)
    try:
        with atomic_open(target) as file:
            np.savez(file, buffer=words, description=text)
    except OSError as error:
        raise InputError(str(target), f"cannot be written: {error.strerror or error}") from error


def save_each(path: str | os.PathLike[str], parts: Iterable[tuple[Any, Description]]) -> list[Path]:
    """Writes buffers with their descriptions: one buffer into ``path``, several into ``path-0``, ``path-1`` ...

    Args:
        path: file name ending in .npz.
        parts: pairs of a buffer and its description.

    Raises:
        InputError, DamagedInput: as in `save`.
    """
    first, several = Path(path), list(parts)
    paths = [first]
    if len(several) != 1:
        paths = [first.with_name(f"{first.stem}-{i}{first.suffix}") for i in range(len(several))]
    for target, (buffer, description) in zip(paths, several, strict=True):
        save(target, buffer, description)
    return paths


def load(path: str | os.PathLike[str]) -> tuple[UInt32, Description]:
    """A buffer and its description.

    Args:
        path: an .npz file, or an .npy file whose description is in a .json file next to it.

    Raises:
        UnknownFormat: the file is neither of these.
        InputError: the file or its description does not exist.
        DamagedInput: the file or its description cannot be parsed.
    """
    file = Path(path)
    name = str(file)
    if not file.exists():
        raise InputError(name, "there is no such file")
    try:
        check_regular(name)
        with file.open("rb") as stream:
            # PK: a zip archive, which .npz is; NUMPY: an array alone.
            magic = stream.read(6)
        if magic[:4] == b"PK\x03\x04":
            return _from_npz(file)
        if magic == b"\x93NUMPY":
            return _from_npy(file)
    except OSError as error:
        raise InputError(name, f"cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        raise DamagedInput(name, f"is cut or damaged: {error}") from error
    raise UnknownFormat(
        name, "is not a buffer of in-kernel events: those are .npz files, or .npy files with a .json file next to them"
    )


def found(inputs: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The buffer files that inputs refer to.

    Args:
        inputs: files, globs, or folders; of a folder, all .npz files and the .npy files that have a
            description.

    Raises:
        InputError: a folder or a glob has no such file.
    """
    names = [os.fspath(given) for given in inputs]
    files = [Path(name) for name in expand(names, _PATTERNS)]
    return [file for file in files if file.suffix != ".npy" or str(file) in names or file.with_suffix(".json").exists()]


def _from_npz(file: Path) -> tuple[UInt32, Description]:
    name = str(file)
    with zipfile.ZipFile(file) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    missing = {"buffer.npy", "description.npy"} - sizes.keys()
    if missing:
        wanted = " and ".join(sorted(part.removesuffix(".npy") for part in missing))
        raise DamagedInput(name, f"holds no array {wanted}: it is not a buffer of in-kernel events")
    if sizes["description.npy"] > _MAX_DESCRIPTION_BYTES:
        raise DamagedInput(name, f"has a description of {format_bytes(sizes['description.npy'])}: too large")
    with np.load(file, allow_pickle=False) as arrays:
        text = np.asarray(arrays["description"])
        description = Description.from_bytes(text.tobytes(), name)
        most = _MAX_BUFFER_BYTES
        if description.flavour == "thence":  # a small archive may claim to hold any amount
            most = description.global_bytes + _ARRAY_HEADER_BYTES
        if sizes["buffer.npy"] > most:
            raise DamagedInput(
                name,
                f"holds a buffer of {format_bytes(sizes['buffer.npy'])}; its description is for "
                f"{format_bytes(description.global_bytes)}",
            )
        return as_words(arrays["buffer"], name), description


def _from_npy(file: Path) -> tuple[UInt32, Description]:
    beside = file.with_suffix(".json")
    if not beside.exists():
        raise InputError(str(file), f"has no description next to it: {beside.name} with names, grid and block")
    if beside.stat().st_size > _MAX_DESCRIPTION_BYTES:
        raise DamagedInput(str(beside), "is too large for a description of in-kernel events")
    description = Description.from_bytes(beside.read_bytes(), str(beside))
    _check_header(file)
    return as_words(np.load(file, mmap_mode="r", allow_pickle=False), str(file)), description


def _check_header(file: Path) -> None:
    """Checks the header length that an .npy file gives: NumPy allocates this much before it reads the header.

    Raises:
        DamagedInput: the header would be longer than the file.
    """
    with file.open("rb") as stream:
        begin = stream.read(12)  # magic, version, and the length of the header
    # The length has 4 bytes, in version 1 only 2:
    # https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    length = int.from_bytes(begin[8:12], "little") if begin[6:7] > b"\x01" else 0
    if length > file.stat().st_size:
        raise DamagedInput(str(file), f"is cut or damaged: its header has a stated length of {length:,} bytes")
