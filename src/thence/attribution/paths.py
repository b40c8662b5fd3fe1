"""Names of the ranges around a row, joined from the outermost to the innermost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW, chain_to

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["SEPARATOR", "numbered_paths", "path_names"]

SEPARATOR = "/"


def path_names(
    parent: npt.NDArray[np.int64],
    names: pl.Series,
    rows: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.bool_],
    separator: str = SEPARATOR,
) -> pl.Series:
    """The path of wanted rows around each of the rows, such as ``forward/attention``.

    Args:
        parent: parent row of every host row, `NO_ROW` at the top.
        names: Categorical name of every host row.
        rows: innermost wanted row of each activity; `NO_ROW` gives null.
        wanted: which host rows belong on the path.
        separator: what stands between two names.

    Returns:
        Categorical Series, one value per row.
    """
    paths, number = numbered_paths(parent, names, rows, wanted)
    texts = [None, *(separator.join(path) for path in paths[1:])]
    return pl.Series(texts, dtype=pl.String).cast(pl.Categorical()).gather(number)


def numbered_paths(
    parent: npt.NDArray[np.int64],
    names: pl.Series,
    rows: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.bool_],
) -> tuple[list[tuple[str, ...]], npt.NDArray[np.int64]]:
    """The same paths as their names, which may hold the separator themselves.

    Equal paths are built once: each row's path is numbered as (number of its parent's path, own
    name), one level of nesting at a time.

    Args:
        parent: parent row of every host row, `NO_ROW` at the top.
        names: Categorical name of every host row; only those of wanted rows matter.
        rows: innermost wanted row of each activity; `NO_ROW` gives the empty path.
        wanted: which host rows belong on the path.

    Returns:
        The distinct paths, the first of them empty, and the number of each row's path.
    """
    distinct, position = np.unique(rows, return_inverse=True)
    levels = [distinct]
    while (levels[-1] != NO_ROW).any():
        above = np.where(levels[-1] == NO_ROW, NO_ROW, parent[levels[-1]])
        levels.append(chain_to(parent, above, wanted))
    codes = names.to_physical().fill_null(0).to_numpy()
    used = names.unique().drop_nulls()
    text_of = dict(zip(used.to_physical().to_list(), used.cast(pl.String).to_list(), strict=True))
    base = max(text_of, default=0) + 1
    paths: list[tuple[str, ...]] = [()]
    path = np.zeros(len(distinct), np.int64)  # number of each row's path in paths
    for level in reversed(levels[:-1]):
        active = level != NO_ROW
        keys, number = np.unique(path[active] * base + codes[level[active]], return_inverse=True)
        path[active] = len(paths) + number
        paths += [(*paths[key // base], text_of[key % base]) for key in keys.tolist()]
    return paths, path[position]
