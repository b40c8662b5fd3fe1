"""The rank of each lane of a file; a lane is one (pid, tid) pair as written in the file.

Most files hold one process. Merged files hold several, in which device numbers, stream numbers and
correlation ids of different ranks collide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.units import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_TAGGED = re.compile(r"(?P<tag>.*?)(?P<number>-?\d*)\s*")


@dataclass(frozen=True)
class Lanes:
    """The (pid, tid) pairs of a file as numbers.

    Attributes:
        process, thread: number of each lane's pid and tid; a text without a number gets a number below -1.
        rank: of each lane; -1 if unknown.
        warnings: assumptions that were made about ranks.
    """

    process: npt.NDArray[np.int64]
    thread: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int32]
    warnings: tuple[str, ...]


def lanes_of(pairs: Sequence[tuple[Any, Any]], launching: Sequence[int], rank: int) -> Lanes:
    """Process, thread and rank of each lane of a file.

    Args:
        pairs: (pid, tid) as written.
        launching: lanes with API calls that launched device work.
        rank: of the file, used if it holds a single rank.
    """
    texts: dict[str, int] = {}
    tags, processes = zip(*(_parsed(pid, texts) for pid, _ in pairs), strict=True) if pairs else ((), ())
    threads = [_parsed(tid, texts)[1] for _, tid in pairs]
    process = np.array(processes, np.int64)
    kinds = sorted({tags[lane] for lane in launching})
    warnings: tuple[str, ...] = ()
    if len(kinds) > 1:  # a tag for each rank before the process id, as "[TP03] 1234"
        numbers = {tag: number for number, tag in enumerate(kinds)}
        ranks = np.array([numbers.get(tag, -1) for tag in tags], np.int32)
        warnings = (f"the file holds {len(kinds)} ranks, numbered in the order of their tags: {listed(kinds)}",)
    else:
        ids = sorted({int(process[lane]) for lane in launching})
        numbers_by_id = {pid: number for number, pid in enumerate(ids)} if len(ids) > 1 else {}
        ranks = np.array([numbers_by_id.get(pid, -1) if numbers_by_id else rank for pid in processes], np.int32)
        if numbers_by_id:
            warnings = (
                (
                    f"the file holds {len(ids)} processes that use GPUs; ranks 0 to {len(ids) - 1} are in the order "
                    "of their process ids"
                ),
            )
    return Lanes(process, np.array(threads, np.int64), ranks, warnings)


def _parsed(value: int | str, texts: dict[str, int]) -> tuple[str, int]:
    """(tag, number) of a pid or tid."""
    if isinstance(value, int):
        return "", min(max(value, -(1 << 62)), 1 << 62)
    match = _TAGGED.fullmatch(value)
    if match and match["number"].lstrip("-") and len(match["number"]) < 18:
        return match["tag"].strip(), int(match["number"])
    return value.strip(), texts.setdefault(value, -2 - len(texts))


def gpu_ranks(
    lanes: Lanes, gpu: dict[str, npt.NDArray[Any]], launches: dict[str, npt.NDArray[Any]], fallback: int
) -> npt.NDArray[np.int32]:
    """The rank of each device activity.

    Args:
        gpu: lane, device and correlation of the activities.
        launches: lane and correlation of the API calls.
        fallback: rank of all activities if ``launches`` is empty, as it is for a file of one process.
    """
    launching_ranks = np.unique(lanes.rank[launches["lane"]])
    if len(launching_ranks) <= 1:
        return np.full(len(gpu["lane"]), launching_ranks[0] if len(launching_ranks) else fallback, np.int32)
    tagged: npt.NDArray[np.int32] = lanes.rank[gpu["lane"]]
    if (tagged >= 0).all():
        return tagged
    # An activity belongs to the rank that launched it. If several ranks used its correlation id, it
    # belongs to the rank that launched most of the other activities of its device.
    owners = (
        pl.DataFrame({"correlation": launches["correlation"], "rank": lanes.rank[launches["lane"]]})
        .unique()
        .group_by("correlation")
        .agg(pl.col("rank").first(), sure=pl.len() == 1)
    )
    rows = pl.DataFrame({"correlation": gpu["correlation"], "device": gpu["device"]}).join(
        owners, on="correlation", how="left", maintain_order="left"
    )
    by_device = (
        rows.filter("sure")
        .group_by("device", owner="rank")
        .len()
        .sort("len", "owner", descending=[True, False])
        .unique("device", keep="first", maintain_order=True)
        .select("device", "owner")
    )
    rows = rows.join(by_device, on="device", how="left", maintain_order="left")
    chosen = pl.when("sure").then("rank").otherwise(pl.coalesce("owner", "rank", pl.lit(int(launching_ranks[0]))))
    ranks: npt.NDArray[np.int32] = rows.select(chosen.cast(pl.Int32)).to_series().to_numpy()
    return ranks
