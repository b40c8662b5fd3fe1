"""HLO modules: every number here is derived from the bytes by protowire, or by hand."""

from __future__ import annotations

import lzma
import random
from collections import Counter
from math import prod

import polars as pl
import pytest

from helpers import DATA
from hlo_building import BF16, F32, TOKEN, TUPLE, at, build, computation, frame_index, instruction, shape, tuple_of
from protowire import every, fields, first, message, pack, packed
from thence.attribution.xla.constituents import constituents_by_cost
from thence.attribution.xla.hlo_collectives import collective_instructions
from thence.errors import DamagedInput
from thence.model.hlo import Frame, HloModule
from thence.readers.expansion import Expansion
from thence.readers.jax.hlo import decode_hlo
from thence.readers.jax.protobuf import unpacked

JAX = DATA / "jax"
PACKED = (JAX / "train_step_fsdp2.hlo.pb.xz").read_bytes()
PROTO = lzma.decompress(PACKED)

# The numbers of xla_data.proto, and the widths that the types' names say.
WIDTHS = {
    1: 8,
    2: 8,
    3: 16,
    4: 32,
    5: 64,
    6: 8,
    7: 16,
    8: 32,
    9: 64,
    10: 16,
    11: 32,
    12: 64,
    15: 64,
    16: 16,
    18: 128,
    19: 8,
    20: 8,
    21: 4,
    22: 4,
    23: 8,
    24: 8,
    25: 8,
    26: 2,
    27: 2,
    28: 8,
    29: 8,
    30: 1,
    31: 1,
    32: 4,
    33: 8,
    35: 6,
    36: 6,
}


# --- the recorded module, read by other means ---------------------------------------------------


@pytest.fixture(scope="module")
def module() -> HloModule:
    return decode_hlo(PACKED, "train.hlo.pb.xz")


@pytest.fixture(scope="module")
def truth() -> list[tuple[dict[int, object], bytes]]:
    """(fields, bytes) of every instruction, in order."""
    computations = every(first(PROTO)[1], 3)
    return [(first(i), i) for c in computations for i in every(c, 2)]


def size(shape: bytes) -> int:
    if first(shape).get(2) == TUPLE:
        return sum(size(part) for part in every(shape, 4))
    bits = WIDTHS.get(first(shape).get(2, 0), 0)
    return bits * prod(n for part in every(shape, 3) for n in _list(part)) // 8


def _list(value: int | bytes) -> list[int]:
    return [value] if isinstance(value, int) else packed(value)


def test_every_instruction_is_a_row_in_order(module: HloModule, truth) -> None:
    table = module.instructions
    assert table["name"].to_list() == [f[1].decode() for f, _ in truth]
    assert table["opcode"].to_list() == [f[2].decode() for f, _ in truth]
    assert table["id"].to_list() == [f[35] for f, _ in truth]
    assert table["result_bytes"].to_list() == [size(f.get(3, b"")) for f, _ in truth]
    operands = [[n for part in every(b, 36) for n in _list(part)] for _, b in truth]
    assert table["operands"].to_list() == operands
    sizes = {f[35]: size(f.get(3, b"")) for f, _ in truth}
    assert table["operand_bytes"].to_list() == [sum(sizes[i] for i in ids) for ids in operands]


def test_facts_of_the_module(module: HloModule) -> None:
    proto = first(first(PROTO)[1])
    attributes = {first(e)[1]: first(e)[2] for e in every(proto[19], 1)}
    assert module.name == proto[1].decode()
    assert module.id == proto[5]
    assert module.entry == proto[6]
    assert module.fingerprint == attributes[b"fingerprint_before_lhs"].decode()
    assert (module.replicas, module.partitions) == (first(proto[15])[1], first(proto[15])[2])


