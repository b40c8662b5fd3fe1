"""Clock alignment from the ends of shared collectives."""

from __future__ import annotations

import json
import random

import polars as pl
import pytest

from thence.analysis.collectives.clock_sync import Alignment
from thence.analysis.collectives.clock_sync import align_clocks as of_attributed
from thence.analysis.collectives.instances import collective_instances
from thence.attribution.attribute import attribute
from thence.model.concat_tables import concat
from thence.model.tables import COLLECTIVES, GPU, PROGRAMS, Tables


def align_clocks(tables: Tables) -> Alignment:
    return of_attributed(attribute(tables))


# (rank, end of each all-reduce in us); every one lasts 10 ns
Ends = dict[int, list[int]]


def xla(ends: Ends, *, group_size: int = 4, fingerprints: dict[int, str] | None = None) -> Tables:
    """One rank each runs program "step" once per collective."""
    parts = []
    for rank, us in ends.items():
        times = [1000 * end for end in us]
        count = len(times)
        rows = {"rank": [rank] * count, "device": [0] * count}
        starts = [end - 10 for end in times]
        identity = (fingerprints or {}).get(rank, "same")
        table = PROGRAMS.frame(
            {**rows, "program": [identity] * count, "name": ["step"] * count, "start": starts}
            | {"execution": list(range(count)), "duration": [10] * count}
        )
        gpu = GPU.frame(
            {**rows, "kind": ["thunk"] * count, "name": ["all-reduce.1"] * count, "start": starts}
            | {"hlo": ["all-reduce.1"] * count, "duration": [10] * count, "program": list(range(count))}
        )
        described = COLLECTIVES.frame(
            {"gpu": list(range(count)), "collective": ["all-reduce"] * count}
            | {"bytes": [8] * count, "group_size": [group_size] * count}
        )
        parts.append(Tables(gpu=gpu, programs=table, collectives=described))
    return concat(parts)


def corrections(tables: Tables) -> dict[int, float | None]:
    """By rank, in us."""
    return in_us(align_clocks(tables))


def in_us(found: Alignment) -> dict[int, float | None]:
    rows = found.corrections.select("rank", "correction_ns").rows()
    return {rank: None if ns is None else ns / 1000 for rank, ns in rows}


def test_a_constant_offset_is_found_and_the_residual_reported() -> None:
    found = align_clocks(xla({0: [100, 210, 300], 1: [1100, 1210, 1306]}))
    # Skews of rank 1: 500, 500, 503; its median 500. What is left: 0, 0 and 3, on both ranks.
    assert in_us(found) == {0: -500, 1: 500}
    assert found.residual_median_ns == 0
    assert found.residual_max_ns == 3000
    assert found.matched == 3


def test_any_subset_of_the_ranks_will_do() -> None:
    assert corrections(xla({0: [100, 200], 3: [90, 190]}, group_size=8)) == {0: 5, 3: -5}


def test_another_fingerprint_on_one_rank_does_not_matter() -> None:
    ends = {0: [100, 200], 1: [100, 200], 2: [130, 230]}
    assert corrections(xla(ends, fingerprints={2: "other tile"})) == {0: -10, 1: -10, 2: 20}


def test_ranks_that_share_only_some_instances_settle() -> None:
    # Rank 2 saw only the last collective. Rank 1 is 100 late, rank 2 is 40 late.
    whole = xla({0: [100, 210, 300], 1: [200, 310, 400]})
    late = xla({0: [100], 1: [200], 2: [140]})
    assert corrections(whole) == {0: -50, 1: 50}
    found = corrections(late)
    assert found[1] - found[0] == pytest.approx(100, abs=1)  # type: ignore[operator]
    assert found[2] - found[0] == pytest.approx(40, abs=1)  # type: ignore[operator]


def test_a_rank_without_shared_collectives_has_no_correction() -> None:
    tables = xla({0: [100], 1: [300], 2: [500]})
    alone = tables.programs.with_columns(
        name=pl.when(pl.col("rank") == 2).then(pl.lit("own")).otherwise(pl.lit("step"))
    ).cast({"name": pl.Categorical()})
    found = align_clocks(Tables(gpu=tables.gpu, programs=alone, collectives=tables.collectives))
    assert found.corrections["correction_ns"].to_list() == [-100_000, 100_000, None]
    assert found.corrections["cluster"].to_list() == [0, 0, 2]
    assert found.corrections["instances"].to_list() == [1, 1, 0]


