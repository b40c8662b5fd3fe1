"""The call of an operator whose work each device activity does.

Of nested operators the outermost with FLOP decides, because the inner ones are how it computes; if none has FLOP, the
innermost that has inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.replays import in_cuda_graph
from thence.attribution.work.flop import FLOP
from thence.attribution.work.operands import ELEMENT_TYPES, Tensor, arguments_of, tensors_of
from thence.attribution.work.served_attention import SERVED_ATTENTION
from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW, chain_to
from thence.model.names import distinct_names

if TYPE_CHECKING:
    from thence.attribution.work.operands import Argument
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed

CALL = {"index": pl.UInt32(), "call": pl.UInt32(), "name": pl.Categorical(), "inputs": pl.Categorical()}
"""Columns of calls: row of an activity in gpu, number of the call that launched it, the operator and its inputs."""
_MAX_LISTED = 4
"""Tensors of a list that the name of a shape shows."""
_MAX_DEPTH = 64
"""Operators with FLOP inside each other; PyTorch nests three."""


def operator_rows(trace: Attributed) -> Int64:
    """Row in host of the operator whose work each activity does, `NO_ROW` for none."""
    host = trace.host
    launch = row_numbers(trace.places["launch"])
    if host["inputs"].null_count() == host.height:
        return np.full(len(launch), NO_ROW, np.int64)
    parent = row_numbers(host["parent"])
    has_inputs = host["inputs"].is_not_null().to_numpy()
    used = distinct_names(host["name"])
    names = used.filter(used.cast(pl.String).is_in([*FLOP, *SERVED_ATTENTION]))
    multiplies = _outermost(
        parent, launch, has_inputs & host["name"].is_in(names.implode()).fill_null(value=False).to_numpy()
    )
    return np.where(multiplies != NO_ROW, multiplies, chain_to(parent, launch, has_inputs))


def _outermost(parent: Int64, rows: Int64, wanted: Mask) -> Int64:
    """The outermost wanted row among each row and its ancestors, `NO_ROW` for none."""
    outermost = chain_to(parent, rows, wanted)
    for _ in range(_MAX_DEPTH):
        inside = outermost != NO_ROW
        further = np.full(len(outermost), NO_ROW, np.int64)
        further[inside] = chain_to(parent, parent[outermost[inside]], wanted)
        if (further == NO_ROW).all():
            break
        outermost = np.where(further != NO_ROW, further, outermost)
    return outermost


def operator_calls(trace: Attributed) -> pl.DataFrame:
    """What a replay of each activity needs to know of the call that launched it, in the order of ``gpu``.

    Returns:
        columns operator and inputs (text), node (position of the activity among those of the call, in order of their
        launch), nodes (number of the activities of the call); null where no operator with inputs launched it.
    """
    rows = operator_rows(trace)
    known = pl.Series(rows).replace(NO_ROW, None)
    launched = trace.host["start"].gather(trace.places["launch"].cast(pl.UInt32))
    calls = pl.DataFrame({"call": known, "launched": launched, "start": trace.gpu["start"]}).with_row_index()
    numbered = (
        calls.drop_nulls("call")
        .sort("launched", "start", maintain_order=True)
        .select("index", node=pl.int_range(pl.len()).over("call"), nodes=pl.len().over("call"))
    )
    of_row = known.cast(pl.UInt32)
    return (
        calls.join(numbered, on="index", how="left", maintain_order="left")
        .select(pl.col("node", "nodes").cast(pl.Int32))
        .with_columns(
            operator=trace.host["name"].gather(of_row).cast(pl.String),
            inputs=trace.host["inputs"].gather(of_row).cast(pl.String),
        )
        .select("operator", "inputs", "node", "nodes")
    )


def calls_of_operators(trace: Attributed) -> pl.DataFrame:
    """The call that launched each activity outside of CUDA graphs, in the columns of `CALL`."""
    rows = operator_rows(trace)
    if (rows == NO_ROW).all():
        return pl.DataFrame(schema=CALL)
    launch = row_numbers(trace.places["launch"])
    index = np.flatnonzero((rows != NO_ROW) & ~in_cuda_graph(trace, launch))
    called = trace.host.select("name", "inputs")[rows[index]]
    return called.select(index=pl.Series(index), call=pl.Series(rows[index]), name="name", inputs="inputs").cast(CALL)  # type: ignore[arg-type]


def calls_in_graphs(trace: Attributed) -> pl.DataFrame:
    """The call to which each activity of a CUDA graph corresponds, in the columns of `CALL`.

    Activities of one launch of a graph belong together if they are the parts of equal calls and equally many such
    parts began before them. Calls of which a part is missing are left out.
    """
    if trace.graph_places["operator"].null_count() == trace.graph_places.height:
        return pl.DataFrame(schema=CALL)
    known = trace.graph_places.select("gpu", "operator", "inputs", "node", "nodes").drop_nulls()
    launched = trace.gpu[known["gpu"].cast(pl.UInt32)].select("rank", "correlation", "graph", "start")
    kind = ["rank", "correlation", "graph", "operator", "inputs", "nodes"]
    numbered = (
        known.hstack(launched)
        .sort("start", maintain_order=True)
        .with_columns(turn=pl.int_range(pl.len()).over(*kind, "node"))
        .with_columns(call=pl.struct(*kind, "turn").rank("dense"))
    )
    whole = numbered.filter(pl.len().over("call") == pl.col("nodes"))
    return whole.select(index="gpu", call="call", name="operator", inputs="inputs").cast(CALL)  # type: ignore[arg-type]


def call_shapes(trace: Attributed) -> pl.Series:
    """The operator of each row of ``gpu`` with its inputs, such as ``aten::mm bf16[4096,1024] bf16[1024,512]``.

    Returns:
        Categorical; null where the inputs of its operator are not known.
    """
    calls = pl.concat([calls_of_operators(trace), calls_in_graphs(trace)])
    distinct = calls.select("name", "inputs").unique()
    texts = [_shape_text(name, inputs) for name, inputs in distinct.cast(pl.String).iter_rows()]
    named = calls.join(distinct.with_columns(shape=pl.Series(texts, dtype=pl.String)), on=["name", "inputs"])
    rows = pl.select(index=pl.int_range(trace.gpu.height, dtype=pl.UInt32))
    shapes = rows.join(named.unique("index", keep="first"), on="index", how="left", maintain_order="left")
    return shapes["shape"].cast(pl.Categorical())


def _shape_text(name: str, inputs: str) -> str | None:
    arguments = arguments_of(inputs)
    if arguments is None:
        return None
    texts = [_tensors_text(argument) for argument in arguments]
    return " ".join((name, *(text for text in texts if text)))


def _tensors_text(argument: Argument) -> str:
    tensors = tensors_of(argument)
    parts = [f"{_short_type(tensor.type or '')}{list(tensor.shape)}".replace(" ", "") for tensor in tensors]
    if isinstance(argument, Tensor):
        return parts[0]
    if len(parts) > _MAX_LISTED:
        parts = [*parts[: _MAX_LISTED - 1], f"... {len(parts) - _MAX_LISTED + 1} more"]
    return f"({' '.join(parts)})" if parts else ""


def _short_type(name: str) -> str:
    return ELEMENT_TYPES[name].short if name in ELEMENT_TYPES else name