def test_innermost_line_and_stack_come_from_the_frame_index(module: HloModule, truth) -> None:
    index = first(first(PROTO)[1])[17]
    files, functions = every(index, 1), every(index, 2)
    places, frames = every(index, 3), every(index, 4)

    def frame(number: int) -> tuple[dict[int, int], int]:
        found = first(frames[number - 1])
        return first(places[found[1] - 1]), found.get(2, 0)

    numbers = [first(f.get(7, b"")).get(15, 0) for f, _ in truth]
    lines = [frame(n)[0].get(3) if n else None for n in numbers]
    assert module.instructions["frame"].to_list() == numbers
    assert module.instructions["source_line"].to_list() == lines
    expected = []
    number = max(numbers)
    while number:
        place, number = frame(number)
        text = files[place[1] - 1].decode(), functions[place[2] - 1].decode()
        expected.append(Frame(text[0], place[3], place.get(4, 0), text[1]))
    assert len(expected) > 1
    assert module.stack(max(numbers)) == tuple(reversed(expected))
    assert module.stack(0) == module.stack(10**6) == ()


def test_collectives_of_the_recording(module: HloModule, truth) -> None:
    """XLA of 2026: plain collectives inside async-start, replica groups as mesh axes."""
    sizes = {f[35]: size(f[3]) for f, _ in truth}
    expected = Counter()
    for values, data in truth:
        opcode = values[2].decode()
        if opcode in ("all-gather", "all-reduce", "reduce-scatter"):
            mesh = first(values[93])[1]
            group = prod(first(axis)[2] for axis in every(mesh, 1))
            moved = sum(sizes[n] for part in every(data, 36) for n in _list(part))
            moved //= group if opcode == "reduce-scatter" else 1
            expected[opcode, moved, group] += 1
    found = collective_instructions(module)
    columns = ("collective", "message_bytes", "group_size")
    plain = found.filter(pl.col("opcode") == pl.col("collective")).select(columns)
    assert Counter(plain.iter_rows()) == expected
    starts = found.filter(pl.col("opcode") == "async-start").select(columns)
    assert starts.height == sum(f[2] == b"async-start" for f, _ in truth)
    assert set(starts.iter_rows()) <= set(expected)


def test_constituents_of_every_kernel_sum_to_one(module: HloModule) -> None:
    found = constituents_by_cost(module)
    expected = module.instructions.with_row_index("row").filter("top_level")
    sums = found.group_by("instruction").agg(pl.col("weight").sum()).sort("instruction")
    assert sums["instruction"].to_list() == expected["row"].to_list()
    assert sums["weight"].to_list() == pytest.approx([1.0] * expected.height)
    assert found["weight"].is_between(0, 1, closed="right").all()


def test_a_module_proto_alone_and_a_plain_file_read_the_same(module: HloModule) -> None:
    for data in (PROTO, first(PROTO)[1]):
        again = decode_hlo(data, "x")
        assert again.instructions.equals(module.instructions)
        assert again.frames.equals(module.frames)


