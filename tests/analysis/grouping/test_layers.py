"""Equal layers are one row, and the parts of a model a tree, whose times are those of the rows."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import statistics
from collections import defaultdict
from typing import Any

import polars as pl
import pytest

import thence
from helpers import DATA
from thence.analysis.activity_rooflines import USE, WORK_SUMS
from thence.analysis.grouping.layers import folded_rows, tree_rows
from thence.errors import UsageError
from thence.model.places import LAYERED

LAYERS = DATA / "torch" / "layers" / "layers36.json.gz"


def table(times: dict[str, int], missing: int = 0) -> pl.DataFrame:
    """Rows of a summary: a place for each name, one activity per 10 ns, and time without a place.

    Places have 2 FLOP and 3 bytes a ns, half of their time is headroom, and memory decides all of it.
    """
    rows: list[tuple[object, ...]] = [
        (name, True, None, ns // 10, ns, ns, 0, 2.0 * ns, ns, 3 * ns, ns, ns, ns // 2, None, ns, None, None, None)
        for name, ns in times.items()
    ]
    rows += [("[outside]", False, "outside_modules", 1, missing, missing, 0, *[None] * 11)] if missing else []
    schema = ["name", "attributed", "reason", "count", "total_ns", "exposed_ns", "backward_ns", *WORK_SUMS]
    frame = pl.DataFrame(rows, schema, orient="row")
    return frame.sort("total_ns", descending=True, maintain_order=True)


MODEL = table(
    {
        **{f"layers.{n}.mlp.up": 100 for n in range(4)},
        **{f"layers.{n}.mlp.down": 200 for n in range(3)},
        "layers.3.mlp.down": 300,
        **{f"layers.{n}.mlp": 10 for n in range(4)},
        "layers.2.adapter": 50,
        "head": 400,
    },
    missing=60,
)


def test_a_folded_row_has_the_layers_their_spread_and_the_one_that_differs_most() -> None:
    folded = folded_rows(MODEL, 2000)
    by_name = {row["name"]: row for row in folded.iter_rows(named=True)}
    assert folded["name"].to_list() == [
        *("layers.*.mlp.down", "head", "layers.*.mlp.up", "[outside]", "layers.2.adapter"),
        "layers.*.mlp",
    ]
    down = by_name["layers.*.mlp.down"]
    assert (down["layers"], down["count"], down["total_ns"], down["share"]) == (4, 90, 900, 0.45)
    assert (down["layer_min_ns"], down["layer_median_ns"], down["layer_max_ns"]) == (200, 200, 300)
    assert (down["differs"], down["differs_ns"], down["differs_share"]) == ("3", 300, 0.5)
    assert [down[name] for name in (*WORK_SUMS[:6], *USE)] == [1800, 900, 2700, 900, 900, 450, 0.002, 3, 0.5, "memory"]
    assert [by_name["[outside]"][name] for name in (*WORK_SUMS, *USE)] == [None] * 15
    assert by_name["layers.*.mlp.up"]["differs"] is None
    for alone in ("head", "layers.2.adapter", "[outside]"):
        assert by_name[alone]["layers"] is None
    assert by_name["[outside]"]["reason"] == "outside_modules"


def test_the_tree_has_every_part_with_the_time_inside_of_it() -> None:
    tree = tree_rows(MODEL, "module", 2000)
    assert tree.select("depth", "part", "layers", "total_ns", "self_ns").rows() == [
        (1, "layers.*", 4, 1390, 0),
        (2, "mlp", 4, 1340, 40),
        (3, "down", 4, 900, 900),
        (3, "up", 4, 400, 400),
        (2, "adapter", 1, 50, 50),
        (1, "head", None, 400, 400),
        (1, "[outside]", None, 60, 60),
    ]
    assert tree["name"].to_list()[:3] == ["layers.*", "layers.*.mlp", "layers.*.mlp.down"]


def test_depth_keeps_the_times_of_what_is_deeper() -> None:
    tree = tree_rows(MODEL, "module", 2000, 1)
    assert tree.select("part", "total_ns").rows() == [*(("layers.*", 1390), ("head", 400), ("[outside]", 60))]


def test_each_makes_every_layer_a_node() -> None:
    tree = tree_rows(MODEL, "module", 2000, 2, each=True)
    assert tree.select("depth", "part", "total_ns").rows() == [
        (1, "layers", 1390), (2, "layers.3.mlp", 410), (2, "layers.2", 360),
        (2, "layers.0.mlp", 310), (2, "layers.1.mlp", 310), (1, "head", 400), (1, "[outside]", 60),
    ]  # fmt: skip


def by_hand() -> dict[tuple[str, ...], dict[int, float]]:
    """us of each part of the layers by layer, from the raw events: classes of the modules around each launch.

    A class that a module holds several times has the position of the instance in its name.
    """
    events = json.loads(gzip.decompress(LAYERS.read_bytes()))["traceEvents"]
    modules = [e for e in events if e["name"].startswith("nn.Module: ")]
    launches = {e["args"]["correlation"]: e for e in events if e["cat"] == "cuda_runtime"}
    kernels = [e for e in events if e["cat"] == "kernel"]

    def chain(launch: dict[str, Any]) -> list[str]:
        around = [m for m in modules if m["ts"] <= launch["ts"] < m["ts"] + m["dur"]]
        return [m["name"].removeprefix("nn.Module: ") for m in sorted(around, key=lambda m: m["ts"])]

    chains = [(chain(launches[k["args"]["correlation"]]), k["dur"]) for k in kernels]
    inside: dict[tuple[str, str], set[int]] = defaultdict(set)
    for names, _ in chains:
        for outer, inner in itertools.pairwise(names):
            stem, number = re.fullmatch(r"(.*)_(\d+)", inner).groups()  # type: ignore[union-attr]
            inside[outer, stem].add(int(number))
    result: dict[tuple[str, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for names, us in chains:
        layer, path = None, []
        for outer, inner in zip(["", *names], names, strict=False):
            stem, number = re.fullmatch(r"(.*)_(\d+)", inner).groups()  # type: ignore[union-attr]
            layer = int(number) if stem == "DecoderLayer" else layer
            siblings = sorted(inside[outer, stem])
            path.append(stem if len(siblings) < 2 else f"{stem}[{siblings.index(int(number))}]")
        if layer is not None:
            result[tuple(path[2:])][layer] += us
    return result


def test_435_modules_of_36_layers_are_15_rows_with_the_times_counted_from_the_file() -> None:
    summary = thence.open(LAYERS).report("module")
    assert summary.rows.height == 435
    assert summary.folded is not None
    assert summary.folded.height == 15
    rows = summary.folded.filter(pl.col("layers").is_not_null())
    assert set(rows["layers"]) == {36}
    expected = by_hand()
    assert len(expected) == rows.height == 12
    for row in rows.iter_rows(named=True):
        parts = row["name"].removeprefix("Model_0/DecoderLayer_*").split("/")[1:]
        layers = expected[tuple(part.replace("_*", "") for part in parts)]
        times = [round(1000 * us) for us in layers.values()]
        assert row["total_ns"] == sum(times)
        assert row["layer_median_ns"] == statistics.median(times)
        assert (row["layer_min_ns"], row["layer_max_ns"]) == (min(times), max(times))
    slow = rows.filter(rows["differs"].is_not_null())
    assert slow.select("name", "differs", "differs_share").rows() == [
        ("Model_0/DecoderLayer_*/MLP_*/Linear_*[2]", "17", 1.0)
    ]


RECORDED = (
    ("torch/layers/layers36.json.gz", "module"),
    ("torch/checkpoints/with_stacks.json.gz", "module"),
    ("torch/torch_fsdp_rank0.json.gz", "label"),
    ("jax/jax_single_nocb.xplane.pb.gz", "op_name"),
    ("jax/jax_fsdp2.xplane.pb.gz", "op_name"),
    ("jax/jax_fsdp2.xplane.pb.gz", "label"),
    ("recording/two_ranks", "label"),
)


@pytest.mark.parametrize(("name", "by"), RECORDED)
def test_folded_rows_and_trees_add_up_to_the_rows(name: str, by: str) -> None:
    summary = thence.open(DATA / name).report(by)  # type: ignore[arg-type]
    folded = summary.folded
    assert folded is not None
    sums = ("count", "total_ns", "backward_ns")
    assert folded.select(sums).sum().rows() == summary.rows.select(sums).sum().rows()
    for each in (False, True):
        tree = summary.tree(each=each)
        assert int(tree["self_ns"].sum()) == summary.sum_ns
        outermost = tree.filter(pl.col("depth") == 1)
        assert outermost.select(sums).sum().rows() == summary.rows.select(sums).sum().rows()
        for depth in (1, 2, 3):
            cut = summary.tree(depth, each=each)
            assert cut.rows() == tree.filter(pl.col("depth") <= depth).rows()


def test_forward_and_backward_of_a_jax_program_fold_alike() -> None:
    summary = thence.open(DATA / "jax" / "jax_single_nocb.xplane.pb.gz").report("label")
    assert summary.folded is not None
    assert summary.folded.select("name", "layers").rows()[:2] == [*(("block*/attention", 4), ("block*/mlp", 4))]


def test_rows_of_other_kinds_have_no_layers() -> None:
    trace = thence.open(LAYERS)
    summary = trace.report("op")
    assert summary.folded is None
    assert summary.to_json()["folded"] is None
    with pytest.raises(UsageError, match="rows by op make no tree; choose one of"):
        summary.tree()
    assert {"module", "label", "op_name"} == {*LAYERED}


def test_a_flame_graph_folds_when_asked() -> None:
    trace = thence.open(LAYERS)
    plain, folded = trace.flame("module"), trace.flame("module", fold=True)
    assert plain.nodes.filter(pl.col("name").str.starts_with("DecoderLayer_")).height == 36
    (layers,) = folded.nodes.filter(pl.col("name") == "DecoderLayer_*").iter_rows(named=True)
    per_layer = sum(sum(times.values()) for times in by_hand().values())
    assert layers["total_ns"] == round(1000 * per_layer)
    assert folded.total_ns == plain.total_ns
    with pytest.raises(UsageError, match="frames by ops have no layers"):
        trace.flame("ops", fold=True)
