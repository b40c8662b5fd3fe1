"""Places of XLA activities: expected places are read from the HLO protos by protowire, or by hand."""

from __future__ import annotations

import dataclasses
import gzip
import lzma
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from helpers import DATA
from hlo_building import at, build, computation
from hlo_building import instruction as hlo_instruction
from hlo_building import shape as hlo_shape
from protowire import every, first, message, pack
from thence.attribution.xla.hlo_places import (
    PLACES,
    HloRows,
    autotuned,
    frame_stacks,
    hlo_places,
    hlo_rows,
    instructions,
    source_shares,
)
from thence.attribution.xla.op_names import labels, parts_of
from thence.attribution.xla.origins import origins
from thence.model.attributed import SHARES
from thence.model.hlo import FRAMES
from thence.model.own_code import OwnCode
from thence.model.tables import GPU, PROGRAMS, Tables
from thence.readers.jax import xplane
from thence.readers.jax.hlo import decode_hlo
from thence.readers.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.model.hlo import HloModule

JAX = DATA / "jax"
SINGLE = "jax_single_nocb.xplane.pb.gz"
FILES = (SINGLE, "streams_moved.xplane.pb", "streams_default.xplane.pb")


def read(name: str) -> Tables:
    with Source.open(str(JAX / name)) as source:
        return xplane.read(source, lambda _done: None)


@pytest.fixture(scope="module", params=FILES)
def tables(request: pytest.FixtureRequest) -> Tables:
    return read(request.param)


def rows_of(tables: Tables) -> HloRows:
    """The instructions that were found, with their modules."""
    trying = autotuned(tables)
    found = instructions(tables, trying)
    with_hlo = dataclasses.replace(tables, gpu=tables.gpu.with_columns(found["hlo"]))
    return hlo_rows(with_hlo, found["hlo_rule"], trying, OwnCode())


def places_of(tables: Tables) -> pl.DataFrame:
    return hlo_places(rows_of(tables))


def shares_of(tables: Tables) -> pl.DataFrame:
    return source_shares(rows_of(tables))


def proto_of(name: str, program: str) -> bytes:
    """The HloModuleProto of a program in a trace, found by wire decoding."""
    data = (JAX / name).read_bytes()
    data = gzip.decompress(data) if name.endswith(".gz") else data
    (plane,) = [p for p in every(data, 1) if first(p)[2] == b"/host:metadata"]
    for entry in every(plane, 4):
        metadata = first(entry)[2]
        if first(metadata)[2].decode().startswith(f"{program}("):
            (proto,) = [first(s)[6] for s in every(metadata, 5) if 6 in first(s)]
            return first(proto)[1]
    raise AssertionError(program)


# --- the recorded files -------------------------------------------------------------------------


def test_all_kernel_time_has_an_hlo_op_and_a_source_line(tables: Tables) -> None:
    places = places_of(tables)
    assert places.columns == [name for kind in PLACES for name in (kind, f"{kind}_rule")]
    assert places.height == tables.gpu.height
    for kind in ("op_name", "opcode", "source", "stack"):
        assert places[kind].null_count() == 0
    for kind in PLACES:
        assert places[f"{kind}_rule"].null_count() == 0


def test_claims_account_for_all_of_every_activity(tables: Tables) -> None:
    claims = shares_of(tables)
    assert dict(claims.schema) == dict(SHARES)
    sums = claims.group_by("gpu", maintain_order=True).agg(pl.col("weight").sum())
    assert sums["gpu"].to_list() == list(range(tables.gpu.height))
    assert sums["weight"].to_list() == pytest.approx([1.0] * len(sums))
    assert claims["weight"].min() > 0  # type: ignore[operator]
    with_place = claims.filter(pl.col("place").is_not_null())
    durations = tables.gpu["duration"].gather(with_place["gpu"])
    attributed = (durations * with_place["weight"]).sum()
    assert attributed >= 0.97 * tables.gpu["duration"].sum()


def lines_of(module: bytes) -> list[str]:
    """``file:line function`` of every stack frame: StackFrameIndexProto is field 17 of the module."""
    index = first(module)[17]
    files = [name.decode() for name in every(index, 1)]
    functions = [name.decode() for name in every(index, 2)]
    places = [first(place) for place in every(index, 3)]
    locations = [places[first(frame)[1] - 1] for frame in every(index, 4)]
    return [f"{files[place[1] - 1]}:{place[3]} {functions[place[2] - 1]}" for place in locations]


