"""Attributes each device activity by the host ranges around its launch.

For every kind of `thence.model.places.LAUNCH` there is a place column and ``<kind>_rule``: the code of the
rule that found the place or, if the place is null, of the reason why there is none (`thence.model.reasons`).
The lookup is always activity -> API call that launched it -> ranges around that call on its thread.
Work of a backward op is attributed to the label, module and source of its forward op.

Three columns have no rule: ``lane``, from the innermost mark that set one; ``metadata``, the merged metadata
of all marks around the launch as one JSON object, where inner marks override outer ones and keys that
describe a collective are removed; and ``detail``, a sentence on why a CUDA graph could not be matched,
null almost everywhere.

For an activity inside a CUDA graph this lookup only reaches the launch of the whole graph. If labels were
joined (`thence.attribution.cuda_graphs`), `Tables.graph_places` has the label from the capture, and the path
continues with it below the ranges that were open around the graph launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from thence.attribution.launches import launch_rows
from thence.attribution.metadata import merge_metadata, merged_metadata
from thence.attribution.paths import SEPARATOR, PathTree, path_names, path_tree
from thence.attribution.sources import parse_frames
from thence.attribution.xla.iterations import iterations
from thence.model.attributed import RULE
from thence.model.intervals import NO_ROW, chain_to, last_begun
from thence.model.places import LAUNCH, Kind
from thence.model.reasons import CODES, RULES
from thence.model.tables import HOST_CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.attribution.sources import Frames
    from thence.model.tables import Tables

__all__ = ["launch_places", "paths_of"]

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int64]
"""Positions in `CODES`."""

_KIND = {kind.name: kind for kind in LAUNCH}


@dataclass(frozen=True)
class _Host:
    """The host table as arrays, with the launches of the activities.

    Attributes:
        tables: of the trace.
        own: what else counts as the user's own code, as `thence.attribution.sources` takes it.
        category: position in `HOST_CATEGORIES` of each row.
        parent, forward: row numbers, `NO_ROW` for none.
        launch: host row that launched each activity.
    """

    tables: Tables
    own: Sequence[str]
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
    def backward_op(self) -> Rows:
        """Nearest op around each launch that belongs to a forward op."""
        return self.climb(self.launch, self.forward != NO_ROW)

    @cached_property
    def forward_op(self) -> Rows:
        """The forward op of that op."""
        return _values_at(self.forward, self.backward_op, NO_ROW)

    @cached_property
    def frames(self) -> Frames:
        """What the host rows are as Python frames."""
        return parse_frames(self.names, self.of("python"), self.own)

    @cached_property
    def in_graph(self) -> Mask:
        """Which activities were launched by cudaGraphLaunch, cuGraphLaunch or hipGraphLaunch."""
        calls = self.names.filter(pl.Series(self.of("runtime", "driver"))).unique()
        launches = calls.filter(calls.cast(pl.String).str.contains("GraphLaunch", literal=True))
        of_graph: Mask = np.isin(
            self.names.to_physical().to_numpy(), launches.to_physical().to_numpy()
        )
        return _values_at(of_graph, self.launch, missing=False)

    def of(self, *categories: str) -> Mask:
        """Which host rows are of one of the categories."""
        if categories not in self._masks:
            chosen = np.array([category in categories for category in HOST_CATEGORIES], np.bool_)
            self._masks[categories] = chosen[self.category]
        return self._masks[categories]

    def climb(self, rows: Rows, wanted: Mask) -> Rows:
        """The nearest wanted host row among each row and its ancestors."""
        return chain_to(self.parent, rows, wanted)


def launch_places(tables: Tables, own: Sequence[str] = ()) -> pl.DataFrame:
    """The places of every row of ``tables.gpu``, in its order.

    Args:
        tables: of the trace.
        own: what else counts as the user's own code, as `thence.attribution.sources` takes it.

    Returns:
        columns ``launch`` (host row of the API call, or of the op where the call was not recorded)
        and, for each kind of `LAUNCH`, the place (Categorical) and its rule (`RULE`); lane, metadata
        and detail (Categorical).
    """
    launch = launch_rows(tables)
    host = _host(tables, launch, own)
    columns: dict[str, Any] = {"launch": pl.Series(launch).replace(NO_ROW, None).cast(pl.Int32)}
    for kind in LAUNCH:
        columns |= _SPECIAL.get(kind.name, _enclosing_ranges)(host, kind)
    columns |= _mark_lane_and_metadata(host)
    if tables.graph_places.height:
        columns |= _with_graph_labels(tables, columns)
    return pl.DataFrame(columns)


def paths_of(
    tables: Tables, launch: pl.Series, kind: str, own: Sequence[str] = ()
) -> tuple[PathTree, Rows]:
    """The path of each activity as a node of a prefix tree of names; names may contain the separator.

    Args:
        tables: of the trace.
        launch: host row that launched each row of gpu, as in the result of `launch_places`.
        kind: label, module, ops or stack; or source, for the lines of the user's own code that were
            open, ``file.py:12``, the innermost of which is the place that `launch_places` gives.
        own: as `launch_places` takes it.

    Returns:
        The distinct paths, and the node of each activity's path, `NO_ROW` where there is none.
    """
    host = _host(tables, _rows(launch), own)
    names, wanted = host.names, host.of(*_KIND[kind].categories)
    if not _KIND[kind].follows_forward:
        return path_tree(host.parent, names, host.climb(host.launch, wanted), wanted)
    if kind == "source":
        names, wanted = host.frames.line, host.frames.own
    row, _ = _own_or_forward(host, wanted)
    return path_tree(host.parent, names, row, wanted)


def _with_graph_labels(tables: Tables, columns: dict[str, pl.Series]) -> dict[str, pl.Series]:
    """The place columns, overridden by joined labels of CUDA graphs where there are any."""
    joined = tables.graph_places
    label_row = np.full(tables.gpu.height, NO_ROW, np.int64)
    label_row[joined["gpu"].to_numpy()] = np.arange(joined.height)
    rule = _gathered(joined["rule"], label_row)
    changed: dict[str, pl.Series] = {}
    for kind in (kind.name for kind in LAUNCH if kind.name in joined.columns):
        labels = _gathered(joined[kind], label_row)
        labelled = labels.is_not_null()
        if kind == "label":
            labels = _below_launch(columns["label"], columns["label_rule"], labels, rule)
        changed[kind] = labels.zip_with(labelled, columns[kind]).alias(kind)
        rules = rule.zip_with(labelled, columns[f"{kind}_rule"])
        if kind == "label":
            # An activity without a label has the reason that joining gave; one whose node had a label
            # without a name has none yet.
            silent = rule.is_not_null() & changed["label"].is_null()
            reasons = _coded(_number("graph_no_label"), len(rule)).zip_with(
                rule.is_in(list(RULES)), rule
            )
            rules = reasons.zip_with(silent, rules)
        changed[f"{kind}_rule"] = rules.alias(f"{kind}_rule")
    lane, metadata, detail = (
        _gathered(joined[name], label_row) for name in ("lane", "metadata", "detail")
    )
    changed["lane"] = lane.zip_with(lane.is_not_null(), columns["lane"])
    changed["metadata"] = merge_metadata(columns["metadata"], metadata)
    changed["detail"] = detail
    return changed


def _below_launch(
    around: pl.Series, around_rule: pl.Series, label: pl.Series, rule: pl.Series
) -> pl.Series:
    """Appends captured labels to the path of the ranges around the graph launch.

    A captured label that already starts with that path is used as it is.
    """
    named = around_rule.is_in(["launch_ranges", "forward_op"]) & around.is_not_null()
    below = named & label.is_not_null() & (rule != "eager_alignment").fill_null(value=False)
    if not below.any():
        return label
    pairs = pl.DataFrame({"around": around, "label": label, "below": below})
    distinct = pairs.filter("below").unique(maintain_order=True)
    paths = [
        path if path == outer or path.startswith(outer + SEPARATOR) else outer + SEPARATOR + path
        for outer, path in distinct.select(pl.col("around", "label").cast(pl.String)).iter_rows()
    ]
    distinct = distinct.with_columns(path=pl.Series(paths, dtype=pl.String).cast(pl.Categorical()))
    joined = pairs.join(
        distinct, on=["around", "label", "below"], how="left", maintain_order="left"
    )
    return joined["path"].zip_with(below, label)


def _host(tables: Tables, launch: Rows, own: Sequence[str]) -> _Host:
    table = tables.host
    category = table["category"].to_physical().to_numpy()
    return _Host(tables, own, category, _rows(table["parent"]), _rows(table["forward"]), launch)


def _own_or_forward(host: _Host, wanted: Mask) -> tuple[Rows, Codes]:
    """The nearest wanted row of each activity, and the rule that found it.

    The order of precedence is: ranges inside the backward op, ranges around its forward op, ranges
    around the backward op.
    """
    around_launch = np.full(len(host.launch), _number("launch_ranges"))
    if not wanted.any():  # skip the climb to the root from every launch
        return np.full(len(host.launch), NO_ROW, np.int64), around_launch
    nearest = host.climb(host.launch, wanted | (host.forward != NO_ROW))
    inside = _values_at(wanted, nearest, missing=False)
    around_forward = host.climb(host.forward_op, wanted)
    around = host.climb(nearest, wanted)
    by_forward = ~inside & (around_forward != NO_ROW)
    row = np.where(by_forward, around_forward, around)
    return row, np.where(by_forward, _number("forward_op"), around_launch)


def _enclosing_ranges(host: _Host, kind: Kind) -> dict[str, pl.Series]:
    """The host ranges of the kind that were open at the launch: all of them, or the innermost."""
    wanted = host.of(*kind.categories)
    rule: Codes | int
    if kind.follows_forward:
        row, rule = _own_or_forward(host, wanted)
    else:
        row, rule = host.climb(host.launch, wanted), _number("launch_ranges")
    if kind.nests:
        return _column(host, kind, path_names(host.parent, host.names, row, wanted), rule)
    return _column(host, kind, _gathered(host.names, row), rule)


def _column(host: _Host, kind: Kind, place: pl.Series, rule: Codes | int) -> dict[str, pl.Series]:
    """The columns of a place and its rule; where the place is null, the rule column has the reason."""
    recorded = bool(host.of(*kind.categories).any())
    # Steps are found by the time of the launch, so activities in a graph have the step of its launch.
    hidden = host.in_graph & (kind.name != "step")
    absent = _number(kind.outside if recorded else kind.missing)
    reason = np.where(hidden, _number("graph"), absent)
    reason = np.where(recorded & (host.launch == NO_ROW), _number("no_launch"), reason)
    rules = np.where(place.is_null().to_numpy(), reason, rule)
    return {kind.name: place, f"{kind.name}_rule": _coded(rules, len(place))}


def _number(code: str) -> int:
    return CODES.index(code)


def _coded(codes: Codes | int, count: int) -> pl.Series:
    """Codes from their numbers, as a rule column."""
    every = pl.Series(CODES, dtype=RULE)
    if isinstance(codes, int):
        return every[codes : codes + 1].new_from_index(0, count)
    return every.gather(codes)


def _label(host: _Host, kind: Kind) -> dict[str, pl.Series]:
    """Ranges of the user around the launch; without any, ranges that a library opened."""
    columns = _enclosing_ranges(host, kind)
    library = host.climb(host.launch, host.of("framework"))
    given = columns["label"].is_null() & pl.Series(library != NO_ROW)
    if given.any():
        path = path_names(host.parent, host.names, library, host.of("framework"))
        rule = _coded(_number("library_range"), len(given))
        columns["label"] = columns["label"].zip_with(~given, path)
        columns["label_rule"] = columns["label_rule"].zip_with(~given, rule)
    return columns


def _mark_lane_and_metadata(host: _Host) -> dict[str, pl.Series]:
    """Lane and metadata of the marks around the launch, or around the forward op; no details yet."""
    lane, metadata = host.tables.host["lane"], host.tables.host["metadata"]
    nothing = pl.Series([None], dtype=pl.Categorical()).new_from_index(0, len(host.launch))
    columns = {"lane": nothing, "metadata": nothing, "detail": nothing}
    if lane.null_count() < len(lane):
        row, _ = _own_or_forward(host, lane.is_not_null().to_numpy())
        columns["lane"] = _gathered(lane, row)
    if metadata.null_count() < len(metadata):
        has_metadata = metadata.is_not_null().to_numpy()
        row, _ = _own_or_forward(host, has_metadata)
        columns["metadata"] = merged_metadata(host.parent, metadata, row, has_metadata)
    return columns


def _gathered(values: pl.Series, row: Rows) -> pl.Series:
    """The value at each row, null at `NO_ROW`."""
    return values.gather(pl.Series(row).replace(NO_ROW, None).cast(pl.UInt32))


def _source(host: _Host, kind: Kind) -> dict[str, pl.Series]:
    """The innermost frame of the user's own code, else the innermost frame with a file."""
    frames = host.frames
    row, rule = _own_or_forward(host, frames.own)
    library, _ = _own_or_forward(host, frames.own | frames.installed)
    rule = np.where(row == NO_ROW, _number("library_frame"), rule)
    return _column(host, kind, _gathered(frames.line, np.where(row == NO_ROW, library, row)), rule)


