"""The phase of XLA work, against op_names taken from the HLO protos by hand."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import DATA
from protowire import every, first, packed
from thence.attribution.xla.hlo_phases import instruction_phases, phases_of

if TYPE_CHECKING:
    from pathlib import Path

REMAT = DATA / "jax" / "remat.xplane.pb.gz"
SINGLE = DATA / "jax" / "jax_single_nocb.xplane.pb.gz"

PHASES = {
    "jit(f)/jvp(a)/transpose": {"forward"},  # the primitive, not the transformation
    "jit(f)/transpose(jvp(a))/dot_general": {"backward"},
    "jit(f)/transpose(jvp(b0))/jvp(b0)/checkpoint/dot_general": {"backward"},
    "jit(f)/transpose(jvp(b0))/jvp(b0)/checkpoint/rematted_computation/mul": {"recompute"},
    "jit(f)/jvp()/while/body/eval_jaxpr/dot_general": {"forward"},
    "jit(f)/sub": {"other"},
    "jit(predict)/b0/checkpoint/dot_general": {"other"},
    "jit(f)/adamw/mul": {"optimizer"},
    "jit(f)/jit(apply_gradients)/mul": {"optimizer"},
    "jit(f)/jvp(adam)/mul": {"forward"},
    "jit(f)/(jvp(a)/x:transpose(jvp(a))/y)": {"forward", "backward"},
    "(jit(f)/jvp()/x:params['w'])": {"forward"},
    "jit(f)/transpose(jvp())/mul;jit(f)/jvp()/add": {"forward", "backward"},
    "params['w']": set(),
}


@pytest.mark.parametrize("op_name", PHASES)
def test_the_transformations_in_a_path_tell_the_phase(op_name: str) -> None:
    assert {phase.value for phase, _ in phases_of(op_name)} == PHASES[op_name]


def test_outside_of_differentiation_the_stack_tells_the_optimizer() -> None:
    assert {phase.value for phase, _ in phases_of("jit(f)/sub", in_optimizer=True)} == {"optimizer"}
    found = phases_of("jit(f)/transpose(jvp())/dot", in_optimizer=True)
    assert {phase.value for phase, _ in found} == {"backward"}


def protos(path: Path) -> dict[str, dict[str, list[str]]]:
    """Of every program in an xplane file: the op_names inside each instruction, its own without any inside."""
    found = {}
    planes = [p for p in every(gzip.decompress(path.read_bytes()), 1) if first(p)[2] == b"/host:metadata"]  # fmt: skip
    for metadata in (first(entry)[2] for entry in every(planes[0], 4)):
        for stat in (first(stat) for stat in every(metadata, 5)):
            if 6 in stat:
                found[first(metadata)[2].decode().split("(")[0]] = op_names(first(stat[6])[1])
    return found


def op_names(module: bytes) -> dict[str, list[str]]:
    computations = {first(c)[5]: every(c, 2) for c in every(module, 3)}
    result = {}
    for instruction in (i for instructions in computations.values() for i in instructions):
        fields = first(instruction)
        inside = [
            first(inner)[7]
            for called in every(instruction, 38)
            for number in (packed(called) if isinstance(called, bytes) else [called])
            for inner in computations.get(number, ())
            if fields[2] == b"fusion" and 2 in first(first(inner).get(7, b""))
        ]
        named = inside or [fields.get(7, b"")]
        result[fields[1].decode()] = [first(name).get(2, b"").decode() for name in named]
    return result


def phase_by_hand(op_name: str) -> str | None:
    if "rematted_computation" in op_name:
        return "recompute"
    if "transpose(" in op_name:
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return "outside" if op_name.startswith(("jit(", "pjit(")) else None


@pytest.mark.parametrize("path", [REMAT, SINGLE], ids=lambda path: path.name)
def test_phases_are_those_of_the_op_names_inside(path: Path) -> None:
    names, trace = protos(path), thence.open(path)
    rows = trace.activities.select(pl.col("program", "hlo", "phase", "phase_rule").cast(pl.String), "duration")
    seen: Counter[str] = Counter()
    for row in rows.filter(pl.col("program").is_not_null()).unique().iter_rows(named=True):
        by_hand = {phase_by_hand(name) for name in names[row["program"]][row["hlo"]]} - {None}
        # What costs nothing, such as a constant, does not count: the phase is among those inside.
        if row["phase"] == "mixed":
            assert len(by_hand) > 1, row
        elif row["phase"] in ("optimizer", "other") and row["phase_rule"] != "outside_autograd":
            assert "outside" in by_hand, row
        elif row["phase"] is not None and len(by_hand) == 1:
            assert by_hand == {row["phase"]}, row
        seen[str(row["phase"])] += 1
    assert {"forward", "backward", "mixed"} <= set(seen)


def test_recomputation_and_optimizer_of_a_recording() -> None:
    """Two programs with jax.checkpoint, one updates with optax; a third only predicts."""
    rows = thence.open(REMAT).activities.select(
        pl.col("program", "op_name", "phase", "phase_rule").cast(pl.String), "duration"
    )
    predict = rows.filter(pl.col("program") == "jit_predict")
    assert set(predict["phase"]) == {"other"}  # nothing in it is differentiated
    dots = rows.filter(pl.col("op_name").str.ends_with("rematted_computation/dot_general"))
    # Three blocks in one program, three rounds of a loop in the other.
    assert dots.height == 6
    assert set(dots["phase"]) == {"recompute"}
    updated = rows.filter(pl.col("phase") == "optimizer")
    assert set(updated["phase_rule"]) == {"optimizer_frame"}
    assert all(re.match(r"jit\(train_step\)/", name) for name in updated["op_name"])


def test_an_update_that_nothing_names_is_neither_forward_nor_backward() -> None:
    """The step of the small transformer subtracts gradients by hand: jit(train_step)/sub."""
    rows = thence.open(SINGLE).activities.select(pl.col("op_name", "phase").cast(pl.String))
    update = rows.filter(pl.col("op_name") == "jit(train_step)/sub")
    assert update.height > 0
    assert set(update["phase"]) <= {"other", "mixed"}  # mixed where gradients end in the same kernel


FORWARD, BACKWARD, AGAIN, APART = (
    "jit(f)/jvp(g)/mul", "jit(f)/transpose(jvp(g))/mul",
    "jit(f)/transpose(jvp(g))/rematted_computation/mul", "jit(f)/sub",
)  # fmt: skip


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ((FORWARD, BACKWARD), "backward"),  # the forward instruction is evaluated again
        ((FORWARD, AGAIN), "recompute"),
        ((FORWARD, AGAIN, BACKWARD), "backward"),
        ((FORWARD, APART), "mixed"),
        ((BACKWARD, APART), "mixed"),
        ((FORWARD, FORWARD), "forward"),
        ((APART,), "other"),
    ],
)
def test_a_kernel_with_backward_work_in_it_is_backward(inside: tuple[str, ...], expected: str) -> None:
    """The first instruction is a fusion without an op_name; the others are what it is made of."""
    module = thence.open(SINGLE).tables.hlo[0]
    origin = pl.DataFrame({"op_name": [None, *inside], "frame": [None] * (len(inside) + 1)},
                          schema={"op_name": pl.String, "frame": pl.Int64})  # fmt: skip
    parts = pl.DataFrame({"instruction": [0] * len(inside), "constituent": range(1, len(inside) + 1)})
    assert instruction_phases(module, origin, parts)["phase"].to_list()[0] == expected
