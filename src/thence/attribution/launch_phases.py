"""The phase and the part of serving of each device activity, by the host ranges around its launch.

The innermost range that shows a phase decides:

forward    an operator that a backward operator of the trace belongs to; an nn.Module call with such an
           operator inside; and the ranges in which FSDP and DistributedDataParallel do their work for a forward
backward   a function of the autograd engine, and the ranges in which FSDP and DistributedDataParallel do their
           work for a backward
recompute  the operators of a checkpoint, run again inside the autograd engine
optimizer  ``Optimizer.step#...``, ``Optimizer.zero_grad#...``, and frames of a library's optimizers
input      ``enumerate(DataLoader)#...``

A recording may have noted phases itself, as ranges of the category ``phase``, which are named as `Phase`.

Work without such a range that an operator launched is ``input`` if it is a copy to the device inside a profiler step,
else ``other``. If phases are noted, such a copy is ``input`` even if no operator launched it.
The phase is unknown if the operator recorded a sequence number and no backward pass follows it in the trace: autograd
may have differentiated it after the trace ended. It is also unknown for work launched outside of every operator: the
trace does not show whether autograd has a part in it.

The operators of a checkpoint are recognized as follows. A reentrant checkpoint runs them inside
``CheckpointFunctionBackward``. One that is not reentrant runs them inside the first autograd function that needs a
saved tensor; the backward pass itself runs without gradients, so its operators have no sequence number, while those
of the checkpoint do. With ``create_graph=True`` all operators have one; then only frames of
torch/utils/checkpoint.py show the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.host_rows import gathered, values_at
from thence.attribution.optimizers import OPTIMIZER_RANGES, is_optimizer_file
from thence.attribution.serving import serving_of
from thence.attribution.sources import file_of_frame
from thence.model.columns import not_null, values_or
from thence.model.intervals import NO_ROW
from thence.model.names import TO_DEVICE, matching
from thence.model.phases import Phase
from thence.model.reasons import CODES
from thence.model.trees import ancestors

if TYPE_CHECKING:
    from thence.attribution.host_rows import HostRows
    from thence.model.arrays import Int64, Mask, UInt8


_ENGINE = r"^autograd::engine::evaluate_function"
_LIBRARY_FORWARD = (
    r"^(?:FSDP::(?:pre|post)_forward|FSDP::root_pre_forward|DistributedDataParallel\.forward|"
    r"FullyShardedDataParallel\.(?:forward|_pre_forward|_post_forward|_root_pre_forward))"
)
_LIBRARY_BACKWARD = (
    r"^(?:FSDP::(?:pre|post|root_post)_backward|"
    r"FullyShardedDataParallel\._(?:pre|post)_backward|DistributedDataParallel\.backward)"
)
_LOADING = r"^enumerate\(DataLoader\)#"
_REENTRANT = r"^CheckpointFunctionBackward$"
_RECOMPUTING = r"(?:^|/)torch/utils/checkpoint\.py\(\d+\): (?:recompute_fn|unpack_hook)$"

_PHASES = (None, *(phase.value for phase in Phase))
_NUMBER = {phase: _PHASES.index(phase.value) for phase in Phase}


def launch_phases(host: HostRows) -> tuple[pl.Series, Int64]:
    """The phase of each device activity, null where it is unknown, and the code of the rule or ``no_backward``."""
    phase, rule = _phases_around(host)
    in_operator = host.climb(host.launch, host.of("op")) != NO_ROW
    unknown = (phase == 0) & ~host.in_graph
    left = unknown & in_operator
    gpu = host.tables.gpu
    copy = (gpu["kind"] == "memcpy").to_numpy()
    loaded = (unknown if host.of("phase").any() else left) & not_null(host.step) & copy
    if loaded.any():
        loaded &= matching(gpu["name"], TO_DEVICE).to_numpy()
    phase[loaded], rule[loaded] = _NUMBER[Phase.INPUT], _code("input_copy")
    undecided = _undecided(host, left & ~loaded)
    rule[undecided] = _code("no_backward")
    other = left & ~loaded & ~undecided
    phase[other], rule[other] = _NUMBER[Phase.OTHER], _code("outside_autograd")
    names = pl.Series(_PHASES, dtype=pl.Categorical())
    return names[phase], rule


def row_phases(host: HostRows) -> pl.Series:
    """The phase that the ranges around each of ``host.launch`` show, whatever was launched; null where none does."""
    return pl.Series(_PHASES, dtype=pl.Categorical())[_phases_around(host)[0]]


def _phases_around(host: HostRows) -> tuple[Int64, Int64]:
    """Number of the phase that the ranges around each launch show, and of its rule; 0 where none does."""
    number_of_row, phases = _phases_of_rows(host)
    number = values_at(number_of_row, host.climb(host.launch, number_of_row > 0), 0)
    phase = np.array([0, *(_NUMBER[phase] for phase, _ in phases)])[number]
    rule = np.array([0, *(_code(code) for _, code in phases)])[number]
    return phase, rule


def launch_serving(host: HostRows) -> pl.Series:
    """The part of serving of the innermost range around each launch that states one; null if none does."""
    categories = ("range", "framework", "step")
    used = host.used_names(*categories)
    stated = [serving_of(name) for name in used.cast(pl.String).to_list()]
    stating = used.filter(pl.Series([s is not None for s in stated], dtype=pl.Boolean))
    wanted = host.of(*categories) & host.with_names(stating)
    if not wanted.any():
        return pl.Series([None], dtype=pl.Categorical()).new_from_index(0, len(host.launch))
    named = gathered(host.names, host.climb(host.launch, wanted)).cast(pl.String)
    texts = {name: s.value for name, s in zip(used.cast(pl.String), stated, strict=True) if s}
    return named.replace_strict(texts, default=None, return_dtype=pl.String).cast(pl.Categorical())


def _code(code: str) -> int:
    return CODES.index(code)


def _phases_of_rows(host: HostRows) -> tuple[UInt8, list[tuple[Phase, str]]]:
    """The phase that each host row shows for the work inside it.

    Returns:
        For each host row its position, from 1 on, in the list, 0 for none; and the list of phases, each with the code
        of its rule.
    """
    engine = host.named(_ENGINE, "op")
    backward = engine | (host.forward != NO_ROW)
    forward = _forward_ops(host, backward)
    module = host.of("module") & ancestors(host.parent, np.flatnonzero(forward))
    evidence: list[tuple[Mask, Phase, str]] = [
        (module, Phase.FORWARD, "differentiated_module"),
        (host.named(_LIBRARY_FORWARD, "framework"), Phase.FORWARD, "library_phase"),
        (host.named(_LIBRARY_BACKWARD, "framework"), Phase.BACKWARD, "library_phase"),
        (host.named(_LOADING, "framework"), Phase.INPUT, "loader_range"),
        (_optimizer_frames(host), Phase.OPTIMIZER, "optimizer_frame"),
        (host.named(OPTIMIZER_RANGES, "framework", "range"), Phase.OPTIMIZER, "optimizer_range"),
        (forward, Phase.FORWARD, "autograd_sequence"),
        (backward, Phase.BACKWARD, "autograd_sequence"),
        (_recomputing(host, engine, backward), Phase.RECOMPUTE, "checkpoint"),
    ]
    if host.of("phase").any():
        evidence += [(host.named(f"^{phase.value}$", "phase"), phase, "phase_noted") for phase in Phase]
    number_of_row = np.zeros(len(host.parent), np.uint8)
    for number, (rows, _, _) in enumerate(evidence, 1):  # of several for one row, the last counts
        number_of_row[rows] = number
    return number_of_row, [(phase, code) for _, phase, code in evidence]


def _forward_ops(host: HostRows, backward: Mask) -> Mask:
    """Operators that backward operators belong to, except those inside a backward pass themselves."""
    forward = np.zeros(len(host.parent), np.bool_)
    forward[host.forward[host.forward != NO_ROW]] = True
    rows = np.flatnonzero(forward)
    forward[rows[host.climb(rows, backward) != NO_ROW]] = False
    return forward


def _optimizer_frames(host: HostRows) -> Mask:
    """Python frames of a library's optimizers."""
    used = host.used_names("python")
    in_optimizer = [is_optimizer_file(file_of_frame(name)) for name in used.cast(pl.String).to_list()]
    return host.of("python") & host.with_names(used.filter(pl.Series(in_optimizer, dtype=pl.Boolean)))


