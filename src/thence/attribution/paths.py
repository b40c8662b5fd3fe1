"""Names of the ranges around a row, joined from the outermost to the innermost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW, chain_to

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["SEPARATOR", "path_names"]

SEPARATOR = "/"


def path_names(
    parent: npt.NDArray[np.int64],
    names: pl.Series,
    rows: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.bool_],
    separator: str = SEPARATOR,
) -> pl.Series:
    """The path of wanted rows around each of the rows, such as ``forward/attention``.

    Equal paths are built once: each row's path is numbered as (number of its parent's path, own
    name), one level of nesting at a time.

    Args:
        parent: parent row of every host row, `NO_ROW` at the top.
        names: Categorical name of every host row.
        rows: innermost wanted row of each activity; `NO_ROW` gives null.
        wanted: which host rows belong on the path.
        separator: what stands between two names.

    Returns:
        Categorical Series, one value per row.
    """
    distinct, position = np.unique(rows, return_inverse=True)
    levels = [distinct]
    while (levels[-1] != NO_ROW).any():
        above = np.where(levels[-1] == NO_ROW, NO_ROW, parent[levels[-1]])
        levels.append(chain_to(parent, above, wanted))
    codes = names.to_physical().to_numpy()
    used = names.unique()
    text_of = dict(zip(used.to_physical().to_list(), used.cast(pl.String).to_list(), strict=True))
    base = max(text_of, default=0) + 1
    texts: list[str | None] = [None]
    path = np.zeros(len(distinct), np.int64)  # number of each row's path in texts
    for level in reversed(levels[:-1]):
        active = level != NO_ROW
        keys, number = np.unique(path[active] * base + codes[level[active]], return_inverse=True)
        path[active] = len(texts) + number
        texts += [
            _joined(texts[key // base], text_of[key % base], separator) for key in keys.tolist()
        ]
    return pl.Series(texts, dtype=pl.String).cast(pl.Categorical()).gather(path[position])


def _joined(outer: str | None, name: str, separator: str) -> str:
    return name if outer is None else f"{outer}{separator}{name}"
