"""Attributes each device activity by the host ranges around its launch.

For every kind of `thence.model.places.LAUNCH` but steps (`thence.attribution.steps`) there is a place column and
``<kind>_rule``: the code of the rule that found the place or, if the place is null, of the reason why there is none
(`thence.model.reasons`).
The lookup is always activity -> API call that launched it -> ranges around that call on its thread.
Work of a backward op is attributed to the label, module and source of its forward op.

Four columns have no rule: ``position``, which line the line number of the source is; ``lane``, from the
innermost mark that set one; ``metadata``, the merged metadata of all marks around the launch as one JSON object,
where inner marks override outer ones and keys that describe a collective are removed; and ``detail``, a sentence
on why a CUDA graph could not be matched, null almost everywhere.

For an activity inside a CUDA graph this lookup only reaches the launch of the whole graph. If labels were
joined (`thence.attribution.cuda_graphs`), `Tables.graph_places` has the label from the capture, which is
appended to the path of the ranges that were open around the graph launch.

Metadata: Marks can be nested arbitrarily deep, so the inherited part is bounded: at most `MAX_MEMBERS` members, and
at most `MAX_CHARACTERS` characters of keys and values among these; members from the outermost marks are
dropped first. The metadata of the innermost mark itself is kept in full.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from thence.attribution.host_rows import HostRows, gathered, host_rows, values_at
from thence.attribution.launch_phases import launch_phases, launch_serving
from thence.attribution.paths import SEPARATOR, PathTree, path_names, path_tree
from thence.attribution.serving import server_passes
from thence.attribution.sources import kernel_places, with_sources
from thence.attribution.xla.iterations import iterations
from thence.model.attributed import RULE
from thence.model.columns import mask_of, not_null, row_numbers, values_or
from thence.model.intervals import NO_ROW
from thence.model.json_fields import decoded
from thence.model.phases import Position
from thence.model.places import LAUNCH, Kind
from thence.model.reasons import CODES, RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.arrays import Int64, Mask
    from thence.model.own_code import OwnCode
    from thence.model.tables import Tables


_KIND = {kind.name: kind for kind in LAUNCH}
_ALL_CODES = pl.Series(CODES, dtype=RULE)
_OF_XLA = r"^(?:TSL:)?(?:Xla|Thunk:#|GpuMetrics$)"
"""Names of XLA's own NVTX ranges, which name nothing of the user's: program and HLO instruction say the same."""
_DOTTED = "module"
"""The kind whose names may be whole dotted paths, which replace the names around them (`PathTree`)."""


def launch_places(host: HostRows) -> pl.DataFrame:
    """The places of every row of ``gpu``, in its order.

    Args:
        host: the host table with the launches of the activities.

    Returns:
        columns ``launch`` (host row of the API call, or of the op where the call was not recorded)
        and, for each kind of `LAUNCH`, the place (Categorical) and its rule (`RULE`); position of the
        source; lane, metadata and detail (Categorical).
    """
    columns: dict[str, Any] = {"launch": pl.Series(host.launch).cast(pl.UInt32, strict=False).cast(pl.Int32)}
    for kind in LAUNCH:
        if kind.name == "step":
            continue
        columns |= _SPECIAL.get(kind.name, _enclosing_ranges)(host, kind)
    columns |= _mark_lane_and_metadata(host)
    columns |= _without_launching_operator(host, columns)
    if host.tables.graph_places.height:
        columns |= _with_graph_labels(host.tables, columns, host.own)
    return pl.DataFrame(columns)


def _without_launching_operator(host: HostRows, columns: dict[str, pl.Series]) -> dict[str, pl.Series]:
    """The operators, without those around the launch of a whole CUDA graph: they are not the operators of its nodes."""
    inside = pl.Series(host.in_graph)
    if not inside.any():
        return {}
    operator = columns["op"]
    nothing = pl.Series([None], dtype=operator.dtype).new_from_index(0, len(operator))
    reason = _coded(_number("graph"), len(operator))
    around = inside & operator.is_not_null()
    return {"op": operator.zip_with(~around, nothing), "op_rule": columns["op_rule"].zip_with(~around, reason)}


def paths_of(tables: Tables, launch: pl.Series, kind: str, own: OwnCode) -> tuple[PathTree, Int64]:
    """The path of each activity as a node of a prefix tree of names; names may contain the separator.

    Args:
        launch: host row that launched each row of gpu, as in the result of `launch_places`.
        kind: label, module, ops or stack; or source, for the functions of the user's own code that were
            open, the innermost of which is the place that `launch_places` returns.

    Returns:
        The distinct paths, and the node of each activity's path, `NO_ROW` where there is none.
    """
    host = host_rows(tables, row_numbers(launch), own)
    names, wanted = host.names, host.of(*_KIND[kind].categories)
    if not _KIND[kind].follows_forward:
        return path_tree(host.parent, names, host.climb(host.launch, wanted), wanted)
    if kind == "source":
        names, wanted = host.frames.place, host.frames.own
    row, _ = _own_or_forward(host, wanted)
    return path_tree(host.parent, names, row, wanted, dotted=kind == _DOTTED)


def places_of_rows(tables: Tables, rows: Int64, own: OwnCode, kinds: Sequence[str]) -> dict[str, pl.Series]:
    """The places of host rows: those that `launch_places` finds for activities that these rows launch.

    Args:
        rows: rows of host, `NO_ROW` for none.
        kinds: of `LAUNCH`.

    Returns:
        for each kind the places, Categorical, null where a row has none.
    """
    host = host_rows(tables, rows, own)
    return {kind: _SPECIAL.get(kind, _enclosing_ranges)(host, _KIND[kind])[kind] for kind in kinds}


def _with_graph_labels(tables: Tables, columns: dict[str, pl.Series], own: OwnCode) -> dict[str, pl.Series]:
    """The place columns, overridden by joined labels of CUDA graphs where there are any."""
    joined = with_sources(tables.graph_places, own)
    label_row = np.full(tables.gpu.height, NO_ROW, np.int64)
    label_row[joined["gpu"].to_numpy()] = np.arange(joined.height)
    rule = gathered(joined["rule"], label_row)
    changed: dict[str, pl.Series] = {}
    for kind in (kind.name for kind in LAUNCH if kind.name in joined.columns):
        labels = gathered(joined[kind], label_row)
        labelled = labels.is_not_null()
        if kind == "label":
            labels = _below_launch(columns["label"], columns["label_rule"], labels, rule)
        changed[kind] = labels.zip_with(labelled, columns[kind]).alias(kind)
        rules = rule.zip_with(labelled, columns[f"{kind}_rule"])
        if kind == "label":
            # An activity without a label keeps the reason that joining gave. If joining gave a rule instead,
            # its node has other places but no label.
            without_label = rule.is_not_null() & changed["label"].is_null()
            reasons = _coded(_number("graph_no_label"), len(rule)).zip_with(rule.is_in(list(RULES)), rule)
            of_run = (rule.is_in(list(RULES)) & _of_another_run(rule)).fill_null(value=False)
            reasons = _coded(_number("graph_no_place"), len(rule)).zip_with(of_run, reasons)
            differ = (rule == "capture_shared").fill_null(value=False)
            reasons = _coded(_number("graph_captures_differ"), len(rule)).zip_with(differ, reasons)
            rules = reasons.zip_with(without_label, rules)
        else:
            unnamed = (columns[f"{kind}_rule"] == "graph") & rule.is_in(list(RULES)) & ~labelled
            rules = _coded(_number("graph_no_place"), len(rule)).zip_with(unnamed.fill_null(value=False), rules)
        changed[f"{kind}_rule"] = rules.alias(f"{kind}_rule")
    lane, metadata, detail = (gathered(joined[name], label_row) for name in ("lane", "metadata", "detail"))
    changed["lane"] = lane.zip_with(lane.is_not_null(), columns["lane"])
    changed["metadata"] = merge_metadata(columns["metadata"], metadata)
    changed["detail"] = detail
    position = gathered(joined["position"], label_row)
    placed = gathered(joined["source"], label_row).is_not_null()
    changed["position"] = position.zip_with(placed, columns["position"])
    return changed


def _of_another_run(rule: pl.Series) -> pl.Series:
    """Whether a label was joined from a trace of another run or of the capture."""
    return rule.cast(pl.String).str.contains("^(?:eager|capture)_")


def _below_launch(around: pl.Series, around_rule: pl.Series, label: pl.Series, rule: pl.Series) -> pl.Series:
    """Appends captured labels to the path of the ranges around the graph launch.

    A captured label that already starts with that path is used as it is.
    """
    named = around_rule.is_in(["launch_ranges", "forward_op"]) & around.is_not_null()
    below = named & label.is_not_null() & ~_of_another_run(rule).fill_null(value=True)
    if not below.any():
        return label
    pairs = pl.DataFrame({"around": around, "label": label, "below": below})
    distinct = pairs.filter("below").unique(maintain_order=True)
    paths = [
        path if path == outer or path.startswith(outer + SEPARATOR) else outer + SEPARATOR + path
        for outer, path in distinct.select(pl.col("around", "label").cast(pl.String)).iter_rows()
    ]
    distinct = distinct.with_columns(path=pl.Series(paths, dtype=pl.String).cast(pl.Categorical()))
    joined = pairs.join(distinct, on=["around", "label", "below"], how="left", maintain_order="left")
    return joined["path"].zip_with(below, label)


def _own_or_forward(host: HostRows, wanted: Mask) -> tuple[Int64, Int64]:
    """The nearest wanted row of each activity, and the number of the rule that found it.

    The order of precedence is: ranges inside the backward op, ranges around its forward op, ranges
    around the backward op.
    """
    around_launch = np.full(len(host.launch), _number("launch_ranges"))
    if not wanted.any():  # skip the climb to the root from every launch
        return np.full(len(host.launch), NO_ROW, np.int64), around_launch
    nearest = host.climb(host.launch, wanted | (host.forward != NO_ROW))
    inside = values_at(wanted, nearest, missing=False)
    around_forward = host.climb(host.forward_op, wanted)
    around = host.climb(nearest, wanted)
    by_forward = ~inside & (around_forward != NO_ROW)
    row = np.where(by_forward, around_forward, around)
    return row, np.where(by_forward, _number("forward_op"), around_launch)


def _enclosing_ranges(host: HostRows, kind: Kind) -> dict[str, pl.Series]:
    """The host ranges of the kind that were open at the launch: all of them, or the innermost."""
    wanted = host.of(*kind.categories)
    rule: Int64 | int
    if kind.follows_forward:
        row, rule = _own_or_forward(host, wanted)
    else:
        row, rule = host.climb(host.launch, wanted), _number("launch_ranges")
    if kind.nests:
        paths = path_names(host.parent, host.names, row, wanted, dotted=kind.name == _DOTTED)
        return _column(host, kind, paths, rule)
    return _column(host, kind, gathered(host.names, row), rule)


def _column(host: HostRows, kind: Kind, place: pl.Series, rule: Int64 | int) -> dict[str, pl.Series]:
    """The columns of a place and its rule; where the place is null, the rule column has the reason."""
    recorded = bool(host.of(*kind.categories).any())
    # What a server computes is told by the time of the launch, also for activities in a graph.
    hidden = host.in_graph & (kind.name != "serving")
    absent = _number(kind.outside if recorded else kind.missing)
    reason = np.where(hidden, _number("graph"), absent)
    reason = np.where(recorded & (host.launch == NO_ROW), _number("no_launch"), reason)
    for code, launched in host.uncertain.items() if recorded else ():
        reason[launched] = _number(code)
    rules = np.where(not_null(place), rule, reason)
    return {kind.name: place, f"{kind.name}_rule": _coded(rules, len(place))}


def _number(code: str) -> int:
    return CODES.index(code)


def _coded(codes: Int64 | int, count: int) -> pl.Series:
    """Codes from their numbers, as a rule column."""
    if isinstance(codes, int):
        return _ALL_CODES.new_from_index(codes, count)
    return gathered(_ALL_CODES, codes)


def _label(host: HostRows, kind: Kind) -> dict[str, pl.Series]:
    """Ranges of the user around the launch; if there are none, ranges that a library other than XLA opened."""
    columns = _enclosing_ranges(host, kind)
    named = host.of("framework") & ~host.named(_OF_XLA, "framework")
    library = host.climb(np.where(not_null(columns["label"]), NO_ROW, host.launch), named)
    given = pl.Series(library != NO_ROW)
    if given.any():
        path = path_names(host.parent, host.names, library, named)
        rule = _coded(_number("library_range"), len(given))
        columns["label"] = columns["label"].zip_with(~given, path)
        columns["label_rule"] = columns["label_rule"].zip_with(~given, rule)
    return columns


def _mark_lane_and_metadata(host: HostRows) -> dict[str, pl.Series]:
    """Lane and metadata of the marks around the launch, or around the forward op; ``detail`` is null."""
    lane, metadata = host.tables.host["lane"], host.tables.host["metadata"]
    nothing = pl.Series([None], dtype=pl.Categorical()).new_from_index(0, len(host.launch))
    columns = {"lane": nothing, "metadata": nothing, "detail": nothing}
    if lane.null_count() < len(lane):
        row, _ = _own_or_forward(host, not_null(lane))
        columns["lane"] = gathered(lane, row)
    if metadata.null_count() < len(metadata):
        has_metadata = not_null(metadata)
        row, _ = _own_or_forward(host, has_metadata)
        columns["metadata"] = merged_metadata(host.parent, metadata, row, has_metadata)
    return columns


def _source(host: HostRows, kind: Kind) -> dict[str, pl.Series]:
    """The innermost frame of the user's own code, else the file of a Triton kernel, else the innermost frame."""
    frames = host.frames
    row, rule = _own_or_forward(host, frames.own)
    library, _ = _own_or_forward(host, frames.own | frames.installed)
    rule = np.where(row == NO_ROW, _number("library_frame"), rule)
    in_file, of_file = _kernel_files(host, row == NO_ROW)
    row = np.where(row == NO_ROW, library, row)
    unlined = values_at(frames.unlined, row, missing=False)
    rule = np.where(unlined, _number("function_frame"), rule)
    place = gathered(frames.place, row)
    if in_file is not None:
        place = in_file.zip_with(in_file.is_not_null(), place)
        rule = np.where(not_null(in_file), of_file, rule)
    of_host = host.tables.host["position"]
    position = pl.Series([None], dtype=of_host.dtype).new_from_index(0, len(place))
    if place.null_count() < len(place):
        stated = gathered(of_host, row).fill_null(Position.FUNCTION.value)
        position = stated.zip_with(pl.Series(not_null(place)), position)
    return _column(host, kind, place, rule) | {"position": position}


