"""FLOP and bytes of every device activity, from the best source that the trace has.

In this order, and for FLOP and bytes each on its own: what the program says of a mark (``thence.mark(flop=, bytes=)``),
the HLO instruction, the call of the operator. An instruction, a call or a mark counts once, over the sum of its
kernels: its FLOP and bytes are shared among them by their time. Copies have their own bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.attribution.host_rows import gathered
from thence.attribution.work.data_types import data_types
from thence.attribution.work.flop import FLOP
from thence.attribution.work.instruction_work import instruction_work
from thence.attribution.work.operands import ELEMENT_TYPES, arguments_of, tensors_of
from thence.attribution.work.operator_calls import calls_in_graphs, calls_of_operators
from thence.attribution.work.said import said_work
from thence.attribution.work.served_attention import SERVED_ATTENTION, served_attention
from thence.attribution.work.traffic import traffic_of
from thence.model.attributed import of_each_activity
from thence.model.columns import at_once, name_codes, values_or
from thence.model.intervals import NO_ROW
from thence.model.names import ON_DEVICE, among, distinct_names, matching
from thence.model.peaks import DTYPES
from thence.model.tables import copies_or_sets
from thence.model.trees import numbered, numbered_together

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed

RULES = ("said", "hlo", "operator", "graph_operator", "copy")
"""Where FLOP and bytes come from: a mark, the HLO instruction, the operator that launched the activity, the operator
that was called when its CUDA graph was captured or in the eager run, and the activity's own bytes."""
WORK: dict[str, Any] = {
    "called": pl.Boolean(),  # whether the inputs of its operator, its instruction, or a statement of a mark are known
    "flop": pl.Float64(),
    "bytes": pl.Float64(),
    "dtype": pl.Enum(DTYPES),
    "work_rule": pl.Enum(RULES),
}
"""Columns of `activity_work`: whether anything is known of it, FLOP, bytes of memory traffic, the data type that it
computes in, and the source of the FLOP, or else of the bytes; null where unknown."""
_DATA_TYPE_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
"""Bytes of an element by the data type in which a kernel computes."""
_ELEMENT_SIZE = r"OpaqueType<([0-9]{1,2})u?>"
"""In names of PyTorch's kernels that move elements of any type: their bytes."""
_SHARED: dict[str, Any] = {
    "index": pl.UInt32(), "call": pl.UInt32(), "flop": pl.Float64(), "traffic": pl.Float64(), "type": WORK["dtype"]
}  # fmt: skip
"""The work of calls: of each activity the number of its call, and the FLOP, bytes and data type of the whole call."""


@of_each_activity
def activity_work(trace: Attributed) -> pl.DataFrame:
    """The work of each device activity: one row for each row of ``gpu``, in the columns of `WORK`.

    Args:
        trace: a trace; its operators have the column ``inputs`` where the profiler recorded shapes.
    """
    if trace.work is not None:
        return trace.work
    copied = copies_or_sets(trace.gpu).alias("copied")
    activities = trace.gpu[["duration", "bytes", "name"]].hstack([copied, _types(data_types(trace)).alias("dtype")])
    every = {
        "said": said_work(trace),
        "hlo": _of_instructions(trace),
        "operator": _of_calls(activities, calls_of_operators(trace), trace.places["step"]),
        "graph_operator": _of_calls(activities, calls_in_graphs(trace), trace.places["step"]),
    }
    known = {rule: calls for rule, calls in every.items() if not calls.is_empty()} or {"said": every["said"]}
    sources = {rule: _shared(activities, calls.cast(_SHARED)) for rule, calls in known.items()}  # type: ignore[arg-type]
    columns = [values.alias(f"{name}_{rule}") for rule, shared in sources.items() for name, values in shared.items()]
    names = list(sources)

    def first(column: str) -> pl.Expr:
        return pl.coalesce(pl.col(f"{column}_{rule}") for rule in names)

    on_device = copied.any() and matching(trace.gpu["name"], ON_DEVICE)
    own = pl.when("copied").then(pl.when(pl.lit(on_device)).then(2).otherwise(1) * pl.col("bytes").cast(pl.Float64))
    rules = [
        pl.when(pl.col(f"{column}_{rule}").is_not_null()).then(pl.lit(rule))
        for column in ("flop", "traffic")
        for rule in names
    ]
    return (
        activities.hstack(columns)
        .lazy()
        .select(
            called=pl.any_horizontal(f"called_{rule}" for rule in names),
            flop=pl.when(~pl.col("copied")).then(first("flop")),
            bytes=pl.when("copied").then(own).otherwise(first("traffic")),
            dtype=pl.when(~pl.col("copied")).then(pl.coalesce(first("type"), "dtype")),
            work_rule=pl.when("copied").then(pl.lit("copy")).otherwise(pl.coalesce(rules)),
        )
        .select(pl.col(name).cast(dtype) for name, dtype in WORK.items())
        .pipe(at_once)
    )