@pytest.mark.parametrize(("name", "program", "least"), [(SINGLE, "jit_train_step", 150), (FILES[1], "jit_f", 3)])
def test_places_are_those_of_the_proto(name: str, program: str, least: int) -> None:
    """Every instruction that ran and has metadata: its op_name, file and line."""
    tables = read(name)
    module = proto_of(name, program)
    lines = lines_of(module)
    truth = {first(i)[1].decode(): first(i) for c in every(module, 3) for i in every(c, 2)}
    places = places_of(tables).with_columns(hlo=tables.gpu["hlo"].cast(pl.String))
    checked = 0
    for row in places.unique("hlo").iter_rows(named=True):
        metadata = first(truth[row["hlo"]].get(7, b""))
        assert row["opcode"] == truth[row["hlo"]][2].decode()
        if 2 in metadata and 15 in metadata:
            assert row["op_name"] == metadata[2].decode()
            assert row["source"] == lines[metadata[15] - 1]
            file, _, rest = row["source"].rpartition(":")
            line, _, function = rest.partition(" ")
            assert f"{file}({line}): {function}" in row["stack"].split(";")[-1]
            assert row["op_name_rule"] == row["source_rule"] == "hlo_instruction"
            checked += 1
    assert checked >= least


def test_labels_are_the_named_scopes_of_the_model() -> None:
    """The model has four blocks of attention and mlp, named by jax.named_scope."""
    tables = read(SINGLE)
    places = places_of(tables)
    found = set(places["label"].drop_nulls().unique().cast(pl.String))
    assert found == {f"block{i}/{part}" for i in range(4) for part in ("attention", "mlp")}


def test_the_moved_layer_is_on_its_own_stream_and_line() -> None:
    tables = read("streams_moved.xplane.pb")
    rows = tables.gpu.select("stream", "hlo").hstack(places_of(tables).select("source"))
    rows = rows.with_columns(pl.col("hlo", "source").cast(pl.String))
    main = rows.filter(pl.col("stream") == 14)
    moved = rows.filter(pl.col("stream") != 14)
    assert set(main["hlo"]) == {"gemm_fusion_dot_general.3", "wrapped_add"}
    assert set(moved["hlo"]) == {"gemm_fusion_dot_general.2"}
    assert moved["source"].str.contains(r"/jax_streams\.py:8 [\w.<>]+$").all()


# --- instructions built by hand -----------------------------------------------------------------

F32, TUPLE = 11, 13


def instruction(number: int, name: str, opcode: str, *more: tuple[int, Any]) -> bytes:
    shape = message((2, F32), (3, pack(1024)))
    return message((1, name), (2, opcode), (3, shape), (35, number), *more)


def named(op_name: str, line: int) -> tuple[int, bytes]:
    return 7, message((2, op_name), (3, "model.py"), (4, line))


def module_of(*entry: bytes, others: tuple[bytes, ...] = (), root: int = 0) -> bytes:
    main = message((1, "main"), (5, 9), (6, root or 99), *((2, i) for i in entry))
    return message((1, message((1, "jit_f"), (5, 1), (6, 9), *((3, o) for o in (*others, main)))))


def running(proto: bytes, *names: str | None, graph: int | None = None) -> Tables:
    """One execution of a program that runs these instructions, 100 ns each."""
    rows = len(names)
    gpu = GPU.frame(
        {
            "kind": ["kernel"] * rows, "name": ["k"] * rows, "start": list(range(rows)),
            "duration": [100] * rows, "program": [0] * rows, "hlo": list(names),
            "graph": [graph] * rows,
        }
    )  # fmt: skip
    programs = PROGRAMS.frame({"hlo": [0], "name": ["jit_f"]})
    return Tables(gpu=gpu, programs=programs, hlo=(decode_hlo(proto, "x"),))


def gathered() -> bytes:
    """(parameter -> copy), (dot -> async-start around an all-gather of its parameter)."""
    inner = message(
        (1, "wrapped"), (5, 5), (6, 52),
        (2, instruction(51, "p", "parameter")),
        (2, instruction(52, "all-gather.7", "all-gather", (36, pack(51)))),
    )  # fmt: skip
    return module_of(
        instruction(1, "arg", "parameter", (7, message((2, "params['w']")))),
        instruction(2, "copy.1", "copy", (36, pack(1))),
        instruction(3, "dot.1", "dot", (36, pack(2)), named("jit(f)/jvp(a)/dot_general", 12)),
        instruction(4, "start.1", "async-start", (36, pack(3)), (38, pack(5))),
        instruction(6, "add.1", "add", (36, pack(2))),
        others=(inner,),
        root=4,
    )