def _kernel_files(host: HostRows, wanted: Mask) -> tuple[pl.Series | None, Int64]:
    """The files of activities that are Triton kernels, null for all others; and the number of the rule of each."""
    nothing = np.zeros(len(wanted), np.int64)
    table = host.tables.host
    if table["metadata"].null_count() == table.height or not wanted.any():
        return None, nothing
    named = pl.DataFrame({"kernel": table["name"], "recorded": table["metadata"]})
    launching = named.select(
        pl.col("recorded").cast(pl.String).str.contains('"kernel_file":', literal=True)
    ).to_series()
    row = host.climb(host.launch, mask_of(launching))
    row = np.where(wanted, row, NO_ROW)
    used = named.filter(launching).unique().select(pl.all().cast(pl.String))
    places = kernel_places(used.iter_rows())
    place_of_launch = pl.DataFrame(
        {
            "kernel": pl.Series([kernel for kernel, _ in places], dtype=pl.String),
            "recorded": pl.Series([recorded for _, recorded in places], dtype=pl.String),
            "place": pl.Series([place for place, _ in places.values()], dtype=pl.Categorical()),
            "rule": pl.Series([_number(rule) for _, rule in places.values()], dtype=pl.Int64),
        }
    )
    of_row = pl.DataFrame({name: gathered(named[name], row).cast(pl.String) for name in named.columns}).join(
        place_of_launch, on=["kernel", "recorded"], how="left", maintain_order="left"
    )
    return of_row["place"], values_or(of_row["rule"], 0)