def _types(names: pl.Series) -> pl.Series:
    """Data types by their names (Categorical)."""
    number, row = numbered(name_codes(names))
    return names[row].cast(pl.String).cast(WORK["dtype"])[number]


def _shared(activities: pl.DataFrame, calls: pl.DataFrame) -> dict[str, pl.Series]:
    """The part of each activity in the work of its call, by its share of the time of the call's kernels.

    Parts are whole numbers that add up to the work of the call. The type is that of the call's inputs. Of float32,
    which can be multiplied in TF32, and of unknown types the name of the longest kernel decides.

    Args:
        activities: duration, copied and dtype.
        calls: index of an activity, call (any number), flop, traffic and type of the whole call.

    Returns:
        flop, traffic and type of each activity, null where unknown, and called: whether it is one of a call.
    """
    calls, first, size = _in_order(calls)
    call, index = (calls[name].to_numpy() for name in ("call", "index"))
    place = np.full(activities.height, NO_ROW, np.int64)
    place[index] = np.arange(len(index))
    copied = activities["copied"].to_numpy()[index]
    time = np.where(copied, 0, activities["duration"].to_numpy()[index])
    until = np.cumsum(time)
    until -= np.repeat(until[first] - time[first], size)
    whole = np.repeat(until[first + size - 1], size)
    # Copies of a call take no part: up to them as much is reached as before them.
    reached_share = until / np.where(whole > 0, whole, 1)
    takes_part = (whole > 0) & ~copied

    def part(work: str) -> pl.Series:
        reached = np.rint(calls[work].to_numpy() * reached_share)
        before = np.append(0.0, reached)[:-1]
        before[first] = 0
        return pl.Series(np.where(takes_part, reached - before, np.nan), nan_to_null=True)

    longest = np.lexsort((np.where(copied, -1, time), call))[first + size - 1]
    named = activities["dtype"][np.repeat(index[longest], size)]
    decided = pl.when(pl.col("type").ne_missing("float32")).then("type")
    types = calls.select(pl.coalesce(decided, pl.lit(named), pl.col("type"))).to_series()
    columns = {"flop": part("flop"), "traffic": part("traffic"), "type": types}
    return {"called": pl.Series(place != NO_ROW), **{name: gathered(values, place) for name, values in columns.items()}}


def _in_order(calls: pl.DataFrame) -> tuple[pl.DataFrame, Int64, Int64]:
    """Rows in the order of their calls, then activities; the first row and the number of rows of each call."""
    call, index = (calls[name].to_numpy() for name in ("call", "index"))
    order = np.lexsort((index, call))
    call = call[order]
    first = np.flatnonzero(np.append(True, call[1:] != call[:-1]))[: len(call)]
    return calls[order], first, np.diff(np.append(first, len(call)))


