"""Collectives labelled from another rank's eager run: its own groups by the layout that torch wrote, or unknown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import TORCH, unzipped

if TYPE_CHECKING:
    from pathlib import Path

GRAPHS = TORCH / "graphs"


def layout(rank: int) -> dict[str, Any]:
    """The process groups of a rank, as torch 2.13 wrote them in a run of six ranks."""
    document = json.loads(unzipped(TORCH / "groups" / f"gloo_rank{rank}.json.gz"))
    return dict(document["distributedInfo"])


def labelled(folder: Path, description: str, rank: int, *, described: bool = True) -> thence.Trace:
    """A replay of a rank, labelled from an eager run of rank 0 whose collectives are in a group of that description."""
    eager, replay = (json.loads(unzipped(GRAPHS / f"comm_{what}_rank0.json.gz")) for what in ("eager", "replay"))
    (group,) = [g for g in layout(0)["pg_config"] if g["pg_desc"] == description]
    for event in eager["traceEvents"]:
        if "Process Group Ranks" in event.get("args", {}):
            event["args"] |= {
                "Process Group Name": group["pg_name"],
                "Process Group Description": description,
                "Process Group Ranks": str(group["ranks"]),
                "Group size": group["pg_size"],
            }
    eager["distributedInfo"], replay["distributedInfo"] = layout(0), layout(rank)
    if not described:
        del replay["distributedInfo"]["pg_config"]
    (folder / "eager.json").write_text(json.dumps(eager))
    (folder / "replay.json").write_text(json.dumps(replay))
    trace = thence.open(folder / "replay.json").label(eager=thence.open(folder / "eager.json"))
    trace.self_check()
    assert trace.rank_numbers == [rank]
    return trace


@pytest.mark.parametrize(
    ("description", "rank", "name", "members"),
    [
        ("default_pg", 2, "0", [0, 1, 2, 3, 4, 5]),
        ("mesh_dp", 3, "2", [1, 3, 5]),
        ("experts", 1, "6", [0, 1]),
        ("undefined", 2, "8", [0, 1, 2]),
    ],
)
def test_the_group_is_that_of_the_rank(
    tmp_path: Path, description: str, rank: int, name: str, members: list[int]
) -> None:
    trace = labelled(tmp_path, description, rank)
    rows = trace.tables.collectives.select("group_name", "group_ranks", "group_size").unique().rows()
    assert rows == [(name, str(members), len(members))]
    assert not [text for text in trace.meta.warnings if "process groups" in text]


def test_bandwidth_follows_the_size_of_the_ranks_own_group(tmp_path: Path) -> None:
    """An all-reduce among n ranks moves 2 (n - 1) / n of its bytes: 1 for two ranks, 1.5 for four."""
    rows = labelled(tmp_path, "experts", 2).collectives().to_json()["rows"]
    (reduced,) = [row for row in rows if row["collective"] == "all-reduce"]
    assert reduced["group_size"] == 4
    assert reduced["bus_gbps_mean"] == pytest.approx(1.5 * reduced["algorithm_gbps_mean"])
    # How much a rank gathers depends on the size of the group.
    others = [row for row in rows if row["collective"] != "all-reduce"]
    assert len(others) == 2
    assert all(row["bytes"] is None and row["bus_gbps_mean"] is None for row in others)


@pytest.mark.parametrize(("description", "described"), [("undefined", True), ("mesh_tp", False)])
def test_a_group_that_the_layout_does_not_give_is_unknown_and_said_so(
    tmp_path: Path, description: str, described: bool
) -> None:
    trace = labelled(tmp_path, description, 3, described=described)
    rows = trace.tables.collectives.select("group_name", "group_ranks", "group_size", "sequence")
    assert rows.unique().rows() == [(None, None, None, None)]
    assert trace.tables.collectives["collective"].null_count() == 0
    (text,) = [text for text in trace.meta.warnings if "process groups" in text]
    assert "rank 3 is labelled from rank 0: the process groups of 3 of its kinds" in text


def test_the_same_rank_keeps_what_its_own_run_says(tmp_path: Path) -> None:
    trace = labelled(tmp_path, "mesh_tp", 0)
    assert trace.tables.collectives["group_ranks"].unique().to_list() == ["[0, 1]"]
