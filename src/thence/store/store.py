"""Reads a store: facts and summaries of all ranks, tables of single ranks, and lazy scans over all ranks."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.activity_rooflines import WORK_SUMS
from thence.analysis.collectives.missing import JobRanks, job_ranks
from thence.analysis.ranks.summary import SUMMARY
from thence.analysis.soundness.evidence import Evidence
from thence.analysis.soundness.findings import Soundness
from thence.analysis.soundness.recording_rules import copied_ranks, missing_ranks_note, windows_apart
from thence.errors import DamagedInput, InputError, UsageError
from thence.memory_limits import free_bytes
from thence.model.losses import Loss
from thence.model.tables import GPU, Meta, Tables
from thence.parquet_files import scanned_tables
from thence.readers.source import unchanged
from thence.store.facts import Facts, decode_facts, merged_meta, merged_soundness
from thence.store.files import is_there, reading, rows_within
from thence.store.layout import MANIFEST, RANKS, SUMMARIES, Manifest, read_manifest
from thence.store.parquet_check import check_parquet
from thence.store.parts import ACTIVITIES, GPU_COLUMNS, read_summary, rows_of, summary_folders, with_numbers
from thence.store.summaries import FACTS_TABLE, LATENESS, REPORT, TABLES, WINDOWS
from thence.units import LATEST_NS, format_bytes, several

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from thence.model.attributed import Attributed
    from thence.store.layout import Entry

_MAX_OF_MEMORY = 0.5
"""Largest fraction of the free memory that the tables of all ranks may take: analyses need as much again."""
_LATER = {
    LATENESS["steps"]: ("host_ns",), LATENESS["devices"]: ("job_ranks",), REPORT["rows"]: WORK_SUMS,
}  # fmt: skip
"""Columns of summaries that earlier versions did not write, by summary; for their stores they are read as null."""


@dataclass(frozen=True)
class Store:
    """A store, or some ranks of it.

    Attributes:
        root: its folder.
        manifest: what is in it; entries of other ranks are left out.
        written: whether thence ingest has written it since it was opened.
    """

    root: Path
    manifest: Manifest
    written: Callable[[], bool] = lambda: False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Converts errors of a block that reads summaries.

        Raises:
            DamagedInput: one of them cannot be read, or the store was written to since it was opened.
        """
        with unchanged(str(self.root), self.written), reading(self.root):
            yield

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its parts, by rank."""
        return self.manifest.entries

    @property
    def ranks(self) -> list[int]:
        """Its ranks, ascending."""
        return sorted(rank for entry in self.entries for rank in entry.ranks)

    def of_ranks(self, ranks: Sequence[int]) -> Store:
        """The store with only the parts that hold at least one of these ranks.

        Raises:
            UsageError: the store lacks one of the ranks.
        """
        absent = sorted(set(ranks) - set(self.ranks))
        if absent:
            raise UsageError(
                f"{self.root}: no rank {', '.join(map(str, absent))}; it holds {several(len(self.ranks), 'rank')}, "
                f"{min(self.ranks)} to {max(self.ranks)}"
            )
        chosen = tuple(entry for entry in self.entries if set(entry.ranks) & set(ranks))
        return replace(self, manifest=_with_entries(self.manifest, chosen))

    def parts(self) -> Iterator[Attributed]:
        """The attributed tables of one part after the other: memory for one is needed at a time."""
        self.check_tables()
        for entry in self.entries:
            yield rows_of(self.root / RANKS / entry.folder, entry.renumbered)

    def check_tables(self) -> None:
        """Checks that the tables of all ranks can be read without a crash of this process.

        Raises:
            DamagedInput: one of them cannot be read.
        """
        _ = self._tables_checked

    @cached_property
    def _tables_checked(self) -> bool:
        """True, once they have been checked: a later change of the store is refused as such."""
        check_parquet(self.root / RANKS / entry.folder for entry in self.entries)
        return True

    def check_memory(self) -> None:
        """Checks that the tables of all ranks fit into memory together.

        Raises:
            UsageError: they do not.
        """
        needed, free = sum(entry.memory_bytes for entry in self.entries), free_bytes()
        if free is not None and needed > _MAX_OF_MEMORY * free:
            raise UsageError(
                f"{self.root}: this needs the tables of all {several(len(self.ranks), 'rank')} at once, about "
                f"{format_bytes(needed)}, but only {format_bytes(free)} of memory are free; select ranks with --rank "
                "(report, ranks and sql read a store of any size)"
            )

    @cached_property
    def _facts(self) -> list[Facts]:
        table = self.summary(FACTS_TABLE)
        if table is None:
            return []
        return [decode_facts(text, str(self.root)) for text in table["facts"]]

    @cached_property
    def meta(self) -> Meta:
        """Facts of all ranks; the store is the input."""
        meta = merged_meta([facts.meta for facts in self._facts])
        manifest = self.manifest
        windows = self._windows
        epoch = None if windows.is_empty() else windows["epoch_ns"].drop_nulls().min()
        return replace(
            meta,
            inputs=(str(self.root),),
            epoch_ns=epoch if isinstance(epoch, int) else None,
            formats=tuple(dict.fromkeys(meta.formats)),
            warnings=(*meta.warnings, *manifest.warnings),
            left_out=(*meta.left_out, *manifest.notes, *(left.reason for left in manifest.left)),
            notes=(*meta.notes, *self._notes()),
        )

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if not self.manifest.settings.host:
            notes.append(
                "the store holds no host ranges (thence ingest --host keeps them): analyses that need them have no data"
            )
        if not self.keeps_work:
            notes.append(
                "the store was written by a version of thence that did not keep FLOP and bytes; the same thence ingest "
                "adds them"
            )
        return tuple(notes)

    @cached_property
    def keeps_work(self) -> bool:
        """Whether it holds FLOP and bytes of activities, which stores of earlier versions do not."""
        _ = self._summaries_checked
        rows = read_summary(self.root, self.manifest, REPORT["rows"])
        with self.reading():
            return rows is None or set(WORK_SUMS) <= set(rows.collect_schema().names())

    @cached_property
    def soundness(self) -> Soundness:
        """The findings about each rank, and findings about the times of all ranks together."""
        windows = self._windows
        lacking = windows["epoch_ns"].null_count()
        text = (
            "some inputs do not state the Unix time at which their clock starts, so times of different inputs cannot "
            "be compared"
        )
        losses = (Loss("no_common_clock", "", lacking, text),) if lacking else ()
        zero = pl.col("epoch_ns").fill_null(0)
        gpu = windows.select("rank", "device", start=pl.col("start") + zero, duration=pl.col("end") - pl.col("start"))
        times = Tables(gpu=GPU.frame(gpu.to_dict()), meta=Meta(losses=losses))
        evidence = Evidence(times)
        judged = windows_apart(evidence)
        notes = (*judged.notes, *missing_ranks_note(self._job_ranks).notes, *copied_ranks(evidence).notes)
        of_all = Soundness(tuple(judged.findings), notes, tuple(judged.not_checked))
        return merged_soundness([facts.soundness for facts in self._facts], of_all)

    @property
    def _job_ranks(self) -> JobRanks:
        """Which ranks of the job the store holds, and which it lacks."""
        devices = self.summary(LATENESS["devices"])
        if devices is None:
            return JobRanks(len(self.ranks))
        size = devices["job_ranks"].max()
        # In large jobs every rank lists thousands of members, so the lists are read only if the size is not known.
        groups = None if size is not None else self.summary(LATENESS["groups"])
        members = () if groups is None else groups["members"].unique()
        return job_ranks(devices["rank"], size, members)  # type: ignore[arg-type] # an integer

    @cached_property
    def _windows(self) -> pl.DataFrame:
        table = self.summary(WINDOWS)
        if table is None:
            return TABLES[WINDOWS].empty()
        moments = table.select("start", "end", "epoch_ns").unpivot()["value"]
        if not moments.is_between(-LATEST_NS, LATEST_NS).all():
            raise DamagedInput(str(self.root), "states impossible times; run the same thence ingest again")
        return table

    def summary(self, name: str) -> pl.DataFrame | None:
        """A summary of the ranks; None if no rank has it.

        Raises:
            DamagedInput: it cannot be read, or a column that is never null holds nulls.
        """
        plan = self._summary_plan(name)
        if plan is None:
            return None
        with self.reading():
            return TABLES[name].complete(plan.collect())

    @cached_property
    def _summaries_checked(self) -> bool:
        """True, once it has been checked that the summaries can be read without a crash of this process.

        Raises:
            DamagedInput: one of them cannot be read.
        """
        check_parquet(summary_folders(self.root, self.manifest.summaries))
        return True

    def _summary_plan(self, name: str) -> pl.LazyFrame | None:
        _ = self._summaries_checked
        table = read_summary(self.root, self.manifest, name)
        if table is None:
            return None
        with self.reading():
            written = table.collect_schema().names()
        table = table.select(
            pl.lit(None, dtype).alias(column)
            if column in _LATER.get(name, ()) and column not in written
            else pl.col(column).cast(dtype)
            for column, dtype in TABLES[name].schema.items()
        )
        # For a part with several ranks, the row of facts has the lowest of them.
        ranks = pl.Series(self.ranks, dtype=pl.Int32).implode()
        return table.filter(pl.col("rank").is_in(ranks))

    def report(self, ranks: Sequence[int] = ()) -> dict[str, pl.DataFrame]:
        """Tables of `thence.analysis.summary_merge`, empty where no rank has device work.

        Args:
            ranks: none means all.
        """
        frames = {}
        for name, stored in REPORT.items():
            table = self.summary(stored)
            if table is None:
                return {}
            frames[name] = table.filter(pl.col("rank").is_in(list(ranks))) if ranks else table
        return frames

    def lateness(self) -> dict[str, pl.LazyFrame]:
        """Tables of `thence.analysis.ranks.summary` of its ranks, as lazy frames."""
        plans = {name: self._summary_plan(stored) for name, stored in LATENESS.items()}
        return {name: SUMMARY[name].empty().lazy() if f is None else f for name, f in plans.items()}

    def scan(self, table: str) -> pl.LazyFrame:
        """A table of all ranks, in their order, as a lazy frame.

        Row numbers in its columns count within the rank's own input.

        Args:
            table: activities, gpu, places, or any other attribute of `Attributed` that is a table.
        """
        stored = table if table not in ("gpu", "places") else ACTIVITIES
        parts = [(self.root / RANKS / entry.folder / f"{stored}.parquet", entry.renumbered) for entry in self.entries]
        parts = [(path, new) for path, new in parts if is_there(path)]
        if not parts:
            return getattr(Tables(), table if table != ACTIVITIES else "gpu").lazy()  # type: ignore[no-any-return]
        paths = [path for path, _ in parts]
        if any(new for _, new in parts):
            plan = pl.concat(with_numbers(scanned_tables([path]), new) for path, new in parts)
        else:  # one scan takes a quarter less memory
            plan = scanned_tables(paths)
        rows = rows_within(plan, paths, self.root)
        if table == "gpu":
            return rows.select(pl.col(old).alias(name) for name, old in GPU_COLUMNS.items())
        if table == "places":
            return rows.drop(GPU_COLUMNS.values())
        return rows


def open_store(path: str | os.PathLike[str]) -> Store:
    """Opens a store.

    Raises:
        InputError: the path is not a store, the store is empty, or its ingest was interrupted.
        DamagedInput: its manifest cannot be read.
    """
    root = Path(path)
    opened = _state(root)
    manifest = read_manifest(root)
    if not manifest.complete:
        raise InputError(str(root), "its ingest was interrupted; run the same thence ingest again to resume it")
    if not manifest.entries:
        raise InputError(str(root), f"{MANIFEST} lists no rank")
    return Store(root, manifest, lambda: _state(root) != opened)


def _state(root: Path) -> list[tuple[int, int]]:
    """What changes when thence ingest writes the manifest or the summaries."""
    states = []
    for name in (MANIFEST, SUMMARIES):
        with suppress(OSError):  # a damaged store may lack them
            state = (root / name).stat()
            states.append((state.st_ino, state.st_mtime_ns))
    return states


def _with_entries(manifest: Manifest, entries: tuple[Entry, ...]) -> Manifest:
    import msgspec

    return msgspec.structs.replace(manifest, entries=entries)
