"""Tables decoded from their pages: what SQLite itself says of them is the reference."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thence
from helpers import examples
from nsight_data import unpacked
from thence.readers.nsight import sqlite
from thence.readers.nsight import sqlite_file_format as pages
from thence.readers.nsight.sqlite_file_format import Damaged, PageFile, Records, Unusual
from thence.readers.nsight.store import distinct, distinct_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

TABLE = "NVTX_EVENTS"
LIMITS = [0, 1, 2, 127, 128, 1 << 15, 1 << 23, 1 << 31, 1 << 47, (1 << 63) - 1]
INTEGERS = st.one_of(
    st.none(),
    st.integers(-(1 << 63) + 2, (1 << 63) - 1),
    st.sampled_from([sign * value + off for value in LIMITS[:-1] for sign in (1, -1) for off in (-1, 0, 1)]),
    st.just((1 << 63) - 1),
)
TEXTS = st.one_of(
    st.none(),
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=80),
    st.sampled_from(["x" * n for n in (0, 7, 8, 9, 57, 58, 300)]),
)
ROWS = st.lists(st.tuples(INTEGERS, TEXTS, INTEGERS), max_size=60)


def made(
    path: Path,
    rows: Iterable[Sequence[object]],
    *,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    columns: str = "start, text, end",
) -> Path:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in before:
            connection.execute(statement)
        connection.execute(f"create table {TABLE} ({columns})")
        connection.execute("begin")
        marks = ", ".join("?" * (columns.count(",") + 1))
        connection.executemany(f"insert into {TABLE} values ({marks})", rows)
        connection.execute("commit")
        for statement in after:
            connection.execute(statement)
    return path


def decoded(path: Path, ints: Sequence[str], texts: Sequence[str] = ()) -> list[tuple[Any, ...]]:
    with sqlite.opened(str(path), path.name) as database:
        frame = database.frame(TABLE, ints, texts)
    return frame.with_columns(pl.col(pl.Categorical).cast(pl.String)).rows()


def said(path: Path, *columns: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"select {', '.join(columns)} from {TABLE}").fetchall()


@pytest.fixture
def fallbacks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tables that were read with SQLite."""
    found = []
    for name in ("_rows", "_text_rows"):
        rows = getattr(sqlite.Database, name)

        def seen(self: sqlite.Database, table: str, of: Any, rows: Any = rows) -> Any:
            found.append(table)
            return rows(self, table, of)

        monkeypatch.setattr(sqlite.Database, name, seen)
    return found


@settings(max_examples=examples(150), deadline=None)
@given(ROWS, st.sampled_from([512, 1024, 4096, 65536]), st.data())
def test_rows_are_those_of_sqlite(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]], size: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("pages") / "a.sqlite"
    gone = data.draw(st.integers(2, 5), label="one of so many rows is deleted")
    after = [
        f"delete from {TABLE} where rowid % {gone} = 0",
        f"insert into {TABLE} (rowid, start) values ({data.draw(st.integers(1000, 1 << 40))}, 5)",
        f"alter table {TABLE} add column later",
        f"insert into {TABLE} values (1, 'a', 2, 3)",
    ]
    before = [f"pragma page_size = {size}", f"pragma auto_vacuum = {data.draw(st.integers(0, 2))}"]
    made(path, rows, before=before, after=after[: data.draw(st.integers(0, 4))])
    with closing(sqlite3.connect(path)) as connection:
        known = [row[1] for row in connection.execute(f"pragma table_info({TABLE})")]
    ints = [column for column in known if column != "text"]
    assert decoded(path, ints, ["text"]) == said(path, *ints, "text")


@pytest.mark.parametrize("size", [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536])
def test_large_tables_need_no_sqlite(tmp_path: Path, size: int, fallbacks: list[str]) -> None:
    """Trees of several levels, short and long texts, and values of all widths."""
    draw = random.Random(size)
    rows = [
        (
            draw.choice([None, draw.randrange(1 << draw.randrange(1, 63))]),
            draw.choice([None, "", "step", f"{draw.randrange(30)}" * draw.randrange(1, 60)]),
            -draw.randrange(1 << draw.randrange(1, 63)),
        )
        for _ in range(20_000)
    ]
    path = made(tmp_path / "a.sqlite", rows, before=[f"pragma page_size = {size}"])
    assert decoded(path, ["end", "start"], ["text"]) == [(c, a, b) for a, b, c in rows]
    assert not fallbacks


