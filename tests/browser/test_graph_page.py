"""The page of a captured graph in a real browser: rows, lines, folding, search, keys, and no name does anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest

from browser.chromium import ABSENT, CHROMIUM, driven
from browser.test_flame_page import HOSTILE
from thence.analysis.cuda_graphs.replayed_graph import ReplayedGraph
from thence.model.tables import Meta
from thence.writers.page.graph_page import graph_html

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=ABSENT)

HELPERS = """
const rows = () => [...document.querySelectorAll("#rows .row")];
const texts = () => rows().map((row) => row.querySelector(".what").textContent.trim().replace(/\\s+/g, " "));
const key = (name) => byId("rows").dispatchEvent(new KeyboardEvent("keydown", {key: name, cancelable: true}));
const at = () => [...document.querySelectorAll("#edges circle")].map((dot) => Number(dot.getAttribute("cx")));
"""


def made(
    names: Sequence[str],
    edges: Sequence[tuple[int, int]],
    critical: Sequence[int],
    labels: Sequence[str | None] | None = None,
    inputs: str = "made.json",
) -> str:
    """The page of a graph whose nodes take 10 us each, one after the other."""
    count = len(names)
    nodes = pl.DataFrame(
        {
            "number": range(count),
            "kind": ["kernel"] * count,
            "name": names,
            "label": labels or [None] * count,
            "module": [None] * count,
            "phase": [None] * count,
            "start_ns": [10_000.0 * i for i in range(count)],
            "duration_ns": [10_000.0] * count,
            "total_ns": [20_000] * count,
            "critical": [i in set(critical) for i in range(count)],
        },
        schema_overrides=dict.fromkeys(("label", "module", "phase"), pl.String),
    )
    pairs = np.array(edges, np.int64).reshape(-1, 2)
    others = pl.DataFrame(schema={"rank": pl.Int64, "graph": pl.Int64, "replays": pl.Int64, "total_ns": pl.Int64})
    graph = ReplayedGraph(
        0, 7, (9,), "labels.json", nodes, pairs, 2, 0, 1e4 * count, 1e4 * count, 1e4 * len(critical), 0, others, 0
    )  # fmt: skip
    return graph_html(graph, Meta(inputs=(inputs,)))


def test_rows_are_the_nodes_and_branches_have_lanes_beside_the_path(tmp_path: Path) -> None:
    found = driven(
        made(["a", "b", "c", "d"], [(0, 1), (0, 2), (1, 3), (2, 3)], [0, 1, 3]),
        tmp_path,
        HELPERS
        + """
        result.texts = texts(); result.at = at(); result.path = rows().map((row) => row.classList.contains("path"));
        result.lines = [...document.querySelectorAll("#edges path")].map((line) => line.getAttribute("class"));
        rows()[3].click(); result.detail = byId("detail").innerText;
        byId("detail").querySelector("button").click(); result.reached = byId("detail").querySelector("h2").textContent;
        byId("only").click(); result.only = texts();
        """,
    )
    assert found["texts"] == ["a", "b", "c", "d"]
    lane = found["at"]
    assert lane[0] == lane[1] == lane[3] < lane[2]
    assert found["path"] == [True, True, False, True]
    assert sorted(found["lines"]) == ["", "", "path", "path"]
    assert "waits for" in found["detail"]
    assert "before no other node" in found["detail"]
    assert "10.00 us" in found["detail"]
    assert found["reached"] == "b"
    assert found["only"] == ["a", "b", "d"]


def test_chains_of_one_place_fold_and_unfold_by_click_and_key(tmp_path: Path) -> None:
    count = 80
    labels = [f"layer{i // 10}" for i in range(count)]
    page = made([f"k{i}" for i in range(count)], [(i, i + 1) for i in range(count - 1)], range(count), labels)
    found = driven(
        page,
        tmp_path,
        HELPERS
        + """
        result.folded = texts(); result.time = rows()[0].querySelector(".figure").textContent;
        rows()[1].click(); result.opened = texts().slice(0, 4);
        result.expanded = rows()[1].getAttribute("aria-expanded");
        key("ArrowLeft"); result.closed = texts().length;
        key("Home"); key("ArrowRight"); result.first = texts().slice(0, 2);
        byId("fold").click(); result.again = texts().length;
        byId("unfold").click(); result.count = byId("rows").getAttribute("aria-rowcount");
        key("End"); result.last = byId("detail").querySelector("h2").textContent;
        search("/^k7/"); result.matched = byId("matched").textContent; byId("next").click();
        result.next = byId("detail").querySelector("h2").textContent;
        search("/(/"); result.broken = byId("matched").textContent;
        """,
    )
    assert found["folded"] == [f"▸layer{i} 10 nodes" for i in range(8)]
    assert found["time"] == "100.0 us"
    assert found["opened"] == ["▸layer0 10 nodes", "▾layer1 k10", "layer1 k11", "layer1 k12"]
    assert found["expanded"] == "true"
    assert found["closed"] == found["again"] == 8
    assert found["first"] == ["▾layer0 k0", "layer0 k1"]
    assert found["count"] == "80"
    assert found["last"] == "k79"
    assert found["matched"] == "11 nodes, 110.0 us"
    assert found["next"] == "k7"
    assert "not a valid" in found["broken"]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    page = made(
        HOSTILE,
        [(0, i) for i in range(1, 5)],
        [0, 1],
        list(reversed(HOSTILE)),
        "</title><script>alert(5)</script>.json",
    )
    found = driven(
        page,
        tmp_path,
        HELPERS
        + """
        result.texts = rows().map((row) => row.querySelector(".kernel").textContent);
        for (const row of rows()) row.click();
        result.images = document.images.length; result.scripts = document.scripts.length; result.title = document.title;
        """,
    )
    assert found["texts"][0] == HOSTILE[0]
    assert found["images"] == 0
    assert found["scripts"] == 4  # data, the page's own, and two of this test
    assert found["title"].endswith("</title><script>alert(5)</script>.json")


def test_ten_thousand_nodes_draw_only_what_is_seen(tmp_path: Path) -> None:
    count = 10_000
    edges = [(i, i + 1) for i in range(count - 1) if i % 7] + [(i - 3, i + 1) for i in range(7, count - 1, 7)]
    page = made([f"kernel{i % 50}" for i in range(count)], edges, [1], [f"layer{i // 100}" for i in range(count)])
    assert len(page) < 1_200_000
    found = driven(
        page,
        tmp_path,
        HELPERS
        + """
        byId("unfold").click(); result.count = byId("rows").getAttribute("aria-rowcount"); result.drawn = rows().length;
        key("End"); result.last = byId("rows").lastElementChild.getAttribute("aria-rowindex");
        result.wide = byId("edges").getAttribute("width");
        """,
    )
    assert found["count"] == "10000"
    assert found["drawn"] < 100
    assert found["last"] == "10000"
    assert float(found["wide"]) < 250


def test_a_page_of_two_thousand_nodes_has_less_than_300_kb() -> None:
    names = [f"void at::native::vectorized_elementwise_kernel<4, Functor{i % 60}>({'int, ' * 40})" for i in range(2000)]
    edges = [(i, i + 1) for i in range(1999)]
    page = made(names, edges, range(2000), [f"step/layer{i // 20}/part{i % 20 // 5}" for i in range(2000)])
    assert len(page.encode()) < 300_000
