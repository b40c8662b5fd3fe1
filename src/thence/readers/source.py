"""Opens inputs (plain or gzipped files, URLs, standard input) as byte streams; expands directories and globs."""

from __future__ import annotations

import glob
import io
import os
import stat
import sys
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from isal import isal_zlib

from thence.errors import DamagedInput, InputError
from thence.model.formats import SUMMARIES_FILE
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.remote import is_folder, is_url, matching_urls, open_url, urls_within

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Iterable, Iterator

STANDARD_INPUT = "-"
_HEAD_BYTES = 1 << 16  # what readers look at to recognise their format
_GZIP_MAGIC = b"\x1f\x8b"
# isal's stub declares its error as an instance of Exception.
_ISAL_ERROR = cast("type[Exception]", isal_zlib.error)
_DAMAGE = (EOFError, _ISAL_ERROR, zlib.error)
_STEP_BYTES = 1 << 15
_MAX_AT_ONCE = 1 << 26  # bytes of one read call, which allocates that much in advance
_CHANGED = (
    "was written to while it was read, so that parts of it may be older than others; "
    "read it again when it is complete, or read a copy"
)
Written = tuple[int, int]
"""Size of a file and the time of its last change, in ns."""
_SPECIAL = {
    "FIFO": stat.S_ISFIFO,
    "device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
    "socket": stat.S_ISSOCK,
}
"""Kinds of special files, which are refused, and the test of a file's mode for each."""


class _Unzipped:
    """The decompressed content of a gzip file of one or more members.

    `gzip` and `isal.igzip` are not used because they lose more of the readable data before a damaged place.
    """

    def __init__(self, raw: BinaryIO, name: str, expansion: Expansion) -> None:
        self._raw = raw
        self._name = name
        self._expansion = expansion
        self._stored = b""
        self._member = _new_member()
        self._taken = self._given = 0  # bytes so far: stored, decompressed

    def read(self, size: int) -> bytes:
        """Some decompressed bytes, at most ``size``; empty at the end.

        Raises:
            EOFError: the file ends inside a member.
            isal_zlib.error: the file is damaged; up to `_STEP_BYTES` before the damaged place are lost.
            TooLarge: the file decompresses to more than the cap.
        """
        while True:
            if not self._stored:
                self._stored = self._raw.read(4 * _STEP_BYTES)
                self._taken += len(self._stored)
            if self._member.eof:
                self._stored = self._stored.lstrip(b"\0")  # padding between members and at the end
                if self._stored:
                    self._member = _new_member()
                elif not self._raw.peek(1):  # type: ignore[attr-defined]
                    return b""
                continue
            ended = not self._stored
            part: bytes = self._member.decompress(self._stored, min(size, _STEP_BYTES))
            member = self._member
            self._stored = member.unused_data if member.eof else member.unconsumed_tail
            if part:
                self._given += len(part)
                self._expansion.check(self._name, self._taken, self._given)
                return part
            if ended and not member.eof:
                raise EOFError("it ends before its end marker")


def _new_member() -> Any:
    return isal_zlib.decompressobj(wbits=31)  # 15 bits of window, and 16: with gzip's header


