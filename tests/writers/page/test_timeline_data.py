"""The timeline's data on the page, decoded as its format is described."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import FSDP, STACK, kernel, launch, opened, shared
from thence.analysis.timelines.activity_timeline import ActivityTimeline, activity_timeline
from thence.writers.page import timeline_data as written
from thence.writers.page.template import as_data, filled

if TYPE_CHECKING:
    from pathlib import Path


def timeline(trace: thence.Trace) -> ActivityTimeline:
    return activity_timeline(trace.tables, trace.idle().pieces)


def decoded(text: str) -> tuple[dict[str, Any], dict[tuple[str, str], list[int]]]:
    """The document, and the numbers of each column, byte by byte."""
    content = zlib.decompress(base64.b64decode(text))
    end = 4 + int.from_bytes(content[:4], "little")
    document = json.loads(content[4:end])
    columns = {}
    for table, name, count, size in document["columns"]:
        planes = [content[end + plane * count : end + (plane + 1) * count] for plane in range(size)]
        columns[table, name] = [
            sum(byte << 8 * plane for plane, byte in enumerate(number)) for number in zip(*planes, strict=True)
        ] or [0] * count
        end += size * count
    assert end == len(content)
    return document, columns


def unfolded(value: int) -> int:
    return -(value + 1) // 2 if value % 2 else value // 2


def summed(differences: list[int]) -> list[int]:
    result, total = [], 0
    for value in differences:
        total += unfolded(value)
        result.append(total)
    return result


@pytest.mark.parametrize("paths", [(STACK,), FSDP], ids=["one rank", "four ranks"])
def test_what_is_written_is_what_the_timeline_holds(paths: tuple[Path, ...]) -> None:
    view = timeline(thence.open(*paths))
    text, shown = written.timeline_data(view)
    assert shown is view
    document, columns = decoded(text)
    rows = view.rows
    assert summed(columns["rows", "start"]) == rows["start"].to_list()
    assert columns["rows", "duration"] == rows["duration"].to_list()
    lead = [unfolded(value) for value in columns["rows", "lead"]]
    assert lead == rows["lead_ns"].fill_null(0).to_list()
    names = [document["names"][i][0] for i in columns["rows", "name"]]
    assert names == [view.details.names[i][0] for i in rows["name"]]
    assert sum(lane["rows"] for lane in document["lanes"]) == rows.height
    assert summed(columns["gaps", "start"]) == view.gaps["start"].to_list()
    assert sum(columns["parts", "ns"]) == view.gaps["idle_ns"].sum()
    op = document["kinds"].index("op")
    place = document["places"][columns["rows", "place"][0]][op]
    assert document["texts"][place] == view.details.places[rows["place"][0]][op][0]


def test_use_of_the_hardware_has_tracks(tmp_path: Path) -> None:
    """Samples in the time of the activities, each with the part of its time that its share is."""
    trace = opened(tmp_path, [launch(1, 8), kernel(1, 10, 20), launch(2, 28), kernel(2, 40, 20)])
    view = timeline(trace)
    use = pl.DataFrame(
        [(0, 0, "memory, of 100 GB/s", 0, 10, 5), (0, 0, "memory, of 100 GB/s", 10, 10, 1), (0, 0, "clock", 0, 10, 9)],
        schema=view.use.schema, orient="row",
    )  # fmt: skip
    document, columns = decoded(written.timeline_data(replace(view, use=use))[0])
    assert [(track["counter"], track["rows"]) for track in document["counters"]] == [
        ("memory, of 100 GB/s", 2),
        ("clock", 1),
    ]
    assert summed(columns["use", "start"]) == [0, 10, 0]
    assert (columns["use", "duration"], columns["use", "busy"]) == ([10, 10, 10], [5, 1, 9])


def test_a_launch_after_its_kernel_and_no_launch_at_all(tmp_path: Path) -> None:
    """Clocks may disagree, and launches may be missing: neither becomes another number."""
    trace = thence.open(opened(tmp_path, [launch(1, 12), kernel(1, 10), kernel(2, 30)]).meta.inputs[0])
    document, columns = decoded(written.timeline_data(timeline(trace))[0])
    assert [unfolded(value) for value in columns["rows", "lead"]] == [-2000, 0]
    assert columns["rows", "call"] == [1, 0]
    assert document["calls"] == ["cudaLaunchKernel on thread 2"]


def test_a_timeline_too_large_for_a_page_is_made_coarser(monkeypatch: pytest.MonkeyPatch) -> None:
    view = timeline(shared(*FSDP))
    whole = len(written.timeline_data(view)[0])
    monkeypatch.setattr(written, "MAX_BYTES", whole * 2 // 3)
    monkeypatch.setattr(written, "_MIN_ROWS", 10)
    text, shown = written.timeline_data(view)
    assert len(text) <= whole * 2 // 3
    assert shown.rows["count"].sum() == view.rows.height > shown.rows.height
    assert any("are merged with their neighbours" in note for note in shown.notes)
    document, _ = decoded(text)
    assert sum(lane["count"] for lane in document["lanes"]) == view.rows.height


def test_texts_are_not_looked_at_for_places_of_a_template() -> None:
    page = filled("diff.html", {"title": "{{body}}", "body": "{{file look.css}} & {{title}}"})
    assert "<title>{{body}}</title>" in page
    assert "{{file look.css}} & {{title}}" in page
    assert as_data('"</script>&"') == '"\\u003c/script\\u003e\\u0026"'