def test_what_moves_data_belongs_to_what_it_moves() -> None:
    tables = running(gathered(), "all-gather.7", "start.1", "copy.1", "add.1", "gone.1")
    places = places_of(tables)
    assert places.select("op_name", "op_name_rule").rows() == [
        ("jit(f)/jvp(a)/dot_general", "hlo_moved"),
        ("jit(f)/jvp(a)/dot_general", "hlo_moved"),
        ("params['w']", "hlo_moved"),
        (None, "no_op_name"),
        (None, "no_instruction"),
    ]
    assert places.select("source", "source_rule").rows() == [
        ("model.py:12", "hlo_moved"),
        ("model.py:12", "hlo_moved"),
        ("model.py:12", "hlo_user"),
        (None, "no_source"),
        (None, "no_instruction"),
    ]
    assert places["label"].to_list() == ["a", "a", None, None, None]
    assert places["phase"].to_list() == ["forward", "forward", None, None, None]
    claims = shares_of(tables)
    assert claims["weight"].to_list() == [1.0] * 5
    assert claims["place"].null_count() == 2


def test_what_has_no_place_inherits_that_of_the_instruction_around_it(hlo: Callable[..., HloModule]) -> None:
    given = {"op_name": "jit(f)/while/body/cond", "frame": 2, "source_file": "model.py", "source_line": 7}
    module = hlo(
        {
            0: [{"name": "outer", "opcode": "while", "called": [1], "op_name": "jit(f)/while"}],
            1: [
                {"name": "cond", "opcode": "conditional", "called": [2], **given},
                {"name": "bare", "opcode": "conditional", "called": [3]},
            ],
            2: [{"name": "copy.1", "opcode": "copy"}, {"name": "add.1", "opcode": "add"}],
            3: [{"name": "copy.2", "opcode": "copy"}],
        }
    )
    frames = pl.DataFrame(
        {"frame": [1, 2], "parent": [0, 0], "file": ["train.py", "model.py"], "line": [3, 7], "column": 0,
         "function": "f", "stack": [1, 2]}, schema=FRAMES,
    )  # fmt: skip
    module = dataclasses.replace(module, frames=frames)
    found = origins(module, OwnCode()).with_columns(module.instructions["name"])
    rows = found.select("name", "op_name", "op_name_rule", "source", "source_rule").rows()
    inner, outer = "jit(f)/while/body/cond", "jit(f)/while"
    assert rows == [
        ("outer", outer, "hlo_instruction", None, "no_source"),
        ("cond", inner, "hlo_instruction", "model.py:7 f", "hlo_instruction"),
        ("bare", outer, "hlo_around", None, "no_source"),
        ("copy.1", inner, "hlo_around", "model.py:7 f", "hlo_around"),
        ("add.1", inner, "hlo_around", "model.py:7 f", "hlo_around"),
        ("copy.2", outer, "hlo_around", None, "no_source"),
    ]


def test_a_fusion_shares_its_time_by_cost() -> None:
    """Both read 4 kB, the second also writes 4 kB; each has 1024 operations, which take as long as 102.4 bytes."""
    fused = message(
        (1, "fused"), (5, 5), (6, 53),
        (2, instruction(50, "p0", "parameter", (9, 0))),
        (2, instruction(51, "p1", "parameter", (9, 1))),
        (2, instruction(52, "a", "negate", (36, pack(50)), named("jit(f)/neg", 1))),
        (2, instruction(53, "b", "add", (36, pack(52, 51)), named("jit(f)/add", 2))),
    )  # fmt: skip
    proto = module_of(
        instruction(1, "x", "parameter"),
        instruction(2, "y", "parameter"),
        instruction(3, "fusion.1", "fusion", (36, pack(1, 2)), (38, pack(5)), named("jit(f)/add", 2)),
        others=(fused,),
        root=3,
    )
    tables = running(proto, "fusion.1")
    read, operations = 3 * 4096**4 * 27, (2 * 102.4) ** 4  # B^4 = (3 * 4096)^4, O^4
    expected = {"model.py:1": read / 3 + operations / 2, "model.py:2": read * 2 / 3 + operations / 2}
    total = sum(expected.values())
    found = dict(shares_of(tables).select("place", "weight").rows())
    assert found == pytest.approx({k: v / total for k, v in expected.items()})


def test_every_collective_of_a_sharded_step_has_a_place() -> None:
    proto = lzma.decompress((JAX / "train_step_fsdp2.hlo.pb.xz").read_bytes())
    module = decode_hlo(proto, "x")
    found = origins(module, OwnCode()).with_columns(opcode=module.instructions["opcode"])
    moving = found.filter(pl.col("opcode").is_in(["all-gather", "reduce-scatter", "all-reduce"]))
    assert moving.height >= 9
    assert moving.select("op_name", "source").null_count().row(0) == (0, 0)


