"""Finds out which files of a directory belong to one job: a log directory may hold several runs of a program.

Files are first chosen by the directory layout, before any of them is read (`in_newest_run`): jax.profiler and
TensorBoard keep a folder for every run, ``plugins/profile/RUN/``; torch's ``tensorboard_trace_handler`` writes a
file ``WORKER.TIME.pt.trace.json`` for every cycle of a profiler's schedule. Of files whose first bytes state the same
rank, only the newest is decoded (`older_of_rank`). They are then chosen by content, once they are read (`one_job`): two
files that hold the same rank are of different jobs, unless the user asked to add them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from thence.errors import InputError, UsageError
from thence.readers.remote import is_url
from thence.readers.source import file_name
from thence.units import listed, several

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from thence.model.tables import Tables
    from thence.units import Ns

_STAMP = re.compile(r"\d{4}_\d{2}_\d{2}_\d{2}_\d{2}_\d{2}.*")
"""Names of runs of jax.profiler, which sort by time."""
_CYCLE = re.compile(r"(?P<worker>.+)\.(?P<time>\d{10,20})\.pt\.trace\.json(?:\.gz)?")
_NAMED = 3  # maximum number of files that a note names
_LISTED = 20  # maximum number of runs that an error names


@dataclass(frozen=True)
class Read:
    """One input that was read.

    Attributes:
        file: its path.
        origin: the directory that it was found in, as the user named it, or else the file itself.
        tables: its content.
    """

    file: str
    origin: str
    tables: Tables

    @cached_property
    def ranks(self) -> list[int]:
        """As `Tables.ranks`, which looks for them each time."""
        return self.tables.ranks

    @cached_property
    def window(self) -> tuple[Ns, Ns] | None:
        """First start and last end in Unix ns; None if the clock is unknown or there are no rows."""
        table = self.tables.gpu if self.tables.gpu.height else self.tables.host
        zero = self.tables.meta.epoch_ns
        if zero is None or table.is_empty():
            return None
        start, duration = table["start"].to_numpy(), table["duration"].to_numpy()
        return zero + int(start.min()), zero + int((start + duration).max())


def in_run(folder: str, files: Sequence[str], run: str) -> list[str]:
    """The files of a directory that belong to the named run: ``run`` is the name of a folder or a part of a file name.

    Raises:
        InputError: the directory holds no such run.
    """
    chosen = [file for file in files if run in _names(folder, file)]
    if not chosen:
        parents = {name for file in files for name in Path(file).relative_to(folder).parts[:-1]}
        times = {match["time"] for file in files if (match := _CYCLE.fullmatch(Path(file).name))}
        known = sorted({*parents, *times} - {"plugins", "profile"})
        expected = f"expected one of: {listed(known, _LISTED)}" if known else "it has no runs with names"
        raise InputError(folder, f"holds no run {run!r}; {expected}")
    return chosen


def _names(folder: str, file: str) -> list[str]:
    """Words by which --run finds a file: its folders, the parts of its name between dots, and its whole name."""
    *folders, name = Path(file).relative_to(folder).parts
    return [*folders, *name.split("."), name]


def in_newest_run(files: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files without those of older runs, where the layout of a log directory separates runs.

    Returns:
        The files, and notes on the files left out.
    """
    kept, notes = _newest_folders(files)
    return _newest_cycles(kept, notes)


def _newest_folders(files: Sequence[str]) -> tuple[list[str], list[str]]:
    logs: dict[Path, dict[str, list[str]]] = {}
    of_folder: dict[str, list[str]] = {}
    for file in files:
        of_folder.setdefault(file.removesuffix(file_name(file)), []).append(file)
    for folder, files_of_folder in of_folder.items():
        run = Path(folder)
        if run.parent.name == "profile" and run.parent.parent.name == "plugins":
            logs.setdefault(run.parent, {}).setdefault(run.name, []).extend(files_of_folder)
    left_out: set[str] = set()
    notes = []
    for log, runs in logs.items():
        if len(runs) < 2:
            continue
        stamped = all(_STAMP.fullmatch(name) for name in runs)
        newest = max(runs) if stamped else max(runs, key=lambda name: _changed(runs[name]))
        left_out.update(file for name in runs if name != newest for file in runs[name])
        others = sorted(set(runs) - {newest}, reverse=True)
        notes.append(
            f"{log.parent.parent}: holds {len(runs)} runs; only the newest, {newest}, is read; --run NAME reads "
            f"another: {listed(others, _NAMED)}"
        )
    return [file for file in files if file not in left_out], notes


def _changed(files: Iterable[str]) -> float:
    return max(_changed_s(file) for file in files)


def _changed_s(file: str) -> float:
    """Unix time at which a file changed, in s; 0 for URLs, as not all protocols report it."""
    return 0.0 if is_url(file) else Path(file).stat().st_mtime


