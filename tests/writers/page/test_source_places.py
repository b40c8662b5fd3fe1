"""Places in source files have one short form on a page."""

from __future__ import annotations

import polars as pl
import pytest

from helpers import DATA, shared
from thence.writers.page.report_page import report_html
from thence.writers.page.source_places import with_short_places

pytestmark = pytest.mark.usefixtures("read_once")


def test_a_place_has_one_short_path_in_tables_charts_and_sentences() -> None:
    """The recording's files all lie in one folder, so no path on the page needs it."""
    page = shared(DATA / "jax" / "memory.xplane.pb.gz").page()
    short = with_short_places(page)
    names = dict(short.summaries["source"].rows.select("name", "short_name").iter_rows())
    changed = {name: text for name, text in names.items() if name != text}
    assert len(changed) == 8
    assert all(name.startswith("/home/user/") and name.endswith(f"/{text}") for name, text in changed.items())
    for part in (short.roofline, short.memory, short.idle):
        assert part.result is not None
        assert not set(part.result.rows["name"].drop_nulls().cast(pl.String)) & set(changed)
    said = report_html(page).partition('<section id="findings"')[2].partition("<template")[0]
    assert "gpu_memory.py:528 jax" in said
    assert "/home/user/" not in said  # what follows has the full paths, for hovering