def test_groups_side_by_side_and_transfers_say_nothing() -> None:
    ends = {0: [100], 1: [100], 2: [900], 3: [900]}
    assert align_clocks(xla(ends, group_size=2)).matched == 0
    tables = xla({0: [100], 1: [130]}, group_size=2)
    kinds = tables.collectives.with_columns(collective=pl.lit("collective-permute").cast(pl.Categorical()))
    permutes = Tables(gpu=tables.gpu, programs=tables.programs, collectives=kinds)
    assert align_clocks(permutes).corrections["correction_ns"].to_list() == [None, None]


def test_times_are_not_changed_but_can_be_shifted() -> None:
    tables = xla({0: [100, 200], 1: [1100, 1200]})
    found = align_clocks(tables)
    aligned = tables.gpu.select("rank", start=pl.col("start") - found.shift())
    assert aligned.filter(rank=0)["start"].to_list() == aligned.filter(rank=1)["start"].to_list()
    assert tables.gpu["start"].to_list() == [99_990, 199_990, 1_099_990, 1_199_990]


def kineto(rank: int, sequence: list[int | None], starts: list[int], group: str = "dp") -> Tables:
    count = len(starts)
    gpu = GPU.frame(
        {"rank": [rank] * count, "device": [0] * count, "kind": ["kernel"] * count}
        | {"name": ["ncclDevKernel"] * count, "start": starts, "duration": [10] * count}
    )
    described = COLLECTIVES.frame(
        {"gpu": list(range(count)), "collective": ["allreduce"] * count, "sequence": sequence}
        | {"bytes": [8] * count, "group_size": [3] * count, "group_name": [group] * count}
    )
    return Tables(gpu=gpu, collectives=described)


def test_collectives_outside_programs_match_by_group_and_sequence() -> None:
    tables = concat([kineto(0, [4, 5], [100_000, 200_000]), kineto(1, [5, 6], [260_000, 300_000])])
    assert collective_instances(attribute(tables)).rows["instance"].n_unique() == 3
    assert corrections(tables) == {0: -30, 1: 30}


def test_groups_are_told_apart_and_order_stands_in_for_sequence() -> None:
    tables = concat([kineto(0, [None, None], [100_000, 200_000]), kineto(1, [None, None], [150_000, 250_000])])
    assert corrections(tables) == {0: -25, 1: 25}
    other = concat([kineto(0, [1], [100_000], "a"), kineto(1, [1], [150_000], "b")])
    assert align_clocks(other).matched == 0


def test_without_collectives_there_is_nothing_to_align() -> None:
    found = align_clocks(Tables())
    assert found.matched == 0
    assert found.residual_median_ns is None
    assert json.loads(json.dumps(found.to_json()))["rows"] == []


def noisy(skew: dict[int, int], seed: int = 4) -> Tables:
    """Forty all-reduces of three ranks; ends scatter by up to 4 us, clocks are ahead by the skew."""
    rng = random.Random(seed)
    ends = [1_000_000 * number + rng.randrange(300_000) for number in range(40)]
    seen = [[end + skew.get(r, 0) + rng.randrange(-4000, 4000) for end in ends] for r in range(3)]
    return concat([kineto(r, list(range(10, 50)), [end - 10 for end in seen[r]]) for r in range(3)])


def test_a_planted_skew_is_recovered_with_its_residual() -> None:
    found = align_clocks(noisy({1: 5_000_000, 2: -300_000}))
    by_rank = dict(found.corrections.select("rank", "correction_ns").rows())
    assert found.applied
    assert by_rank[1] - by_rank[0] == pytest.approx(5_000_000, abs=2500)
    assert by_rank[2] - by_rank[0] == pytest.approx(-300_000, abs=2500)
    assert found.residual_median_ns is not None
    assert 500 < found.residual_median_ns < 4000
    assert "remaining difference: median" in found.statement