def _newest_cycles(files: Sequence[str], notes: list[str]) -> tuple[list[str], list[str]]:
    cycles: dict[tuple[Path, str], dict[int, str]] = {}
    for file in files:
        if match := _CYCLE.fullmatch(file_name(file)):
            of_worker = cycles.setdefault((Path(file).parent, match["worker"]), {})
            of_worker[int(match["time"])] = file
    older = {
        file
        for cycles_of_worker in cycles.values()
        for time, file in cycles_of_worker.items()
        if time < max(cycles_of_worker)
    }
    if older:
        notes.append(
            f"left out: {several(len(older), 'file')} of earlier profiling cycles of the same processes: "
            f"{listed(sorted(Path(file).name for file in older), _NAMED)}; --run TIME reads the files with this time "
            "in their names, --add reads all"
        )
    return [file for file in files if file not in older], notes


def older_of_rank(files: Mapping[str, str], look: Callable[[str], tuple[int, Ns] | None]) -> dict[str, str]:
    """The files of directories that state the same rank as a newer file of the directory, with their directories.

    Args:
        files: each with the input that it came from.
        look: returns the rank and the begin of a file in Unix ns, or None if it does not state both at once.
    """
    newest: dict[tuple[str, int], tuple[Ns, str]] = {}
    older = []
    for file, origin in files.items():
        if file == origin or is_url(file) or (told := look(file)) is None:
            continue
        rank, begin = told
        this_file = begin, file
        other = newest.get((origin, rank), this_file)
        newest[origin, rank] = max(this_file, other)  # of files that begin together, the last by name
        if other != this_file:
            older.append(min(this_file, other)[1])
    return {file: files[file] for file in older}


def one_job(
    parts: Sequence[Read], *, add: bool, unread: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[Read], list[str]]:
    """The inputs that belong to one job: from a directory with several runs, the files of the newest run.

    Args:
        unread: files of older runs that were not read, with their directories.
        add: keep all inputs; inputs that hold the same rank become ranks of their own.

    Returns:
        The inputs, and notes on the files left out.

    Raises:
        UsageError: inputs from different origins, such as files named one by one, hold the same rank.
    """
    if add:
        return list(parts), []
    left_out: set[str] = set()
    notes = []
    for origin in dict.fromkeys(part.origin for part in parts if part.origin != part.file):
        of_origin = [part for part in parts if part.origin == origin]
        not_read = [file for file, where in unread.items() if where == origin]
        others = _of_other_runs(of_origin, several_runs=bool(not_read))
        left_out.update(others)
        older = sorted([*others, *not_read])
        if older:
            names = listed([str(Path(file).relative_to(origin)) for file in older], _NAMED)
            count = len(of_origin) - len(others)
            notes.append(
                f"{origin}: holds several runs; only the newest, {count} of {count + len(older)} files, is read; left "
                f"out: {names}; --run NAME reads another, --add reads all"
            )
    kept = [part for part in parts if part.file not in left_out]
    by_rank: dict[int, list[Read]] = {}
    for part in kept:
        if other := _clashing(part, by_rank):
            raise UsageError(_refusal(other, part))
        _enter(part, by_rank)
    return kept, notes


def _of_other_runs(parts: Sequence[Read], *, several_runs: bool) -> list[str]:
    """Files of a directory that are not of its newest run; none if no two files hold the same rank.

    Args:
        several_runs: whether a rank of theirs is also in a file that was not read.
    """
    newest_first = sorted(parts, key=_recency, reverse=True)
    by_rank: dict[int, list[Read]] = {}
    repeated = []
    for part in newest_first:
        if _clashing(part, by_rank):
            repeated.append(part.file)
        else:
            _enter(part, by_rank)
    if not (repeated or several_runs):
        return []
    newest = next((part.window for part in newest_first if part.window), None)
    return [part.file for part in parts if part.file in repeated or _separate(newest, part.window)]


def _recency(part: Read) -> tuple[float, str]:
    """When the work of an input ended, in Unix ns; of inputs that ended together, the last by name counts as newest."""
    return (part.window[1] if part.window else _changed_s(part.file) * 1e9), part.file


def _enter(part: Read, by_rank: dict[int, list[Read]]) -> None:
    for rank in part.ranks:
        by_rank.setdefault(rank, []).append(part)


def _clashing(part: Read, by_rank: dict[int, list[Read]]) -> Read | None:
    """An earlier input that holds a rank of this input and cannot be of the same job; None if there is none.

    Two inputs that both state the same rank cannot. A rank that an input does not state is only a placeholder:
    such inputs can be of the same job unless they were recorded at different times.
    """
    stated = part.tables.meta.ranks_stated
    for rank in part.ranks:
        for other in by_rank.get(rank, []):
            same = stated and other.tables.meta.ranks_stated
            if same or _separate(part.window, other.window):
                return other
    return None


def _separate(first: tuple[Ns, Ns] | None, second: tuple[Ns, Ns] | None) -> bool:
    """Whether two windows are known and do not overlap."""
    return bool(first and second and (first[1] < second[0] or second[1] < first[0]))


def _refusal(first: Read, second: Read) -> str:
    rank = min(set(first.ranks) & set(second.ranks))
    if first.tables.meta.ranks_stated and second.tables.meta.ranks_stated:
        what = f"both hold rank {rank}"
    else:
        what = f"were recorded at different times, and neither states a rank other than {rank}"
    return (
        f"{first.file} and {second.file} {what}: they are not one job; give only one of them, or use --add to "
        "count each as a rank of its own"
    )