def _phase(host: HostRows, kind: Kind) -> dict[str, pl.Series]:
    """Which part of a training step the launch is in."""
    phase, rule = launch_phases(host)
    columns = _column(host, kind, phase, rule)
    undecided = pl.Series(rule == _number("no_backward"), dtype=pl.Boolean)
    reason = _coded(_number("no_backward"), len(phase))
    columns["phase_rule"] = reason.zip_with(undecided, columns["phase_rule"]).alias("phase_rule")
    return columns


def _serving(host: HostRows, kind: Kind) -> dict[str, pl.Series]:
    """The part of serving, by the names of the ranges around the launch."""
    return _column(host, kind, launch_serving(host), _number("launch_ranges"))


def _step_kind(host: HostRows, kind: Kind) -> dict[str, pl.Series]:
    """What the pass of a server around the launch computes, by the names of its ranges."""
    top, step_of_row = server_passes(host.tables.host, host.parent)
    row = host.climb(host.launch, top)
    passes = sorted(step_of_row)
    steps = pl.Series([str(step_of_row[pass_row]) for pass_row in passes], dtype=pl.Categorical())
    names = gathered(steps, np.where(row == NO_ROW, NO_ROW, np.searchsorted(passes, row)))
    rules = np.where(row == NO_ROW, _number(kind.outside if passes else kind.missing), _number("launch_ranges"))
    return {kind.name: names, f"{kind.name}_rule": _coded(rules, len(names))}


