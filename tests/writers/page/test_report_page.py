"""The HTML report: what is in it, what is said to be absent, and that no name becomes markup."""

from __future__ import annotations

import functools
import html
import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import DATA, FSDP, STACK, kernel, launch, opened, run_thence, shared
from thence.analysis import roofline
from thence.analysis.idle.host_causes import REASON_TITLES
from thence.analysis.report import summary
from thence.analysis.whatif import answer as whatif

if TYPE_CHECKING:
    from pathlib import Path


JAX = DATA / "jax"
SECTIONS = [
    "findings",
    "run",
    "ranks",
    "time",
    "flame",
    "idle",
    "timeline",
    "gains",
    "collectives",
    "streams",
    "programs",
    "compile",
    "use",
    "memory",
    "spread",
    "attribution",
]
NOT_OF_ONE_GPU = ("ranks", "memory", "collectives", "programs", "compile")
OF_ONE_GPU = [name for name in SECTIONS if name not in NOT_OF_ONE_GPU]
MAX_BYTES = 600_000
"""Of the page of a trace of 180 kB; it was 5,060,000 with a library for charts in it."""
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
        if given.get("data-table"):
            self.places.append(given["data-table"] or "")


def data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def charts(page: str) -> list[str]:
    """Titles of the charts."""
    return [html.unescape(text) for text in re.findall(r"<figcaption><b>(.*?)</b>", page)]


def absent(page: str) -> list[str]:
    """What the page says that the trace does not contain."""
    found = re.search(r"<h3>Not in this trace</h3><ul[^>]*>(.*?)</ul>", page)
    return [html.unescape(text) for text in re.findall("<li>(.*?)</li>", found[1])] if found else []


@functools.cache
def page_of(*paths: Path) -> str:
    """The page of recordings, written once."""
    return shared(*paths).report_html()


def test_idle_time_without_a_place_is_in_words(tmp_path: Path) -> None:
    """Kernel 2 has no launch: its idle time is unknown, and the page says why as the terminal does."""
    page = opened(tmp_path, [launch(1, 1), kernel(1, 10), kernel(2, 100)]).report_html()
    rows = data(page)["tables"]["idle"]["rows"]
    assert [row[:3] for row in rows] == [["unknown", "reason", REASON_TITLES["no_launch"]]]


def test_every_section_of_four_ranks() -> None:
    page = page_of(*FSDP)
    content, outline = data(page), Outline(page)
    assert outline.sections == [name for name in SECTIONS if name not in ("memory", "gains", "programs", "compile")]
    assert set(outline.places) == set(content["tables"])
    assert charts(page) == [
        "The recording",
        "Steps over time",
        "A step of each rank",
        "Last arrivals",
        "Wait for the last device",
        "How many waited for how long",
        "Wait against message size",
        "Bus bandwidth against message size",
        "Time of each stream by group of kernels",
        "Streams busy at once",
        "Roofline",
        "Spread of durations of the same computation",
    ]
    tables = {"by-kernel", "by-label", "by-rank", "sizes", "last-arrivals"}
    assert tables | {"idle", "idle-causes", "idle-late"} <= set(content["tables"])
    assert len(page.encode()) < MAX_BYTES
    assert absent(page) == [
        "The trace holds no XLA programs; traces of jax.profiler, nsys-jax and thence record hold them.",
        "The trace holds no compilation; nsys-jax and thence record hold XLA's compile phases.",
    ]
    assert "No warnings." in page


def test_what_several_parts_need_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for module, name in ((summary, "summarize"), (roofline, "roofline"), (whatif, "what_if")):
        original = getattr(module, name)

        def counted(trace: Any, *more: Any, original: Any = original, name: str = name) -> Any:
            asked.append(f"{name} of {len(trace.gpu)} activities {more[0] if name != 'what_if' else ''}")
            return original(trace, *more)

        monkeypatch.setattr(module, name, counted)
    thence.open(STACK).report_html()
    assert {"summarize", "roofline", "what_if"} <= {text.split()[0] for text in asked}
    assert len(asked) == len(set(asked)), sorted(asked)


def test_parts_of_a_model_are_a_tree_first() -> None:
    """Each row has the time of everything inside, so the rows of the first level add up to the attributed time."""
    trace = shared(STACK)
    table = data(page_of(STACK))["tables"]["by-module"]
    assert table["columns"][3]["title"] == "total, with everything inside"
    outermost = [row[3] for row in table["rows"] if not row[0].startswith("\u2003")]
    assert sum(outermost) == trace.select(steps="typical").tables.gpu["duration"].sum()


