"""Where each device activity came from: one place of every kind, and how it was found.

    label    path of the ranges that the user named, outermost first: ``forward/attention``
    module   path of nn.Module calls: ``GPT_0/Block_2/MLP_2/Linear_9``
    op       innermost framework operator
    ops      path of the operators, and of the ranges that libraries named, around it
    source   ``file.py:12``, the innermost Python frame outside installed libraries
    stack    path of all Python frames around it
    phase    forward or backward, where autograd says so
    step     profiler step

Every kind has a second column, ``<kind>_rule``: how the place was found or, where it is null, why
not. The way is always the same: activity -> the API call that launched it -> the ranges around that
call on its thread. Work of a backward op belongs to the label, module and source of its forward op.

Two columns without a rule hold what marks said beside their names: ``lane``, that of the innermost mark
that named one, and ``metadata``, the facts of all of them as one JSON object, inner marks winning, without
what describes a collective.

Inside a CUDA graph that way ends at the launch of the whole graph. There `Tables.graph_places` says more
where labels were joined (`thence.attribution.graphs`): a label of the capture stands below the ranges
that were open around the launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from thence.attribution.launches import NOT_FOUND, launch_rows
from thence.attribution.metadata import merged_metadata, within
from thence.attribution.paths import SEPARATOR, PathTree, path_names, path_tree
from thence.attribution.reasons import EVERY_REASON, IN_GRAPH, missing
from thence.attribution.sources import source_lines
from thence.model.intervals import NO_ROW, chain_to
from thence.model.tables import HOST_CATEGORIES

if TYPE_CHECKING:
    from thence.model.tables import Tables

__all__ = ["BY_EAGER", "NO_LABEL", "PLACES", "attribute", "paths_of"]

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Rules = npt.NDArray[np.int64]
"""Numbers in `RULES`."""

PLACES = ("label", "module", "op", "ops", "source", "stack", "phase", "step")
"""Kinds of places, each a column of the result beside its ``_rule``."""

AROUND = "ranges around the launch"
FORWARD = "forward op of the backward op"
LIBRARY = "range named by a library"
STEP = "time of the launch"
AUTOGRAD = "autograd sequence number"
LIBRARY_FRAME = "frame of an installed library"

CATEGORIES = {
    "label": ("range",),
    "module": ("module",),
    "op": ("op",),
    "ops": ("op", "framework"),
    "source": ("python",),
    "stack": ("python",),
    "phase": ("op",),
    "step": ("step",),
}
"""Host rows that a kind of place is made from."""

NO_LABEL = "inside a CUDA graph: no label was open when its node was captured"
BY_EAGER = "alignment to an eager run"
OUTSIDE = {
    "label": "launched outside every named range",
    "module": "launched outside every nn.Module call",
    "op": "launched outside every operator",
    "ops": "launched outside every operator",
    "source": "launched outside every recorded Python frame",
    "stack": "launched outside every recorded Python frame",
    "phase": "autograd has no part in it",
    "step": "launched outside every profiler step",
}


RULES: tuple[str, ...] = (
    *(AROUND, FORWARD, LIBRARY, STEP, AUTOGRAD, LIBRARY_FRAME, NOT_FOUND),
    *dict.fromkeys((*EVERY_REASON, *OUTSIDE.values())),
)
"""Everything that a ``_rule`` column can say."""


@dataclass(frozen=True)
class _Host:
    """The host table as arrays, with the launches of the activities."""

    tables: Tables
    category: npt.NDArray[np.uint8]
    parent: Rows
    forward: Rows
    launch: Rows
    _masks: dict[tuple[str, ...], Mask] = field(default_factory=dict)

    @property
    def names(self) -> pl.Series:
        """Name of every host row."""
        return self.tables.host["name"]

    @cached_property
    def in_graph(self) -> Mask:
        """Which activities came from the launch of a whole graph (cuda, cu or hipGraphLaunch)."""
        calls = self.names.filter(pl.Series(self.of("runtime", "driver"))).unique()
        launches = calls.filter(calls.cast(pl.String).str.contains("GraphLaunch", literal=True))
        of_graph: Mask = np.isin(
            self.names.to_physical().to_numpy(), launches.to_physical().to_numpy()
        )
        return _at(of_graph, self.launch, missing=False)

    def of(self, *categories: str) -> Mask:
        """Which host rows are of one of the categories."""
        if categories not in self._masks:
            chosen = np.array([category in categories for category in HOST_CATEGORIES], np.bool_)
            self._masks[categories] = chosen[self.category]
        return self._masks[categories]

    def climb(self, rows: Rows, wanted: Mask) -> Rows:
        """Nearest wanted host row around each of the rows."""
        return chain_to(self.parent, rows, wanted)


def attribute(tables: Tables) -> pl.DataFrame:
    """The places of every row of ``tables.gpu``, in its order.

    Returns:
        columns ``launch`` (host row of the API call, or of the op where the call was not recorded)
        and, for each kind of `PLACES`, the place and its rule, both Categorical; lane and metadata.
    """
    launch, _ = launch_rows(tables)
    host = _host(tables, launch)
    backward_op = host.climb(launch, host.forward != NO_ROW)
    forward_op = _at(host.forward, backward_op, NO_ROW)
    columns: dict[str, Any] = {"launch": pl.Series(launch).replace(NO_ROW, None).cast(pl.Int32)}
    columns |= _label(host, forward_op)
    columns |= _path(host, "module", *_own_or_forward(host, host.of("module"), forward_op))
    columns |= _op(host)
    columns |= _path(host, "ops", host.climb(launch, host.of("op", "framework")), _number(AROUND))
    columns |= _source(host, forward_op)
    columns |= _path(host, "stack", *_own_or_forward(host, host.of("python"), forward_op))
    columns |= _phase(host, backward_op)
    columns |= _step(host)
    columns |= _said(host, forward_op)
    if tables.graph_places.height:
        columns |= _of_graphs(tables, columns)
    return pl.DataFrame(columns)


def paths_of(tables: Tables, launch: pl.Series, kind: str) -> tuple[PathTree, Rows]:
    """The names on the path of each activity, apart: the names themselves may hold a separator.

    Args:
        tables: of the trace.
        launch: host row that launched each row of gpu, as in the result of `attribute`.
        kind: label, module, ops or stack; or source, for the lines of the user's own code that were
            open, ``file.py:12``, the innermost of which is the place that `attribute` gives.

    Returns:
        The distinct paths, and the node of each activity's path, `NO_ROW` where there is none.
    """
    host = _host(tables, _rows(launch))
    names, wanted = host.names, host.of(*CATEGORIES[kind])
    if kind == "ops":
        return path_tree(host.parent, names, host.climb(host.launch, wanted), wanted)
    if kind == "source":
        frames = source_lines(names, wanted)
        names, wanted = frames.line, frames.own
    backward_op = host.climb(host.launch, host.forward != NO_ROW)
    row, _ = _own_or_forward(host, wanted, _at(host.forward, backward_op, NO_ROW))
    return path_tree(host.parent, names, row, wanted)


def _of_graphs(tables: Tables, columns: dict[str, pl.Series]) -> dict[str, pl.Series]:
    """The columns with what labels of graphs say; the rest as it was."""
    joined = tables.graph_places
    at = np.full(tables.gpu.height, NO_ROW, np.int64)
    at[joined["gpu"].to_numpy()] = np.arange(joined.height)
    rule = _gathered(joined["rule"], at)
    changed: dict[str, pl.Series] = {}
    for kind in PLACES:
        if kind not in joined.columns:
            continue
        found = _gathered(joined[kind], at)
        known = found.is_not_null()
        if kind == "label":
            found = _below_launch(columns["label"], columns["label_rule"], found, rule)
        changed[kind] = found.zip_with(known, columns[kind]).alias(kind)
        rules = rule.zip_with(known, columns[f"{kind}_rule"])
        if kind == "label":
            # What was joined to a label without a name has a rule but no reason.
            silent = rule.is_not_null() & changed["label"].is_null()
            told = rule.cast(pl.String).str.starts_with("inside ").fill_null(value=False)
            no_label = pl.Series([NO_LABEL], dtype=pl.Categorical()).new_from_index(0, len(silent))
            rules = rule.zip_with(told, no_label).zip_with(silent, rules)
        changed[f"{kind}_rule"] = rules.alias(f"{kind}_rule")
    lane, metadata = (_gathered(joined[name], at) for name in ("lane", "metadata"))
    changed["lane"] = lane.zip_with(lane.is_not_null(), columns["lane"])
    changed["metadata"] = within(columns["metadata"], metadata)
    return changed


def _below_launch(
    around: pl.Series, around_rule: pl.Series, label: pl.Series, rule: pl.Series
) -> pl.Series:
    """The path of a captured label behind that of the ranges around the launch, unless it has that already."""
    named = around_rule.cast(pl.String).is_in([AROUND, FORWARD]) & around.is_not_null()
    below = named & label.is_not_null() & (rule.cast(pl.String) != BY_EAGER).fill_null(value=False)
    if not below.any():
        return label
    pairs = pl.DataFrame({"around": around, "label": label, "below": below})
    distinct = pairs.filter("below").unique(maintain_order=True)
    paths = [
        own if own == outer or own.startswith(outer + SEPARATOR) else outer + SEPARATOR + own
        for outer, own in distinct.select(pl.col("around", "label").cast(pl.String)).iter_rows()
    ]
    distinct = distinct.with_columns(path=pl.Series(paths, dtype=pl.String).cast(pl.Categorical()))
    joined = pairs.join(
        distinct, on=["around", "label", "below"], how="left", maintain_order="left"
    )
    return joined["path"].zip_with(below, label)


def _host(tables: Tables, launch: Rows) -> _Host:
    table = tables.host
    category = table["category"].to_physical().to_numpy()
    return _Host(tables, category, _rows(table["parent"]), _rows(table["forward"]), launch)


def _own_or_forward(host: _Host, wanted: Mask, forward_op: Rows) -> tuple[Rows, Rules]:
    """The nearest wanted row, and the rule that gave it.

    What is open inside the backward op itself is nearest; then what was open around its forward op;
    then what is open around the backward op.
    """
    if not wanted.any():  # no use in climbing to the top from everywhere
        return np.full(len(host.launch), NO_ROW, np.int64), np.full(
            len(host.launch), _number(AROUND)
        )
    nearest = host.climb(host.launch, wanted | (host.forward != NO_ROW))
    inside = _at(wanted, nearest, missing=False)
    around_forward = host.climb(forward_op, wanted)
    around = host.climb(nearest, wanted)
    by_forward = ~inside & (around_forward != NO_ROW)
    row = np.where(by_forward, around_forward, around)
    return row, np.where(by_forward, _number(FORWARD), _number(AROUND))


def _path(host: _Host, kind: str, row: Rows, rule: Rules | int) -> dict[str, pl.Series]:
    wanted = host.of(*CATEGORIES[kind])
    return _column(host, kind, path_names(host.parent, host.names, row, wanted), rule)


def _column(host: _Host, kind: str, place: pl.Series, rule: Rules | int) -> dict[str, pl.Series]:
    """A place and its rule; where there is no place, the rule is the reason."""
    recorded, formats = bool(host.of(*CATEGORIES[kind]).any()), host.tables.meta.formats
    absent = _number(OUTSIDE[kind] if recorded else missing(kind, formats))
    # The moment of the launch tells the step, so a graph's activities have that of its launch.
    hidden = host.in_graph & (kind != "step")
    reason = np.where(hidden, _number(missing(IN_GRAPH, formats)), absent)
    reason = np.where(recorded & (host.launch == NO_ROW), _number(NOT_FOUND), reason)
    rules = np.where(place.is_null().to_numpy(), reason, rule)
    return {kind: place, f"{kind}_rule": _texts(RULES, rules)}


def _number(rule: str) -> int:
    return RULES.index(rule)


def _texts(texts: tuple[str | None, ...], numbers: npt.NDArray[Any]) -> pl.Series:
    return pl.Series(texts, dtype=pl.String).cast(pl.Categorical()).gather(numbers)


def _label(host: _Host, forward_op: Rows) -> dict[str, pl.Series]:
    """Ranges of the user; failing those, ranges that a library opened around the launch."""
    columns = _path(host, "label", *_own_or_forward(host, host.of("range"), forward_op))
    library = host.climb(host.launch, host.of("framework"))
    given = columns["label"].is_null() & pl.Series(library != NO_ROW)
    if given.any():
        path = path_names(host.parent, host.names, library, host.of("framework"))
        rule = _texts(RULES, np.full(len(given), _number(LIBRARY)))
        columns["label"] = columns["label"].zip_with(~given, path)
        columns["label_rule"] = columns["label_rule"].zip_with(~given, rule)
    return columns


def _said(host: _Host, forward_op: Rows) -> dict[str, pl.Series]:
    """Lane and metadata of the marks around the launch, or around the forward op."""
    lane, metadata = host.tables.host["lane"], host.tables.host["metadata"]
    nothing = pl.Series([None], dtype=pl.Categorical()).new_from_index(0, len(host.launch))
    columns = {"lane": nothing, "metadata": nothing}
    if lane.null_count() < len(lane):
        row, _ = _own_or_forward(host, lane.is_not_null().to_numpy(), forward_op)
        columns["lane"] = _gathered(lane, row)
    if metadata.null_count() < len(metadata):
        told = metadata.is_not_null().to_numpy()
        row, _ = _own_or_forward(host, told, forward_op)
        columns["metadata"] = merged_metadata(host.parent, metadata, row, told)
    return columns


def _op(host: _Host) -> dict[str, pl.Series]:
    row = host.climb(host.launch, host.of("op"))
    return _column(host, "op", _gathered(host.names, row), _number(AROUND))


def _gathered(values: pl.Series, row: Rows) -> pl.Series:
    """The value at each row, null at `NO_ROW`."""
    return values.gather(pl.Series(row).replace(NO_ROW, None).cast(pl.UInt32))


def _source(host: _Host, forward_op: Rows) -> dict[str, pl.Series]:
    """The innermost frame of the user's own code, else the innermost frame with a file."""
    frames = source_lines(host.names, host.of("python"))
    row, rule = _own_or_forward(host, frames.own, forward_op)
    library, _ = _own_or_forward(host, frames.own | frames.installed, forward_op)
    rule = np.where(row == NO_ROW, _number(LIBRARY_FRAME), rule)
    return _column(
        host, "source", _gathered(frames.line, np.where(row == NO_ROW, library, row)), rule
    )