@pytest.mark.parametrize("name", ["torch_ddp", "torch_graph", "jax_train"])
def test_recordings_need_no_sqlite(tmp_path: Path, name: str, fallbacks: list[str]) -> None:
    thence.open(unpacked(name, tmp_path)).self_check()
    # Their ids are the numbers of the rows, which only SQLite is asked for.
    assert set(fallbacks) <= {"ENUM_CUDA_MEMCPY_OPER", "ENUM_CUDA_MEM_KIND"}


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([(1.5, "a", 1)], {}),
        ([("7", "a", 1)], {}),
        ([(1, "a" * 5000, 1 << 40)], {}),  # the end lies in an overflow page
        ([(1, b"blob", 2), (1, 7, 2), (1, 0.5, 2)], {}),
        ([(1, "ä", 2)], {"before": ["pragma encoding = 'UTF-16le'"]}),
        ([(1, "a", 2)], {"columns": "start integer primary key, text, end"}),
        ([(1, "a", 2)], {"after": [f"alter table {TABLE} add column later default 9"]}),
        ([(1, "a", 2)], {"after": [f"alter table {TABLE} add column later as (start + end)"]}),
    ],
)  # fmt: skip
def test_the_unusual_is_left_to_sqlite(tmp_path: Path, rows: list[tuple[object, ...]], options: dict[str, Any]) -> None:
    path = made(tmp_path / "a.sqlite", rows, **options)
    with closing(sqlite3.connect(path)) as connection:
        # Without generated columns, which are not read.
        known = [row[1] for row in connection.execute(f"pragma table_info({TABLE})")]
    ints = [column for column in known if column != "text"]
    expected = said(path, *(f"cast({c} as integer)" for c in ints), "cast(text as text)")
    assert decoded(path, ints, ["text"]) == expected


def test_tables_without_row_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"create table {TABLE} (start, end, primary key (start)) without rowid")
        connection.execute(f"insert into {TABLE} values (3, 4), (1, 2)")
        connection.commit()
    assert decoded(path, ["start", "end"]) == [(1, 2), (3, 4)]