@dataclass
class Source:
    """One input as a stream of decompressed bytes.

    Attributes:
        name: the path as the user named it; ``-`` is standard input.
        stored_bytes: size on disk, 0 where unknown; `consumed` counts in the same unit.
        plain: whether the file on disk holds the bytes of the stream, so that others can read it by offsets.
        expansion: how much larger than its stored size its content may be.
        cores: how many cores may decode it at once; None: all cores.
        damage: why the stream ended early, set while reading; None if it did not.
        failed: whether that is because the system could not read on, not because of what the input holds.
    """

    name: str
    stream: BinaryIO | _Unzipped
    stored_bytes: int
    plain: bool
    expansion: Expansion = DEFAULT
    cores: int | None = None
    damage: str | None = None
    failed: bool = False
    _raw: BinaryIO | None = None
    _ahead: bytes = b""
    _written: Written | None = None

    @classmethod
    @contextmanager
    def open(cls, name: str, expansion: Expansion = DEFAULT, cores: int | None = None) -> Iterator[Source]:
        """The opened input, which is gunzipped if its first bytes are those of a gzip file.

        Args:
            name: path, URL, or ``-`` for standard input.
            expansion: how much larger than its stored size its content may be.
            cores: how many cores may decode it at once; None: all cores.

        Raises:
            InputError: the input does not exist, is a directory or a special file, or may not be read.
        """
        with _opened(name) as (raw, size):
            local = name != STANDARD_INPUT and not is_url(name)
            source = cls(name, raw, size, local, expansion, cores, _raw=raw)
            if local:
                source._written = _written(os.fstat(raw.fileno()))
            try:
                if raw.peek(2)[:2] == _GZIP_MAGIC:
                    source.stream, source.plain = _Unzipped(raw, name, expansion), False
            except IsADirectoryError as error:
                raise InputError(name, "is a directory") from error
            except OSError as error:
                raise InputError(name, f"cannot be read ({error.strerror or error})") from error
            yield source

    def head(self) -> bytes:
        """The first decompressed bytes, up to `_HEAD_BYTES`; `read` still returns them."""
        while len(self._ahead) < _HEAD_BYTES and (more := self._take(_HEAD_BYTES - len(self._ahead))):
            self._ahead += more
        return self._ahead

    @property
    def path(self) -> str:
        """Where the file can be opened again while this source is open.

        On Linux this is the same file even if it was renamed, replaced or deleted since.
        """
        if self.plain and self._raw is not None:
            opened = f"/proc/{os.getpid()}/fd/{self._raw.fileno()}"
            if os.access(opened, os.R_OK):
                return opened
        return self.name

    @property
    def changed(self) -> bool:
        """Whether the file was written to since it was opened. A file that was renamed, replaced or deleted was not."""
        return self._state is not None and _written(self._state) != self._written

    @property
    def deleted(self) -> bool:
        """Whether no name leads to the file any more, because it was deleted or replaced since it was opened."""
        return self._state is not None and self._state.st_nlink == 0

    @property
    def _state(self) -> os.stat_result | None:
        """The state of a file of this machine now."""
        if self._raw is None or self._written is None:
            return None
        return os.fstat(self._raw.fileno())

    @property
    def expected_bytes(self) -> int:
        """Estimated size of the decompressed content, 0 if unknown; gzip makes JSON some 12 times smaller."""
        return self.stored_bytes if self.plain else 12 * self.stored_bytes

    @property
    def consumed(self) -> int:
        """How many of `stored_bytes` have been read."""
        if self._raw is None or not self.stored_bytes:
            return 0
        try:
            return self._raw.tell()
        except OSError:  # a stream of a remote protocol that cannot seek
            return 0

    def read(self, size: int) -> bytes:
        """Up to ``size`` decompressed bytes; fewer only at the end, or where the gzip data is damaged.

        Raises:
            TooLarge: the input decompresses to more than the cap.
        """
        parts = [self._ahead[:size]]
        self._ahead = self._ahead[size:]
        size -= len(parts[0])
        while size > 0 and (part := self._take(min(size, _MAX_AT_ONCE))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def seek(self, offset: int) -> None:
        """Continues reading at an offset; allowed only if the input is `plain`."""
        assert self._raw is not None
        self._ahead = b""
        self._raw.seek(offset)

    def _take(self, size: int) -> bytes:
        if self.damage is not None:
            return b""
        try:
            return self.stream.read(size)
        except _DAMAGE as error:
            self.damage = f"the gzip data is cut or damaged ({error})"
        except OSError as error:
            self.damage, self.failed = f"reading failed ({error.strerror or error})", True
        return b""


def _written(state: os.stat_result) -> Written:
    return state.st_size, state.st_mtime_ns


@contextmanager
def unchanged(name: str, changed: Callable[[], bool]) -> Iterator[None]:
    """Refuses an input that is written to while the block reads it: what was read may be parts of two states of it.

    Args:
        name: the input as the user named it.
        changed: whether it was written to since reading began.

    Raises:
        DamagedInput: it was written to.
    """
    try:
        yield
    except DamagedInput as error:
        if changed():
            raise DamagedInput(name, _CHANGED) from error
        raise
    if changed():
        raise DamagedInput(name, _CHANGED)


def changes_in(folder: str) -> Callable[[], bool]:
    """A function that says whether a file of this folder, or this file, was written to, replaced or deleted since."""
    path = Path(folder)

    def states() -> dict[Path, tuple[int, Written]]:
        state_of_file = {}
        for file in path.rglob("*") if path.is_dir() else (path,):
            with suppress(OSError):  # deleted meanwhile
                state = file.stat()
                if stat.S_ISREG(state.st_mode):
                    state_of_file[file] = state.st_ino, _written(state)
        return state_of_file

    before = states()
    return lambda: bool(before.items() - states().items())


@contextmanager
def _opened(name: str) -> Iterator[tuple[io.BufferedReader, int]]:
    """A stream of the stored bytes of an input, and its size; 0 if that is unknown."""
    if name == STANDARD_INPUT:
        yield io.BufferedReader(sys.stdin.buffer, _HEAD_BYTES), 0  # type: ignore[arg-type]
        return
    if is_url(name):
        with open_url(name) as opened:
            yield opened
        return
    try:
        check_regular(name)
        raw = open(name, "rb")  # noqa: PTH123, SIM115 - as `check_regular` looks at names; closed below
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(name, f"cannot be opened ({reason})") from error
    except ValueError as error:
        raise InputError(name, f"is not a valid path ({error})") from error
    with raw:
        yield raw, os.fstat(raw.fileno()).st_size


def file_name(path: str) -> str:
    """The last part of a path, of thousands of files: `Path`, which splits all of it, takes ten times as long."""
    return os.path.basename(path)  # noqa: PTH119


def check_regular(path: str) -> os.stat_result:
    """Refuses special files: opening a FIFO may block forever, and reading a device may never end.

    Returns:
        What the system says of the file, so that it is asked once: file systems of a network take long to answer.

    Raises:
        InputError: the path is a special file.
        OSError: the path does not exist, or is a circular link.
    """
    state = os.stat(path)  # noqa: PTH116 - pathlib would refuse the same names in other ways
    kind = next((word for word, of_kind in _SPECIAL.items() if of_kind(state.st_mode)), None)
    if kind is not None:
        raise InputError(path, f"is a {kind}, not a file; pipe its content to standard input (-)")
    return state


def expand(inputs: list[str], patterns: tuple[str, ...]) -> list[str]:
    """The files that inputs refer to: the input itself, the matches of a glob, or the files of a directory.

    Args:
        inputs: paths, globs, directories, URLs of each of them, or ``-``.
        patterns: globs of the files to take from a directory and all its subfolders.

    Raises:
        InputError: nothing was found for one of the inputs.
    """
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if is_url(name):
            files.extend(_of_url(name, patterns))
        elif name == STANDARD_INPUT or path.is_file():
            files.append(name)
        elif path.is_dir():
            files_found = sorted({str(p) for pattern in patterns for p in path.rglob(pattern) if p.is_file()})
            files_found = files_found or sorted(map(str, path.rglob(SUMMARIES_FILE)))[:1]  # reading it says what is
            if not files_found:
                raise InputError(name, f"no trace in this directory (looked for {', '.join(patterns)})")
            files.extend(files_found)
        elif glob.has_magic(name):
            files_found = sorted(p for p in matching(name) if Path(p).is_file())
            if not files_found:
                raise InputError(name, "no file matches this pattern")
            files.extend(files_found)
        else:
            files.append(name)  # opening it will say what is wrong with it
    return list(dict.fromkeys(files))


def _of_url(name: str, patterns: tuple[str, ...]) -> list[str]:
    """As `expand`, of one URL."""
    if glob.has_magic(name):
        files = matching_urls(name)
        if not files:
            raise InputError(name, "no file matches this pattern")
        return files
    if not is_folder(name):
        return [name]
    files = urls_within(name, patterns)
    if not files:
        raise InputError(name, f"no trace in this directory (looked for {', '.join(patterns)})")
    return files


class NumberedFiles:
    """Files in folders whose names hold the number of a rank or process.

    A folder is listed once for each kind of name, and looked for once for each input, because thousands of inputs may
    lie in one.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Path, re.Pattern[str]], dict[int, list[Path]]] = {}
        self._folders: dict[str, list[Path]] = {}

    def folders(self, inputs: Iterable[str]) -> list[Path]:
        """The folders of those inputs that are files of this machine, each once."""
        for name in inputs:
            if name not in self._folders:
                path = Path(name)
                self._folders[name] = [path.parent] if name != STANDARD_INPUT and path.is_file() else []
        return list(dict.fromkeys(folder for name in inputs for folder in self._folders[name]))

    def beside(
        self, inputs: Iterable[str], name: re.Pattern[str], numbers: Callable[[], Collection[int]]
    ) -> list[Path]:
        """The files of some numbers in the folders of inputs.

        Args:
            name: as in `of`.
            numbers: returns those of ranks or processes; called only if a folder has files with such names.
        """
        folders = [folder for folder in self.folders(inputs) if self._numbered(folder, name)]
        return [path for folder in folders for path in self.of(folder, name, numbers())]

    def of(self, folder: Path, name: re.Pattern[str], numbers: Collection[int]) -> list[Path]:
        """The files of some numbers, in order of their names; none where the folder cannot be listed.

        Args:
            name: matches whole names; its first group is the number.
            numbers: of ranks or processes.
        """
        of_number = self._numbered(folder, name)
        return sorted(path for number in numbers for path in of_number.get(number, ()))

    def _numbered(self, folder: Path, name: re.Pattern[str]) -> dict[int, list[Path]]:
        if (folder, name) not in self._found:
            of_number = self._found[folder, name] = {}
            with suppress(OSError):
                for path in folder.iterdir():
                    if match := name.fullmatch(path.name):
                        of_number.setdefault(int(match[1]), []).append(path)
        return self._found[folder, name]


def matching(pattern: str) -> list[str]:
    """Paths that a glob matches; ``**`` does not follow links, because they may be circular."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return glob.glob(pattern)  # noqa: PTH207 - pathlib takes no absolute pattern
    index = parts.index("**")
    inner = Path(*parts[index:], *(["*"] if parts[-1] == "**" else []))
    roots = [str(Path(*parts[:index]))] if index else ["."]
    if glob.has_magic(roots[0]):
        roots = glob.glob(roots[0])  # noqa: PTH207 - as above
    paths = [path for root in roots for path in Path(root).glob(str(inner))]
    # As in a shell, names that begin with a dot match only if a part of the pattern begins with a dot.
    hidden = any(part.startswith(".") for part in parts[index:])
    return [str(path) for path in paths if hidden or not any(part.startswith(".") for part in path.parts[index:])]