@pytest.mark.parametrize("seed", range(6))
def test_clocks_that_agree_are_left_alone(seed: int) -> None:
    tables = noisy({}, seed)
    found = align_clocks(tables)
    assert not found.applied
    assert found.corrections["correction_ns"].to_list() == [0, 0, 0]
    assert tables.gpu.select(found.shift()).to_series().unique().to_list() == [0]
    assert "clocks agree: the ends of" in found.statement
    assert found.to_json()["applied"] is False


def test_only_collectives_that_end_together_for_all_say_how_far_clocks_are_apart() -> None:
    tables = noisy({1: 5_000_000})
    for kind in ("broadcast", "reduce", "gather", "scatter", "send", "recv"):
        named = tables.collectives.with_columns(collective=pl.lit(kind).cast(pl.Categorical()))
        assert align_clocks(Tables(gpu=tables.gpu, collectives=named)).matched == 0
    lost = Tables(gpu=tables.gpu, collectives=tables.collectives[:-39])  # rank 2 shows one
    assert align_clocks(lost).matched == 1


def grouped(clocks: dict[int, int], groups: list[list[int]], jitter: int, seed: int) -> Tables:
    """Thirty all-reduces of each group, one after the other; clocks are ahead by so many ns."""
    rng = random.Random(seed)
    ends: dict[int, list[tuple[str, int, int]]] = {rank: [] for rank in clocks}
    for number in range(30):
        for place, members in enumerate(groups):
            moment = 10_000_000 * number + 1_000_000 * place
            for rank in members:
                seen = moment + clocks[rank] + (rng.randrange(jitter) if jitter else 0)
                ends[rank].append((f"g{place}", number, seen))
    parts = []
    for rank, rows in ends.items():
        of = {name: [row for row in rows if row[0] == name] for name, _, _ in rows}
        one = concat([kineto(0, [n for _, n, _ in r], [e for *_, e in r], g) for g, r in of.items()])
        # concat makes ranks of their own of them: they are one.
        same = one.gpu.with_columns(rank=pl.lit(rank, pl.Int32))
        parts.append(Tables(gpu=same, collectives=one.collectives))
    return concat(parts)


def test_groups_that_share_no_rank_are_each_aligned_as_if_alone() -> None:
    rng = random.Random(0)
    clocks = {rank: rng.randrange(-5_000_000, 5_000_000) for rank in range(9)}
    groups = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    together = corrections(grouped(clocks, groups, 3000, 1))
    whole = grouped(clocks, groups, 3000, 1)
    for members in groups:
        gpu = whole.gpu.with_row_index("row").filter(pl.col("rank").is_in(members))
        numbers = pl.DataFrame({"gpu": gpu["row"].cast(pl.Int32)}).with_row_index("new")
        described = whole.collectives.join(numbers, on="gpu").with_columns(gpu=pl.col("new").cast(pl.Int32))
        alone = Tables(gpu=gpu.drop("row"), collectives=described.drop("new"))
        assert corrections(alone) == {rank: together[rank] for rank in members}


def test_a_chain_of_groups_settles_where_the_clocks_are() -> None:
    clocks = {0: 0, 1: 900_000, 2: -350_000, 3: 70_000, 4: 640_000}
    found = corrections(grouped(clocks, [[0, 1], [1, 2], [2, 3], [3, 4]], 0, 2))
    assert None not in found.values()
    apart = {rank: (us or 0.0) - (found[0] or 0.0) for rank, us in found.items()}
    assert apart == pytest.approx({rank: ns / 1000 for rank, ns in clocks.items()}, abs=2)
    # Nothing says when all clocks move together, so the corrections must not run away either.
    assert max(abs(us or 0.0) for us in found.values()) <= 1250


def test_a_long_chain_is_one_cluster() -> None:
    groups = [[rank, rank + 1] for rank in range(63)]
    rng = random.Random(3)
    order = list(range(64))
    rng.shuffle(order)
    groups = [[order[a], order[b]] for a, b in groups]
    found = align_clocks(grouped(dict.fromkeys(range(64), 0), groups, 0, 3))
    assert found.corrections["cluster"].to_list() == [0] * 64