def _phase(host: _Host, kind: Kind) -> dict[str, pl.Series]:
    """Backward inside the autograd engine; forward inside an op that a backward op belongs to."""
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
    backward = (host.backward_op != NO_ROW) | (host.climb(host.launch, in_engine) != NO_ROW)
    forward = host.climb(host.launch, is_forward) != NO_ROW
    phases = pl.Series([None, "forward", "backward"], dtype=pl.Categorical())
    phase = phases.gather(np.where(backward, 2, forward.astype(np.int64)))
    return _column(host, kind, phase, _number("autograd_sequence"))


def _step(host: _Host, kind: Kind) -> dict[str, pl.Series]:
    """The step that was open in the launching process when the launch began, on whatever thread."""
    table = host.tables.host
    start, rank, process = (table[name].to_numpy() for name in ("start", "rank", "process"))
    launch_row = np.where(host.launch == NO_ROW, 0, host.launch)
    step_row = np.full(len(launch_row), NO_ROW, np.int64)
    steps = table.with_row_index("row").filter(pl.col("category") == "step")
    for (of_rank, of_process), rank_steps in steps.group_by("rank", "process"):
        rows = rank_steps["row"].to_numpy().astype(np.int64)
        ends = (rank_steps["start"] + rank_steps["duration"]).to_numpy()
        last = last_begun(rank_steps["start"].to_numpy(), start[launch_row])
        inside = (last != NO_ROW) & (start[launch_row] < ends[last]) & (host.launch != NO_ROW)
        inside &= (rank[launch_row] == of_rank) & (process[launch_row] == of_process)
        step_row[inside] = rows[last[inside]]
    return _column(host, kind, _gathered(host.names, step_row), _number("launch_time"))


