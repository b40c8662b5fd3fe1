"""The summaries of all ranks, each as one file, and how they are read: joined, or rank by rank where they are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.atomic_files import temporary_path
from thence.errors import DamagedInput
from thence.store.layout import RANKS, SUMMARIES, summary_file
from thence.store.parts import with_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thence.store.layout import Entry, Manifest

__all__ = ["join_summaries", "read_summary"]

_AT_ONCE = 256
"""Files that are joined at a time."""


def join_summaries(root: Path, entries: Sequence[Entry]) -> tuple[str, ...]:
    """Writes every summary of all ranks as one file, in the order of the ranks.

    Returns:
        names of the summaries.
    """
    (root / SUMMARIES).mkdir(exist_ok=True)
    first = [root / RANKS / entry.folder for entry in entries]
    names = sorted({_name(path) for folder in first for path in folder.glob(summary_file("*"))})
    for name in names:
        target = root / SUMMARIES / f"{name}.parquet"
        unfinished = temporary_path(target)
        frames = [
            _of_ranks(root, entries[i : i + _AT_ONCE], name)
            for i in range(0, len(entries), _AT_ONCE)
        ]
        pl.concat(frames, how="diagonal_relaxed").sink_parquet(unfinished, compression="lz4")
        unfinished.replace(target)
    return tuple(names)


def _name(path: Path) -> str:
    before, after = summary_file("*").split("*")
    return path.name.removeprefix(before).removesuffix(after)


def _of_ranks(root: Path, entries: Sequence[Entry], name: str) -> pl.LazyFrame:
    """One summary of some ranks."""
    frames = []
    for entry in entries:
        path = root / RANKS / entry.folder / summary_file(name)
        if path.exists():
            frames.append(with_numbers(pl.scan_parquet(path), entry.renumbered))
    return pl.concat(frames, how="diagonal_relaxed") if frames else pl.LazyFrame()


def read_summary(root: Path, manifest: Manifest, name: str) -> pl.LazyFrame | None:
    """A joined summary; None where no rank has it.

    Raises:
        DamagedInput: the manifest names it, and it is not there.
    """
    if name not in manifest.summaries:
        return None
    path = root / SUMMARIES / f"{name}.parquet"
    if not path.exists():
        raise DamagedInput(str(path), "is missing; the same ingest again writes it")
    return pl.scan_parquet(path)
