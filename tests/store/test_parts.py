"""A part of a store holds what was written: every table, type and fact, of every kind of input."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import thence
from helpers import DATA, FSDP, TORCH, shared
from stores import kept
from thence.attribution.work.activity_work import activity_work
from thence.errors import DamagedInput
from thence.model.attributed import Attributed, concat_attributed
from thence.model.hlo import HloModule
from thence.store.facts import Facts, encode_facts
from thence.store.layout import FACTS
from thence.store.parts import rows_of, write_tables

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = (
    TORCH / "torch_eager_rank0.json.gz",
    TORCH / "graph_replay_rank0.json.gz",
    DATA / "jax" / "remat.xplane.pb.gz",
    DATA / "recording" / "two_ranks",
)


def assert_same(left: object, right: object) -> None:
    """Equal tables with equal types, and equal facts; columns of places in any order."""
    for field in dataclasses.fields(left):  # type: ignore[arg-type]
        one, other = getattr(left, field.name), getattr(right, field.name)
        if field.name == "work" and isinstance(
            left, Attributed
        ):  # a store keeps it, and it is computed of other traces
            one, other = activity_work(left), activity_work(right)  # type: ignore[arg-type]
        if field.name == "places":
            other = other.select(one.columns)
        if isinstance(one, pl.DataFrame):
            assert one.schema == other.schema, field.name
            assert_frame_equal(one, other, categorical_as_str=True)
        elif isinstance(one, tuple) and one and isinstance(one[0], HloModule):
            for module, same in zip(one, other, strict=True):
                assert_same(module, same)
        elif field.name != "graph_labels":
            assert one == other, field.name


@pytest.mark.parametrize("path", INPUTS, ids=[path.name for path in INPUTS])
def test_what_is_read_is_what_was_written(path: Path, tmp_path: Path) -> None:
    trace = shared(path)
    whole = trace.whole
    write_tables(whole, tmp_path, host=True)
    facts = Facts(whole.meta, trace.check(), whole.own, whole.installed)
    (tmp_path / FACTS).write_bytes(encode_facts(facts))
    assert_same(rows_of(tmp_path, {}), whole)


def test_a_kind_of_place_that_is_newer_than_a_store_is_not_recorded_there(tmp_path: Path) -> None:
    trace = shared(INPUTS[0])
    write_tables(trace.whole, tmp_path, host=True)
    (tmp_path / FACTS).write_bytes(
        encode_facts(Facts(trace.meta, trace.check(), trace.whole.own, trace.whole.installed))
    )
    path = tmp_path / "activities.parquet"
    pl.read_parquet(path).drop("phase", "phase_rule").write_parquet(path)
    places = rows_of(tmp_path, {}).places
    assert places["phase"].null_count() == trace.whole.gpu.height
    assert places["phase_rule"].unique().to_list() == ["not_recorded"]
    assert_frame_equal(places["module", "op"], trace.whole.places["module", "op"], categorical_as_str=True)


def test_columns_of_a_part_that_have_another_type_are_converted_or_refused(tmp_path: Path) -> None:
    store = shutil.copytree(kept(FSDP[:2], host=True), tmp_path / "store")
    path = next(store.glob("ranks/rank-00001-*/activities.parquet"))
    converted = (pl.lit(None, pl.String).alias("lane"), pl.lit(1).alias("other"))
    pl.read_parquet(path).with_columns(converted).write_parquet(path)
    assert thence.open(store).report("label").rows.height
    pl.read_parquet(path).with_columns(pl.lit(1.5).alias("detail")).write_parquet(path)
    with pytest.raises(DamagedInput, match="cannot be read"):
        thence.open(store).report("label")


def test_ranks_put_together_are_those_that_were_read_together() -> None:
    parts = [shared(path).whole for path in FSDP[:3]]
    assert_same(concat_attributed(parts), shared(*FSDP[:3]).whole)


def test_without_host_ranges_nothing_refers_to_them(tmp_path: Path) -> None:
    trace = shared(FSDP[0])
    write_tables(trace.whole, tmp_path, host=False)
    facts = Facts(trace.meta, trace.check())
    (tmp_path / FACTS).write_bytes(encode_facts(facts))
    read = rows_of(tmp_path, {0: 9})
    assert read.host.is_empty()
    assert read.places["launch"].null_count() == read.places.height > 0
    assert read.collectives["host"].null_count() == read.collectives.height > 0
    assert read.gpu["rank"].unique().to_list() == [9]
