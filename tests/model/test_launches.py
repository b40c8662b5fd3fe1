"""The launch of each activity: bodies of conditional nodes have the correlation id of their graph's launch."""

from __future__ import annotations

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.model.intervals import NO_ROW
from thence.model.launches import CALLS, launch_correlations, matched_rows
from thence.model.tables import GPU, HOST

ACTIVITY = st.tuples(
    st.integers(0, 1),  # rank
    st.integers(0, 1),  # device
    st.sampled_from([None, 7, 8]),  # graph
    st.integers(0, 40),  # start
    st.sampled_from([None, 0, 0, 3, 4, 5]),  # correlation
)


def gpu(rows: list[tuple[int | None, ...]]) -> pl.DataFrame:
    names = ("rank", "device", "graph", "start", "correlation")
    return GPU.frame({name: [row[i] for row in rows] for i, name in enumerate(names)})


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(ACTIVITY, max_size=14, unique_by=lambda row: row[3]))
def test_a_body_has_the_correlation_of_the_latest_activity_of_its_graph_with_one(
    rows: list[tuple[int | None, ...]],
) -> None:
    wanted = []
    for rank, device, graph, start, correlation in rows:
        earlier = [
            row
            for row in rows
            if row[:3] == (rank, device, graph) and row[3] <= start and row[4] not in (None, 0)  # type: ignore[operator]
        ]
        inside = correlation == 0 and graph is not None and earlier
        wanted.append(max(earlier, key=lambda row: row[3] or 0)[4] if inside else correlation)
    assert launch_correlations(gpu(rows)).to_list() == wanted


def test_a_body_was_launched_by_the_call_that_launched_its_graph() -> None:
    host = HOST.frame(
        {
            "rank": [0, 0, 0],
            "category": ["driver"] * 3,
            "name": ["cuInit", "cuGraphLaunch", "cuGraphLaunch"],
            "start": [0, 1, 50],
            "duration": [1] * 3,
            "correlation": [0, 3, 4],
        }
    )
    activities = gpu([(0, 0, 7, 10, 3), (0, 0, 7, 20, 0), (0, 0, 7, 60, 4), (0, 0, 7, 70, 0), (0, 0, None, 80, 0)])
    found = matched_rows(activities, host, "correlation", CALLS & (pl.col("correlation") != 0))
    assert found.tolist() == [1, 1, 2, 2, NO_ROW]
