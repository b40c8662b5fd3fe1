"""HLO modules as columns: one row per instruction, with its source, size, costs and device groups.

Reads a serialized HloProto or HloModuleProto, plain or xz: ``*.hlo.pb`` dumps, the "Hlo Proto" stat
of an xplane file, the dump folder of an nsys-jax archive. Source files, lines and functions come from the module's
index of stack frames.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import polars as pl
from google.protobuf.message import DecodeError

from thence.errors import DamagedInput
from thence.model.hlo import ASYNCHRONOUS, COMPUTATIONS, FRAMES, INSTRUCTIONS, LOOPS, Frame, HloModule
from thence.model.shortened_names import affordable
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.jax.buffers import buffers_of
from thence.readers.jax.instructions import Body, Distinct, backend_config, memory_space, replica_groups, work_columns
from thence.readers.jax.protobuf import unpacked
from thence.readers.jax.protos.hlo_pb2 import (
    BufferAssignmentProto,
    FrontendAttributes,
    HloModuleProto,
    HloProto,
    OpMetadata,
    ShapeProto,
    WhileLoopBackendConfig,
)

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from thence.model.arrays import Int64
    from thence.readers.jax.protos.hlo_pb2 import StackFrameIndexProto

MAX_TEXT, MAX_TEXT_PER_FRAME = 4_000_000, 500
"""Characters of the files, or of the functions, of all frames of a module: of any number, and more for each frame."""
_NOWHERE = Frame("", 0, 0, "")
_STARTS = """
all-gather-start all-reduce-start async-start collective-permute-start copy-start recv send
"""
_ASYNC_STARTS = frozenset(_STARTS.split())
"""Opcodes that start an asynchronous operation, which another instruction waits for."""
_COLLECTIVE = """
all-gather all-gather-start all-reduce all-reduce-start all-to-all collective-broadcast
collective-permute collective-permute-start collective-reduce ragged-all-to-all recv reduce-scatter
send
"""
_GROUPED = frozenset(_COLLECTIVE.split())
_TRANSFERS = frozenset(("recv", "recv-done", "send", "send-done"))
_Placed: TypeAlias = "dict[int, int | None]"
_Loop: TypeAlias = "tuple[int, str, int | None, int | None, int | None]"
_STREAM = "_xla_stream_annotation"
"""The frontend attribute with the number of the stream that an instruction is to run on (thence.jax.on_stream)."""
_NUMBER = re.compile(r"0*[1-9][0-9]{0,8}")
_RUNS_CALLED = frozenset(("async-start", "call", "conditional", "while"))
_DAMAGED = "is cut or damaged: its content is not an HLO module with instructions"


class FrameTable:
    """Collects the stack frames of one module while it is decoded.

    StackFrameIndexProto keeps frames as a tree: location and parent, both 1-based, 0 is none. (Text
    dumps of XLA print every parent one too high; the protos are right.) Old modules have only one
    file and line per instruction (OpMetadata): these become frames without a parent, numbered after
    the recorded frames, so that a frame number identifies the source in both cases.
    """

    def __init__(self, index: StackFrameIndexProto) -> None:
        locations = index.file_locations
        used = np.fromiter((frame.file_location_id for frame in index.stack_frames), np.int64)
        uses = np.bincount(used[(used > 0) & (used <= len(locations))], minlength=len(locations) + 1)
        files = _names(index.file_names, [place.file_name_id for place in locations], uses)
        functions = _names(index.function_names, [p.function_name_id for p in locations], uses)
        places = [_NOWHERE] + [
            Frame(
                files[_within(place.file_name_id, files)],
                place.line,
                place.column,
                functions[_within(place.function_name_id, functions)],
            )
            for place in locations
        ]
        self.frames = [places[_within(location, places)] for location in used.tolist()]
        # A frame is stored after its parent. Others would be cycles, or may be, and are cut.
        self.parents = [
            parent if 0 < parent < frame else 0
            for frame, parent in enumerate((f.parent_frame_id for f in index.stack_frames), 1)
        ]
        self._recorded = len(self.frames)
        self._lines: dict[tuple[str, int], int] = {}

    def of(self, metadata: OpMetadata) -> int:
        """Frame number of an instruction's metadata, 0 if it has no source."""
        if 0 < metadata.stack_frame_id <= self._recorded:
            return metadata.stack_frame_id
        if not metadata.source_file:
            return 0
        key = (metadata.source_file, metadata.source_line)
        if key not in self._lines:
            self.frames.append(Frame(*key, 0, ""))
            self.parents.append(0)
            self._lines[key] = len(self.frames)
        return self._lines[key]

    def place(self, frame: int) -> Frame:
        """The frame with a number that `of` returned; an empty frame for 0."""
        return self.frames[frame - 1] if frame else _NOWHERE

    def table(self) -> pl.DataFrame:
        """All frames in the columns of `FRAMES`."""
        return pl.DataFrame(
            {
                "frame": range(1, len(self.frames) + 1),
                "parent": self.parents,
                "file": shared_texts([f.file for f in self.frames]),
                "line": [f.line for f in self.frames],
                "column": [f.column for f in self.frames],
                "function": shared_texts([f.function for f in self.frames]),
                "stack": self._equal_stacks(),
            },
            schema=FRAMES,
        )

    def _equal_stacks(self) -> list[int]:
        """For each frame, the number of the first frame with an equal stack."""
        first: dict[tuple[Frame, int], int] = {}
        result: list[int] = []
        for number, (frame, parent) in enumerate(zip(self.frames, self.parents, strict=True), 1):
            key = (frame, result[parent - 1] if parent else 0)
            result.append(first.setdefault(key, number))
        return result


