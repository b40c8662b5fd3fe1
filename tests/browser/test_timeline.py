"""The page's timeline in a real browser: every activity at every zoom, by pointer, keyboard and search.

The trace is made here, so every number that the page must show is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from browser.chromium import ABSENT, CHROMIUM
from counter_samples import back_to_back
from helpers import STACK, event, kernel, launch, opened, shared
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from browser.live import Page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=ABSENT)

MANY = 12_500
"""Kernels of 5 us, one every 10 us: more than were ever shown one by one."""
NEEDLE = MANY * 10 + 300
"""us: when the one other kernel begins, after a gap of 305 us."""
US = 1000

VIEW = "thenceTimeline.view"
STATUS = "document.getElementById('timeline-status').textContent"
PANEL = "document.getElementById('timeline-details').innerText"
WINDOW = f"[{VIEW}.state.from, {VIEW}.state.to]"
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Escape": 27, "Tab": 9,
        "Home": 36, "End": 35}  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    from browser.live import living_page

    with living_page(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of many equal kernels and one other on a stream of its own, launched in an operator in a range."""
    events: list[Any] = []
    for i in range(MANY):
        events += [launch(i, 10 * i - 4), kernel(i, 10 * i, name=f"gemm_{i % 7}")]
    events += [
        event("user_annotation", "haystack", NEEDLE - 60, 58),
        event("cpu_op", "aten::needle", NEEDLE - 50, 45, args={"External id": 1}),
        launch(MANY, NEEDLE - 20),
        kernel(MANY, NEEDLE, 2, name="needle", args={"stream": 9}, tid=9),
    ]
    folder = tmp_path_factory.mktemp("timeline")
    file = folder / "many.html"
    file.write_text(opened(folder, events).report_html(), encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def _nothing_complains(page: Page) -> Iterator[None]:
    page.complaints.clear()
    yield
    page.js("0")  # what the browser still has to say arrives before the answer
    assert page.complaints == []


@pytest.fixture
def open_page(page: Page, many: Path) -> Page:
    page.open(many)
    page.js("document.getElementById('timeline-canvas').scrollIntoView()")
    return page


def press(page: Page, key: str, shift: bool = False) -> None:
    """A key as the keyboard sends it, to what has the focus."""
    text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
    pressed = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper())), "modifiers": 8 if shift else 0}
    page.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **text)
    page.call("Input.dispatchKeyEvent", type="keyUp", **pressed)


def focus(page: Page) -> None:
    page.js("document.getElementById('timeline-canvas').focus()")


def point(page: Page, ns: float, track: str) -> tuple[float, float]:
    """Where a moment of a track is in the window."""
    return tuple(
        page.js(
            f"(() => {{ const v = {VIEW}, box = v.canvas.getBoundingClientRect();"
            f"const number = thenceTimeline.data.tracks.findIndex((each) => each.name === {track!r});"
            f"return [box.x + v.placeOf({ns}, number)[0], box.y + v.placeOf({ns}, number)[1]]; }})()"
        )
    )


def mouse(page: Page, kind: str, at: tuple[float, float], **rest: Any) -> None:
    page.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **rest)


def click(page: Page, at: tuple[float, float]) -> None:
    mouse(page, "mousePressed", at, button="left", clickCount=1)
    mouse(page, "mouseReleased", at, button="left", clickCount=1)


def colour_at(page: Page, at: tuple[float, float]) -> list[int]:
    return page.js(
        f"(() => {{ const from = {VIEW}.canvas, box = from.getBoundingClientRect(), scale = devicePixelRatio;"
        "const pen = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});"
        f"pen.drawImage(from, ({at[0]} - box.x) * scale, ({at[1]} - box.y) * scale, 1, 1, 0, 0, 1, 1);"
        "return [...pen.getImageData(0, 0, 1, 1).data]; })()"
    )


def test_every_activity_is_there_and_the_pyramid_adds_up(open_page: Page) -> None:
    tracks = open_page.js(
        "thenceTimeline.data.tracks.map((t) => [t.name, t.to - t.from,"
        "t.levels.map((level) => level.busy.reduce((a, b) => a + b, 0)), t.levels.map((level) => level.start.length)])"
    )
    assert [(name, rows) for name, rows, _, _ in tracks] == [("why idle", MANY), ("stream 7", MANY), ("stream 9", 1)]
    idle, stream, needle = (sums for _, _, sums, _ in tracks)
    assert set(stream) == {MANY * 5 * US}
    assert set(idle) == {(MANY - 1) * 5 * US + 305 * US}
    assert needle == []
    assert tracks[1][3] == [1563, 196, 25, 4, 1]  # one entry for eight of the level below