def _phase(host: _Host, backward_op: Rows) -> dict[str, pl.Series]:
    used = host.names.unique()
    of_engine = (
        used.cast(pl.String)
        .str.starts_with("autograd::engine::evaluate_function")
        .fill_null(value=False)
    )
    codes = used.to_physical().filter(of_engine).to_numpy()
    in_engine = np.isin(host.names.to_physical().to_numpy(), codes)
    is_forward = np.zeros(len(in_engine), np.bool_)
    is_forward[host.forward[host.forward != NO_ROW]] = True
    backward = (backward_op != NO_ROW) | (host.climb(host.launch, in_engine) != NO_ROW)
    forward = host.climb(host.launch, is_forward) != NO_ROW
    phase = _texts((None, "forward", "backward"), np.where(backward, 2, forward.astype(np.int64)))
    return _column(host, "phase", phase, _number(AUTOGRAD))


def _step(host: _Host) -> dict[str, pl.Series]:
    """The step that was open in the launching process when the launch began, on whatever thread."""
    table = host.tables.host
    start, rank, process = (table[name].to_numpy() for name in ("start", "rank", "process"))
    at = np.where(host.launch == NO_ROW, 0, host.launch)
    found = np.full(len(at), NO_ROW, np.int64)
    steps = table.with_row_index("row").filter(pl.col("category") == "step").sort("start")
    for (of_rank, of_process), own in steps.group_by("rank", "process"):
        rows = own["row"].to_numpy().astype(np.int64)
        begins, ends = own["start"].to_numpy(), (own["start"] + own["duration"]).to_numpy()
        last = np.searchsorted(begins, start[at], side="right") - 1
        inside = (last >= 0) & (start[at] < ends[last]) & (host.launch != NO_ROW)
        inside &= (rank[at] == of_rank) & (process[at] == of_process)
        found[inside] = rows[last[inside]]
    return _column(host, "step", _gathered(host.names, found), _number(STEP))


def _at(values: npt.NDArray[Any], rows: Rows, missing: int) -> npt.NDArray[Any]:
    """The value at each row, ``missing`` at `NO_ROW`; there may be no rows at all."""
    result = np.full(len(rows), missing, values.dtype)
    known = rows != NO_ROW
    result[known] = values[rows[known]]
    return result


def _rows(references: pl.Series) -> Rows:
    return references.fill_null(NO_ROW).cast(pl.Int64).to_numpy()