def shared_texts(texts: Sequence[str | None]) -> pl.Series:
    """A Categorical column in which each distinct text is stored once."""
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    distinct = pl.Series(list(places), dtype=pl.String).cast(pl.Categorical())
    return distinct.gather(pl.Series([places[text] for text in texts], dtype=pl.UInt32))


def _names(names: Sequence[str], of_location: Sequence[int], uses: Int64) -> list[str]:
    """The names that locations refer to by numbers from 1, as long as their number of uses permits."""
    number = np.array([0, *of_location], np.int64)
    number[(number < 0) | (number > len(names))] = 0
    written = np.bincount(number, uses + 1, len(names) + 1).astype(np.int64)
    distinct = pl.Series(["", *names], dtype=pl.String)
    return affordable(distinct, written, MAX_TEXT, MAX_TEXT_PER_FRAME).to_list()


def _within(number: int, values: Sequence[object]) -> int:
    """The number, or 0 if there is no such value."""
    return number if 0 < number < len(values) else 0


def decode_hlo(data: bytes, path: str, expansion: Expansion = DEFAULT) -> HloModule:
    """The HLO module in a HloProto or HloModuleProto, xz-compressed or not.

    Args:
        data: content of the file.
        path: for messages.
        expansion: how much larger than its stored size the content of an xz file may be.

    Raises:
        DamagedInput: the bytes are neither message, or end too early, or unpack to more than is accepted.
    """
    module, assignment = _module(unpacked(data, path, expansion), path)
    try:
        return _decoded(module, assignment)
    except DecodeError as error:  # in a part of an instruction that is parsed separately
        raise DamagedInput(path, _DAMAGED) from error


def _module(data: bytes, path: str) -> tuple[HloModuleProto, BufferAssignmentProto]:
    """The module of either message, and the plan of its memory, which only a HloProto has.

    Field 1 is the module in a HloProto, its name in a HloModuleProto.
    """
    for kind in (HloProto, HloModuleProto):
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            continue
        module = message.hlo_module if isinstance(message, HloProto) else message
        if any(computation.instructions for computation in module.computations):
            return module, message.buffer_assignment if isinstance(message, HloProto) else BufferAssignmentProto()
    raise DamagedInput(path, _DAMAGED)


def _decoded(module: HloModuleProto, assignment: BufferAssignmentProto) -> HloModule:
    """The module as columns, with the nesting of its computations and loops."""
    body = Body.of(module)
    entry = _entry(module)
    placed, loops = _placement(body, entry)
    frames = FrameTable(module.stack_frame_index)
    columns = _instruction_columns(body, frames)
    instructions = pl.DataFrame([*columns, *_computation_columns(body, placed, loops), _stream_placement(body, entry)])
    has_devices = module.HasField("device_assignment")
    return HloModule(
        name=module.name,
        id=module.id,
        fingerprint=module.frontend_attributes.map.get("fingerprint_before_lhs"),
        entry=entry,
        replicas=module.device_assignment.replica_count if has_devices else None,
        partitions=module.device_assignment.computation_count if has_devices else None,
        instructions=instructions.select(*INSTRUCTIONS),
        computations=_computations(body, placed),
        loops=pl.DataFrame(loops, schema=LOOPS, orient="row"),
        frames=frames.table(),
        buffers=buffers_of(assignment, _interface(body, entry)),
    )


def _entry(module: HloModuleProto) -> int:
    """Id of the entry computation: found by id, by name, else the last one (callees come before callers)."""
    computations = module.computations
    if any(c.id == module.entry_computation_id for c in computations):
        return module.entry_computation_id
    named = [c.id for c in computations if c.name == module.entry_computation_name]
    return named[0] if named else computations[-1].id


_SAME_MEMORY = ("tuple", "get-tuple-element", "bitcast")
"""Instructions whose results are in the memory of their operands."""


