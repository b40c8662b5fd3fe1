"""Names that match a pattern, against Polars' own search of every row."""

from __future__ import annotations

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from thence.model.names import matching

NAMES = st.lists(st.one_of(st.none(), st.sampled_from(["ncclAllReduce", "gemm", "Nccl", "", "a.b"])))


@given(NAMES, st.sampled_from(["(?i)nccl", "^gemm$", r"a\.b", "nothing", ""]))
def test_names_are_found_as_row_by_row(names: list[str | None], pattern: str) -> None:
    rows = pl.Series(names, dtype=pl.String)
    expected = rows.str.contains(pattern).fill_null(value=False)
    assert matching(rows.cast(pl.Categorical()), pattern).to_list() == expected.to_list()