def _iteration(host: HostRows, kind: Kind) -> dict[str, pl.Series]:
    """The iteration of the outermost loop of the XLA program around the launch."""
    place = iterations(host.tables, host.launch, host.every_name)
    if place is None:
        nothing = pl.Series([None], dtype=pl.Categorical()).new_from_index(0, len(host.launch))
        reason = _coded(_number(kind.missing), len(nothing))
        return {kind.name: nothing, f"{kind.name}_rule": reason}
    rules = np.where(not_null(place), _number("loop_rounds"), _number(kind.outside))
    return {kind.name: place, f"{kind.name}_rule": _coded(rules, len(place))}


_SPECIAL = {
    "label": _label,
    "source": _source,
    "phase": _phase,
    "serving": _serving,
    "step-kind": _step_kind,
    "iteration": _iteration,
}
"""The functions of the kinds that need more than `_enclosing_ranges`."""


# ---- Metadata of nested marks as one JSON object


MAX_MEMBERS = 64
MAX_CHARACTERS = 4096
"""Of the metadata that an activity inherits from the marks around it: without a limit, nested marks could make texts
thousands of times as long as the trace."""


def merged_metadata(parent: Int64, metadata: pl.Series, rows: Int64, has_metadata: Mask) -> pl.Series:
    """The metadata of all marks around each of the rows.

    Args:
        parent: parent row of every host row, `NO_ROW` at the top.
        metadata: Categorical JSON object of every host row, null where there is none.
        rows: innermost host row with metadata of each activity, `NO_ROW` for none.
        has_metadata: which host rows have metadata.

    Returns:
        Categorical Series of JSON objects, one value per row, null where no mark has metadata.
    """
    tree, node = path_tree(parent, metadata, rows, has_metadata)
    node_texts = tree.name.cast(pl.String).to_list()
    texts: list[str | None] = []
    merged_pairs: dict[tuple[str | None, str], str | None] = {}  # many marks have the same metadata as others
    for above, text in zip(tree.parent.tolist(), node_texts, strict=True):
        pair = (None if above == NO_ROW else texts[above], text)
        if pair not in merged_pairs:
            merged_pairs[pair] = _merged_objects(*pair)
        texts.append(merged_pairs[pair])
    texts.append(None)  # for NO_ROW
    return (
        pl.Series("metadata", texts, dtype=pl.String)
        .cast(pl.Categorical())
        .gather(np.where(node == NO_ROW, len(texts) - 1, node))
    )