def test_reasons_where_there_is_no_instruction() -> None:
    tables = running(gathered(), None, None)
    in_graph = running(gathered(), None, graph=3)
    without = dataclasses.replace(running(gathered(), "dot.1"), programs=PROGRAMS.frame({"name": ["jit_f"]}), hlo=())
    alone = dataclasses.replace(tables, gpu=GPU.frame({"duration": [1], "kind": ["kernel"]}))
    reasons = {"no_hlo_op": tables, "command_buffer": in_graph, "no_hlo": without, "no_program": alone}
    for reason, case in reasons.items():
        places = places_of(case)
        assert {places[f"{kind}_rule"][0] for kind in PLACES} == {reason}
        assert shares_of(case).row(0) == (0, None, 1.0, reason)


def test_no_rows() -> None:
    assert places_of(Tables()).height == 0
    assert shares_of(Tables()).height == 0


# --- op_names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op_name", "parts"),
    [
        ("jit(f)/add", ["jit(f)/add"]),
        ("(jit(f)/a:jit(f)/b)", ["jit(f)/a", "jit(f)/b"]),
        ("jit(f)/(jvp(x)/a:transpose(jvp(x))/b)", ["jit(f)/jvp(x)/a", "jit(f)/transpose(jvp(x))/b"]),
        ("(p['a:b']:jit(f)/c)", ["p['a:b']", "jit(f)/c"]),
        ("jit(f)/((a:b):c)", ["jit(f)/a", "jit(f)/b", "jit(f)/c"]),
        ("jit(f)/transpose(jvp())", ["jit(f)/transpose(jvp())"]),
        ("((((", ["(((("]),
    ],
)
def test_merged_op_names(op_name: str, parts: list[str]) -> None:
    assert parts_of(op_name) == parts


@pytest.mark.parametrize(
    ("op_name", "label"),
    [
        ("jit(f)/jvp(layer1)/mlp/dot_general", "layer1/mlp"),
        ("jit(f)/transpose(jvp(layer1))/mlp/dot_general", "layer1/mlp"),
        ("jit(f)/jvp()/dot_general", None),
        ("jit(f)/add", None),
        ("jit(f)/outer/jit(silu)/logistic", "outer"),
        ("jit(f)/while/body/layer/add", "layer"),
        ("jit(f)/layer/checkpoint/rematted_computation/mlp/dot_general", "layer/mlp"),
        ("jit(f)/cond/branch_1_fun/expert/add", "expert"),
        ("jit(f)/attention/bhqk,bkhd->bqhd/dot_general", "attention"),
        ("jit(f)/compute_on/dot_general", None),
        ("params['w']", None),
        ("jit(f)/(a/b/add:a/c/mul)", "a"),
        ("jit(f)/(a/add:b/mul)", None),
        ("(jit(f)/a/add:params['w'])", "a"),
    ],
)
def test_labels(op_name: str, label: str | None) -> None:
    assert labels([op_name])[op_name][0] == label


def test_a_common_beginning_is_a_scope_and_a_leaf_is_a_primitive() -> None:
    """XLA shortens merged op_names to the part they share."""
    found = labels(["jit(f)/a/b", "jit(f)/a/b/add", "jit(f)/a/mul"])
    assert [label for label, _ in found.values()] == ["a/b", "a/b", "a"]


def test_stacks_share_the_frames_around_them() -> None:
    """2,000 frames in each other, each in a file with a name of 3,000 characters: 6 GB of text in all stacks."""
    count = 2000
    frames = message(
        (1, "x" * 3000 + ";.py"), (2, "f"),
        *((3, message((1, 1), (2, 1), (3, i + 1))) for i in range(count)),
        *((4, message((1, i + 1), (2, i))) for i in range(count)),
    )  # fmt: skip
    parts = [hlo_instruction(f"i{i}", "add", i + 1, hlo_shape(11), (), (), at(i + 1)) for i in range(count)]
    module = build(computation(1, *parts), more=((17, frames),))
    stacks = frame_stacks(module, [None, 0, 5, *range(1, count + 1), count + 1])
    assert sorted(stacks) == list(range(1, count + 1))
    assert sum(map(len, stacks.values())) < 6_000_000
    assert len(set(stacks.values())) == count
    assert stacks[5].count(";") == 4
    assert "levels left out" in stacks[count]
    assert set(module.frames["file"].cast(pl.String).str.len_chars()) == {1000}
