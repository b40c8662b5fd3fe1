"""Pages checked by axe-core, and their tables on a narrow screen: no one is left out.

axe-core is in the package axe-core-python; the variable AXE names another axe.min.js.
"""

from __future__ import annotations

import os
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browser.chromium import ABSENT, CHROMIUM
from helpers import FSDP, STACK, TORCH, recording, shared
from thence.writers.page.diff_page import diff_html
from thence.writers.page.flame_page import flame_html
from thence.writers.page.graph_page import graph_html

if TYPE_CHECKING:
    from collections.abc import Iterator

    from browser.live import Page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=ABSENT)

PACKAGE = util.find_spec("axe_core_python")
AXE = os.environ.get("AXE") or (PACKAGE and PACKAGE.origin and Path(PACKAGE.origin).with_name("axe.min.js"))
NO_AXE = "axe-core-python is not installed, and no axe.min.js named in the variable AXE"
WIDE, NARROW = 1400, 400
SCRIPTLESS = "diff"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    from browser.live import living_page

    with living_page(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of each sort."""
    folder = tmp_path_factory.mktemp("pages")
    before, after = shared(recording("torch_eager_rank0")), shared(STACK)
    graphed = shared(TORCH / "graphs" / "compiled_replay.json.gz")
    texts = {
        "report": shared(*FSDP).report_html(),
        "flame": flame_html(after.flame("module")),
        "graph": graph_html(graphed.replayed_graph(), graphed.meta),
        SCRIPTLESS: diff_html(before.diff(after)),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def show(page: Page, file: Path, width: int, scheme: str = "light") -> None:
    page.complaints.clear()
    page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
    )  # fmt: skip
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.call("Page.navigate", url=file.as_uri())
    page.wait_for("location.protocol === 'file:' && document.readyState === 'complete'")
    if file.stem == "graph":
        page.js("document.querySelector('#rows .row').click()")  # its facts are below the rows
    if file.stem == "report":
        page.wait_for("window.thenceReady === true")
        # With an activity selected and the textual alternatives open there is more to check.
        page.js("document.querySelectorAll('.numbers').forEach((each) => { each.open = true; })")
        page.js(
            "(() => { const all = document.querySelector('.as-text'); all.open = true;"
            "const canvas = document.getElementById('timeline-canvas'); canvas.focus();"
            "canvas.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true})); })()"
        )
        page.wait_for("document.querySelectorAll('.as-text td').length > 0")


@pytest.mark.skipif(not AXE, reason=NO_AXE)
@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (800, "light"), (NARROW, "dark")])
@pytest.mark.parametrize("name", ["report", "flame", "graph", SCRIPTLESS])
def test_axe_finds_nothing(page: Page, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    show(page, pages[name], width, scheme)
    # Rows of a table are alike: some of each say what all would, in a fraction of the time.
    page.js("document.querySelectorAll('tbody tr:nth-child(n+5)').forEach((row) => row.remove())")
    page.js(Path(str(AXE)).read_text(encoding="utf-8") + "; 0")
    found, checked = page.js(
        "axe.run(document, {iframes: false}).then((result) => [result.violations.map((each) =>"
        "[each.impact, each.id, each.nodes.slice(0, 3).map((node) => node.html.slice(0, 200))]), result.passes.length])"
    )
    assert found == []
    assert checked > 5
    assert page.complaints == []


@pytest.mark.parametrize("width", [NARROW, 800])
@pytest.mark.parametrize("name", ["report", "flame", "graph", SCRIPTLESS])
def test_a_narrow_page_is_read_without_sideways_scrolling(
    page: Page, pages: dict[str, Path], name: str, width: int
) -> None:
    """Wide tables scroll by themselves; a name has room for more than a letter a line."""
    show(page, pages[name], width)
    assert page.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    narrowest = page.js(
        "Math.min(1000, ...[...document.querySelectorAll('td.text')].filter((cell) => cell.offsetParent)"
        ".map((cell) => cell.clientWidth))"
    )
    assert narrowest >= 140
    too_wide = page.js(
        "[...document.querySelectorAll('h1, h2, h3, p, li, dd, button')].filter((each) => each.offsetParent &&"
        f"!each.closest('.scroll') && each.getBoundingClientRect().right > {width}).map((each) => each.outerHTML)"
    )
    assert too_wide == []
    assert page.complaints == []
