"""The page of ranks in a real browser: it draws, opens two ranks, and stays quick with thousands of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl
import pytest

from browser.chromium import ABSENT, CHROMIUM, driven
from rank_jobs import Plant, RankJob
from thence.analysis.ranks.answer import Job, job_of
from thence.writers.page.ranks_page import MAX_CELLS, ranks_html

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=ABSENT)

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"

COUNTED = """
  result.rows = document.querySelectorAll("#ranks details").length;
  const names = document.querySelectorAll("#ranks details[open] summary span:first-child");
  result.open = [...names].map((e) => e.textContent);
  const heat = byId("heat");
  result.size = [heat.width, heat.height];
  const pixels = heat.getContext("2d").getImageData(0, 0, heat.width, heat.height).data;
  const colors = new Set();
  for (let i = 0; i < pixels.length; i += 4) colors.add(pixels[i] + "," + pixels[i + 1] + "," + pixels[i + 2]);
  result.colors = colors.size;
  result.more = byId("more").textContent;
  result.statement = byId("statement").textContent;
  document.querySelector('button[data-map="step_ns"]').click();
  result.scale = byId("scale").textContent;
"""


def job(ranks: int, steps: int, detailed: tuple[int, ...]) -> Job:
    plant = Plant("kernel", ranks // 2, 0.2)
    made = RankJob(ranks=ranks, steps=steps, plant=plant, detailed=detailed)
    return job_of(made.summaries())


@pytest.fixture(scope="module")
def small() -> Job:
    return job(6, 8, tuple(range(6)))


def test_the_slowest_and_the_median_rank_are_open(small: Job, tmp_path: Path) -> None:
    found = driven(ranks_html(small, ["run/"], small.notes), tmp_path, COUNTED)
    why = small.reasons[0]
    assert found["rows"] == 6
    assert set(found["open"]) == {"rank 3 GPU 0", f"rank {why.median_rank} GPU 0"}
    assert found["size"][1] == 6 * 16
    assert found["colors"] > 8
    assert found["statement"] == small.statement
    assert "(light)" in found["scale"]


def test_names_do_nothing_but_show(small: Job, tmp_path: Path) -> None:
    hostile = replace(
        small, reasons=tuple(replace(why, rows=why.rows.with_columns(name=pl.lit(HOSTILE))) for why in small.reasons)
    )
    page = ranks_html(hostile, [HOSTILE], [HOSTILE])
    found = driven(page, tmp_path, COUNTED + 'result.text = byId("why").textContent;')
    assert HOSTILE in found["text"]


def test_thousands_of_ranks_are_folded(small: Job, tmp_path: Path) -> None:
    count = 4096
    numbers = pl.Series("rank", range(count), dtype=pl.Int32)
    ranks = pl.concat([small.ranks] * (count // small.ranks.height + 1)).head(count)
    cells = numbers.to_frame().join(small.cells.filter(rank=0).drop("rank"), how="cross")
    large = replace(small, ranks=ranks.with_columns(numbers), cells=cells, reasons=())
    found = driven(ranks_html(large, ["run/"], []), tmp_path, COUNTED)
    assert found["rows"] <= 102
    assert len(found["open"]) == 2
    assert "folded" in found["more"]
    assert found["size"][1] == 2 * count


def test_more_steps_than_cells_are_put_together(small: Job) -> None:
    keys = tuple(f"step {number}" for number in range(MAX_CELLS // small.ranks.height + 1))
    page = ranks_html(replace(small, keys=keys), ["run/"], [])
    assert "columns, the mean of each" in page


BARS = """
  const bars = [...document.querySelector("#ranks details[open] .steps").children];
  const pieces = (bar) => [...bar.children].map((e) => parseFloat(e.style.height));
  result.heights = bars.map((bar) => pieces(bar).reduce((a, b) => a + b, 0));
  result.kinds = bars.map((bar) => bar.className);
  result.titles = bars.map((bar) => bar.title);
  result.left = byId("left").textContent;
  result.scale = byId("scale").textContent;
"""


def test_bars_are_scaled_by_the_steps_that_count(small: Job, tmp_path: Path) -> None:
    first, *others = small.keys
    longer = pl.when(pl.col("key") == first).then(50).otherwise(1)
    times = pl.col("step_ns", "compute_ns", "wait_ns", "caused_ns")
    warmed = replace(small, counted=tuple(others), cells=small.cells.with_columns(times * longer))
    found = driven(ranks_html(warmed, ["run/"], []), tmp_path, BARS)
    heights = found["heights"]
    assert max(heights[1:]) == pytest.approx(67, abs=0.1)
    assert min(heights[1:]) > 40
    assert heights[0] == pytest.approx(67, abs=0.1)
    assert found["kinds"] == ["out cut"] + [""] * len(others)
    assert found["titles"][0].endswith("or incomplete; the bar is cut off")
    assert not any("left out" in title for title in found["titles"][1:])
    assert "left out of the figures" in found["left"]
    unwarmed = driven(ranks_html(replace(warmed, cells=small.cells), ["run/"], []), tmp_path, BARS)
    assert found["scale"] == unwarmed["scale"]
    assert unwarmed["kinds"][0].split()[0] == "out"
    everything = driven(ranks_html(replace(small, counted=small.keys), ["run/"], []), tmp_path, BARS)
    assert set(everything["kinds"]) == {""}
    assert everything["left"] == ""
