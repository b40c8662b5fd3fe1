"""HLO modules built by hand, byte by byte: what several test modules share."""

from __future__ import annotations

from typing import Any

import polars as pl

from protowire import first, message, pack
from thence.attribution.xla.hlo_collectives import collective_instructions
from thence.model.hlo import COMPUTATIONS, FRAMES, INSTRUCTIONS, LOOPS, HloModule
from thence.readers.jax.hlo import decode_hlo


def module_of(rows: list[dict[str, Any]]) -> HloModule:
    """A module with these instructions, each a mapping with what matters of `INSTRUCTIONS`."""
    return HloModule(
        "jit_f", 1, None, 0, None, None,
        instructions=pl.DataFrame(rows, schema=INSTRUCTIONS, orient="row"),
        computations=pl.DataFrame(schema=COMPUTATIONS),
        loops=pl.DataFrame(schema=LOOPS),
        frames=pl.DataFrame(schema=FRAMES),
    )  # fmt: skip


F32, BF16, TUPLE, TOKEN = 11, 16, 13, 17


def shape(kind: int, *dimensions: int, space: int = 0, bits: int = 0) -> bytes:
    layout = message((7, bits), (8, space))
    return message((2, kind), (3, pack(*dimensions)), (5, layout))


def tuple_of(*parts: bytes) -> bytes:
    return message((2, TUPLE), *((4, part) for part in parts))


def instruction(name, opcode, number, result, operands=(), called=(), *more) -> bytes:
    head = ((1, name), (2, opcode), (3, result), (35, number))
    return message(*head, (36, pack(*operands)), (38, pack(*called)), *more)


def computation(number: int, *instructions: bytes, root: int = 0) -> bytes:
    return message((1, f"c{number}"), *((2, i) for i in instructions), (5, number), (6, root))


def build(*computations: bytes, entry: int | None = None, more: tuple = ()) -> HloModule:
    last = first(computations[-1])[5] if entry is None else entry
    proto = message((1, "jit_f"), (6, last), *((3, c) for c in computations), *more)
    return decode_hlo(message((1, proto)), "hand made")


def only(*more, opcode: str = "all-reduce", module: tuple = ()) -> dict[str, object]:
    """The single row of collectives of a module with one of them on 1024 floats."""
    given = instruction("p", "parameter", 1, shape(F32, 1024))
    moved = instruction("c", opcode, 2, shape(F32, 1024), (1,), (), *more)
    return collective_instructions(build(computation(1, given, moved, root=2), more=module)).row(0, named=True)


def frame_index(*frames: tuple[int, int]) -> tuple[int, bytes]:
    """Frames as (line, parent) in f.py."""
    lines = sorted({line for line, _ in frames})
    places = ((3, message((1, 1), (2, 1), (3, line))) for line in lines)
    stack = ((4, message((1, lines.index(line) + 1), (2, parent))) for line, parent in frames)
    return (17, message((1, "f.py"), (2, "f"), *places, *stack))


def at(frame: int, scope: str = "") -> tuple[int, bytes]:
    return (7, message((2, scope), (15, frame)))
