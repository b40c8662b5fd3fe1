"""Alignment may abstain, but it never gives an activity the label of another node."""

from __future__ import annotations

import dataclasses
import json
import random

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_data import Made, Ran, as_eager, layers, replay, tables_of
from helpers import examples
from thence.attribution.attribute import attribute
from thence.attribution.cuda_graphs.by_eager import join_eager
from thence.attribution.cuda_graphs.join_labels import join_labels
from thence.readers.label_files import read_labels


@st.composite
def graphs(draw: st.DrawFn) -> Made:
    made = Made()
    count = draw(st.integers(1, 24))
    reach = draw(st.integers(1, 6))
    for node in range(count):
        earlier = list(range(max(0, node - reach), node))
        before = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3)) if earlier else []
        label = draw(st.sampled_from(["a", "b", "c", f"own{node}", None]))
        made.node(draw(st.sampled_from(["gemm", "gelu", "norm"])), label, *before)
    return made


@pytest.mark.slow_oracle
@settings(max_examples=examples(100), deadline=None)
@given(made=graphs(), streams=st.integers(1, 4), seed=st.integers(0, 1 << 32), times=st.integers(1, 3))
def test_no_label_is_ever_wrong(
    tmp_path_factory: pytest.TempPathFactory, made: Made, streams: int, seed: int, times: int
) -> None:
    chance = random.Random(seed)
    launches = [replay(made, streams, chance, 1_000_000_000 * i) for i in range(times)]
    tables, nodes = tables_of(made, launches)
    path = tmp_path_factory.mktemp("labels") / "labels.json"
    path.write_text(json.dumps(made.document()))
    joined = join_labels(tables, [read_labels(path)])
    assert not joined.notes, "the replay respects the edges, so nothing may be refused"
    for row, label, rule in joined.places.select("gpu", "label", "rule").iter_rows():
        if label is not None:
            assert label == made.labels[nodes[row]]
        elif "no label was open" in rule:
            assert made.labels[nodes[row]] is None


@settings(max_examples=examples(20), deadline=None)
@given(streams=st.integers(1, 5), seed=st.integers(0, 1 << 32))
def test_identical_layers_are_all_labelled_whatever_the_streams(
    tmp_path_factory: pytest.TempPathFactory, streams: int, seed: int
) -> None:
    made = layers(32)
    chance = random.Random(seed)
    tables, nodes = tables_of(made, [replay(made, streams, chance, 10**9 * i, 1) for i in range(2)])
    path = tmp_path_factory.mktemp("labels") / "labels.json"
    path.write_text(json.dumps(made.document()))
    joined = join_labels(tables, [read_labels(path)])
    assert joined.labelled == 2 * 32 * 6
    assert joined.places["label"].to_list() == [made.labels[node] for node in nodes]


@pytest.mark.slow_oracle
@settings(max_examples=examples(60), deadline=None)
@given(
    kernels=st.lists(st.tuples(st.sampled_from(["gemm", "gelu", "norm"]), st.integers(0, 2)), min_size=2, max_size=16),
    iterations=st.integers(1, 3),
    # Where both sides lost a kernel, nothing can show it.
    losses=st.one_of(
        st.tuples(st.none(), st.integers(0, 47)), st.tuples(st.integers(0, 15), st.none()), st.just((None, None))
    ),
    seed=st.integers(0, 1 << 32),
)
def test_an_eager_run_never_gives_a_wrong_label_whatever_was_lost(
    kernels: list[tuple[str, int]], iterations: int, losses: tuple[int | None, int | None], seed: int
) -> None:
    dropped, lost = losses
    made = Made()
    last: dict[int, int] = {}
    for node, (kernel, stream) in enumerate(kernels):
        made.node(kernel, f"own{node}", *([last[stream]] if stream in last else []))
        last[stream] = node
    launches = [
        [Ran(node, 10_000 * (i * len(kernels) + node), 5000, stream)]
        for i in range(iterations)
        for node, (_, stream) in enumerate(kernels)
    ]
    eager, of_eager = tables_of(made, launches)
    eager = as_eager(eager, [str(made.labels[node]) for node in of_eager])
    if lost is not None and lost < eager.gpu.height:
        eager = dataclasses.replace(eager, gpu=eager.gpu.filter(pl.int_range(pl.len()) != lost))
    ran = replay(made, 3, random.Random(seed), 0, 1)
    tables, nodes = tables_of(made, [[r for r in ran if r.node != dropped]])
    if not nodes or eager.gpu.is_empty():
        return
    joined = join_eager(tables, [attribute(eager)])
    # A graph that holds the run several times, and names, are other rules: half a run is such a run too.
    aligned = joined.places.filter(pl.col("rule") == "eager_alignment")
    for row, label in aligned.select("gpu", "label").iter_rows():
        assert label in (None, made.labels[nodes[row]])
