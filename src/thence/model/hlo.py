"""HLO modules: the optimized XLA programs that a trace refers to, one row per instruction."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

INSTRUCTIONS = {
    "computation": pl.Int64(),  # id of the computation it is part of
    "name": pl.String(),  # unique in the module; what traces call hlo_op
    "id": pl.Int64(),  # unique in the module; newer ones pack (computation << 32 | number)
    "opcode": pl.String(),
    "op_name": pl.String(),  # framework scope, such as jit(f)/jvp(layer)/dot_general; null: none
    "source_file": pl.Categorical(),  # of the innermost frame; null: none
    "source_line": pl.Int32(),  # of the innermost frame; null: none
    "frame": pl.Int32(),  # number in `HloModule.frames`; 0: none
    "called": pl.List(pl.Int64()),  # ids of computations
    "operands": pl.List(pl.Int64()),  # ids of instructions
    "result_bytes": pl.Int64(),  # tuples summed
    "operand_bytes": pl.Int64(),  # sum over operands, tuples summed
    "flops": pl.Int64(),  # with those of computations called by a fusion, call or async-start
    "own_flops": pl.Int64(),  # without those
    "product_type": pl.Categorical(),  # in which a product or convolution multiplies; null: others, unknown
    "group_size": pl.Int64(),  # devices of one replica group; null: no collective, or unknown
    "group_count": pl.Int64(),  # replica groups, pairs of a collective-permute; null: as above
    "channel": pl.Int64(),  # null: none
    "custom_call_target": pl.String(),  # null: no custom call
    "fusion_kind": pl.String(),  # kLoop, kInput, kOutput, kCustom; null: no fusion
    "memory_space": pl.Int64(),  # of an array result: 0 device, 5 host; null: tuple, token
    "parameter": pl.Int64(),  # number of a parameter; null: none
    "is_root": pl.Boolean(),  # returned by its computation
    "is_async_start": pl.Boolean(),  # see _ASYNC_STARTS of readers.jax.hlo
    "is_host_transfer": pl.Boolean(),  # a send or recv whose other end is the host
    "top_level": pl.Boolean(),  # runs as a step of its own: not inside a fusion, nor a reducer
    "loop": pl.Int64(),  # id of the innermost while whose body or condition it is in; null: none
    "trip_count": pl.Int64(),  # how often that loop runs; null: none, or unknown
    "placement": pl.Categorical(),  # where it runs if not in its program's order; see `ASYNCHRONOUS`
    "step": pl.Int32(),  # place in the schedule of its computation, from 0; null: not scheduled
}
"""Schema of the instructions of a module."""

ASYNCHRONOUS = "asynchronous"
"""Placement of what XLA starts and waits for later. What is annotated with a stream, or called by such an instruction,
has the placement ``stream 1``, with the number of the annotation. Null: neither."""

COMPUTATIONS = {
    "id": pl.Int64(),
    "name": pl.String(),
    "root": pl.Int64(),  # id of the instruction that it returns
    "top_level": pl.Boolean(),
    "loop": pl.Int64(),  # as for instructions
}
"""Schema of the computations of a module."""

LOOPS = {
    "id": pl.Int64(),  # of the while instruction
    "name": pl.String(),
    "condition": pl.Int64(),  # id of a computation
    "body": pl.Int64(),  # id of a computation
    "trip_count": pl.Int64(),  # null: not known at compile time
}
"""Schema of the while loops of a module."""

FRAMES = {
    "frame": pl.Int32(),
    "parent": pl.Int32(),
    "file": pl.Categorical(),
    "line": pl.Int32(),
    "column": pl.Int32(),
    "function": pl.Categorical(),
    "stack": pl.Int32(),
}
"""Schema of the frames of a module. frame counts from 1; parent 0 is none (outermost frames); line
and column count from 1, 0 is unknown; frames whose whole stacks are equal share ``stack``, the number of
the first of these frames."""

BUFFERS = {
    "allocation": pl.Int64(),  # number of the allocation that it is in
    "kind": pl.Categorical(),  # argument, output, constant, temporary; null: not used when most is
    "bytes": pl.Int64(),
    "instruction": pl.Int64(),  # id of the instruction that makes it; null: unknown
    "name": pl.String(),  # its name, where a module of before 2022 states no id; else null
}
"""Schema of the memory of a module when its program needs most: one row for each buffer that is live then, and for
what is not used of an allocation; the rows of an allocation add up to its size."""

_MAX_DEPTH = 10_000


@dataclass(frozen=True, slots=True)
class Frame:
    """One entry of a stack; line and column are 0, and names empty, if the module does not state them."""

    file: str
    line: int
    column: int
    function: str

    @property
    def place(self) -> str:
        """The frame as a place of the kind ``source``: ``file.py:12 Block.forward``, or as much as is known."""
        line = f"{self.file}:{self.line}" if self.line else self.file
        return f"{line} {self.function}" if self.function else line


@dataclass(frozen=True)
class HloModule:
    """One HLO module.

    Attributes:
        name: such as ``jit_train_step``.
        id: XLA's number of the module; traces call it program_id.
        fingerprint: frontend attribute fingerprint_before_lhs, equal on ranks that run the same
            program; None if the module has none.
        entry: id of the entry computation.
        replicas: replica count, None if unknown.
        partitions: partition count, None if unknown.
        instructions: columns of `INSTRUCTIONS`, in the module's order.
        computations: columns of `COMPUTATIONS`.
        loops: columns of `LOOPS`.
        frames: columns of `FRAMES`.
        buffers: columns of `BUFFERS`; empty if the module came without its buffer assignment.
    """

    name: str
    id: int
    fingerprint: str | None
    entry: int
    replicas: int | None
    partitions: int | None
    instructions: pl.DataFrame
    computations: pl.DataFrame
    loops: pl.DataFrame
    frames: pl.DataFrame
    buffers: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=BUFFERS))

    def stack(self, frame: int) -> tuple[Frame, ...]:
        """The source stack that ends in a frame, outermost first; empty for frame 0."""
        return _stack_of(self.frames, frame)


def _stack_of(frames: pl.DataFrame, frame: int) -> tuple[Frame, ...]:
    """The stack that ends in a frame, outermost first; empty for 0 and for unknown numbers."""
    parents = frames["parent"]
    chain: list[int] = []
    while 0 < frame <= len(parents) and len(chain) < _MAX_DEPTH:  # a damaged file can hold a cycle
        chain.append(frame - 1)
        frame = parents[frame - 1]
    columns = ("file", "line", "column", "function")
    return tuple(Frame(*row) for row in frames[chain[::-1]].select(columns).iter_rows())