def _recomputing(host: HostRows, engine: Mask, backward: Mask) -> Mask:
    """Host rows inside which a checkpoint runs its forward pass again."""
    roots = host.named(_REENTRANT, "op") | host.named(_RECOMPUTING, "python")
    if not engine.any():
        return roots
    ops = host.of("op")
    sequence = values_or(host.tables.host["sequence"], NO_ROW)
    numbered = ops & (sequence != NO_ROW)
    rows = np.flatnonzero(numbered)
    around = host.climb(host.parent[rows], ops)
    # An autograd function and the engine's range around it have the same sequence number, or neither has one.
    function, bare = engine | backward, engine & ~numbered
    of_engine = values_at(engine, around, missing=False)
    of_engine &= sequence[rows] == values_at(sequence, around, NO_ROW)
    function[rows[of_engine]] = True
    holding = np.zeros(len(ops), np.bool_)
    holding[around[around != NO_ROW]] = True
    holders = np.flatnonzero(holding & ~numbered & ~function)
    of_bare = values_at(bare, host.climb(host.parent[holders], ops), missing=False)
    function[holders[of_bare]] = True
    direct = ~function[rows] & values_at(function, around, missing=False)
    if direct.any():  # else nothing was run again, and operators without a number prove nothing
        others = np.flatnonzero(ops & ~numbered & ~function)
        inside = host.climb(host.parent[others], ops)
        inside = inside[(inside != NO_ROW) & ~values_at(bare, inside, missing=False)]
        without_gradients = np.zeros(len(ops), np.bool_)
        without_gradients[inside] = True
        roots[rows[direct & values_at(without_gradients, around, missing=False)]] = True
    return roots


def _undecided(host: HostRows, asked: Mask) -> Mask:
    """Which activities have an operator with a sequence number, but no backward pass after it in the trace.

    Args:
        asked: which activities to look at; the result is false for all others.
    """
    ended = np.zeros(len(asked), np.bool_)
    if not asked.any():
        return ended
    table = host.tables.host
    numbered = host.of("op") & table["sequence"].is_not_null().to_numpy()
    op = host.climb(np.where(asked, host.launch, NO_ROW), numbered)
    rows = np.flatnonzero(op != NO_ROW)
    times = table.select("rank", "process", "start")
    passes = np.flatnonzero((host.forward != NO_ROW) | host.named(_ENGINE, "op"))
    last = times[passes].group_by("rank", "process").agg(last=pl.col("start").max())
    after = times[op[rows]].join(last, on=["rank", "process"], how="left", maintain_order="left")
    ended[rows] = after.select(pl.col("last").is_null() | (pl.col("start") > pl.col("last"))).to_series()
    return ended