def _interface(body: Body, entry: int) -> set[int]:
    """Ids of the instructions that are parameters of the entry computation, and of those that make its results."""
    computation, rows = next((both for both in body.computations if both[0].id == entry), (None, range(0)))
    if computation is None:
        return set()
    row_of = {body.ids[row]: row for row in rows}
    waiting, seen = [_full_id(computation.root_id, entry, row_of)], set()
    while waiting:
        number = waiting.pop()
        if number in seen or number not in row_of:
            continue
        seen.add(number)
        if body.opcodes[row_of[number]] in _SAME_MEMORY:
            waiting += [_full_id(operand, entry, row_of) for operand in body.operands.of(row_of[number])]
    return seen | {body.ids[row] for row in rows if body.opcodes[row] == "parameter"}


def _placement(body: Body, entry: int) -> tuple[_Placed, list[_Loop]]:
    """The computations whose instructions run one by one, found from the entry downwards, and their loops.

    Returns:
        For each top-level computation, its id and the id of its innermost while instruction (None
        outside of loops); and the rows of `LOOPS`.
    """
    rows_of = {computation.id: rows for computation, rows in body.computations}
    placed: _Placed = {entry: None}
    loops: list[_Loop] = []
    waiting = [entry]
    while waiting:
        computation = waiting.pop()
        for row in rows_of.get(computation, ()):
            opcode = body.opcodes[row]
            if opcode not in _RUNS_CALLED:
                continue
            loop, called = placed[computation], body.called.of(row)
            if opcode == "while":
                loop, name = body.ids[row], body.instructions[row].name
                inner, condition = (*called, None, None)[:2]  # in this order in the proto
                loops.append((loop, name, condition, inner, _trip_count(body.config(row))))
            new = [c for c in dict.fromkeys(called) if c not in placed]
            placed.update(dict.fromkeys(new, loop))
            waiting.extend(new)
    return placed, loops


def _stream_placement(body: Body, entry: int) -> pl.Series:
    """The column ``placement``; what a computation is called for is the placement of its instructions, too."""
    attributes = Distinct[bytes](body.read("frontend_attributes"))
    streams = [_annotated_stream(data) for data in attributes.values]
    own = [streams[distinct] for distinct in attributes.of_row.tolist()]
    result = [
        stream or (ASYNCHRONOUS if opcode in _ASYNC_STARTS else None)
        for stream, opcode in zip(own, body.opcodes, strict=True)
    ]
    if any(result):
        rows_of = {computation.id: rows for computation, rows in body.computations}
        inherited: dict[int, str | None] = {entry: None}
        waiting = [entry]
        while waiting:
            computation = waiting.pop()
            for row in rows_of.get(computation, ()):
                # A collective that is started in annotated work is asynchronous in it: the annotation says more.
                result[row] = own[row] or inherited[computation] or result[row]
                if body.opcodes[row] in _RUNS_CALLED:
                    new = [c for c in dict.fromkeys(body.called.of(row)) if c not in inherited]
                    inherited.update(dict.fromkeys(new, result[row]))
                    waiting.extend(new)
    return pl.Series("placement", result, INSTRUCTIONS["placement"])


def _annotated_stream(attributes: bytes) -> str | None:
    """``stream 1`` for instructions annotated with a stream; 0 is the stream of everything else."""
    number = FrontendAttributes.FromString(attributes).map.get(_STREAM, "") if attributes else ""
    return f"stream {int(number)}" if _NUMBER.fullmatch(number) else None


def _trip_count(config: bytes) -> int | None:
    """known_trip_count of a while: in JSON on GPUs, in a WhileLoopBackendConfig elsewhere."""
    if config.startswith(b"{"):
        trip_count = backend_config(config).trip_count
        return None if trip_count is None else int(trip_count.n)
    parsed = WhileLoopBackendConfig()
    try:
        parsed.ParseFromString(config)
    except DecodeError:
        return None
    return parsed.known_trip_count.n if parsed.HasField("known_trip_count") else None


def _computation_columns(body: Body, placed: _Placed, loops: list[_Loop]) -> list[pl.Series]:
    """Columns that the instructions of one computation share, whether each is its root, and its step."""
    trips: dict[int | None, int | None] = {loop: trips for loop, *_, trips in reversed(loops)}
    shared = [(c.id, c.id in placed, placed.get(c.id), trips.get(placed.get(c.id))) for c, _ in body.computations]
    names = ("computation", "top_level", "loop", "trip_count")
    table = pl.DataFrame(shared, {name: INSTRUCTIONS[name] for name in names}, orient="row")
    lengths = [len(rows) for _, rows in body.computations]
    roots: list[bool] = []
    for c, rows in body.computations:
        root = (c.root_id, c.id << 32 | c.root_id)
        roots += [number in root for number in body.ids[rows.start : rows.stop]]
    return [
        *table[np.repeat(np.arange(len(lengths)), lengths)].get_columns(),
        pl.Series("is_root", roots, INSTRUCTIONS["is_root"]),
        pl.Series("step", _steps(body), INSTRUCTIONS["step"]),
    ]


