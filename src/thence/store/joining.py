"""Joins the summaries of single ranks into files of some hundred ranks each, and reads these."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.atomic_files import atomic_folder
from thence.errors import DamagedInput
from thence.store.files import reading, tables_within, write_table
from thence.store.layout import RANKS, SUMMARIES, summary_file
from thence.store.parts import with_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thence.store.layout import Entry, Manifest

_AT_ONCE = 256
"""Parts whose summaries go to one file; they are in memory together while it is written."""


def join_summaries(root: Path, entries: Sequence[Entry]) -> tuple[str, ...]:
    """Writes every summary of all ranks, in the order of the ranks, as a folder of files.

    Returns:
        names of the summaries.
    """
    target = root / SUMMARIES
    with atomic_folder(target) as folder:
        for first in range(0, len(entries), _AT_ONCE):
            _join(root, entries[first : first + _AT_ONCE], folder, f"{first:07}.parquet")
    return tuple(sorted(path.name for path in target.iterdir()))


def _join(root: Path, entries: Sequence[Entry], target: Path, name: str) -> None:
    """Writes one file of each summary that at least one of these parts has."""
    before, after = summary_file("*").split("*")
    files: dict[str, list[tuple[Path, Entry]]] = {}
    for entry in entries:
        for path in (root / RANKS / entry.folder).glob(summary_file("*")):
            summary = path.name.removeprefix(before).removesuffix(after)
            files.setdefault(summary, []).append((path, entry))
    for summary, found in files.items():
        (target / summary).mkdir(exist_ok=True)
        whole = tables_within([path for path, _ in found], root / RANKS)
        with reading(root / RANKS):
            if any(entry.renumbered for _, entry in found):
                plans = (with_numbers(pl.scan_parquet(path, glob=False), e.renumbered) for path, e in found)
                joined = pl.concat(plans).collect()
            else:  # much faster
                joined = whole.collect()
        write_table(joined, target / summary / name)


def summary_folders(root: Path, names: Sequence[str]) -> list[Path]:
    """The folders of the joined summaries.

    Args:
        root: of the store.
        names: of the summaries.
    """
    return [root / SUMMARIES / name for name in names]


def read_summary(root: Path, manifest: Manifest, name: str) -> pl.LazyFrame | None:
    """A summary of all ranks as a lazy frame; None if no rank has it.

    Raises:
        DamagedInput: the manifest names it, but it is missing or is not a table.
    """
    if name not in manifest.summaries:
        return None
    files = sorted((root / SUMMARIES / name).glob("*.parquet"))
    if not files:
        path = root / SUMMARIES / name
        raise DamagedInput(str(path), "is missing; run the same thence ingest again to write it")
    return tables_within(files, root)
