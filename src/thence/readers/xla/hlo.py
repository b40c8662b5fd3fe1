"""HLO modules as columns: one row per instruction, with its source, size, work and groups.

Reads a serialized HloProto or HloModuleProto, plain or xz: ``*.hlo.pb`` dumps, the "Hlo Proto" stat
of an xplane file, the dump folder of an nsys-jax archive.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from google.protobuf.message import DecodeError

from thence.errors import DamagedInput
from thence.model.hlo import COMPUTATIONS, INSTRUCTIONS, LOOPS, HloModule
from thence.readers.protos.hlo_pb2 import (
    HloModuleProto,
    HloProto,
    ShapeProto,
    WhileLoopBackendConfig,
)
from thence.readers.xla.costs import NO_FLOPS, flops, json_config
from thence.readers.xla.frames import FrameTable
from thence.readers.xla.parsing import unpacked
from thence.readers.xla.replica_groups import replica_groups
from thence.readers.xla.shapes import MAX_INT64, memory_space, shape_bytes

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from thence.readers.protos.hlo_pb2 import HloComputationProto, HloInstructionProto

__all__ = ["ASYNC_STARTS", "COMPUTATIONS", "INSTRUCTIONS", "LOOPS", "HloModule", "decode_hlo"]

_STARTS = """
all-gather-start all-reduce-start async-start collective-permute-start copy-start recv send
"""
ASYNC_STARTS = frozenset(_STARTS.split())
"""Opcodes that begin something another instruction waits for."""

_COLLECTIVE = """
all-gather all-gather-start all-reduce all-reduce-start all-to-all collective-broadcast
collective-permute collective-permute-start collective-reduce ragged-all-to-all recv reduce-scatter
send
"""
_GROUPED = frozenset(_COLLECTIVE.split())
_RUNS_CALLED = frozenset(("async-start", "call", "conditional", "while"))
_SUMS_CALLED = frozenset(("async-start", "call", "fusion"))
_NO_SHAPE = ShapeProto()


def decode_hlo(data: bytes, path: str) -> HloModule:
    """The HLO module in a HloProto or HloModuleProto, xz-compressed or not.

    Args:
        data: content of the file.
        path: for messages.

    Raises:
        DamagedInput: the bytes are neither, or end too early, or unpack to more than 1 GiB.
    """
    module = _module(unpacked(data, path), path)
    entry = _entry(module)
    placed, loops = _placement(module, entry)
    frames = FrameTable(module.stack_frame_index)
    instructions = _instructions(module, placed, frames)
    known = module.HasField("device_assignment")
    return HloModule(
        name=module.name,
        id=module.id,
        fingerprint=module.frontend_attributes.map.get("fingerprint_before_lhs"),
        entry=entry,
        replicas=module.device_assignment.replica_count if known else None,
        partitions=module.device_assignment.computation_count if known else None,
        instructions=_with_steps(_with_sources(instructions, frames.table(), loops), module),
        computations=_computations(module, placed),
        loops=loops,
        frames=frames.table(),
    )


def _module(data: bytes, path: str) -> HloModuleProto:
    """Field 1 is the module in a HloProto, and its name, a string, in a HloModuleProto."""
    for kind in (HloProto, HloModuleProto):
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            continue
        module = message.hlo_module if isinstance(message, HloProto) else message
        if any(computation.instructions for computation in module.computations):
            return module
    raise DamagedInput(path, "is cut or damaged: its content is no HLO module with instructions")


def _entry(module: HloModuleProto) -> int:
    """Id of the entry computation: by id, by name, else the last (callees come before callers)."""
    computations = module.computations
    if any(c.id == module.entry_computation_id for c in computations):
        return module.entry_computation_id
    named = [c.id for c in computations if c.name == module.entry_computation_name]
    return named[0] if named else computations[-1].id


def _placement(module: HloModuleProto, entry: int) -> tuple[dict[int, int | None], pl.DataFrame]:
    """From the entry downwards: which computations run as sequences, and the loop each is in.

    Returns:
        Computation id to id of its innermost while (None outside loops), for those on the top
        level; and the `LOOPS`.
    """
    bodies = {c.id: c.instructions for c in module.computations}
    placed: dict[int, int | None] = {entry: None}
    loops: list[tuple[int, str, int | None, int | None, int | None]] = []
    waiting = [entry]
    while waiting:
        computation = waiting.pop()
        for instruction in bodies.get(computation, ()):
            if instruction.opcode not in _RUNS_CALLED:
                continue
            loop, called = placed[computation], list(instruction.called_computation_ids)
            if instruction.opcode == "while":
                loop = instruction.id
                body, condition = (*called, None, None)[:2]  # in this order in the proto
                trips = _trip_count(_config(instruction, module))
                loops.append((loop, instruction.name, condition, body, trips))
            new = [c for c in dict.fromkeys(called) if c not in placed]
            placed.update(dict.fromkeys(new, loop))
            waiting.extend(new)
    return placed, pl.DataFrame(loops, schema=LOOPS, orient="row")


def _config(instruction: HloInstructionProto, module: HloModuleProto) -> bytes:
    """Backend config: a field, or since 2026 a payload, inline or in the module's list."""
    if not instruction.HasField("backend_config_payload"):
        return instruction.backend_config
    payload = instruction.backend_config_payload
    if payload.WhichOneof("payload") != "id":
        return payload.value
    return module.payloads[payload.id] if 0 <= payload.id < len(module.payloads) else b""