def test_search_finds_one_of_many_and_zooms_to_it(open_page: Page) -> None:
    page = open_page
    found = "document.querySelector('#timeline-place output').textContent"
    page.js("document.getElementById('timeline-search').focus()")
    for letter in "haystack":
        press(page, letter)
    assert page.js(found) == "1 activity, 2.000 us; 1 gap"  # the host was in it before the launch
    press(page, "Enter")
    assert page.js(STATUS).startswith("Idle: ")
    press(page, "Enter")
    assert page.js(STATUS).startswith("needle  ·  duration 2.000 us")
    press(page, "Enter")
    assert page.js(STATUS).startswith("needle")  # there is no other
    panel = page.js(PANEL)
    for said in ("aten::needle", "haystack", "cudaLaunchKernel on thread 2", "20.00 us before it started"):
        assert said in panel
    assert "The GPU was idle for 305.0 us before it" in panel
    assert "none: no nn.Module calls recorded" in panel
    focus(page)
    press(page, "Enter")
    begin, end = page.js(WINDOW)
    assert begin < NEEDLE * US < (NEEDLE + 2) * US <= end
    assert end - begin < 5 * US
    page.js(f"{VIEW}.draw()")
    inside, outside = (point(page, ns, "stream 9") for ns in (NEEDLE * US + 1000, NEEDLE * US - 500))
    assert colour_at(page, inside) != colour_at(page, outside)


def test_a_search_that_finds_nothing_and_one_that_is_no_regex(open_page: Page) -> None:
    said = open_page.js(
        "(() => { const input = document.getElementById('timeline-search');"
        "const search = (text) => { input.value = text; input.dispatchEvent(new Event('input'));"
        "return document.querySelector('#timeline-place output').textContent; };"
        "return [search('gemm_3'), search('/^gemm_[01]$/'), search('no such thing'), search('/(/'), search('')]; })()"
    )
    third = sum(i % 7 == 3 for i in range(MANY))
    first = sum(i % 7 < 2 for i in range(MANY))
    assert said == [
        f"{third:,} activities, {format_ns(third * 5 * US)}",
        f"{first:,} activities, {format_ns(first * 5 * US)}",
        "0 activities, 0 ns",
        "not a valid regular expression",
        "",
    ]


def test_the_keyboard_moves_zooms_and_goes_back(open_page: Page) -> None:
    page = open_page
    page.js("[...document.querySelectorAll('#timeline-place .tools button')].pop().focus()")
    press(page, "Tab")
    assert page.js("document.activeElement.id") == "timeline-canvas"
    assert page.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    whole = page.js(WINDOW)
    press(page, "ArrowRight")
    assert page.js(STATUS).startswith("gemm_0  ·  duration 5.000 us  ·  start 0 ns")
    press(page, "ArrowRight")
    press(page, "ArrowRight")
    assert page.js(STATUS).startswith("gemm_2  ·  duration 5.000 us  ·  start 20.00 us")
    press(page, "ArrowLeft")
    assert page.js(STATUS).startswith("gemm_1")
    press(page, "Enter")
    begin, end = page.js(WINDOW)
    assert begin < 10 * US < 15 * US < end < 20 * US
    press(page, "ArrowUp")
    assert page.js(STATUS).startswith("Idle: launch  ·  duration 5.000 us  ·  start 5.000 us")
    press(page, "ArrowDown")
    press(page, "End")
    assert f"start {(MANY - 1) / 100:.1f} ms" in page.js(STATUS)
    assert page.js(f"{VIEW}.state.to") > (MANY - 1) * 10 * US  # the view follows
    press(page, "ArrowDown")
    assert page.js(STATUS).startswith("needle")
    press(page, "Escape")
    assert page.js(WINDOW) == whole
    press(page, "+")
    begin, end = page.js(WINDOW)
    assert end - begin == whole[1] / 2
    press(page, "ArrowRight", shift=True)
    assert page.js(WINDOW)[0] > begin
    press(page, "0")
    assert page.js(WINDOW) == whole


