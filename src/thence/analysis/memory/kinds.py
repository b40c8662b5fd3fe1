"""What allocations are for, where a trace of PyTorch proves it: `thence.model.tables.MEMORY_KINDS`.

A pass is a run of operators of one phase. Memory from before the trace is of no known kind.

communication    allocated in a range of collectives or of FSDP
parameter        allocated where a module moves or converts its parameters and buffers
temporary        returned before the operator that allocated it ends, or before the pass ends
workspace        of the size that PyTorch gives cuBLAS, allocated in a product of matrices and never returned
activation       allocated in a forward pass, and returned after the following backward pass began
gradient         allocated in a backward pass, and live when the optimizer or the next forward pass begins
optimizer_state  allocated by the optimizer, and live when the next forward pass begins
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.memory.places import PLACES, MemoryPlaces, next_start
from thence.model.columns import mask_of, values_or
from thence.model.intervals import NO_ROW, chain_to
from thence.model.phases import Phase
from thence.model.tables import MEMORY_KINDS

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed

_OF_COLLECTIVES = r"^(?:c10d::|_c10d_functional::|nccl:|gloo:|fsdp::|FSDP::|record_param_comms$)"
_OF_MODULES = r"(?:^|/)torch/nn/modules/module\.py(?::\d+|\(\d+\):) _apply$"
"""Names of the frames in which `torch.nn.Module` moves parameters and buffers."""
_PRODUCT = r"^aten::(?:_?(?:scaled|grouped|int)_)?(?:addmm|mm|baddbmm|bmm|addbmm|addmv|mv|dot|_addmm_activation)$"
_CUBLAS_BYTES = (33_554_432, 8_519_680)
"""What PyTorch allocates for each handle and stream of cuBLAS, on Hopper and newer GPUs, and on others."""
_NEVER = np.iinfo(np.int64).max


def placed_memory(trace: Attributed, table: pl.DataFrame | None = None) -> pl.DataFrame:
    """Allocations with every place and kind that is known.

    Args:
        table: as `thence.model.tables.MEMORY`, of which some columns may be further ones; None: all of the trace.
    """
    memory = trace.memory if table is None else table
    places = MemoryPlaces(trace, memory)
    return memory.with_columns(*(places.of_calls(kind).alias(kind) for kind in PLACES), kinds(places).alias("kind"))


def kinds(places: MemoryPlaces) -> pl.Series:
    """The kind of each allocation: what the producer says, else what can be proved; Enum, null if unknown."""
    rows = places.calls
    stated = rows["kind"]
    if stated.null_count() == 0 or places.trace.host.is_empty():
        return stated
    start = values_or(rows["start"], _NEVER)
    end = values_or(rows["end"], _NEVER)
    kind = _by_pass(places, start, end)
    host = places.trace.host
    operator_end = (host["start"] + host["duration"]).to_numpy()[places.operator]
    kind[(places.operator != NO_ROW) & (end <= operator_end)] = MEMORY_KINDS.index("temporary")
    product = places.of_calls("op").cast(pl.String).str.contains(_PRODUCT).fill_null(value=False).to_numpy()
    product &= rows["bytes"].is_in(_CUBLAS_BYTES).to_numpy() & (end == _NEVER)
    kind[product] = MEMORY_KINDS.index("workspace")
    kind[_around(places, "python", _OF_MODULES) & (end == _NEVER)] = MEMORY_KINDS.index("parameter")
    for category in ("op", "range", "framework"):
        kind[_around(places, category, _OF_COLLECTIVES)] = MEMORY_KINDS.index("communication")
    kind[rows["start"].is_null().to_numpy()] = NO_ROW
    names = pl.Series(MEMORY_KINDS, dtype=pl.Enum(MEMORY_KINDS))
    proved = names.gather(pl.Series(kind).replace(NO_ROW, None).cast(pl.UInt32))
    return stated.zip_with(stated.is_not_null(), proved).alias("kind")


def _around(places: MemoryPlaces, category: str, pattern: str) -> Mask:
    """Which allocations were made in a host range of a category with such a name."""
    host = places.trace.host
    of_category = host["category"] == category
    names = host["name"].filter(of_category).unique().drop_nulls()
    fitting = names.filter(names.cast(pl.String).str.contains(pattern))
    if fitting.is_empty():
        return np.zeros(places.calls.height, np.bool_)
    wanted = (of_category & host["name"].is_in(fitting.implode())).fill_null(value=False).to_numpy()
    around: Mask = chain_to(places.parent, places.host, wanted) != NO_ROW
    return around


def _by_pass(places: MemoryPlaces, start: Int64, end: Int64) -> Int64:
    """The kind by the passes in which memory is allocated and returned: position in `MEMORY_KINDS`, or `NO_ROW`."""
    kind = np.full(len(start), NO_ROW, np.int64)
    phase, rank = places.of_calls("phase").cast(pl.String), places.calls["rank"].to_numpy()
    of_phase = {p: mask_of(phase == p.value) for p in Phase}

    def put(mask: Mask, name: str) -> None:
        kind[mask] = MEMORY_KINDS.index(name)

    for number in np.unique(rank).tolist():
        begins = places.phase_starts.filter(pl.col("rank") == number)
        text = begins["phase"].cast(pl.String)
        forward, backward, optimizer = (
            begins["start"].filter(text == p.value).to_numpy() for p in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
        )
        of_rank = rank == number
        next_forward = next_start(forward, start)
        in_forward = of_rank & (of_phase[Phase.FORWARD] | of_phase[Phase.RECOMPUTE])
        turn = next_start(backward, start)
        turned = in_forward & (turn < _NEVER)
        again = next_start(backward, next_start(forward, turn))
        put(turned & (end < turn), "temporary")
        put(turned & (end >= turn) & (end < again), "activation")
        in_backward = of_rank & of_phase[Phase.BACKWARD]
        over = np.minimum(next_start(optimizer, start), next_forward)
        put(in_backward & (end < over), "temporary")
        put(in_backward & (end >= over) & (over < _NEVER), "gradient")
        in_optimizer = of_rank & of_phase[Phase.OPTIMIZER]
        put(in_optimizer & (end < next_forward), "temporary")
        put(in_optimizer & (end >= next_forward) & (next_forward < _NEVER), "optimizer_state")
    return kind
