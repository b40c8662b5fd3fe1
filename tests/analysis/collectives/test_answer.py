"""Collectives: bandwidths, hidden time and waits, worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thence.analysis.collectives.answer import Collectives
from thence.analysis.collectives.answer import collectives as of_attributed
from thence.analysis.collectives.clock_sync import align_clocks
from thence.analysis.programs.warmup import WarmUp
from thence.analysis.report.duration_spread import duration_spread
from thence.attribution.attribute import attribute
from thence.model.collective_kinds import kind_of, kind_of_kernel
from thence.model.concat_tables import concat
from thence.model.intervals import covered_lengths
from thence.model.tables import COLLECTIVES, GPU, Tables


def collectives(tables: Tables, **more: Any) -> Collectives:
    return of_attributed(attribute(tables), WarmUp.KEEP, **more)


def spread_of_tables(tables: Tables) -> pl.DataFrame:
    return duration_spread(attribute(tables), WarmUp.KEEP)


Kernel = tuple[str, int, int]  # name, start, duration


def rank_tables(rank: int, kernels: list[Kernel], described: list[dict[str, Any]]) -> Tables:
    names, starts, durations = map(list, zip(*kernels, strict=True))
    count = len(kernels)
    gpu = GPU.frame(
        {"rank": [rank] * count, "device": [0] * count, "kind": ["kernel"] * count}
        | {"name": names, "start": starts, "duration": durations}
    )
    keys = ("gpu", "collective", "bytes", "group_size", "group_name", "sequence")
    columns = {key: [row.get(key) for row in described] for key in keys}
    return Tables(gpu=gpu, collectives=COLLECTIVES.frame(columns))


def one(collective: str, size: int = 1000, group: int | None = 4) -> dict[str, Any]:
    return {"gpu": 0, "collective": collective, "bytes": size, "group_size": group, "sequence": 1}


@pytest.mark.parametrize(
    ("name", "kind", "algorithm", "bus"),
    [
        ("all-gather", "all-gather", 40.0, 30.0),
        ("_allgather_base", "all-gather", 40.0, 30.0),
        ("allgather_into_tensor_coalesced", "all-gather", 40.0, 30.0),
        ("_reduce_scatter_base", "reduce-scatter", 40.0, 30.0),
        ("allreduce", "all-reduce", 10.0, 15.0),
        ("all_reduce_coalesced", "all-reduce", 10.0, 15.0),
        ("all_to_allv", "all-to-all", 10.0, 7.5),
        ("alltoall_base", "all-to-all", 10.0, 7.5),
        ("broadcast", "broadcast", 10.0, 10.0),
        ("collective-broadcast", "broadcast", 10.0, 10.0),
        ("collective-permute", "collective-permute", 10.0, 10.0),
        ("host-to-device", "host-to-device", 10.0, 10.0),
        ("ragged-all-to-all", "ragged-all-to-all", 10.0, 7.5),
    ],
)
def test_bandwidths(name: str, kind: str, algorithm: float, bus: float) -> None:
    """1000 bytes among 4 in 100 ns."""
    row = collectives(rank_tables(0, [("k", 0, 100)], [one(name)])).by_size.row(0, named=True)
    assert row["collective"] == kind
    assert row["algorithm_gbps_mean"] == pytest.approx(algorithm)
    assert row["bus_gbps_mean"] == pytest.approx(bus)


def test_unknown_sizes_give_no_bandwidth() -> None:
    tables = rank_tables(0, [("k", 0, 100)], [one("allreduce", group=None)])
    row = collectives(tables).by_size.row(0, named=True)
    assert row["bus_gbps_mean"] is None
    assert row["exposed_ns"] == 100


def test_hidden_time_is_a_union() -> None:
    """Two kernels cover 20..60 together; their plain sum is 60, and the third ends later."""
    kernels = [("k", 0, 100), ("gemm", 20, 30), ("add", 30, 30), ("late", 90, 500), ("early", -50, 40)]
    row = collectives(rank_tables(0, kernels, [one("allreduce")])).rows.row(0, named=True)
    assert row["hidden_ns"] == 40 + 10
    assert row["exposed_ns"] == 50


def test_exposed_time_is_never_negative_where_sums_would_be() -> None:
    kernels = [("k", 0, 100), *(("gemm", 0, 100) for _ in range(5))]
    row = collectives(rank_tables(0, kernels, [one("allreduce")])).rows.row(0, named=True)
    assert (row["exposed_ns"], row["hidden_ns"]) == (0, 100)


def test_other_collectives_and_copies_hide_nothing() -> None:
    kernels = [("k", 0, 100), ("ncclDevKernel_Undescribed", 0, 100), ("copy", 0, 100)]
    tables = rank_tables(0, kernels, [one("allreduce")])
    kinds = pl.Series(["kernel", "kernel", "memcpy"], dtype=tables.gpu.schema["kind"])
    tables = Tables(gpu=tables.gpu.with_columns(kind=kinds), collectives=tables.collectives)
    assert collectives(tables).rows.select("described", "hidden_ns").rows() == [(True, 0), (False, 0)]


def two_ranks() -> Tables:
    """Rank 1 starts 30 late, then rank 0 starts 10 late; both end together."""
    described = [
        {**one("allreduce", group=2), "gpu": number, "sequence": number, "group_name": "dp"} for number in (0, 1)
    ]
    return concat(
        [
            rank_tables(0, [("k", 100, 100), ("k", 310, 40)], described),
            rank_tables(1, [("k", 130, 70), ("k", 300, 50)], described),
        ]
    )


def result() -> Collectives:
    return collectives(two_ranks())


def test_waits_by_instance() -> None:
    rows = result().instances.sort("fastest_ns", descending=True).rows(named=True)
    first, second = rows
    assert (first["devices"], first["wait_ns"], first["last_rank"]) == (2, 30, 1)
    assert first["fastest_ns"] == 70
    assert first["wait_relative"] == pytest.approx(30 / 70)
    assert first["out_of_step_ns"] == 200 - 100 - 70
    assert (second["wait_ns"], second["last_rank"]) == (10, 0)


def test_waits_by_size() -> None:
    row = result().by_size.row(0, named=True)
    assert (row["count"], row["instances"], row["wait_ns_mean"], row["wait_ns_max"]) == (4, 2, 20.0, 30)


def test_late_devices_the_most_waited_for_first() -> None:
    both = {"device": 0, "code": None, "instances": 2, "last": 1}
    assert result().last_arrivals.rows(named=True) == [
        {"rank": 1, **both, "waited_ns": 30, "waited_device_ns": 30, "late_ns_mean": 15.0, "late_ns_max": 30},
        {"rank": 0, **both, "waited_ns": 10, "waited_device_ns": 10, "late_ns_mean": 5.0, "late_ns_max": 10},
    ]  # fmt: skip


def test_waits_are_measured_on_one_clock() -> None:
    tables = two_ranks()
    behind = tables.gpu.with_columns(start=pl.when(pl.col("rank") == 1).then(pl.col("start") + 5000).otherwise("start"))
    skewed = Tables(gpu=behind, collectives=tables.collectives)
    assert collectives(skewed).instances["wait_ns"].max() == 5030
    aligned = collectives(skewed, alignment=align_clocks(attribute(skewed)))
    assert aligned.aligned
    assert sorted(aligned.instances["wait_ns"]) == [10, 30]
    assert aligned.rows["start"].to_list() == behind["start"].to_list()  # as measured


def test_one_rank_alone_knows_no_waits() -> None:
    found = collectives(rank_tables(0, [("k", 0, 100)], [one("allreduce")]))
    assert found.instances["wait_ns"].to_list() == [None]
    assert found.by_size["wait_ns_mean"].to_list() == [None]
    assert found.last_arrivals.is_empty()


def test_json_has_the_agreed_keys() -> None:
    rows = json.loads(json.dumps(result().to_json()))["rows"]
    keys = """collective bytes group_size count exposed_ns hidden_ns algorithm_gbps_mean
    algorithm_gbps_std bus_gbps_mean bus_gbps_std wait_ns_mean wait_ns_max"""
    assert set(keys.split()) <= set(rows[0])


def test_a_trace_without_collectives() -> None:
    assert collectives(Tables()).to_json()["rows"] == []
    assert spread_of_tables(Tables()).is_empty()


def test_spread_of_compute() -> None:
    kernels = [("k", 0, 100), ("gemm", 0, 10), ("gemm", 20, 30), ("add", 60, 5)]
    spread = spread_of_tables(rank_tables(0, kernels, [one("allreduce")]))
    assert spread.rows() == [(None, "add", 1, 5.0, 0.0, 0.0), (None, "gemm", 2, 20.0, 10.0, 0.5)]


def test_a_name_that_is_no_known_kind_stays() -> None:
    frame = pl.DataFrame({"name": ["barrier", "send"]})
    assert frame.select(kind_of(pl.col("name"))).to_series().to_list() == ["barrier", "send"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-reduce"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_bf16(ncclWorkElem)", "reduce-scatter"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send-recv"),
        ("void vllm::cross_device_reduce_1stage<float, 2>(vllm::RankData*)", "all-reduce"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", None),
        ("nvshmemi_transfer", None),
    ],
)
def test_kinds_that_kernels_say(name: str, kind: str | None) -> None:
    frame = pl.DataFrame({"name": [name]})
    assert frame.select(kind_of_kernel(pl.col("name"))).to_series().to_list() == [kind]


def test_one_csv_holds_both_tables() -> None:
    found = result()
    both = found.to_frame()
    assert both["table"].to_list() == ["last_arrivals", "last_arrivals", "sizes"]
    assert both.filter(table="last_arrivals")["waited_ns"].to_list() == [30, 10]
    assert both.filter(table="sizes").select(found.by_size.columns).equals(found.by_size)


INTERVALS = st.lists(st.tuples(st.integers(-40, 40), st.integers(0, 30)), max_size=12)


@given(INTERVALS, INTERVALS)
def test_covered_lengths_against_counting_every_nanosecond(
    asked: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    covered = {time for start, length in others for time in range(start, start + length)}
    expected = [len(covered & set(range(start, start + length))) for start, length in asked]
    start, length = np.array(asked, np.int64).reshape(-1, 2).T
    other, lasting = np.array(others, np.int64).reshape(-1, 2).T
    assert covered_lengths(start, start + length, other, other + lasting).tolist() == expected
