"""The report page in a real browser: it draws, searches, sorts, zooms, goes dark, and no name does anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browser.chromium import ABSENT, CHROMIUM
from helpers import FSDP, STACK, kernel, launch, opened, shared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from browser.live import Page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=ABSENT)

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</script><img src=x onerror='window.hacked = 2'>",
    "<a href='javascript:window.hacked=3'>kernel</a>",
    "{{data}} ${window.hacked = 4} %{x} \u2028 <!--",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    from browser.live import living_page

    with living_page(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "fsdp.html"
    file.write_text(shared(*FSDP).report_html(), encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def _nothing_complains(page: Page) -> Iterator[None]:
    page.complaints.clear()
    yield
    page.js("0")  # what the browser still has to say arrives before the answer
    assert page.complaints == []


def drawn_everywhere(page: Page) -> None:
    """Scrolls through the page, so that all of it is drawn."""
    page.js(
        "(async () => { document.getElementById('flame-place').scrollIntoView();"
        "await new Promise((done) => setTimeout(done, 60)); })()"
    )
    page.wait_for("!!document.querySelector('iframe')?.contentDocument?.getElementById('graph')")


def test_all_of_it_is_drawn(page: Page, fsdp: Path) -> None:
    page.open(fsdp)
    drawn_everywhere(page)
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    assert page.js("document.getElementById('timeline-canvas').width > 1000")


def test_search_narrows_the_table(page: Page, fsdp: Path) -> None:
    page.open(fsdp)
    table = "document.querySelector('[data-table=by-kernel]')"
    found = page.js(
        f"(() => {{ const t = {table}, input = t.querySelector('input');"
        "const search = (text) => { input.value = text; input.dispatchEvent(new Event('input'));"
        "return [...t.querySelectorAll('tbody tr')].map((row) => row.cells[0].textContent); };"
        "return [search(''), search('NCCL'), search('/^nvjet.*NTN$/'), search('/(/'), search('no such thing')]; })()"
    )
    everything, nccl, regex, broken, nothing = found
    assert len(everything) == 25
    assert sorted(nccl) == ["ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"]
    assert regex
    assert all(name.startswith("nvjet") for name in regex)
    assert broken == nothing == []


def test_a_click_on_a_heading_sorts(page: Page, fsdp: Path) -> None:
    page.open(fsdp)
    counts = page.js(
        "(() => { const t = document.querySelector('[data-table=by-kernel]');"
        "const heading = [...t.querySelectorAll('th')].find((th) => th.textContent === 'count');"
        "const column = () => [...t.querySelectorAll('tbody tr')].map((row) => +row.cells[1].textContent);"
        "const sort = () => heading.querySelector('button').click(); sort(); const down = column(); sort();"
        "return [down, column()]; })()"
    )
    assert counts[0] == sorted(counts[0], reverse=True)
    assert counts[1] == sorted(counts[1])
    assert counts[0] != counts[1]


def test_dark_where_the_system_is_and_at_a_click(page: Page, fsdp: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    page.open(fsdp, "dark")
    assert page.js(background) == "rgb(20, 23, 27)"
    drawn_everywhere(page)
    flame = "document.querySelector('iframe').contentDocument.documentElement.dataset.theme"
    page.wait_for(f"{flame} === 'dark'")
    page.js("document.getElementById('theme').click()")
    assert page.js(background) == "rgb(255, 255, 255)"
    page.wait_for(f"{flame} === 'light'")
    page.open(fsdp)
    assert page.js(background) == "rgb(255, 255, 255)"


def test_printing_draws_everything_on_light_ground(page: Page, fsdp: Path) -> None:
    page.open(fsdp, "dark")
    page.js("window.dispatchEvent(new Event('beforeprint'))")
    assert page.js("document.documentElement.dataset.theme") == "light"
    page.js("window.dispatchEvent(new Event('afterprint'))")
    assert page.js("document.documentElement.dataset.theme") == "dark"


def test_names_are_shown_and_do_nothing(page: Page, tmp_path: Path) -> None:
    kernels = [kernel(i, 10 * i, name=name) for i, name in enumerate(HOSTILE, 1)]
    labels = [launch(i, 9 * i) for i in range(1, len(HOSTILE) + 1)]
    file = tmp_path / "hostile.html"
    file.write_text(opened(tmp_path, [*labels, *kernels]).report_html(), encoding="utf-8")
    page.open(file)
    drawn_everywhere(page)
    titles = page.js("[...document.querySelectorAll('[data-table=by-kernel] td')].map((x) => x.title)")
    assert set(HOSTILE) <= set(titles)
    page.js("document.querySelector('.as-text').open = true")
    page.js("document.getElementById('timeline').scrollIntoView()")
    tips, told, panels = [], [], []
    for number in range(len(HOSTILE)):
        x, y = page.js(
            "(() => { const v = thenceTimeline.view, box = v.canvas.getBoundingClientRect();"
            f"v.show({10_000 * number}, {10_000 * number + 4000}); v.draw();"
            f"const [x, y] = v.placeOf({10_000 * number + 2000}, 1); return [box.x + x + {number}, box.y + y]; }})()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            rest = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **rest)
            if kind == "mouseMoved":
                tips.append(page.js("document.querySelector('#tip .name')?.textContent"))
        told.append(page.js("document.querySelector('#timeline-details h3')?.textContent"))
        panels.append(page.js("document.getElementById('timeline-details').textContent"))
    assert len(set(tips)) == len(HOSTILE)
    assert tips == told
    for name, panel in zip(HOSTILE, panels, strict=True):
        assert name[:20] in panel
    assert page.js("window.hacked === undefined")
    assert page.js("document.querySelectorAll('img, section a[href^=javascript]').length") == 0


def test_the_heat_map_tells_each_cell(page: Page, fsdp: Path) -> None:
    """By keyboard: the figures are those of the job, in either order of the ranks."""
    page.open(fsdp)
    job = shared(*FSDP).ranks()
    first = job.ranks.row(0, named=True)  # the rank for which the others wait most
    (cell,) = job.cells.filter(rank=first["rank"], device=first["device"], key=job.keys[1]).to_dicts()
    told = page.js(
        "(() => { const place = document.getElementById('heat-map'), canvas = place.querySelector('canvas');"
        "const order = place.querySelectorAll('select')[1]; order.value = 1; order.dispatchEvent(new Event('change'));"
        "for (const key of ['ArrowRight', 'ArrowRight'])"
        "canvas.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));"
        "return [place.querySelector('.status').textContent, canvas.width, canvas.height]; })()"
    )
    assert told[0].startswith(f"rank {first['rank']} GPU {first['device']}, {job.keys[1]}: waits ")
    assert f"step {cell['step_ns'] / 1e6:.4g}"[:8] in told[0]
    assert told[1:] == [len(job.keys), 4]


def test_python_stacks_of_one_gpu(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "stack.html"
    file.write_text(shared(STACK).report_html(), encoding="utf-8")
    page.open(file)
    drawn_everywhere(page)
    tabs = page.js("[...document.querySelectorAll('.tabs button')].map((x) => x.textContent)")
    assert tabs[:2] == ["Module", "Function"]
    assert tabs[-2:] == ["Kernel", "Rank"]
    page.js("document.getElementById('tab-module').click()")
    assert page.js("document.getElementById('panel-module').hidden") is False
    assert page.js("document.getElementById('panel-kernel').hidden") is True
