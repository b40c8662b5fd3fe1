"""The store that is fuzzed: the descriptions as trees of JSON, and the tables as lists of cells."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from stores import stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.mutations import Tree

    Inputs = Callable[[Path], list[Path]]

_JSON = (".json",)


@dataclass(frozen=True)
class _Store:
    """A store.

    Attributes:
        tree: {path: JSON, or {column: cells}}.
        types: of the columns of each table, by the name of its file.
        tables: what each table is as text, and its file.
    """

    tree: dict[str, Any]
    types: dict[str, dict[str, pl.DataType]]
    tables: dict[str, tuple[str, bytes]]


@functools.cache
def _store(inputs: Inputs) -> _Store:
    store = _Store({}, {}, {})
    with tempfile.TemporaryDirectory() as name:
        for path in _files(Path(name), inputs):
            inside = str(path.relative_to(Path(name) / "a.store"))
            if path.suffix in _JSON:
                store.tree[inside] = json.loads(path.read_bytes())
            elif path.suffix == ".parquet":
                columns = pl.read_parquet(path).with_columns(pl.col(pl.Categorical).cast(pl.String))
                cells = columns.to_dict(as_series=False)
                store.tree[inside] = cells
                store.types[path.name] = dict(pl.read_parquet_schema(path))
                store.tables[inside] = repr(cells), path.read_bytes()
    return store


def store_tree(inputs: Inputs) -> Tree:
    """The store of inputs, which are written into a folder: {path: JSON, or {column: cells}}."""
    return _store(inputs).tree


def _files(folder: Path, inputs: Inputs) -> list[Path]:
    stored(folder / "a.store", inputs(folder), host=True, add=True)
    return sorted(path for path in (folder / "a.store").rglob("*") if path.is_file())


def store_writer(
    inputs: Inputs,
    columns: Callable[[Tree], dict[str, list[Any]]],
    frame: Callable[[dict[str, list[Any]]], pl.DataFrame],
) -> Callable[[Tree, Path], Path]:
    """Writes a tree as a store: tables that are not mutated as they were, of others columns that still fit."""

    def write(tree: Tree, folder: Path) -> Path:
        whole = _store(inputs)
        store = folder / "a.store"
        store.mkdir()
        for name, value in tree.items() if isinstance(tree, dict) else []:
            inside = Path(*(part[:80] for part in Path(str(name).replace("\0", "0")).parts))
            path = store / inside
            if inside.is_absolute() or ".." in inside.parts or path.is_dir() or path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            text, content = whole.tables.get(str(name), ("", b""))
            if text and repr(value) == text:
                path.write_bytes(content)
            elif path.suffix == ".parquet":
                table = _typed(columns(value), whole.types.get(path.name, {}), frame)
                table.write_parquet(path)
            else:
                path.write_text(json.dumps(value, default=repr, skipkeys=True), errors="replace")
        return store

    return write


def _typed(
    columns: dict[str, list[Any]], types: dict[str, pl.DataType], frame: Callable[[dict[str, list[Any]]], pl.DataFrame]
) -> pl.DataFrame:
    series = []
    for name, cells in columns.items():
        dtype = types.get(name)
        # Polars takes seconds to refuse a cell of hundreds of levels.
        if dtype is None or (not dtype.is_nested() and any(isinstance(c, list | dict) for c in cells)):
            series.append(frame({name: cells})[name])
            continue
        try:
            series.append(pl.Series(name, cells, dtype))
        except (pl.exceptions.PolarsError, TypeError, OverflowError, ValueError):
            series.append(frame({name: cells})[name])
    return pl.DataFrame(series)
