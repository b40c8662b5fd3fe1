"""Attributes every device activity of a trace: `Tables` -> `Attributed`.

PyTorch work is attributed through its launches (`launch_places`), XLA work through its HLO
(`hlo_places`, imported for traces that hold XLA programs).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import polars as pl

from thence.attribution.collectives import complete_collectives, described_on_host
from thence.attribution.host_rows import host_rows, launch_rows
from thence.attribution.launch_places import launch_places
from thence.attribution.sources import file_of_frame
from thence.attribution.steps import find_steps, with_counting_ranges
from thence.attribution.waiting import completed_waiting
from thence.model.attributed import RULE, Attributed
from thence.model.columns import row_numbers
from thence.model.names import distinct_names
from thence.model.own_code import OwnCode, packages_shown
from thence.model.places import HLO
from thence.model.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FROM_HLO = tuple(kind.name for kind in HLO if kind.origin == "hlo")


def attribute(tables: Tables, own: Sequence[str] = ()) -> Attributed:
    """Attributes every device activity of a trace.

    Args:
        tables: as the readers returned them, with the labels of CUDA graphs joined
            (`thence.attribution.cuda_graphs.labelling`).
        own: patterns of other code that counts as the user's own, as `thence.model.own_code` takes them.
    """
    installed = packages_shown(_files(tables))
    own_code = OwnCode.of(own, installed)
    host = host_rows(tables, launch_rows(tables), own_code)
    tables, counting = with_counting_ranges(tables, host)
    if tables is not host.tables:
        host = host_rows(tables, launch_rows(tables), own_code)
    of_launch = launch_places(host)
    shares = None
    if tables.programs.is_empty():
        places = of_launch.hstack(_nothing_from_hlo(tables.gpu.height))
    else:
        from thence.attribution.xla.hlo_places import with_hlo

        tables, places, shares = with_hlo(tables, of_launch, own_code)
    collectives, parts = complete_collectives(tables, of_launch["launch"])
    notes: list[str] = []
    if tables.flight_records:
        from thence.attribution.flight_records import with_flight_records

        launches = row_numbers(of_launch["launch"])
        collectives, notes = with_flight_records(tables, collectives, launches)
    if tables.inspector_records:
        from thence.attribution.inspector_records import with_inspector_records

        collectives, more = with_inspector_records(tables, collectives)
        notes += more
    events, waits = completed_waiting(tables, row_numbers(of_launch["launch"]))
    columns = {field.name: getattr(tables, field.name) for field in dataclasses.fields(Tables)}
    columns |= {
        "collectives": collectives,
        "events": events,
        "waits": waits,
        "collective_parts": parts,
        "host_collectives": described_on_host(tables),
        "graph_labels": (),
        "flight_records": (),
        "inspector_records": (),
        "meta": dataclasses.replace(tables.meta, notes=(*tables.meta.notes, *notes)),
    }
    if tables is not host.tables:
        host = host_rows(tables, row_numbers(of_launch["launch"]), own_code)
    steps, *of_steps = find_steps(tables, host, counting)
    places = places.with_columns(*of_steps, pl.lit(None, RULE).alias("separate"), label_rule=_label_rule(places))
    columns["steps"] = steps
    return Attributed(**columns, places=places, shares=shares, own=tuple(own), installed=installed)


def _label_rule(places: pl.DataFrame) -> pl.Series:
    """The rule of each label; work without a label is outside every named range if any work has a label.

    Ranges of libraries and named scopes of the HLO are labels, too, so whether the user's ranges are recorded does
    not decide this.
    """
    rule = places["label_rule"]
    if places["label"].null_count() == places.height:
        return rule
    outside = pl.Series(["outside_ranges"], dtype=RULE).new_from_index(0, places.height)
    return outside.zip_with((rule == "no_ranges").fill_null(value=False), rule).alias("label_rule")


def _files(tables: Tables) -> Iterator[str]:
    """The source files that the trace names, some more than once."""
    python = distinct_names(tables.host["name"].filter(tables.host["category"] == "python"))
    yield from (file_of_frame(name) for name in python.cast(pl.String))
    for module in tables.hlo:
        yield from module.frames["file"].unique().drop_nulls()


def _nothing_from_hlo(rows: int) -> list[pl.Series]:
    reason = pl.Series(["no_xla"], dtype=RULE).new_from_index(0, rows)
    null = pl.Series([None], dtype=pl.Categorical()).new_from_index(0, rows)
    return [x for kind in _FROM_HLO for x in (null.alias(kind), reason.alias(f"{kind}_rule"))]
