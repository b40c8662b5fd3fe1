"""What collectives crossed: jobs of a few kernels whose ranks are on machines a and b."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

import thence
from helpers import DATA
from thence.analysis.collectives.answer import collectives
from thence.analysis.collectives.links import UNKNOWN_LINKS
from thence.analysis.programs.warmup import WarmUp
from thence.attribution.attribute import attribute
from thence.model.tables import COLLECTIVES, GPU, Device, Meta, Tables

Found = tuple[str, str | None]


def found(nodes: list[str | None], described: list[dict[str, Any]]) -> tuple[list[Found], list[str]]:
    """Link, and why it is unknown, of one kernel of each rank that has a description; and the notes."""
    count = len(described)
    ranks = [row.get("rank", number) for number, row in enumerate(described)]
    gpu = GPU.frame(
        {"rank": ranks, "device": [0] * count, "kind": ["kernel"] * count, "name": ["k"] * count}
        | {"start": [1000 * number for number in range(count)], "duration": [100] * count}
    )
    given = {"collective": "allreduce", "bytes": 8, "group_size": count, "group_name": "0", "sequence": 1}
    rows = [
        given | {"gpu": number} | {k: v for k, v in row.items() if k != "rank"} for number, row in enumerate(described)
    ]
    keys = (*given, "gpu", "group_ranks", "source_rank", "destination_rank")
    table = COLLECTIVES.frame({key: [row.get(key) for row in rows] for key in keys})
    devices = tuple(Device(rank, 0, node=node) for rank, node in enumerate(nodes))
    answer = collectives(attribute(Tables(gpu=gpu, collectives=table, meta=Meta(devices=devices))), WarmUp.KEEP)
    assert answer.by_size["count"].sum() == count
    links = answer.rows.sort("gpu").select("link", "link_unknown").rows()
    return links, [note for note in answer.notes if "crossed a network" in note]


@pytest.mark.parametrize(
    ("nodes", "listed", "size", "link"),
    [
        (["a", "a"], "[0, 1]", 2, ("node", None)),
        (["a", "b"], "[0, 1]", 2, ("network", None)),
        (["a", "a"], None, 2, ("node", None)),  # all that there are
        (["a", "a"], None, 4, ("unknown", "members")),  # two others may be anywhere
        (["a", "b"], "[0, 1, ..., 511]", 512, ("network", None)),  # whoever else
        (["a", "a"], "[0, 1, ...]", 512, ("unknown", "members")),
        (["a", "a"], "[0, 1, 2]", 3, ("unknown", "machine")),  # nothing shows rank 2
        ([None, None], "[0, 1]", 2, ("unknown", "machine")),
        (["a", "b", None], "[0, 1, 2]", 3, ("network", None)),
    ],
)
def test_links_of_a_group(nodes: list[str | None], listed: str | None, size: int, link: Found) -> None:
    links, notes = found(nodes, [{"group_ranks": listed, "group_size": size}] * 2)
    assert links == [link, link]
    reason = link[1]
    said = f"whether 2 of 2 kernels crossed a network is unknown: {UNKNOWN_LINKS.get(str(reason))}"
    assert notes == ([said] if reason else [])


def test_groups_of_one_size_with_other_links_are_rows_of_their_own() -> None:
    inside, across = {"group_ranks": "[0, 1]"}, {"group_ranks": "[1, 2]", "group_name": "1"}
    four = [inside, inside | {"rank": 1}, across | {"rank": 1}, across | {"rank": 2}]
    links, notes = found(["a", "a", "b"], [row | {"group_size": 2} for row in four])
    assert links == [("node", None)] * 2 + [("network", None)] * 2
    assert notes == []


@pytest.mark.parametrize(
    ("ends", "shown", "link"),
    [((0, 1), (0, 1), ("node", None)), ((1, 2), (1, 2), ("network", None)), ((1, 2), (1,), ("unknown", "peer"))],
)
def test_a_send_is_between_two_ranks_of_its_group(ends: tuple[int, int], shown: tuple[int, ...], link: Found) -> None:
    message = {"group_ranks": "[0, 1, 2, 3]", "group_size": 4, "source_rank": ends[0], "destination_rank": ends[1]}
    rows = [message | {"rank": rank, "collective": "send" if rank == ends[0] else "recv"} for rank in shown]
    assert found(["a", "a", "b", "b"], rows)[0] == [link] * len(shown)


def test_recorded_links() -> None:
    torch = thence.open(DATA / "recording" / "two_ranks").collectives()
    assert torch.by_size["link"].unique().to_list() == ["node"]
    jax = thence.open(DATA / "jax" / "jax_fsdp2.xplane.pb.gz").collectives()  # two GPUs of one process
    assert jax.by_size.filter(pl.col("described"))["link"].unique().to_list() == ["node"]
