"""The file ``summaries.jsonl`` in the folder of a recorded process: a line of JSON for each window that was recorded.

Lines are appended in order of time, and a line is at most `MAX_LINE` bytes, usually 2 to 4 KB. When the file is larger
than `MAX_FILE` bytes, it becomes ``summaries.1.jsonl``, and the one of that name before is deleted. So a process keeps
at most twice as much, and what was deleted is the oldest. A line that was cut, because the writer was killed or the
disk is full, is skipped and counted.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec

from thence.model.formats import OLDER_SUMMARIES_FILE, SUMMARIES_FILE
from thence.model.json_fields import NotAsWritten, Rank, decoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

MAX_FILE = 64 << 20
MAX_PROCESSES = 10_000
"""Processes of a recording that are followed."""
MAX_LINE = 32 << 10
SCHEMA = 1
MAX_PLACES = 20
"""Modules of a line, and collectives; the rest is one number."""
MAX_DURATIONS = 256
"""Steps between two lines whose durations are all in the line; of more, it has quantiles."""
MAX_WAITS = 32
"""Collectives of one kind and group in a window whose durations are all in the line."""


Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""A time in ns, or the number of a step."""
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""How many; sums of those of all lines fit in 64 bits."""


class Steps(msgspec.Struct):
    """All steps since the line before, recorded or not.

    Attributes:
        first: number of the first of them.
        count: how many.
        begin_unix_ns, end_unix_ns: when the first began and the last ended, Unix time.
        total_ns: sum of their durations.
        median_ns, p95_ns, max_ns: of their durations.
        longest: number of the longest.
        durations_us: the duration of each, in microseconds; null if there are more than `MAX_DURATIONS`.
    """

    first: Amount
    count: Number
    begin_unix_ns: Amount
    end_unix_ns: Amount
    total_ns: Amount
    median_ns: Amount
    p95_ns: Amount
    max_ns: Amount
    longest: Amount
    durations_us: list[Number] | None = None


class Collective(msgspec.Struct):
    """Collectives of one kind and group in the window.

    Attributes:
        name: such as allreduce.
        group: the process group; null if it is not known.
        count: how many.
        total_ns: sum of the durations of their kernels, waits for late ranks included.
        durations_us: of each in order, in microseconds; null if there are more than `MAX_WAITS`. What a kernel takes
            longer than that of the same collective on another rank, it waited for.
    """

    name: str
    group: str | None
    count: Number
    total_ns: Amount
    durations_us: list[Number] | None = None


class Window(msgspec.Struct):
    """One line: a recorded window, and the steps before it.

    Attributes:
        schema: `SCHEMA`.
        rank, host, pid: of the process.
        first_step, steps: number of the first recorded step that counts, and how many count.
        begin_unix_ns, end_unix_ns: of the window, Unix time.
        duration_ns: of the steps that count, summed over devices.
        busy_ns, exposed_ns: time in them with device work, and with communication alone, summed over devices.
        idle_ns: by cause; adds up to duration_ns - busy_ns.
        modules: GPU time by module, or by label where no module is known, the largest first, at most `MAX_PLACES`.
        other_ns, unattributed_ns: of further modules, and of work without a module or label.
        kernels: GPU time by kernel, in the same way, at most 10.
        collectives: of the window.
        asked: why the window was recorded out of turn; null for one in turn. Estimates leave those out.
        all_steps: all steps since the line before; null if no times of steps are known.
        interval: steps from one window to the next at that time.
        cost_share: what recording cost then, by its own measurement; null if it is not known.
        dropped: records that were lost up to then.
    """

    schema: Number
    rank: Rank
    host: str
    pid: Number
    first_step: Amount
    steps: Number
    begin_unix_ns: Amount
    end_unix_ns: Amount
    duration_ns: Amount
    busy_ns: Amount
    exposed_ns: Amount
    idle_ns: dict[str, Amount]
    modules: dict[str, Amount]
    other_ns: Amount
    unattributed_ns: Amount
    kernels: dict[str, Amount]
    collectives: list[Collective] = []
    asked: str | None = None
    all_steps: Steps | None = None
    interval: Number = 0
    cost_share: float | None = None
    dropped: Amount = 0


@dataclass(frozen=True)
class Summaries:
    """What the files of one process hold.

    Attributes:
        windows: in order of time.
        damaged: lines that could not be read.
    """

    windows: tuple[Window, ...]
    damaged: int


def append(folder: Path, windows: Sequence[Window]) -> None:
    """Appends lines to the file of a process.

    Raises:
        OSError: they could not be written; a line may have been cut.
    """
    path = folder / SUMMARIES_FILE
    lines = [line for line in map(msgspec.json.encode, windows) if len(line) < MAX_LINE]
    if lines:
        with path.open("ab") as stream:
            # The line before may have been cut; an empty line is none.
            stream.write(b"\n" + b"\n".join(lines) + b"\n" if stream.tell() else b"\n".join(lines) + b"\n")
        if path.stat().st_size > MAX_FILE:
            os.replace(path, folder / OLDER_SUMMARIES_FILE)  # noqa: PTH105 - Path.replace is the same


class Tail:
    """Reads what is appended to the file of a process.

    Args:
        folder: of the process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = 0
        self._position = 0

    def new(self) -> Summaries:
        """The lines since the last call, the first time all; a line that is being written comes with the next call."""
        try:
            with (self._folder / SUMMARIES_FILE).open("rb") as stream:
                number = os.fstat(stream.fileno()).st_ino
                older = self._rest_of_older() if number != self._file else b""
                if number != self._file:
                    self._file, self._position = number, 0
                content = _from(stream, self._position)
        except OSError:  # none yet, or it is just being replaced
            return Summaries((), 0)
        content = content[: content.rfind(b"\n") + 1]
        self._position += len(content)
        return _decoded((*older.split(b"\n"), *content.split(b"\n")))

    def _rest_of_older(self) -> bytes:
        """What was not read yet of the file that became the older one."""
        try:
            with (self._folder / OLDER_SUMMARIES_FILE).open("rb") as stream:
                known = os.fstat(stream.fileno()).st_ino == self._file
                return _from(stream, self._position if known else 0)
        except OSError:
            return b""