def test_a_drag_zooms_and_a_click_tells(open_page: Page) -> None:
    page = open_page
    page.js(f"{VIEW}.show(0, 100 * {US}); {VIEW}.draw()")
    begin, end = point(page, 20 * US, "stream 7"), point(page, 40 * US, "stream 7")
    mouse(page, "mousePressed", begin, button="left", clickCount=1)
    mouse(page, "mouseMoved", end, button="left", buttons=1)
    mouse(page, "mouseReleased", end, button="left", clickCount=1)
    shown = page.js(WINDOW)
    assert shown == pytest.approx([20 * US, 40 * US], abs=200)
    page.js(f"{VIEW}.draw()")
    click(page, point(page, 32 * US, "stream 7"))
    assert page.js(STATUS).startswith("gemm_3  ·  duration 5.000 us  ·  start 30.00 us")
    assert "The GPU was idle for 5.000 us before it" in page.js(PANEL)
    click(page, point(page, 37 * US, "why idle"))
    assert page.js(STATUS).startswith("Idle: ")
    click(page, point(page, 27 * US, "stream 7"))  # nothing ran then
    assert page.js("document.getElementById('timeline-details').hidden")


def test_what_is_in_view_can_be_read_as_a_table(open_page: Page) -> None:
    page = open_page
    page.js(f"{VIEW}.show(0, 1000 * {US})")
    page.js("document.querySelector('.as-text').open = true")
    rows = (
        "[...document.querySelectorAll('.as-text tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    page.wait_for(f"{rows}.length === 3")
    idle, stream, needle = page.js(rows)
    assert idle[:4] == ["why idle", "100 gaps", "500.0 us", "50.0 %"]
    assert stream == ["stream 7", "100 activities", "500.0 us", "50.0 %", "gemm_0 (75.00 us)"]
    assert needle[:4] == ["stream 9", "0 activities", "0 ns", "0.0 %"]


def test_what_is_outside_of_the_window_is_not_drawn_over_the_names(open_page: Page) -> None:
    """Zoomed into one kernel, its bar ends at the window's edge."""
    page = open_page
    page.js(f"{VIEW}.show(1000, 2000); {VIEW}.draw()")
    x, y = point(page, 1000, "stream 7")
    assert colour_at(page, (x + 5, y)) != colour_at(page, (x - 5, y))


def test_activities_of_a_recording_are_all_found_by_name(page: Page, tmp_path: Path) -> None:
    trace = shared(STACK)
    file = tmp_path / "stack.html"
    file.write_text(trace.report_html(), encoding="utf-8")
    page.open(file)
    names = trace.tables.gpu["name"].cast(str)
    for part in ("softmax", "nvjet"):
        found = page.js(
            f"(() => {{ const input = document.getElementById('timeline-search'); input.value = '/^(void )?.*{part}/';"
            "input.dispatchEvent(new Event('input'));"
            "return thenceTimeline.view.state.hits.rows; })()"
        )
        assert found >= names.str.to_lowercase().str.contains(part).sum() > 0


def test_counters_have_tracks_of_the_share_that_was_used(page: Page, tmp_path: Path) -> None:
    made = back_to_back(np.random.default_rng(1), (50_000,), (1.0,), 4)
    begin = made.start[0] + 10_000 * np.arange(15)
    clock = np.full(15, 15e3)
    counted = {"sm_elapsed_cycles": clock, "sm_active_cycles": 0.75 * 132 * clock}
    file = tmp_path / "counted.html"
    trace = made.trace(counted, (begin, begin + 10_000), ("gemm_bf16",))
    file.write_text(trace.report_html(), encoding="utf-8")
    page.open(file)
    names = page.js("thenceTimeline.data.tracks.map((track) => track.name)")
    assert names[-2:] == ["SMs active", "clock, of 1,500 MHz"]
    page.js("(([track]) => thenceTimeline.select({track, row: track.from + 3}))(thenceTimeline.data.tracks.slice(-2))")
    assert page.js(STATUS) == "SMs active: 75.0 %  ·  counted in 10.00 us  ·  start 30.00 us"
    page.js("document.querySelector('.as-text').open = true")
    rows = (
        "[...document.querySelectorAll('.as-text tbody tr')]"
        ".map((row) => [...row.cells].slice(1, 4).map((cell) => cell.textContent))"
    )
    page.wait_for(f"{rows}.length === 3")
    assert page.js(rows)[1] == ["15 samples", "-", "75.0 %"]
