"""The flame page in a real browser: it draws, searches, zooms, filters, and no name does anything."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest

from browser.chromium import ABSENT, CHROMIUM, driven
from helpers import STACK, shared
from thence.analysis.flame.answer import Flame, Split
from thence.analysis.flame.prefix_tree import FRAMES, PHASE_SUMS, Groups, build_tree
from thence.model.tables import Meta
from thence.writers.page.flame_page import MAX_NODES, flame_html

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=ABSENT)

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "a;b\n\u2028c\u2029 & \"quoted\" 'too' --> <!-- \u202etxt",
    "javascript:alert(3)",
    "${alert(4)} {{data}} {{title}}",
)


@functools.cache
def page() -> str:
    return flame_html(shared(STACK).flame("module"))


def made(stacks: Sequence[tuple[tuple[str, ...], int]], inputs: str = "made.json") -> Flame:
    """A flame graph of these stacks and times."""
    frames = [tuple((name, "frame", None) for name in names) for names, _ in stacks]
    frames = [(*names[:-1], (names[-1][0], "compute", None)) for names in frames]
    times = [ns for _, ns in stacks]
    sums = pl.DataFrame(
        {"self_ns": times, "count": [1] * len(times), **dict.fromkeys(PHASE_SUMS, 0), "backward_ns": times}
    ).cast(pl.Int64)
    nodes = build_tree(Groups.of_paths(frames, sums), "GPU time")
    total = sum(times)
    return Flame(Meta(inputs=(inputs,)), "label", "label", Split.NONE, (0,), 1, total, total, total, nodes, ())


def test_search_says_the_share_and_marks_what_it_found(tmp_path: Path) -> None:
    flame = made([(("outer", "gemm"), 30), (("outer", "add"), 10), (("gemm", "gemm"), 60)])
    found = driven(
        flame_html(flame),
        tmp_path,
        """
        result.before = picture();
        search("GEMM"); result.text = byId("matched").textContent; result.after = picture();
        search("/^a.d$/"); result.regex = byId("matched").textContent;
        search("/(/"); result.broken = byId("matched").textContent;
        search("gemm"); byId("only").click(); result.only = picture();
        search("nothing like it"); result.nothing = byId("matched").textContent; result.empty = byId("empty").hidden;
        byId("reset").click(); result.reset = picture(); result.cleared = byId("matched").textContent;
        """,
    )
    assert found["text"] == "3 frames, 90 ns, 90.0 %"  # gemm inside gemm counts once
    assert found["regex"] == "1 frame, 10 ns, 10.0 %"
    assert "not a valid" in found["broken"]
    assert found["nothing"] == "0 frames, 0 ns, 0.0 %"
    assert found["empty"] is False
    assert len({found["before"], found["after"], found["only"]}) == 3
    assert found["reset"] == found["before"]
    assert found["cleared"] == ""


def test_zoom_by_click_by_key_and_back(tmp_path: Path) -> None:
    flame = made([(("outer", "inner", "gemm"), 75), (("other", "add"), 25)])
    found = driven(
        flame_html(flame),
        tmp_path,
        """
        result.start = crumbs(); const first = picture();
        pointer("mousemove", 20, 30); result.tip = byId("tip").innerText; result.shown = !byId("tip").hidden;
        pointer("click", 20, 30); result.clicked = crumbs(); result.changed = picture() !== first;
        press("ArrowDown"); press("Enter"); result.entered = crumbs(); result.status = byId("status").textContent;
        press("Escape"); result.back = crumbs();
        document.querySelector("#crumbs button").click(); result.top = crumbs(); result.same = picture() === first;
        press("ArrowDown"); press("ArrowRight"); result.moved = byId("status").textContent;
        """,
    )
    assert found["start"] == ["GPU time"]
    assert found["shown"]
    assert "outer" in found["tip"]
    assert "75 ns" in found["tip"]
    assert "75.0 %" in found["tip"]
    assert found["clicked"] == ["GPU time", "outer"]
    assert found["changed"]
    assert found["entered"] == ["GPU time", "outer", "inner"]
    assert "of the view 100.0 %" in found["status"]
    assert found["back"] == ["GPU time", "outer"]
    assert found["top"] == ["GPU time"]
    assert found["moved"].startswith("other")
    assert "25 ns" in found["moved"]


def test_filters_take_time_out_and_put_it_back(tmp_path: Path) -> None:
    found = driven(
        page(),
        tmp_path,
        """
        const time = () => { press("Home"); return byId("status").textContent; };
        result.chips = [...document.querySelectorAll(".chip")].map((chip) => chip.id);
        result.notes = byId("notes").textContent;
        result.busy = time(); byId("chip-idle").click(); result.all = time(); byId("chip-idle").click();
        byId("chip-backward").dispatchEvent(new MouseEvent("click", {shiftKey: true})); result.backward = time();
        byId("reset").click(); result.reset = time();
        byId("chip-compute").click(); result.status = byId("status").textContent; byId("reset").click();
        press("ArrowDown"); press("Enter"); result.inside = crumbs();
        byId("chip-compute").click(); byId("chip-copy").click(); result.outside = crumbs();
        """,
    )
    assert found["chips"] == [
        "chip-compute", "chip-copy", "chip-idle", "chip-forward", "chip-backward", "chip-optimizer", "chip-other",
    ]  # fmt: skip
    assert "94.6 % of the time" in found["notes"]  # mostly idle: what ran is shown first
    assert "time 2.278 ms" in found["busy"]
    assert "time 42.20 ms" in found["all"]
    assert "time 1.329 ms" in found["backward"]
    assert "time 42.20 ms" in found["reset"]
    assert "time 39.94 ms" in found["status"]  # idle and copies
    assert found["inside"] == ["GPU and idle time", "GPT_0"]
    assert found["outside"] == ["GPU and idle time"]  # nothing is left to look at inside


def test_dark_and_light_follow_the_system_and_the_button(tmp_path: Path) -> None:
    script = """
    const paper = () => getComputedStyle(document.body).backgroundColor;
    const look = () => [document.documentElement.dataset.theme, paper(), picture()];
    result.first = look(); byId("theme").click(); result.second = look();
    """
    (tmp_path / "light").mkdir()
    (tmp_path / "dark").mkdir()
    light = driven(page(), tmp_path / "light", script, "--blink-settings=preferredColorScheme=1")
    dark = driven(page(), tmp_path / "dark", script, "--blink-settings=preferredColorScheme=0")
    assert light["first"][0] == dark["second"][0] == "light"
    assert light["second"][0] == dark["first"][0] == "dark"
    assert light["first"][1] == "rgb(255, 255, 255)" != dark["first"][1]
    assert light["first"][2] != light["second"][2]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    stacks = [((f"{number} {name}", name), 10) for number, name in enumerate(HOSTILE)]
    found = driven(
        flame_html(made(stacks, inputs="</title><script>alert(5)</script>.json")),
        tmp_path,
        """
        result.names = [];
        for (let i = 0; i < 5; i++) {
          pointer("mousemove", canvas.clientWidth * (i + 0.5) / 5, 60);
          result.names.push(byId("tip").querySelector(".name").textContent);
        }
        pointer("click", 20, 30); result.crumbs = crumbs();
        result.images = document.images.length; result.scripts = document.scripts.length;
        result.title = document.title;
        """,
    )
    assert sorted(found["names"]) == sorted(HOSTILE)
    assert found["crumbs"][1] == f"0 {HOSTILE[0]}"
    assert found["images"] == 0
    assert found["scripts"] == 4  # data, the page's own, and two of this test
    assert found["title"].endswith("</title><script>alert(5)</script>.json")


def test_a_page_of_many_frames_stays_quick(tmp_path: Path) -> None:
    stacks = [
        ((f"a{number % 40}", f"b{number % 1000}", f"c{number % 9000}", f"kernel {number}"), 1 + number % 97)
        for number in range(30_000)
    ]  # fmt: skip
    flame = made(stacks)
    assert flame.nodes.height > MAX_NODES
    found = driven(
        flame_html(flame),
        tmp_path,
        """
        const begin = performance.now();
        for (let i = 0; i < 10; i++) { search("kernel " + i); press("ArrowDown"); }
        result.ms = (performance.now() - begin) / 10;
        result.notes = byId("notes").textContent; press("Home"); result.status = byId("status").textContent;
        """,
    )
    assert "frames were too small to be shown by themselves" in found["notes"]
    assert "activities 30,000" in found["status"]
    assert found["ms"] > 0  # a time fails no test


def test_a_very_deep_graph_is_drawn_and_zoomed(tmp_path: Path) -> None:
    depth = 100_000
    parent = np.arange(depth, dtype=np.int64) - 1
    frames = pl.DataFrame(
        {"parent": parent, "name": [f"f{i}" for i in range(depth)], "kind": "frame", "full_name": None}, schema=FRAMES
    )  # fmt: skip
    sums = pl.DataFrame(
        {"self_ns": [10], "count": [1], **{name: [0] for name in PHASE_SUMS}}, schema_overrides={"self_ns": pl.Int64}
    )  # fmt: skip
    deepest = Groups(frames, np.array([depth - 1]), sums, None)
    flame = replace(made([(("outer", "gemm"), 10)]), nodes=build_tree(deepest, "GPU time"))
    found = driven(
        flame_html(flame),
        tmp_path,
        """
        const first = picture();
        result.height = byId("space").offsetHeight;
        for (let i = 0; i < 500; i++) press("ArrowDown");
        press("Enter");
        result.crumbs = crumbs(); result.bar = byId("crumbs").textContent; result.status = byId("status").textContent;
        press("Home"); press("Enter"); search("f777"); result.matched = byId("matched").textContent;
        """,
    )
    # The page has the 20,000 largest frames, and one that stands for the rest.
    assert found["height"] == 21 * (MAX_NODES + 1)
    # 500 frames below the root: 16 outer ones and 112 inner ones have buttons.
    assert found["crumbs"][:2] == ["GPU time", "f0"]
    assert found["crumbs"][-1] == "f499"
    assert len(found["crumbs"]) == 16 + 112
    assert "… 373 frames …" in found["bar"]  # 501 - 128
    assert found["status"].startswith("f499")
    assert found["matched"].startswith("11 frames, 10 ns")  # f777, f7770 to f7779
