"""The HTML report: what is in it, what is said to be absent, and that no name becomes markup."""

from __future__ import annotations

import html
import json
import re
import statistics
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import DATA, FSDP, STACK, kernel, launch, opened, run_thence, shared
from thence.analysis.idle.rules import REASON_TITLES

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("plotly", reason="Plotly is not installed")

JAX = DATA / "jax"
SECTIONS = [
    "timeline",
    "time",
    "idle",
    "flame",
    "streams",
    "collectives",
    "programs",
    "compile",
    "spread",
    "attribution",
]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Outline(HTMLParser):
    """Sections and elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.elements: list[str] = []
        self.places: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append(tag)
        if tag == "section":
            self.sections.append(given["id"] or "")
        for name in ("data-figure", "data-table"):
            if given.get(name):
                self.places.append(given[name] or "")


def data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def absent(page: str) -> list[str]:
    return [html.unescape(text) for text in re.findall(r'<p class="absent">(.*?)</p>', page)]


def test_idle_time_without_a_place_is_in_words(tmp_path: Path) -> None:
    """Kernel 2 has no launch: its idle time is unknown, and the page says why as the terminal does."""
    page = opened(tmp_path, [launch(1, 1), kernel(1, 10), kernel(2, 100)]).report_html()
    rows = data(page)["tables"]["idle"]["rows"]
    assert [row[:3] for row in rows] == [["unknown", "reason", REASON_TITLES["no_launch"]]]


def test_every_section_of_four_ranks() -> None:
    page = shared(*FSDP).report_html()
    content, outline = data(page), Outline(page)
    assert outline.sections == SECTIONS
    assert set(outline.places) == {*content["figures"], *content["tables"]}
    assert {"bandwidth", "waits", "last-arrivals", "groups", "concurrency"} <= set(content["figures"])
    tables = {"by-kernel", "by-label", "by-rank", "sizes", "last-arrivals"}
    assert tables | {"idle", "idle-causes", "idle-late"} <= set(content["tables"])
    assert len(page.encode()) < 6_000_000
    assert absent(page) == [
        "The trace holds no XLA programs; traces of jax.profiler, nsys-jax and thence record hold them.",
        "The trace holds no compilation; nsys-jax and thence record hold XLA's compile phases.",
        "No warnings.",
    ]


def test_every_section_of_a_jax_program() -> None:
    page = thence.open(JAX / "jax_fsdp2.xplane.pb.gz").report_html()
    content = data(page)
    assert Outline(page).sections == SECTIONS
    assert {"programs", "bandwidth"} <= set(content["figures"])
    assert content["tables"]["programs"]["rows"][0][0]


def test_one_gpu_has_no_collectives_and_says_so() -> None:
    page = shared(STACK).report_html()
    assert "The trace describes no collectives, because it is of a single GPU." in absent(page)
    assert {"by-module", "by-source"} <= set(data(page)["tables"])


def test_the_numbers_are_those_of_the_summary_of_typical_steps() -> None:
    trace = shared(STACK)
    table = data(trace.report_html())["tables"]["by-kernel"]
    columns = [column["title"] for column in table["columns"]]
    assert columns == ["kernel", "count", "total", "share", "mean", "backward"]
    rows = trace.select(steps="typical").summary().rows
    assert [row[2] for row in table["rows"]] == rows["total_ns"].to_list()
    assert table["full"][0] == rows["name"][0][:400]


def test_a_long_table_is_cut_and_says_by_how_much(tmp_path: Path) -> None:
    events = [launch(i, i) for i in range(1, 504)]
    events += [kernel(i, 1000 + 10 * i, name=f"kernel_{'x' * i}") for i in range(1, 504)]
    table = data(opened(tmp_path, events).report_html())["tables"]["by-kernel"]
    assert len(table["rows"]) == 500
    assert table["note"] == "the rest takes 15.00 us (0.6 %); 3 more rows are not in this page"


def test_no_name_becomes_markup(tmp_path: Path) -> None:
    harmless = opened(tmp_path, [launch(1, 1), kernel(1, 10, name="k"), launch(2, 2), kernel(2, 20, name="m")])
    expected = Outline(harmless.report_html()).elements
    hostile = opened(tmp_path, [launch(1, 1), kernel(1, 10, name=HOSTILE), launch(2, 2), kernel(2, 20, name="m")])
    page = hostile.report_html()
    assert Outline(page).elements == expected
    assert HOSTILE not in page
    assert HOSTILE in data(page)["tables"]["by-kernel"]["full"]


def test_the_page_holds_the_license_texts_of_the_script_that_it_embeds() -> None:
    """The MIT and BSD licenses require them in every copy; the script itself only names them and their holders."""
    before, _, script = shared(*FSDP).report_html().partition("<script>/**\n* plotly.js")
    assert "Copyright" in script[:200]
    assert "Permission is hereby granted, free of charge" in before
    assert "Redistribution and use in source and binary forms" in before
    named = set(re.findall(r"(?i)\b(MIT|BSD|Apache|ISC|MPL|GPL|LGPL|Zlib|CC0)\b[ -](?:\S+ )?license", script))
    named |= {name.strip() for name in re.findall(r"@license +([^\n.]{1,20})", script)}
    assert {name.removeprefix("3-Clause ").split()[0].upper() for name in named} <= {"MIT", "BSD"}


@pytest.mark.parametrize("name", ["plot_timeline", "plot_by", "plot_flame", "plot_streams", "plot_concurrency",
                                  "plot_bandwidth", "plot_waits", "plot_wait_histogram",
                                  "plot_wait_sizes", "plot_last_arrivals", "plot_spread"])  # fmt: skip
def test_figures_for_notebooks(name: str) -> None:
    figure = getattr(shared(*FSDP), f"{name}")()
    assert figure.data


def test_figures_escape_names(tmp_path: Path) -> None:
    trace = opened(tmp_path, [launch(1, 1), kernel(1, 10, name="<a href='x'>k</a>")])
    for figure in (trace.plot_by(), trace.plot_timeline()):
        assert "<a " not in json.dumps(figure.to_plotly_json(), default=str)


@pytest.mark.parametrize("ranks", [FSDP, FSDP[:2]], ids=["transfers", "whole kernels"])
def test_lines_of_bandwidth_go_through_the_middle_of_their_dots(ranks: tuple[Path, ...]) -> None:
    """Two of four ranks show no whole transfer: then both dots and lines are of kernels."""
    trace = thence.open(*ranks)
    traces = trace.plot_bandwidth().data
    dots = [trace for trace in traces if trace.mode == "markers"]
    lines = [trace for trace in traces if trace.mode == "lines+markers"]
    assert len(dots) == len(lines) == 2
    middle = statistics.median if len(ranks) == 4 else statistics.fmean
    for line in lines:
        (own,) = [trace for trace in dots if trace.name == line.name]
        for size, gbps in zip(line.x, line.y, strict=True):
            ys = [y for x, y in zip(own.x, own.y, strict=True) if x == size]
            assert gbps == pytest.approx(middle(ys), rel=1e-3)
    page = html.unescape(trace.report_html())
    assert ("a dot is the transfer of one collective" in page) == (len(ranks) == 4)
    assert ("a dot is one whole kernel" in page) == (len(ranks) == 2)


def test_figures_of_programs() -> None:
    trace = thence.open(JAX / "jax_single_nocb.xplane.pb.gz")
    assert [bar.name for bar in trace.plot_programs().data] == ["busy", "idle inside", "idle between"]
    with pytest.raises(thence.MissingData):
        trace.plot_compile()


def test_without_plotly_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(thence.MissingRequirement, match=r"pip install plotly"):
        shared(STACK).plot_by()


def test_the_command_writes_a_page_once(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert run_thence("report", STACK, "-o", target).returncode == 0
    assert target.stat().st_size < 6_000_000
    again = run_thence("report", STACK, "-o", target)
    assert again.returncode == 2
    assert "exists already; --force replaces it" in again.stderr.decode()
    target.write_text("old")
    assert run_thence("report", STACK, "-o", target, "--force").returncode == 0
    assert Outline(target.read_text()).sections == SECTIONS
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_command_writes_json_and_csv(tmp_path: Path) -> None:
    assert run_thence("report", STACK, "--by", "module", "-o", tmp_path / "a.json").returncode == 0
    assert json.loads((tmp_path / "a.json").read_text())["by"] == "module"
    assert run_thence("report", STACK, "-o", tmp_path / "a.csv").returncode == 0
    assert (tmp_path / "a.csv").read_text().startswith("name,")
    wrong = run_thence("report", STACK, "-o", tmp_path / "a.pdf")
    assert wrong.returncode == 2
    assert ".html, .htm, .json, .csv" in wrong.stderr.decode()