def test_row_numbers_of_any_width(tmp_path: Path, fallbacks: list[str]) -> None:
    numbers = [-(1 << 63), -5, 0, 1, 127, 128, 1 << 21, 1 << 35, (1 << 63) - 1]
    path = made(tmp_path / "a.sqlite", [])
    with closing(sqlite3.connect(path)) as connection:
        connection.executemany(f"insert into {TABLE} (rowid, start) values (?, ?)", [(n, n // 2) for n in numbers])
        connection.commit()
    assert decoded(path, ["start"]) == [(n // 2,) for n in numbers]
    assert fallbacks == [TABLE]


def test_views_are_no_tables(tmp_path: Path) -> None:
    path = made(tmp_path / "a.sqlite", [(1, "a", 2)], after=[
        "create view StringIds as with recursive n(i) as (select 1 union all select i + 1 from n) select i as id from n"
    ])  # fmt: skip
    with sqlite.opened(str(path), "a") as database:
        assert database.columns("StringIds") == frozenset()


def interior_pages(path: Path) -> tuple[PageFile, list[int]]:
    file = PageFile.of(path)
    return file, [n for n in range(2, file.count + 1) if file.read(np.array([n]), 0)[0] == 5]


@pytest.mark.parametrize("target", ["itself", "sibling"])
def test_pages_that_lead_in_a_circle(tmp_path: Path, target: str) -> None:
    """SQLite would follow such a tree for as long as it has rows: 20 levels of circles."""
    rows = [(n, "x" * 40, n) for n in range(20_000)]
    path = made(tmp_path / "a.sqlite", rows, before=["pragma page_size = 512"])
    file, interior = interior_pages(path)
    content = bytearray(path.read_bytes())
    root = 2
    assert root in interior
    for number in interior:
        at = (number - 1) * file.size
        to = number if target == "itself" else interior[-1]
        content[at + 8 : at + 12] = to.to_bytes(4, "big")
        for cell in range(int.from_bytes(content[at + 3 : at + 5], "big")):
            offset = int.from_bytes(content[at + 12 + 2 * cell : at + 14 + 2 * cell], "big")
            content[at + offset : at + offset + 4] = to.to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(Damaged, match="used twice"):
        file.leaves(root)
    with pytest.raises(thence.DamagedInput, match="used twice"):
        thence.open(path)


def test_sqlite_is_stopped_where_it_goes_on_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_STEPS", sqlite._STEPS_AT_ONCE)
    path = made(tmp_path / "a.sqlite", [(1, "a", 2)])
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"
    with closing(sqlite3.connect(path)) as connection:
        sqlite._limit_steps(connection, 1000)
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            connection.execute(endless).fetchall()


def test_files_that_become_shorter_are_left_to_sqlite(tmp_path: Path) -> None:
    path = made(tmp_path / "a.sqlite", [(n, "x" * 90, n) for n in range(5000)])
    file = PageFile.of(path)
    leaves = file.leaves(2)
    path.write_bytes(path.read_bytes()[: file.size * 10])
    with pytest.raises(Unusual):
        file.leaf_pages(leaves)


@pytest.mark.parametrize("seed", range(6))
def test_damaged_pages_end_in_rows_or_one_kind_of_error(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rows = [(n << draw.randrange(30), "x" * draw.randrange(80), n) for n in range(3000)]
    path = made(tmp_path / "a.sqlite", rows, before=["pragma page_size = 1024"])
    file = PageFile.of(path)
    leaves = file.leaves(2)
    content = path.read_bytes()
    for _ in range(20):
        broken = bytearray(content)
        for _ in range(draw.choice([1, 5, 500])):
            broken[draw.randrange(file.size, len(content))] = draw.choice([0, 1, 128, 255, draw.randrange(256)])
        path.write_bytes(broken)
        for work in (
            lambda: file.leaves(2),
            lambda: Records(file.leaf_pages(leaves), 3).integers(0),
            lambda: Records(file.leaf_pages(leaves), 3).texts(1),
        ):
            with suppress(Unusual, Damaged):
                work()
        with suppress(thence.DamagedInput):
            decoded(path, ["start", "end"], ["text"])


@pytest.mark.parametrize(("place", "value"), [(16, 3), (17, 1), (20, 255), (0, 0)])
def test_headers_that_sqlite_does_not_write(tmp_path: Path, place: int, value: int) -> None:
    path = made(tmp_path / "a.sqlite", [], before=["pragma page_size = 512"])
    content = bytearray(path.read_bytes())
    content[place] = value
    path.write_bytes(content)
    with pytest.raises(Unusual):
        PageFile.of(path)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), min_size=1, max_size=200))
def test_few_different_rows_among_many(rows: list[tuple[int, int]]) -> None:
    columns = [np.array(column, np.int64).view(np.uint64) for column in zip(*rows, strict=True)]
    first, of = distinct(columns)
    assert [rows[first[number]] for number in of] == rows
    assert len(first) == len(set(rows))


def test_many_rows_of_many_kinds() -> None:
    draw = np.random.default_rng(0)
    for kinds in (10, 3_000, 1 << 62):
        values = draw.integers(0, kinds, 400_000)
        first, of = distinct([values.view(np.uint64)])
        assert (values[first][of] == values).all()
    few = pl.Series([None, 0, None, 7, 0], dtype=pl.Int64)
    first, of = distinct_values(few)
    assert few[first.tolist()][of.tolist()].to_list() == few.to_list()
    assert len(first) == 3


def test_magic_is_the_one_of_sqlite(tmp_path: Path) -> None:
    assert made(tmp_path / "a.sqlite", []).read_bytes().startswith(pages.MAGIC)