def _steps(body: Body) -> list[int | None]:
    """The position of each instruction in the schedule of its computation; None where there is no schedule.

    A proto lists instructions after their operands; the order in which they run is
    HloModuleProto.schedule (xla/service/hlo.proto).
    """
    sequences = body.module.schedule.sequences
    steps: list[int | None] = [None] * len(body.ids)
    for computation, rows in body.computations:
        if computation.id in sequences:
            step_of: dict[int, int] = {}
            for step, number in enumerate(sequences[computation.id].instruction_ids):
                step_of.setdefault(number, step)
            steps[rows.start : rows.stop] = map(step_of.get, body.ids[rows.start : rows.stop])
    return steps


def _computations(body: Body, placed: _Placed) -> pl.DataFrame:
    rows = [
        (
            c.id,
            c.name,
            _full_id(c.root_id, c.id, set(body.ids[rows.start : rows.stop])),
            c.id in placed,
            placed.get(c.id),
        )
        for c, rows in body.computations
    ]
    return pl.DataFrame(rows, schema=COMPUTATIONS, orient="row")


def _full_id(number: int, computation: int, ids: Container[int]) -> int:
    """The full id of an instruction; some writers leave out its upper 32 bits, the computation's id."""
    packed = computation << 32 | number
    return packed if number not in ids and packed in ids else number


def _instruction_columns(body: Body, frames: FrameTable) -> list[pl.Series]:
    """The columns of `INSTRUCTIONS` that depend on the instructions alone.

    Args:
        body: of the module.
        frames: of the module; the source lines that instructions of old modules hold are added to it.

    Raises:
        DecodeError: a part of an instruction is damaged.
    """
    opcodes, shapes = Distinct(body.opcodes), Distinct[bytes](body.read("shape"))
    parsed = [ShapeProto.FromString(shape) for shape in shapes.values]
    spaces = [None if shape.tuple_shapes else memory_space(shape) for shape in parsed]
    starts = [opcode in _ASYNC_STARTS for opcode in opcodes.values]
    columns = {
        "name": body.read("name"),
        "id": body.ids,
        "channel": [number if number > 0 else None for number in body.read("channel_id")],
        **_opcode_specific_columns(body),
        **work_columns(body, shapes, parsed),
    }
    return [
        *(pl.Series(name, values, INSTRUCTIONS[name]) for name, values in columns.items()),
        *opcodes.columns(opcode=opcodes.values, is_async_start=starts),
        *shapes.columns(memory_space=spaces),
        *_source_columns(body, frames),
    ]


def _opcode_specific_columns(body: Body) -> dict[str, list[Any]]:
    """The columns of fields that only instructions of some opcodes have."""
    parameters: list[int | None] = [None] * len(body.ids)
    sizes, counts = parameters.copy(), parameters.copy()
    targets: list[str | None] = [None] * len(body.ids)
    kinds = targets.copy()
    host_transfers = [False] * len(body.ids)
    for row, opcode in enumerate(body.opcodes):
        if opcode == "parameter":
            parameters[row] = body.instructions[row].parameter_number
        elif opcode == "fusion":
            kinds[row] = body.instructions[row].fusion_kind or None
        elif opcode == "custom-call":
            targets[row] = body.instructions[row].custom_call_target or None
        elif opcode in _GROUPED:
            groups = replica_groups(body.instructions[row], body.module.device_assignment)
            if groups:
                sizes[row], counts[row] = groups.size, groups.count
        if opcode in _TRANSFERS:
            host_transfers[row] = body.instructions[row].is_host_transfer
    return {
        "parameter": parameters,
        "fusion_kind": kinds,
        "custom_call_target": targets,
        "group_size": sizes,
        "group_count": counts,
        "is_host_transfer": host_transfers,
    }


def _source_columns(body: Body, frames: FrameTable) -> list[pl.Series]:
    """Framework scope and source of each instruction."""
    distinct = Distinct[bytes](body.read("metadata"))
    metadata = [OpMetadata.FromString(data) for data in distinct.values]
    numbers = [frames.of(m) for m in metadata]
    places = [frames.place(number) for number in numbers]
    return distinct.columns(
        op_name=[m.op_name or None for m in metadata],
        frame=numbers,
        source_file=shared_texts([place.file or None for place in places]),
        source_line=[place.line if place.line > 0 else None for place in places],
    )