def _iteration(host: _Host, kind: Kind) -> dict[str, pl.Series]:
    """The iteration of the outermost loop of the XLA program around the launch."""
    place = iterations(host.tables, host.launch)
    if place is None:
        nothing = pl.Series([None], dtype=pl.Categorical()).new_from_index(0, len(host.launch))
        reason = _coded(_number(kind.missing), len(nothing))
        return {kind.name: nothing, f"{kind.name}_rule": reason}
    found = place.is_not_null().to_numpy()
    rules = np.where(found, _number("loop_rounds"), _number(kind.outside))
    return {kind.name: place, f"{kind.name}_rule": _coded(rules, len(place))}


_SPECIAL = {
    "label": _label,
    "source": _source,
    "phase": _phase,
    "step": _step,
    "iteration": _iteration,
}
"""Kinds that need more than the ranges around the launch."""


def _values_at(values: npt.NDArray[Any], rows: Rows, missing: int) -> npt.NDArray[Any]:
    """The value at each row, ``missing`` at `NO_ROW`; there may be no rows at all."""
    result = np.full(len(rows), missing, values.dtype)
    valid = rows != NO_ROW
    result[valid] = values[rows[valid]]
    return result


def _rows(references: pl.Series) -> Rows:
    return references.fill_null(NO_ROW).cast(pl.Int64).to_numpy()