def _of_calls(activities: pl.DataFrame, calls: pl.DataFrame, steps: pl.Series) -> pl.DataFrame:
    """The work of calls: index, call, flop, traffic and type. Equal calls are computed once.

    Args:
        activities: name and dtype.
        calls: as `calls_of_operators` returns them.
        steps: name of the step of each activity; servers state lengths of sequences there.
    """
    if calls.is_empty():
        return pl.DataFrame(schema=_SHARED)
    calls, first, size = _in_order(calls)
    index = calls["index"].to_numpy().astype(np.int64)
    # of several kernels, all have the size that one of them says
    element_bytes = np.repeat(np.maximum.reduceat(_element_bytes(activities)[index], first), size)
    used = distinct_names(calls["name"])
    served = among(calls["name"], used.filter(used.cast(pl.String).is_in(list(SERVED_ATTENTION))))
    step = gathered(steps, np.where(served, index, NO_ROW))
    names = {"name": calls["name"], "inputs": calls["inputs"], "step": step}
    number, row = numbered_together(*map(name_codes, names.values()), element_bytes)
    texts = [values[row].cast(pl.String) for values in names.values()]
    equal = zip(*texts, element_bytes[row].tolist(), strict=True)
    works = [_work_of_call(name, inputs, size or None, step) for name, inputs, step, size in equal]
    schema = {name: _SHARED[name] for name in ("flop", "traffic", "type")}
    return calls.select("index", "call").hstack(pl.DataFrame(works, schema, orient="row")[number])


def _element_bytes(activities: pl.DataFrame) -> Int64:
    """Bytes of an element of each activity, by its name and data type; 0 where unknown."""
    number, row = numbered_together(*(name_codes(activities[name]) for name in ("name", "dtype")))
    names, types = (activities[name][row].cast(pl.String) for name in ("name", "dtype"))
    said = names.str.extract(_ELEMENT_SIZE).cast(pl.Int64)
    of_type = types.replace_strict(_DATA_TYPE_BYTES, default=None, return_dtype=pl.Int64)
    return values_or(said.zip_with(said.is_not_null(), of_type), 0)[number]


def _work_of_call(
    name: str, inputs: str, element_bytes: int | None, step: str | None
) -> tuple[int | None, int | None, str | None]:
    """FLOP, bytes, and the narrowest data type among the inputs: sums, scales and results are often wider."""
    arguments = arguments_of(inputs)
    if arguments is None:
        return None, None, None
    types = (ELEMENT_TYPES.get(tensor.type or "") for argument in arguments for tensor in tensors_of(argument))
    multiplied = [operand for operand in types if operand is not None and operand.data_type is not None]
    data_type = min(multiplied, key=lambda operand: operand.bytes).data_type if multiplied else None
    if name in SERVED_ATTENTION:
        return *served_attention(name, arguments, step), data_type
    flop = FLOP[name](arguments) if name in FLOP else None
    return flop, traffic_of(name, arguments, element_bytes), data_type


def _of_instructions(trace: Attributed) -> pl.DataFrame:
    """The work of each execution of an HLO instruction: index of an activity, call, flop, traffic and type.

    Kernels of one instruction in one execution of its program are divided among as many executions of the instruction
    as its rarest kernel has, in the order of their begin: in a loop it runs several times.
    """
    if trace.programs["hlo"].null_count() == trace.programs.height:
        return pl.DataFrame(schema=_SHARED)
    modules = trace.programs["hlo"].drop_nulls().unique().to_list()
    module_of = trace.programs.select(program=pl.int_range(pl.len(), dtype=pl.Int32), module="hlo").drop_nulls()
    ran = (
        trace.gpu.select("program", "start", "name", "kind", pl.col("hlo").cast(pl.String))
        .with_row_index()
        .filter(~pl.col("kind").is_in(["memcpy", "memset"]))
        .drop_nulls(["program", "hlo"])
        .join(module_of, on="program", maintain_order="left")
        .sort("start", maintain_order=True)
    )
    execution = ["program", "hlo"]
    numbered = ran.with_columns(of_name=pl.len().over(*execution, "name"))
    numbered = numbered.with_columns(times=pl.col("of_name").min().over(execution))
    turn = pl.int_range(pl.len()).over(*execution, "name") * pl.col("times") // pl.col("of_name")
    numbered = numbered.with_columns(turn=turn).with_columns(call=pl.struct(*execution, "turn").rank("dense"))
    works = pl.concat(
        instruction_work(trace.hlo[module]).with_columns(module=pl.lit(module, module_of.schema["module"]))
        for module in modules
    )
    return numbered.join(works, on=["module", "hlo"]).select(
        pl.col("index").cast(pl.UInt32), pl.col("call").cast(pl.UInt32), "flop", traffic="bytes", type="type"
    )
