"""What notebooks show of results: tables with bars, coverage and reasons, nothing of a trace as HTML."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import DATA, FSDP, event, kernel, launch, opened, recording, shared
from thence.errors import MissingRequirement
from thence.model.answer import MAX_ROWS, Answer, TableView

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RESULTS: dict[str, Callable[[dict[str, thence.Trace]], Any]] = {
    "trace": lambda t: t["one"],
    "summary": lambda t: t["one"].report("label"),
    "hlo": lambda t: t["xla"].report("hlo"),
    "first_screen": lambda t: t["ranks"].first_screen(),
    "idle": lambda t: t["one"].idle(),
    "streams": lambda t: t["ranks"].streams(),
    "collectives": lambda t: t["ranks"].collectives(),
    "programs": lambda t: t["xla"].programs(),
    "compilation": lambda t: t["compiled"].compile(),
    "steps": lambda t: t["one"].steps(),
    "what_if": lambda t: t["one"].whatif(free=["label:optimizer"]),
    "alignment": lambda t: t["ranks"].alignment,
    "soundness": lambda t: t["one"].check(),
    "diff": lambda t: t["one"].diff(t["one"]),
    "flame": lambda t: t["one"].flame("label"),
    "graph_coverage": lambda t: t["one"].graph_coverage,
    "replayed_graph": lambda t: t["graphed"].replayed_graph(),
    "self_check": lambda t: t["one"].self_check(),
    "explanation": lambda t: t["one"].explain(),
    "late_ranks": lambda t: t["ranks"].ranks(),
    "roofline": lambda t: t["one"].roofline(),
    "memory": lambda t: t["memory"].memory(),
    "memory_over_time": lambda t: t["memory"].memory_over_time(),
    "inside": lambda _: thence.inside.open(DATA / "inside" / "gpu_triton.npz").summary(),
}


@pytest.fixture(scope="module")
def traces() -> dict[str, thence.Trace]:
    return {
        "one": shared(recording("torch_eager_rank0")),
        "ranks": shared(*FSDP),
        "xla": thence.open(DATA / "jax" / "jax_fsdp2.xplane.pb.gz"),
        "compiled": thence.open(DATA / "jax" / "recording"),
        "memory": thence.open(DATA / "torch" / "memory" / "conv_training.json.gz"),
        "graphed": thence.open(DATA / "torch" / "graphs" / "compiled_replay.json.gz"),
    }


def parsed(fragment: str) -> ET.Element:
    return ET.fromstring(fragment.replace("<br>", "<br/>"))  # our own text


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_shows_itself(name: str, traces: dict[str, thence.Trace]) -> None:
    result = RESULTS[name](traces)
    root = parsed(result._repr_html_())
    tables = list(root.iter("table"))
    views = [view for view in result.views() if isinstance(view, TableView)] if isinstance(result, Answer) else [None]
    assert len(tables) == len(views)
    for table, view in zip(tables, views, strict=True):
        headings = list(table.iter("th"))
        rows = [list(row) for row in table.iter("tr")][1:]
        assert all(len(row) == len(headings) for row in rows)
        assert view is None or len(rows) == min(view.rows.height, MAX_ROWS)
    if isinstance(result, Answer):
        text = "".join(root.itertext())
        assert all(note in text for note in result.all_notes())
        assert result.to_frame().width


def test_reasons_and_coverage_are_said(traces: dict[str, thence.Trace]) -> None:
    text = "".join(parsed(traces["one"]._repr_html_()).itertext())
    assert "module 0.0 % ▯▯▯▯▯" in text
    assert "label 100.0 % ▮▮▮▮▮" in text
    assert "no nn.Module calls recorded" in text
    assert 'next: trace.select(steps="typical").idle(): the GPU is idle for' in text


def test_the_bar_of_a_row_is_as_long_as_its_part_of_the_largest(traces: dict[str, thence.Trace]) -> None:
    result = traces["one"].report("label")
    bars = [row[-1].text or "" for row in list(parsed(result._repr_html_()).iter("tr"))[1:]]
    times = result.rows["total_ns"].to_list()
    assert [len(bar) for bar in bars] == [round(12 * time / times[0]) for time in times]


def test_names_of_a_trace_are_no_html(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script><b>"
    trace = opened(tmp_path, [event("user_annotation", bad, 0, 100), launch(1, 10), kernel(1, 20, name=bad)])
    for result in (trace, trace.report("label"), trace.flame("label"), trace.idle(), trace.streams()):
        shown = result._repr_html_()
        assert not re.search(r"<(script|b>&)", shown)
        assert "&lt;script&gt;" in shown or bad not in str(result)


def test_without_pandas_one_sentence_says_what_to_install(
    traces: dict[str, thence.Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingRequirement) as refused:
        traces["one"].report().to_pandas()
    assert str(refused.value).endswith("pip install 'thence[pandas]'")
    assert "\n" not in str(refused.value)


def test_what_a_check_proves_is_counted_again(traces: dict[str, thence.Trace]) -> None:
    trace = traces["one"]
    proof = trace.self_check()
    duration = trace.tables.gpu["duration"]
    assert proof.sum_ns == duration.sum()
    assert proof.activities == len(duration)
    for kind, attributed, rest, together, whole in proof.kinds.rows():
        placed = trace.tables.places[kind].is_not_null()
        assert (attributed, rest) == (duration.filter(placed).sum(), duration.filter(~placed).sum())
        assert attributed + rest == together == whole
    assert "attributed and unattributed time add up" in str(proof)


def test_what_is_almost_whole_is_not_shown_as_whole() -> None:
    @dataclass(frozen=True)
    class Almost(Answer):
        def views(self) -> tuple[TableView, ...]:
            return (TableView(pl.DataFrame({"x": [1]}), {"x": "x"}),)

        def known(self) -> dict[str, float]:
            return {"most": 0.9999, "all": 1.0}

    html = Almost()._repr_html_()
    assert "most &gt;99.9 % ▮▮▮▮▯" in html
    assert "all 100.0 % ▮▮▮▮▮" in html
