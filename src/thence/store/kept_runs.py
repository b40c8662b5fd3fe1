"""The file in which summaries of runs are kept, so that a history reads no run twice and outlives the traces.

One line of JSON a run. A line that cannot be read is left out and told, and the file is replaced as a whole, so a
damaged line costs one run.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import polars as pl

from thence.analysis.diff.sample import Conditions
from thence.analysis.history.run_summary import FIGURES, ROWS, RunSummary
from thence.atomic_files import atomic_write, not_written
from thence.errors import DamagedInput, UsageError
from thence.model.json_fields import Count, JsonInt64, NotAsWritten, decoded
from thence.store.files import content_of
from thence.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FORMAT, VERSION = "thence.run", 1
_MAX_BYTES = 1 << 30
"""Most bytes of such a file; a run takes some 100 kB."""
_MAX_FILES = 100_000
"""Files of a run whose size and time of change tell whether it changed; of more, the first ones."""
_GRIDS = {"kernel": pl.String, "grid": pl.String, "count": pl.Float64, "ns": pl.Float64}


class _Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """`Conditions`, with columns for its frame."""

    identity: list[JsonInt64 | None]
    gpus: list[str]
    clocks: dict[str, str]
    ranks: Count
    world_size: Count | None
    devices: Count
    formats: list[str]
    options: dict[str, str]
    versions: dict[str, str]
    unsound: str | None
    copied_bytes: float
    grids: _Grids


class _Grids(TypedDict):
    kernel: list[str]
    grid: list[str]
    count: list[float]
    ns: list[float]


class _Rows(TypedDict):
    by: list[str]
    name: list[str]
    mean: list[float]
    least: list[float | None]
    error: list[float | None]
    freedom: list[float]
    count: list[float]
    share: list[float]


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    version: Count
    key: str
    name: str
    started_ns: JsonInt64
    started_from: str
    what: str
    steps: Count
    conditions: _Conditions
    rows: _Rows


def key_of(run: str, settings: Iterable[str]) -> str:
    """What tells whether a run is the one that was summed up: names, sizes and times of its files, and the settings."""
    digest = hashlib.sha256("\0".join((__version__, *settings)).encode())
    for name, (size, changed) in _files(Path(run)).items():
        digest.update(f"\0{name}\0{size}\0{changed}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def written_ns(run: str) -> int:
    """Unix time in ns at which the newest file of a run was written; 0 if it has none."""
    return max((changed for _, changed in _files(Path(run)).values()), default=0)


def _files(run: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change (ns) of each file of a run, by its path in it."""
    files: dict[str, tuple[int, int]] = {}
    paths = sorted(run.rglob("*")) if run.is_dir() else [run]
    for path in paths[:_MAX_FILES]:
        if path.is_file():
            state = path.stat()
            files[str(path.relative_to(run))] = state.st_size, state.st_mtime_ns
    return files


def read_kept(path: Path) -> tuple[dict[str, RunSummary], list[str]]:
    """The runs in a file, by their keys, and what is wrong with it; nothing if there is no file.

    Raises:
        InputError: it cannot be read, or is too large.
        DamagedInput: it has lines, and none is a run.
    """
    if not path.exists():
        return {}, []
    runs: dict[str, RunSummary] = {}
    wrong = []
    for number, line in enumerate(content_of(path, _MAX_BYTES).splitlines(), 1):
        try:
            key, run = _run(decoded(line, _Line))
        except NotAsWritten as error:
            wrong.append(f"{path}: line {number} is no run that thence wrote, and is left out ({error})")
            continue
        runs[key] = run
    if wrong and not runs:
        raise DamagedInput(str(path), f"holds no runs that thence history wrote: {wrong[0]}")
    return runs, wrong


def write_kept(path: Path, runs: Mapping[str, RunSummary]) -> None:
    """Replaces the file by one with these runs.

    Raises:
        UsageError: it cannot be written.
    """
    lines = [msgspec.json.encode(_line(key, run)) for key, run in runs.items()]
    try:
        atomic_write(path, b"".join(line + b"\n" for line in lines))
    except OSError as error:
        raise UsageError(not_written(path, error)) from error


def _line(key: str, run: RunSummary) -> dict[str, Any]:
    about = run.conditions
    conditions = {name: getattr(about, name) for name in _Conditions.__struct_fields__}
    return {
        "format": FORMAT, "version": VERSION, "key": key, "name": run.name, "started_ns": run.started_ns,
        "started_from": run.started_from, "what": run.what, "steps": run.steps,
        "conditions": conditions | {"grids": about.grids.to_dict(as_series=False)},
        "rows": run.rows.fill_nan(None).to_dict(as_series=False),
    }  # fmt: skip


def _run(line: _Line) -> tuple[str, RunSummary]:
    """Key and summary of a run.

    Raises:
        NotAsWritten: its columns differ in length, or it is of another format.
    """
    if (line.format, line.version) != (FORMAT, VERSION):
        raise NotAsWritten(f"it is of the format {line.format} {line.version}, expected {FORMAT} {VERSION}")
    given = {name: getattr(line.conditions, name) for name in _Conditions.__struct_fields__}
    grids = _frame(line.conditions.grids, pl.Schema(_GRIDS))
    rows = _frame(line.rows, ROWS).with_columns(pl.col(FIGURES).fill_null(float("nan")))
    whole = rows.filter(pl.col("by").is_in(["step", "busy", "idle"]), pl.col("name") == "all")
    if whole.height != 3 or rows.select("by", "name").is_duplicated().any() or line.steps < 1:
        raise NotAsWritten("it lacks the step, or has a place twice")
    if not rows.select(pl.all_horizontal(pl.col(FIGURES).is_infinite().not_()).all()).item():
        raise NotAsWritten("it has times that are not finite")
    texts = {name: tuple(given[name]) for name in ("identity", "gpus", "formats")}
    conditions = Conditions(**{**given, **texts, "grids": grids})
    run = RunSummary(line.name, line.started_ns, line.started_from, line.what, line.steps, conditions, rows)
    return line.key, run


def _frame(columns: Mapping[str, Any], schema: pl.Schema) -> pl.DataFrame:
    if len({len(column) for column in columns.values()}) != 1:
        raise NotAsWritten("its columns differ in length")
    return pl.DataFrame(dict(columns), schema=schema)
