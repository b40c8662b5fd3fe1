"""Draw an in-kernel profile as SVG: every SM over the whole launch, and the warps of one block.

python docs/make_inside_picture.py inside_gemm.npz docs/inside_gemm.svg
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from thence import inside

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH, LEFT, RIGHT = 1000, 90, 20
SM_HEIGHT, WARP_HEIGHT = 2.5, 22
SHADES = ("#9ecae1", "#3182bd", "#08519c", "#08306b")
COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#eeca3b", "#b279a2", "#9d755d")


def axis(start: float, end: float, y: float) -> Iterator[str]:
    """Ticks in microseconds, round numbers, at most ten of them."""
    span_us = (end - start) / 1000
    step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000) if span_us / s <= 10)
    scale = (WIDTH - LEFT - RIGHT) / span_us
    for i in range(int(span_us / step) + 1):
        x = LEFT + i * step * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}" stroke="#888"/>'
        text = f"{i * step:g} us"
        yield f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{text}</text>'


def rectangles(rows: pl.DataFrame, start: int, end: int) -> Iterator[str]:
    """One for each row of x_ns, length_ns, y, height, colour, title."""
    scale = (WIDTH - LEFT - RIGHT) / (end - start)
    for x_ns, length_ns, y, height, colour, title in rows.iter_rows():
        x, width = LEFT + (x_ns - start) * scale, max(length_ns * scale, 0.2)
        yield (
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
            f' fill="{colour}"><title>{escape(title)}</title></rect>'
        )


def resident(traces: pl.DataFrame) -> pl.DataFrame:
    """How many blocks were on each SM, when: sm, start_ns, length_ns, blocks; none with no block."""
    blocks = traces.group_by("sm", "block").agg(
        pl.col("start_ns").min().alias("begin"), pl.col("end_ns").max().alias("end")
    )
    steps = [
        blocks.select("sm", pl.col(column).alias("start_ns"), pl.lit(step).alias("step"))
        for column, step in (("begin", 1), ("end", -1))
    ]
    return (
        pl.concat(steps)
        .sort("sm", "start_ns")
        .with_columns(
            pl.col("step").cum_sum().over("sm").alias("blocks"),
            (pl.col("start_ns").shift(-1).over("sm") - pl.col("start_ns")).alias("length_ns"),
        )
        .filter((pl.col("blocks") > 0) & (pl.col("length_ns") > 0))
        .select("sm", "start_ns", "length_ns", "blocks")
    )


def whole_launch(traces: pl.DataFrame, top: float) -> tuple[list[str], float]:
    """A row for each SM, the darker the more blocks were on it."""
    shown = resident(traces)
    start, end = int(traces["start_ns"].min()), int(traces["end_ns"].max())
    sms = shown["sm"].unique().sort().to_list()
    row = {sm: i for i, sm in enumerate(sms)}
    most = min(int(shown["blocks"].max()), len(SHADES))
    rows = shown.select(
        "start_ns",
        "length_ns",
        (top + pl.col("sm").replace_strict(row) * SM_HEIGHT).alias("y"),
        pl.lit(SM_HEIGHT - 0.4).alias("height"),
        pl.col("blocks").clip(1, most).replace_strict(dict(enumerate(SHADES, 1))).alias("colour"),
        pl.format("SM {}: {} blocks for {} ns", "sm", "blocks", "length_ns").alias("title"),
    )
    bottom = top + len(sms) * SM_HEIGHT
    title = f"{traces['block'].n_unique()} blocks on {len(sms)} SMs, {(end - start) / 1000:.1f} us"
    parts = [f'<text x="{LEFT}" y="{top - 10}" class="title">{title}</text>']
    x = LEFT + 230
    for i in range(most):
        label = f"{i + 1} block{'s' * (i > 0)} at a time{' or more' * (i + 1 == len(SHADES))}"
        parts.append(f'<rect x="{x}" y="{top - 20}" width="12" height="12" fill="{SHADES[i]}"/>')
        parts.append(f'<text x="{x + 17}" y="{top - 10}">{label}</text>')
        x += 50 + 7 * len(label)
    parts += [f'<text x="{LEFT - 8}" y="{top + 10}" text-anchor="end">SM {sms[0]}</text>']
    parts += [f'<text x="{LEFT - 8}" y="{bottom}" text-anchor="end">SM {sms[-1]}</text>']
    parts += rectangles(rows, start, end)
    return [*parts, *axis(start, end, bottom + 3)], bottom + 30


def one_block(ranges: pl.DataFrame, block: int, top: float) -> tuple[list[str], float]:
    """The traces (warps) of one block, their ranges in colours, with a legend."""
    own = ranges.filter(pl.col("block") == block).with_columns(pl.col("name").cast(pl.String))
    names = ranges["name"].cast(pl.String).unique(maintain_order=True).to_list()
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    start = int(own["start_ns"].min())
    end = int((own["start_ns"] + own["duration_ns"]).max())
    parts = [f'<text x="{LEFT}" y="{top}" class="title">The warps of block {block}</text>']
    x = LEFT + 190
    for name in names:
        total = own.filter(pl.col("name") == name)["net_ns"].sum() / own["net_ns"].sum()
        parts.append(f'<rect x="{x}" y="{top - 10}" width="12" height="12" fill="{colour[name]}"/>')
        label = f"{escape(name)} {100 * total:.0f} %"
        parts.append(f'<text x="{x + 17}" y="{top}">{label}</text>')
        x += 40 + 7 * len(label)
    top += 12
    rows = own.select(
        "start_ns",
        "duration_ns",
        (top + pl.col("index") * WARP_HEIGHT).alias("y"),
        pl.lit(WARP_HEIGHT - 4.0).alias("height"),
        pl.col("name").replace_strict(colour).alias("colour"),
        pl.format("{}: {} ns", "name", "duration_ns").alias("title"),
    )
    warps = own["index"].unique().sort().to_list()
    for warp in warps:
        y = top + warp * WARP_HEIGHT + 13
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">warp {warp}</text>')
    bottom = top + (max(warps) + 1) * WARP_HEIGHT
    parts += rectangles(rows, start, end)
    return [*parts, *axis(start, end, bottom)], bottom + 25


def picture(path: str) -> str:
    """The SVG of a buffer."""
    profile = inside.open(path)
    first, middle = whole_launch(profile.traces, 30)
    second, bottom = one_block(profile.ranges, 0, middle + 25)
    style = "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom:.0f}"'
        f' width="{WIDTH}"><style>{style}</style>'
        f'<rect width="{WIDTH}" height="{bottom:.0f}" fill="white"/>'
    )
    return "\n".join([head, *first, *second, "</svg>", ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws an in-kernel profile as SVG.")
    parser.add_argument("profile", help="what thence.inside.save wrote")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    given = parser.parse_args()
    given.picture.write_text(picture(given.profile))
