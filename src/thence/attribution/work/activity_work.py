"""FLOP and bytes of every device activity, from the best source that the trace has.

In this order, and for FLOP and bytes each on its own: what the program says of a mark (``thence.mark(flop=, bytes=)``),
the HLO instruction, the call of the operator. An instruction, a call or a mark counts once, over the sum of its
kernels: its FLOP and bytes are shared among them by their time. Copies have their own bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.attribution.work.data_types import data_types
from thence.attribution.work.flop import FLOP
from thence.attribution.work.instruction_work import instruction_work
from thence.attribution.work.operands import ELEMENT_TYPES, arguments_of, tensors_of
from thence.attribution.work.operator_calls import calls_in_graphs, calls_of_operators
from thence.attribution.work.said import said_work
from thence.attribution.work.served_attention import SERVED_ATTENTION, served_attention
from thence.attribution.work.traffic import traffic_of
from thence.model.attributed import of_each_activity
from thence.model.names import ON_DEVICE, matching
from thence.model.peaks import DTYPES

if TYPE_CHECKING:
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
_SHARED: dict[str, Any] = {"index": pl.UInt32(), "flop": pl.Float64(), "traffic": pl.Float64(), "type": pl.String()}


@of_each_activity
def activity_work(trace: Attributed) -> pl.DataFrame:
    """The work of each device activity: one row for each row of ``gpu``, in the columns of `WORK`.

    Args:
        trace: a trace; its operators have the column ``inputs`` where the profiler recorded shapes.
    """
    if trace.work is not None:
        return trace.work
    activities = trace.gpu.select(
        "kind", "duration", "bytes", "name", copied=pl.col("kind").is_in(["memcpy", "memset"]), dtype=data_types(trace)
    ).with_row_index()
    result = activities.select("index")
    every = {
        "said": said_work(trace),
        "hlo": _of_instructions(trace),
        "operator": _of_calls(activities, calls_of_operators(trace), trace.places["step"]),
        "graph_operator": _of_calls(activities, calls_in_graphs(trace), trace.places["step"]),
    }
    sources = {rule: calls for rule, calls in every.items() if not calls.is_empty()} or {"said": every["said"]}
    for rule, calls in sources.items():
        columns = {name: f"{name}_{rule}" for name in ("flop", "traffic", "type")}
        shared = _shared(activities, calls).with_columns(pl.lit(value=True).alias(f"called_{rule}")).rename(columns)
        result = result.join(shared, on="index", how="left", maintain_order="left")
    names = list(sources)

    def first(column: str) -> pl.Expr:
        return pl.coalesce(pl.col(f"{column}_{rule}") for rule in names)

    times_moved = pl.when(pl.lit(matching(trace.gpu["name"], ON_DEVICE))).then(2).otherwise(1)
    own = pl.when("copied").then(times_moved * pl.col("bytes").cast(pl.Float64))
    rules = [
        pl.when(pl.col(f"{column}_{rule}").is_not_null()).then(pl.lit(rule))
        for column in ("flop", "traffic")
        for rule in names
    ]
    return (
        activities.hstack(result.drop("index"))
        .select(
            called=pl.any_horizontal(pl.col(f"called_{rule}").fill_null(value=False) for rule in names),
            flop=pl.when(~pl.col("copied")).then(first("flop")),
            bytes=pl.when("copied").then(own).otherwise(first("traffic")),
            dtype=pl.when(~pl.col("copied")).then(pl.coalesce(first("type"), pl.col("dtype").cast(pl.String))),
            work_rule=pl.when("copied").then(pl.lit("copy")).otherwise(pl.coalesce(rules)),
        )
        .select(pl.col(name).cast(dtype) for name, dtype in WORK.items())
    )


def _shared(activities: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """The part of each activity in the work of its call, by its share of the time of the call's kernels.

    Parts are whole numbers that add up to the work of the call. The type is that of the call's inputs. Of float32,
    which can be multiplied in TF32, and of unknown types the name of the longest kernel decides.

    Args:
        activities: index, duration, copied and dtype.
        calls: index of an activity, call (any number), flop, traffic and type of the whole call.
    """
    timed = calls.join(activities.select("index", "duration", "copied", "dtype"), on="index").sort("call", "index")
    if timed.is_empty():
        return pl.DataFrame(schema=_SHARED)
    call, copied = (timed[name].to_numpy() for name in ("call", "copied"))
    time = np.where(copied, 0, timed["duration"].to_numpy())
    first = np.flatnonzero(np.append(True, call[1:] != call[:-1]))
    size = np.diff(np.append(first, len(call)))
    until = np.cumsum(time)
    until -= np.repeat(until[first] - time[first], size)
    whole = np.repeat(until[first + size - 1], size)
    # Copies of a call take no part: up to them as much is reached as before them.
    reached_share = until / np.where(whole > 0, whole, 1)
    takes_part = (whole > 0) & ~copied

    def part(work: str) -> pl.Series:
        reached = np.rint(timed[work].to_numpy() * reached_share)
        before = np.append(0.0, reached[:-1])
        before[first] = 0
        return pl.Series(np.where(takes_part, reached - before, np.nan)).fill_nan(None)

    longest = np.lexsort((np.where(copied, -1, time), call))[first + size - 1]
    named = timed["dtype"].cast(pl.String).gather(np.repeat(longest, size))
    decided = pl.when(pl.col("type").ne_missing("float32")).then("type")
    return timed.select(
        "index", flop=part("flop"), traffic=part("traffic"), type=pl.coalesce(decided, named, pl.col("type"))
    )


def _of_calls(activities: pl.DataFrame, calls: pl.DataFrame, steps: pl.Series) -> pl.DataFrame:
    """The work of calls: index, call, flop, traffic and type. Equal calls are computed once.

    Args:
        activities: index, name and dtype.
        calls: as `calls_of_operators` returns them.
        steps: name of the step of each activity; servers state lengths of sequences there.
    """
    if calls.is_empty():
        return pl.DataFrame(schema=_SHARED | {"call": pl.UInt32()})
    text = pl.col("name").cast(pl.String)
    stated = activities.select("name", "dtype").unique()
    stated = stated.with_columns(
        element_bytes=pl.coalesce(
            text.str.extract(_ELEMENT_SIZE).cast(pl.Int64),
            pl.col("dtype").cast(pl.String).replace_strict(_DATA_TYPE_BYTES, default=None, return_dtype=pl.Int64),
        )
    )
    of_kernel = activities.join(stated, on=["name", "dtype"], nulls_equal=True).select("index", "element_bytes")
    sized = calls.join(of_kernel, on="index").with_columns(
        # of several kernels, all have the size that one of them says
        element_bytes=pl.col("element_bytes").max().over("call")
    )
    used = sized["name"].unique()
    served = sized["name"].is_in(used.filter(used.cast(pl.String).is_in(list(SERVED_ATTENTION))).implode())
    step = steps.gather(sized["index"]).cast(pl.String) if served.any() else pl.lit(None, pl.String)
    sized = sized.with_columns(step=pl.when(served).then(step))
    key = ["name", "inputs", "element_bytes", "step"]
    distinct = sized.select(key).unique()
    works = [_work_of_call(*call) for call in distinct.cast({"name": pl.String, "inputs": pl.String}).iter_rows()]
    schema = {"flop": pl.Float64(), "traffic": pl.Float64(), "type": pl.String()}
    distinct = distinct.hstack(pl.DataFrame(works, schema=schema, orient="row"))
    return sized.join(distinct, on=key, nulls_equal=True).select("index", "call", *schema)


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
    empty: dict[str, Any] = {**_SHARED, "call": pl.UInt32()}
    modules = trace.programs["hlo"].drop_nulls().unique().to_list()
    if not modules:
        return pl.DataFrame(schema=empty)
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