def merge_metadata(outer: pl.Series, inner: pl.Series) -> pl.Series:
    """Merges two metadata columns row by row; ``inner`` overrides ``outer``. See `merged_metadata`."""
    pairs = pl.DataFrame({"outer": outer, "inner": inner})
    distinct = pairs.unique(maintain_order=True)
    texts = [_merged_objects(*pair) for pair in distinct.cast(pl.String).iter_rows()]
    merged = distinct.with_columns(metadata=pl.Series(texts, dtype=pl.String).cast(pl.Categorical()))
    both = ["outer", "inner"]
    return pairs.join(merged, on=both, how="left", maintain_order="left", nulls_equal=True)["metadata"]


def _merged_objects(outer: str | None, inner: str | None) -> str | None:
    """Merges two JSON objects; members of ``inner`` override those of ``outer``."""
    members = _bounded(outer) | _members(inner)
    return msgspec.json.encode(members).decode() if members else None


def _members(text: str | None) -> dict[str, msgspec.Raw]:
    if text is None:
        return {}
    return decoded(text, dict[str, msgspec.Raw])


def _bounded(text: str | None) -> dict[str, msgspec.Raw]:
    """The last members of an object, as many as the bounds allow, in their order."""
    members = _members(text)
    kept = min(len(members), MAX_MEMBERS)
    if text is not None and len(text) > MAX_CHARACTERS:
        sizes = (len(key) + len(bytes(members[key])) for key in reversed(members))
        within_bounds = (total <= MAX_CHARACTERS for total in itertools.accumulate(sizes))
        kept = min(kept, sum(itertools.takewhile(bool, within_bounds)))
    return dict(itertools.islice(members.items(), len(members) - kept, None))
