"""Counts what a recording contains, without reading all of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thence.capture.session.notes import BEGUN, UNSEEN, notes
from thence.model.column_file import DamagedPart, rows_of
from thence.model.formats import ACTIVITIES, DESCRIPTION, part_name

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Content:
    """What the processes of one directory recorded.

    Attributes:
        processes: number of processes that recorded something.
        cut: number of these that did not finish their recording.
        unwritten: number of further processes that began to record and ended before anything was written.
        troubles: why other processes could not be recorded, or not all of what they did could be written; a reason
            that several processes have is repeated.
        unseen: why Python processes that were started by others did not record themselves.
        rows: number of kernels, memcpys and memsets.
        kernels: number of kernels.
        dropped: number of records that were lost for lack of memory or disk space.
        bytes: size on disk.
    """

    processes: int
    cut: int
    unwritten: int
    troubles: tuple[str, ...]
    unseen: tuple[str, ...]
    rows: int
    kernels: int
    dropped: int
    bytes: int


def content(directory: Path) -> Content:
    """Count the content of a directory; files that cannot be read count as empty."""
    left = notes(directory)
    begun = {note.pid for note in left if note.kind == BEGUN and note.reason is None}
    folders = [path.parent for path in sorted(directory.glob(f"*/{DESCRIPTION}"))]
    descriptions = [_description(folder) for folder in folders]
    counts = [_counts(folder, description) for folder, description in zip(folders, descriptions, strict=True)]
    return Content(
        processes=len(folders),
        cut=sum(not description.get("finished") for description in descriptions),
        unwritten=len(begun - {description.get("pid") for description in descriptions}),
        troubles=tuple(note.reason for note in left if note.reason and note.kind != UNSEEN),
        unseen=tuple(note.reason for note in left if note.reason and note.kind == UNSEEN),
        rows=sum(sum(count.values()) for count in counts),
        kernels=sum(count["kernels"] for count in counts),
        dropped=sum(int(d.get("dropped", 0)) + sum(d.get("lost", {}).values()) for d in descriptions),
        bytes=sum(p.stat().st_size for f in folders for p in f.rglob("*") if p.is_file()),
    )


def _description(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / DESCRIPTION).read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _counts(folder: Path, description: dict[str, Any]) -> dict[str, int]:
    if description.get("finished"):
        stated = description.get("counts", {})
        return {table: int(stated.get(table, 0)) for table in ACTIVITIES}
    return {table: sum(map(_rows, folder.glob(part_name(table)))) for table in ACTIVITIES}


def _rows(path: Path) -> int:
    try:
        return rows_of(path.read_bytes())
    except (OSError, DamagedPart):
        return 0
