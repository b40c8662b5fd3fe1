"""Reader of the ``parquetdir`` and ``arrowdir`` exports: a folder with one file per table."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from thence.errors import DamagedInput
from thence.model.formats import NSIGHT_EXPORT
from thence.parquet_files import held_tables
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.nsight.store import PAYLOADS, READABLE, Part
from thence.readers.parquet_probe import ARROW_ENDING, MAX_ROWS, probing
from thence.readers.source import changes_in, unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thence.model.tables import Tables

NAME = f"{NSIGHT_EXPORT} (parquetdir, arrowdir)"
PATTERNS: tuple[str, ...] = ()
"""Empty: an export is a directory, not a file in one."""

_SUFFIXES = (".parquet", ARROW_ENDING)
_MARKS = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS")
_ARROW_FILE = b"ARROW1"


def sniff_archive(path: str) -> bool:
    """Whether a path is a directory with a table of Nsight Systems."""
    return any((Path(path) / f"{table}{suffix}").is_file() for table in _MARKS for suffix in _SUFFIXES)


def read(name: str, progress: Callable[[int], None], expansion: Expansion = DEFAULT) -> Tables:
    """The tables of one export.

    Args:
        progress: called once, at the end, with the number of bytes of all files.
        expansion: how much larger than its stored size a table may be.

    Raises:
        DamagedInput: a table cannot be read.
    """
    from thence.readers.nsight.tables import tables_of

    paths = {f.stem: f for f in sorted(Path(name).iterdir())
             if f.suffix in _SUFFIXES and f.stem in READABLE and f.is_file()}  # fmt: skip
    with unchanged(name, changes_in(name)):
        with probing(list(paths.values()), name, expansion) as probe:
            probe.passed()
        tables = tables_of(Folder(name, paths))
    progress(sum(path.stat().st_size for path in paths.values()))
    return tables


@dataclass
class Folder:
    """One folder of tables, each read on demand. Tables outside `READABLE` are not even listed."""

    name: str
    _paths: dict[str, Path]
    _frames: dict[str, pl.LazyFrame] = field(default_factory=dict)

    def columns(self, table: str) -> frozenset[str]:
        """Names of the columns of a table; empty if there is no such table."""
        return frozenset(self._schema(table))

    def frame(self, table: str, integers: Sequence[str], texts: Sequence[str] = ()) -> pl.DataFrame:
        """Columns of a table: integers as Int64, texts as Categorical; absent columns are null.

        Raises:
            DamagedInput: the table cannot be read.
        """
        schema = {**dict.fromkeys(integers, pl.Int64()), **dict.fromkeys(texts, pl.Categorical())}
        schema_of_file = self._schema(table)
        if not schema_of_file:
            return pl.DataFrame(schema=schema)
        # Ids are unsigned in some versions: the cast keeps their bits, as SQLite does.
        wrap = {c: schema_of_file.get(c) == pl.UInt64 for c in schema}
        return self._collected(
            table,
            *(
                pl.col(c).cast(dtype, wrap_numerical=wrap[c]) if c in schema_of_file else pl.lit(None, dtype).alias(c)
                for c, dtype in schema.items()
            ),
        )

    def parts(self, table: str, integers: Sequence[str], work: Callable[[pl.DataFrame], Part]) -> list[Part]:
        """Applies a function to the whole table as one part; see `Store.parts`."""
        return [work(self.frame(table, integers))]

    def payloads(self) -> pl.DataFrame:
        """Payloads of NVTX events; see `Store.payloads`."""
        columns = self._schema("NVTX_EVENTS")
        binary = pl.col("binaryData").cast(pl.Binary) if "binaryData" in columns else pl.lit(None, pl.Binary)
        json = pl.col("jsonText").cast(pl.String) if "jsonText" in columns else pl.lit(None, pl.String)
        if not columns.keys() & {"binaryData", "jsonText"}:
            return pl.DataFrame(schema=PAYLOADS)
        rows = pl.int_range(pl.len(), dtype=pl.Int64).alias("row")
        frame = self._collected("NVTX_EVENTS", rows, binary.alias("binary"), json.alias("json"))
        return frame.filter(pl.col("binary").is_not_null() | pl.col("json").is_not_null())

    def strings(self, ids: pl.Series) -> pl.DataFrame:
        """Texts of StringIds for the given ids only: columns id (Int64) and value (Categorical).

        Raises:
            DamagedInput: the table cannot be read.
        """
        frame = self.frame("StringIds", ("id",), ("value",))
        return frame.filter(pl.col("id").is_in(ids.drop_nulls().unique().implode())).unique("id", keep="first")

    def _schema(self, table: str) -> dict[str, pl.DataType]:
        if table not in self._paths:
            return {}
        try:
            return dict(self._lazy(table).collect_schema())
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise self._damage(table, error) from error

    def _lazy(self, table: str) -> pl.LazyFrame:
        if table not in self._frames:
            path = self._paths[table]
            if path.suffix == ".parquet":
                self._frames[table] = self._parquet(path)
            else:
                with path.open("rb") as stream:
                    is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE
                # nsys writes the stream format; the file format is accepted as well. read_ipc would take
                # brackets in a path for a glob pattern, so it gets an opened file; read_ipc_stream would not.
                with path.open("rb") as stream:
                    frame = pl.read_ipc(stream) if is_file else pl.read_ipc_stream(path)
                self._frames[table] = frame.lazy()
        return self._frames[table]

    def _parquet(self, path: Path) -> pl.LazyFrame:
        frame = held_tables([path])
        rows = frame.select(pl.len()).collect().item()
        if rows > MAX_ROWS:
            raise DamagedInput(self.name, f"{path.name} claims {rows:,} rows; at most {MAX_ROWS:,} are accepted")
        return frame

    def _collected(self, table: str, *columns: pl.Expr) -> pl.DataFrame:
        try:
            return self._lazy(table).select(columns).collect()
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise self._damage(table, error) from error

    def _damage(self, table: str, error: BaseException) -> DamagedInput:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return DamagedInput(self.name, f"{self._paths[table].name} cannot be read ({reason})")