def test_use_of_the_gpu_is_shown_or_said_to_be_unknown() -> None:
    page = page_of(*FSDP)
    assert "MFU" in page
    assert data(page)["tables"]["use"]["columns"][1]["title"] == "total"
    replay = thence.open(DATA / "torch" / "graph_replay_rank0.json.gz").report_html()
    assert "use" not in Outline(replay).sections
    assert any("FLOP and bytes of the work are not known: it was launched by no operator" in t for t in absent(replay))


def test_memory_is_a_section_with_a_chart_of_areas() -> None:
    page = thence.open(DATA / "torch" / "memory" / "conv_training.json.gz").report_html()
    content = data(page)
    assert "memory" in Outline(page).sections
    assert "Memory over time" in charts(page)
    assert content["tables"]["memory-recompute"]["rows"][1][0] == "Model_0/Sequential_1"


def test_every_section_of_a_jax_program() -> None:
    page = thence.open(JAX / "jax_fsdp2.xplane.pb.gz").report_html()
    content = data(page)
    assert Outline(page).sections == [name for name in SECTIONS if name not in ("gains", "compile")]
    assert {"Busy and idle time of each program", "Bus bandwidth against message size"} <= set(charts(page))
    assert content["tables"]["programs"]["rows"][0][0]


def test_one_gpu_has_no_collectives_and_says_so() -> None:
    page = page_of(STACK)
    assert "The trace describes no collectives, because it is of a single GPU." in absent(page)
    assert Outline(page).sections == OF_ONE_GPU
    assert {"by-module", "by-source"} <= set(data(page)["tables"])


def test_the_numbers_are_those_of_the_summary_of_typical_steps() -> None:
    trace = shared(STACK)
    table = data(page_of(STACK))["tables"]["by-kernel"]
    columns = [column["title"] for column in table["columns"]]
    assert columns == ["kernel", "count", "total", "share", "mean", "backward"]
    rows = trace.select(steps="typical").report().rows
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


def test_a_section_without_content_is_left_out(tmp_path: Path) -> None:
    """One kernel: no computation ran twice, nothing was idle, one device has no collectives."""
    page = opened(tmp_path, [launch(1, 1), kernel(1, 10)]).report_html()
    assert Outline(page).sections == [
        "findings", "time", "flame", "timeline", "gains", "streams", "attribution",
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [FSDP, FSDP[:2]], ids=["transfers", "whole kernels"])
def test_the_page_says_what_a_dot_of_bandwidth_is(ranks: tuple[Path, ...]) -> None:
    """Two of four ranks show no whole transfer: then both dots and lines are of kernels."""
    page = html.unescape(page_of(*ranks))
    assert ("a dot is the transfer of one collective" in page) == (len(ranks) == 4)
    assert ("a dot is one whole kernel" in page) == (len(ranks) == 2)


def test_the_command_writes_a_page_once(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    again = run_thence("report", STACK, "-o", target)
    assert again.returncode == 2
    assert "exists already; --force replaces it" in again.stderr.decode()
    assert target.read_text() == "old"
    assert run_thence("report", STACK, "-o", target, "--force").returncode == 0
    assert target.stat().st_size < MAX_BYTES
    assert Outline(target.read_text()).sections == OF_ONE_GPU
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_command_writes_json_and_csv(tmp_path: Path) -> None:
    assert run_thence("report", STACK, "--by", "module", "-o", tmp_path / "a.json").returncode == 0
    assert json.loads((tmp_path / "a.json").read_text())["by"] == "module"
    assert run_thence("report", STACK, "-o", tmp_path / "a.csv").returncode == 0
    assert (tmp_path / "a.csv").read_text().startswith("name,")
    wrong = run_thence("report", STACK, "-o", tmp_path / "a.pdf")
    assert wrong.returncode == 2
    assert ".html, .htm, .json, .csv" in wrong.stderr.decode()


def test_a_finding_has_a_button_that_names_its_time_on_the_timeline() -> None:
    trace = shared(*FSDP)
    page, timeline = page_of(*FSDP), trace.page().timeline
    moments = {f.id: f.moment for f in trace.explain().findings if f.moment is not None}
    begins = re.findall(r'<li id="finding-(\w+)">.*?(?:data-from="(-?\d+)" data-to="(-?\d+)".*?)?</li>', page)
    found = {id_: (int(begin), int(end)) for id_, begin, end in begins if begin}
    assert moments.keys() == found.keys() != set()
    first = timeline.rows["start"].min()
    for id_, (begin, end) in found.items():
        assert end - begin == moments[id_].duration
        assert first <= begin < end <= timeline.span_ns
