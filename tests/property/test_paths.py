"""Paths of names, built once for all rows that share them, against a walk from each row."""

from __future__ import annotations

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from thence.attribution.paths import path_names
from thence.model.intervals import NO_ROW

settings.register_profile("thence", deadline=None, max_examples=150)
settings.load_profile("thence")


@given(st.lists(st.sampled_from(["a", "b", "a/b", "", "ä [red]"]), max_size=20), st.data())
def test_a_path_is_the_wanted_names_from_the_outermost_to_the_row(
    names: list[str], data: st.DataObject
) -> None:
    parent = [data.draw(st.integers(-1, i - 1)) for i in range(len(names))]
    wanted = [data.draw(st.booleans()) for _ in names]
    candidates = [NO_ROW, *(i for i, is_wanted in enumerate(wanted) if is_wanted)]
    rows = data.draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=10))
    expected = []
    for row in rows:
        found, at = [], row
        while at != NO_ROW:
            if wanted[at]:
                found.append(names[at])
            at = parent[at]
        expected.append("/".join(reversed(found)) if found else None)
    result = path_names(
        np.array(parent, np.int64),
        pl.Series(names, dtype=pl.String).cast(pl.Categorical()),
        np.array(rows, np.int64),
        np.array(wanted, np.bool_),
    )
    assert result.cast(pl.String).to_list() == expected