def _trip_count(config: bytes) -> int | None:
    """known_trip_count of a while: in JSON on GPUs, in a WhileLoopBackendConfig elsewhere."""
    if config.startswith(b"{"):
        known = json_config(config).get("known_trip_count")
        count = str(known.get("n", 0)) if isinstance(known, dict) else ""
        return int(count) if count.isdecimal() and len(count) < 19 else None
    parsed = WhileLoopBackendConfig()
    try:
        parsed.ParseFromString(config)
    except DecodeError:
        return None
    return parsed.known_trip_count.n if parsed.HasField("known_trip_count") else None


def _computations(module: HloModuleProto, placed: dict[int, int | None]) -> pl.DataFrame:
    rows = [
        (
            c.id,
            c.name,
            _full_id(c.root_id, c.id, {i.id for i in c.instructions}),
            c.id in placed,
            placed.get(c.id),
        )
        for c in module.computations
    ]
    return pl.DataFrame(rows, schema=COMPUTATIONS, orient="row")


def _full_id(number: int, computation: int, known: Container[int]) -> int:
    """An id within a computation; some writers leave out the computation's number, 32 bits up."""
    packed = computation << 32 | number
    return packed if number not in known and packed in known else number


def _instructions(
    module: HloModuleProto, placed: dict[int, int | None], frames: FrameTable
) -> pl.DataFrame:
    work: dict[int, int] = {}  # floating-point operations of the computations so far
    rows: list[tuple[Any, ...]] = []
    for computation in module.computations:
        new = list(_rows(computation, module, frames, work))
        work[computation.id] = min(sum(row[_FLOPS] for row in new), MAX_INT64)
        rows.extend(new)
    columns = dict(zip(_DECODED, zip(*rows, strict=True), strict=True))
    where = columns["computation"]
    columns["top_level"] = tuple(c in placed for c in where)
    columns["loop"] = tuple(placed.get(c) for c in where)
    return pl.DataFrame(
        [
            _lists(name, values)
            if name in ("called", "operands")
            else pl.Series(name, values, INSTRUCTIONS[name])
            for name, values in columns.items()
        ]
    )


def _lists(name: str, values: Sequence[list[int]]) -> pl.Series:
    """A column of int64 lists; Polars takes ten times as long to build one from Python lists."""
    rows = np.repeat(np.arange(len(values)), [len(value) for value in values])
    flat = pl.DataFrame(
        {"row": rows, name: np.fromiter(chain.from_iterable(values), np.int64, rows.size)}
    )
    empty = pl.Series(name, [[]], pl.List(pl.Int64))
    lists = flat.group_by("row", maintain_order=True).agg(name)
    every = pl.DataFrame({"row": np.arange(len(values))})
    joined = every.join(lists, on="row", how="left", maintain_order="left")
    return joined[name].fill_null(empty)