class Tails:
    """Reads what is appended to the files of all processes of a recording.

    Args:
        directory: of the recording.

    Attributes:
        folders: of the processes, as the last call of `new` found them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tails: dict[Path, Tail] = {}
        self.folders: list[Path] = []

    def new(self) -> Iterator[tuple[Path, Summaries]]:
        """For the folder of each process, the lines since the last call."""
        self.folders = _folders(self._directory)[:MAX_PROCESSES]
        for folder in self.folders:
            yield folder, self._tails.setdefault(folder, Tail(folder)).new()


def read(folder: Path) -> Summaries:
    """What the files of a process hold."""
    return Tail(folder).new()


def _from(stream: BinaryIO, position: int) -> bytes:
    """The content of a file from a position on; of a file that is larger than ours are, the end."""
    stream.seek(max(position, stream.seek(0, os.SEEK_END) - 2 * MAX_FILE))
    return stream.read(2 * MAX_FILE)


def _decoded(lines: Iterable[bytes]) -> Summaries:
    windows, damaged = [], 0
    for line in filter(None, lines):
        window = None
        if len(line) <= MAX_LINE:
            with suppress(NotAsWritten):
                window = decoded(line, Window)
        if window is None or window.schema != SCHEMA:
            damaged += 1
        else:
            windows.append(window)
    return Summaries(tuple(sorted(windows, key=lambda window: window.end_unix_ns)), damaged)


def last_end_unix_ns(folder: Path) -> int:
    """When the last window ended of which there is a line, Unix ns; 0 if there is none."""
    windows = read(folder).windows
    return windows[-1].end_unix_ns if windows else 0


def _folders(directory: Path) -> list[Path]:
    """The folders of the processes of a recording that have summaries."""
    folders = {
        path.parent
        for name in (SUMMARIES_FILE, OLDER_SUMMARIES_FILE)
        for path in (*directory.glob(name), *directory.glob(f"*/{name}"))
    }
    return sorted(folders)