# --- modules built by hand ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "bits"), WIDTHS.items())
def test_width_of_every_element_type(kind: int, bits: int) -> None:
    table = build(computation(1, instruction("p", "parameter", 1, shape(kind, 3, 8)))).instructions
    assert table["result_bytes"].to_list() == [24 * bits // 8]


def test_narrow_elements_fill_up_the_last_byte_and_layouts_may_widen_them() -> None:
    shapes = [shape(21, 3), shape(21, 3, bits=8), shape(F32), shape(F32, 0, 5), shape(TOKEN)]
    parts = [instruction(f"p{i}", "parameter", i, s) for i, s in enumerate(shapes, 1)]
    both = instruction("t", "tuple", 9, tuple_of(*shapes[:3], tuple_of(shapes[2])), (1, 2, 3))
    table = build(computation(1, *parts, both)).instructions
    assert table["result_bytes"].to_list() == [2, 3, 4, 0, 0, 2 + 3 + 4 + 4]
    assert table["operand_bytes"][-1] == 2 + 3 + 4


def test_flops_of_products_and_convolutions() -> None:
    left = instruction("l", "parameter", 1, shape(BF16, 8, 32, 16))
    right = instruction("r", "parameter", 2, shape(BF16, 8, 16, 64))
    numbers = message((1, pack(2)), (2, pack(1)), (3, pack(0)), (4, pack(0)))
    dot = instruction("d", "dot", 3, shape(F32, 8, 32, 64), (1, 2), (), (30, numbers))
    config = b'{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}}'
    result = tuple_of(shape(BF16, 8, 32, 64), shape(2, 1 << 20))  # with its workspace
    library = ((28, "__cublas$lt$matmul"), (43, config))
    call = instruction("m", "custom-call", 4, result, (1, 2), (), *library)
    ragged = instruction("g", "ragged-dot", 5, shape(F32, 4, 2), (1, 2), (), (90, message((1, numbers))))
    kernel = instruction("k", "parameter", 6, shape(F32, 3, 3, 16, 32))
    sizes = (16, message((4, 3)))
    conv = instruction("v", "convolution", 7, shape(F32, 1, 10, 10, 32), (1, 6), (), sizes)
    other = instruction("o", "custom-call", 8, result, (1, 2), (), (28, "anything"))
    table = build(computation(1, left, right, dot, call, ragged, kernel, conv, other)).instructions
    product = 2 * 8 * 32 * 64 * 16
    convolution = 2 * (10 * 10 * 32) * (3 * 3 * 16)
    expected = [0, 0, product, product, 2 * 4 * 2 * 16, 0, convolution, 0]
    assert table["flops"].to_list() == expected


def test_flops_of_a_fusion_are_those_of_its_computation() -> None:
    inner = computation(
        1,
        instruction("p", "parameter", 1, shape(F32, 100)),
        instruction("b", "bitcast", 2, shape(F32, 10, 10), (1,)),
        instruction("e", "exponential", 3, shape(F32, 10, 10), (2,)),
        instruction("z", "constant", 4, shape(F32)),
        instruction("r", "reduce", 5, shape(F32, 10), (3, 4)),
    )
    outer = computation(2, instruction("f", "fusion", 6, shape(F32, 10), (), (1,)))
    row = build(inner, outer).instructions.row(-1, named=True)
    assert (row["flops"], row["own_flops"]) == (200, 0)


WHILES = {
    "json": ((43, b'{"known_trip_count":{"n":"12"},"known_init_step":{"init":"0"}}'), 12),
    "proto": ((43, message((1, message((1, 12))))), 12),
    "inline payload": ((99, message((1, b'{"known_trip_count":{"n":"12"}}'))), 12),
    "shared payload": ((99, message((2, 1))), 12),
    "unknown": ((43, b'{"known_init_step":{}}'), None),
    "none": ((43, b""), None),
}


@pytest.mark.parametrize("form", WHILES)
def test_loops_and_what_is_in_them(form: str) -> None:
    config, trips = WHILES[form]
    adder = computation(1, instruction("add", "add", 1, shape(F32)))
    fused = computation(2, instruction("mul", "multiply", 2, shape(F32)))
    body = computation(
        3, instruction("f", "fusion", 3, shape(F32), (), (2,)), instruction("r", "reduce", 4, shape(F32), (), (1,))
    )
    condition = computation(4, instruction("lt", "compare", 5, shape(1)))
    entry = computation(5, instruction("w", "while", 6, shape(F32), (), (3, 4), config))
    payloads = ((22, b"other"), (22, b'{"known_trip_count":{"n":"12"}}'))
    module = build(adder, fused, body, condition, entry, more=payloads)
    assert module.loops.rows() == [(6, "w", 4, 3, trips)]
    inside = module.instructions.select("name", "top_level", "loop", "trip_count").rows()
    assert inside == [
        ("add", False, None, None),
        ("mul", False, None, None),
        ("f", True, 6, trips),
        ("r", True, 6, trips),
        ("lt", True, 6, trips),
        ("w", True, None, None),
    ]


def annotated(stream: str) -> tuple[int, bytes]:
    """Frontend attributes of an instruction: a map, of which each entry is a message with key and value."""
    attributes = (("inlineable", "false"), ("_xla_stream_annotation", stream))
    return 68, message(*((1, message((1, key), (2, value))) for key, value in attributes))


def test_placement_of_annotated_and_asynchronous_work_and_of_what_it_calls() -> None:
    one = shape(F32, 4)
    inner = computation(1, instruction("inner", "negate", 10, one), instruction("fused", "fusion", 11, one), root=11)
    side = computation(2, instruction("call", "call", 20, one, (), (1,)), root=20)
    other = computation(3, instruction("scatter", "reduce-scatter", 30, one), root=30)
    names = {"zero": "0", "negative": "-1", "no number": "x", "empty": "", "huge": "9" * 20}
    entry = computation(
        4,
        instruction("start", "async-start", 40, one, (), (2,), annotated("007")),
        instruction("scatter-start", "async-start", 41, one, (), (3,)),
        instruction("gather", "all-gather-start", 42, one),
        instruction("plain", "negate", 43, one),
        *(instruction(name, "call", 50 + n, one, (), (), annotated(s)) for n, (name, s) in enumerate(names.items())),
        root=43,
    )
    rows = build(inner, side, other, entry).instructions
    placement = dict(rows.select("name", pl.col("placement").cast(pl.String)).iter_rows())
    assert placement == {
        **dict.fromkeys(("start", "call", "inner", "fused"), "stream 7"),
        **dict.fromkeys(("scatter-start", "scatter", "gather"), "asynchronous"),
        **dict.fromkeys(("plain", *names)),
    }


def test_old_modules_have_a_file_and_line_instead_of_frames() -> None:
    metadata = (7, message((2, "jit(f)/mul"), (3, "/x/f.py"), (4, 7)))
    parts = [instruction(n, "add", i, shape(F32), (), (), metadata) for i, n in ((1, "a"), (2, "b"))]
    module = build(computation(1, *parts))
    table = module.instructions
    assert table.select("op_name", "source_file", "source_line").unique().rows() == [("jit(f)/mul", "/x/f.py", 7)]
    assert table["frame"].n_unique() == 1
    assert module.stack(table["frame"][0]) == (Frame("/x/f.py", 7, 0, ""),)


def test_a_cycle_of_frames_ends() -> None:
    part = instruction("a", "add", 1, shape(F32), (), (), at(1))
    module = build(computation(1, part), more=(frame_index((5, 2), (6, 1)),))
    assert 0 < len(module.stack(1)) <= 10_000


def test_absurd_dimensions_neither_overflow_nor_hang() -> None:
    wide = instruction("a", "add", 1, shape(F32, *[2**62] * 60))
    long = instruction("b", "add", 2, shape(F32, *[2] * 200_000))
    table = build(computation(1, wide, long)).instructions
    assert table["flops"].to_list() == [2**63 - 1, 0]
    assert table["result_bytes"].to_list() == [2**63 - 1, 0]


# --- damage -----------------------------------------------------------------------------


def test_unknown_fields_are_skipped() -> None:
    part = instruction("a", "add", 1, shape(F32), (), (), (1999, "new"), (1998, 7))
    assert build(computation(1, part), more=((1997, b"\xff"),)).instructions.height == 1


@pytest.mark.parametrize("data", [b"", b"hello, world", PROTO[:1000], PACKED[:1000], PACKED[:-1]])
def test_damaged_bytes_are_one_error(data: bytes) -> None:
    with pytest.raises(DamagedInput, match=r"^some\.hlo\.pb: "):
        decode_hlo(data, "some.hlo.pb")


def test_xz_streams_are_joined_and_limited() -> None:
    two = lzma.compress(b"ab") + bytes(4) + lzma.compress(b"cd")
    assert unpacked(two, "x") == b"abcd"
    bomb = lzma.compress(bytes(65 << 20), preset=0)  # more than is accepted whatever the ratio
    with pytest.raises(DamagedInput, match="more than 2 times its size and 64 MiB"):
        unpacked(bomb, "x", Expansion(2))


def test_cut_and_flipped_modules_are_read_or_refused(module: HloModule) -> None:
    generator = random.Random(1)
    entry = next(c for c in every(first(PROTO)[1], 3) if first(c)[5] == module.entry)
    small = message((1, message((1, "m"), (3, entry), (17, first(first(PROTO)[1])[17]))))
    for _ in range(50):
        data = bytearray(small)
        if generator.random() < 0.3:
            del data[generator.randrange(len(data)) :]
        for _ in range(generator.choice((1, 1, 4)) if data else 0):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            read = decode_hlo(bytes(data), "x")
        except DamagedInput:
            continue
        collective_instructions(read)
        constituents_by_cost(read)


def test_wire_reader_of_these_tests_agrees_with_its_writer() -> None:
    assert fields(message((1, 300), (2, "a"), (3, -1))) == [(1, 300), (2, b"a"), (3, 2**64 - 1)]
