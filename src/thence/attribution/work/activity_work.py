"""FLOP and bytes of every device activity, from the operator that launched it.

An operator counts once, over the sum of its kernels: its FLOP and bytes are shared among them by their time. Of nested
operators the outermost with FLOP decides, because the inner ones are how it computes; if none has FLOP, the innermost
that has inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.attribution.work.flop import FLOP
from thence.attribution.work.operands import arguments_of, tensors_of
from thence.attribution.work.operator_calls import operator_rows
from thence.attribution.work.traffic import traffic_of
from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

WORK = {"operator": pl.Int64(), "flop": pl.Float64(), "bytes": pl.Float64(), "dtype": pl.String()}
"""Columns of `activity_work`: row in ``host`` of the operator, FLOP, bytes of memory traffic, and the data type that
it computes in; null where unknown."""
ELEMENT_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
"""Bytes of an element by the data type in which a kernel computes."""
_TYPES = {
    "float": "float32",
    "double": "float64",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "signed char": "int8",
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2"), "float8"),
}
"""Data types by the names of element types of inputs."""


def activity_work(trace: Attributed, data_types: pl.Series) -> pl.DataFrame:
    """The work of each device activity: one row for each row of ``gpu``, in the columns of `WORK`.

    Args:
        trace: a trace; its operators have the column ``inputs`` where the profiler recorded shapes.
        data_types: in which each activity computes. They give the size of elements in lists of tensors, whose types are
            not recorded.
    """
    rows = operator_rows(trace)
    element_bytes = data_types.replace_strict(ELEMENT_BYTES, default=None, return_dtype=pl.Int64)
    operator = pl.Series(rows).replace(NO_ROW, None)
    activities = trace.gpu.select("kind", "duration", "bytes", operator=operator, element_bytes=element_bytes)
    called = trace.host.select("name", "inputs")[rows[rows != NO_ROW]].cast(pl.String)
    named = activities.filter(pl.col("operator").is_not_null()).hstack(called)
    of_call = named.select("name", "inputs", "element_bytes").unique()
    works = [_work_of_call(*call) for call in of_call.iter_rows()]
    schema = {"flop": pl.Float64(), "traffic": pl.Float64(), "type": pl.String()}
    of_call = of_call.hstack(pl.DataFrame(works, schema=schema, orient="row"))
    of_operator = (
        named.join(of_call, on=["name", "inputs", "element_bytes"], nulls_equal=True)
        .group_by("operator")
        .agg(
            pl.col("flop").max(),
            pl.col("traffic").max(),
            pl.col("duration").filter(pl.col("kind") == "kernel").sum().alias("whole"),
            pl.col("type").first(),
        )
    )
    shared = activities.join(of_operator, on="operator", how="left", maintain_order="left")
    share = pl.col("duration") / pl.when(pl.col("whole") > 0).then("whole")
    copied = pl.col("kind").is_in(["memcpy", "memset"])
    return shared.select(
        "operator",
        flop=pl.when(~copied).then(pl.col("flop") * share),
        bytes=pl.when(copied).then(pl.col("bytes").cast(pl.Float64)).otherwise(pl.col("traffic") * share),
        dtype=pl.coalesce(pl.Series(data_types).cast(pl.String), pl.when(~copied).then("type")),
    ).cast(WORK)  # type: ignore[arg-type]


def _work_of_call(name: str, inputs: str, element_bytes: int | None) -> tuple[int | None, int | None, str | None]:
    """FLOP, bytes, and the data type of the first tensor of floating-point numbers, or of 8 bits, among the inputs."""
    arguments = arguments_of(inputs)
    if arguments is None:
        return None, None, None
    types = (tensor.type for argument in arguments for tensor in tensors_of(argument))
    data_type = next((_TYPES[name] for name in types if name in _TYPES), None)
    flop = FLOP[name](arguments) if name in FLOP else None
    return flop, traffic_of(name, arguments, element_bytes), data_type