_DECODED = (
    *("computation", "name", "id", "opcode", "op_name", "frame", "called", "operands"),
    *(
        "result_bytes",
        "operand_bytes",
        "flops",
        "own_flops",
        "group_size",
        "group_count",
        "channel",
    ),
    *("custom_call_target", "fusion_kind", "memory_space", "parameter"),
    *("is_root", "is_async_start", "is_host_transfer"),
)
_FLOPS = _DECODED.index("flops")


def _rows(
    computation: HloComputationProto,
    module: HloModuleProto,
    frames: FrameTable,
    work: dict[int, int],
) -> Iterator[tuple[Any, ...]]:
    """The instructions of one computation in the columns of `_DECODED`."""
    home = computation.id
    shapes: dict[int, ShapeProto] = {}
    sizes: dict[int, int] = {}
    root = computation.root_id
    packed_root = home << 32 | root
    for instruction in computation.instructions:
        number, opcode, shape = instruction.id, instruction.opcode, instruction.shape
        operands = [_full_id(i, home, sizes) for i in instruction.operand_ids]
        called = list(instruction.called_computation_ids)
        shapes[number], sizes[number] = shape, shape_bytes(shape)
        own = 0
        if opcode not in NO_FLOPS or opcode == "custom-call":
            given = [shapes.get(i, _NO_SHAPE) for i in operands]
            own = flops(instruction, given, _config(instruction, module))
        inner = sum(work.get(c, 0) for c in called) if opcode in _SUMS_CALLED else 0
        groups = (
            replica_groups(instruction, module.device_assignment) if opcode in _GROUPED else None
        )
        metadata = instruction.metadata
        yield (
            home,
            instruction.name,
            number,
            opcode,
            metadata.op_name or None,
            frames.of(metadata),
            called,
            operands,
            sizes[number],
            min(sum(sizes.get(i, 0) for i in operands), MAX_INT64),
            min(own + inner, MAX_INT64),
            own,
            groups.size if groups else None,
            groups.count if groups else None,
            instruction.channel_id if instruction.channel_id > 0 else None,
            instruction.custom_call_target or None,
            instruction.fusion_kind or None,
            None if shape.tuple_shapes else memory_space(shape),
            instruction.parameter_number if opcode == "parameter" else None,
            number in (root, packed_root),
            opcode in ASYNC_STARTS,
            instruction.is_host_transfer,
        )


def _with_sources(
    instructions: pl.DataFrame, frames: pl.DataFrame, loops: pl.DataFrame
) -> pl.DataFrame:
    """The columns that follow from others: innermost source line, trip count of the loop around."""
    sources = frames.select(
        "frame",
        source_file=pl.when(pl.col("file") != "").then("file"),
        source_line=pl.when(pl.col("line") > 0).then("line"),
    )
    trips = loops.select(pl.col("id").alias("loop"), "trip_count").unique("loop", keep="first")
    return instructions.join(sources, on="frame", how="left", maintain_order="left").join(
        trips, on="loop", how="left", maintain_order="left"
    )


def _with_steps(instructions: pl.DataFrame, module: HloModuleProto) -> pl.DataFrame:
    """The place of each instruction in the schedule of its computation.

    A proto lists instructions in an order that respects their operands; the order in which they run is
    HloModuleProto.schedule (xla/service/hlo.proto).
    """
    sequences = module.schedule.sequences
    steps = pl.DataFrame(
        [
            (computation, number, step)
            for computation, sequence in sequences.items()
            for step, number in enumerate(sequence.instruction_ids)
        ],
        schema={"computation": pl.Int64, "id": pl.Int64, "step": pl.Int32},
        orient="row",
    ).unique(["computation", "id"], keep="first")
    return instructions.join(
        steps, on=["computation", "id"], how="left", maintain_order="left"
    ).select(*INSTRUCTIONS)
