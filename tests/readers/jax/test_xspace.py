"""XSpace files: expected numbers are read from the bytes by protowire, or built by hand."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from typing import Any

import polars as pl
import pytest

from helpers import DATA
from protowire import every, first, message
from thence.errors import DamagedInput
from thence.readers.jax.hlo import decode_hlo
from thence.readers.jax.xspace import GPU_EVENTS, HOST_EVENTS, XSpace, decode_xspace, parsed_details

JAX = DATA / "jax"
FILES = ("streams_moved.xplane.pb", "streams_default.xplane.pb", "jax_single_nocb.xplane.pb.gz")


def content(name: str) -> bytes:
    data = (JAX / name).read_bytes()
    return gzip.decompress(data) if name.endswith(".gz") else data


# --- the recorded files, read by other means ----------------------------------------------------


class Truth:
    """Events of one plane by wire decoding: (line, name, start ps, duration ps, stats)."""

    def __init__(self, data: bytes, plane_name: str) -> None:
        planes = every(data, 1)
        (plane,) = [p for p in planes if first(p).get(2, b"").decode() == plane_name]
        names = {first(e)[1]: first(first(e).get(2, b"")).get(2, b"") for e in every(plane, 4)}
        stats = {first(e)[1]: first(first(e).get(2, b"")).get(2, b"") for e in every(plane, 5)}
        self.events: list[tuple[int, str, int, int, dict[str, Any]]] = []
        self.stats = {stats.get(first(s).get(1, 0), b"").decode(): _value(s, stats) for s in every(plane, 6)}
        self.metadata = {first(e)[1]: first(first(e)[2]) for e in every(plane, 4)}
        for line in every(plane, 3):
            facts = first(line)
            for event in every(line, 4):
                values = first(event)
                start = facts.get(3, 0) * 1000 + values.get(2, 0)
                found = {stats[first(s)[1]].decode(): _value(s, stats) for s in every(event, 4)}
                name = names[values[1]].decode()
                self.events.append((_signed(facts.get(1, 0)), name, start, values.get(3, 0), found))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _value(stat: bytes, names: dict[int, bytes]) -> Any:
    ((number, value),) = [(n, v) for n, v in first(stat).items() if n != 1] or [(0, None)]
    if number == 7:
        return names[value].decode()
    return _signed(value) if number == 4 else value.decode() if number == 5 else value


@pytest.fixture(scope="module", params=FILES)
def recorded(request: pytest.FixtureRequest) -> tuple[XSpace, bytes]:
    data = content(request.param)
    return decode_xspace(data, request.param), data


def test_device_events(recorded: tuple[XSpace, bytes]) -> None:
    space, data = recorded
    truth = Truth(data, "/device:GPU:0").events
    table = space.gpu
    assert table.height == len(truth) > 0
    assert table["duration_ps"].sum() == sum(t[3] for t in truth)
    assert table["stream"].to_list() == [t[0] for t in truth]
    assert table["name"].cast(pl.String).to_list() == [t[1] for t in truth]
    start_ps = table["start"] * 1000 + table["start_rest_ps"].cast(pl.Int64)
    assert start_ps.to_list() == [t[2] for t in truth]
    end = table["start"] + table["duration"]
    assert end.to_list() == [(t[2] + t[3]) // 1000 for t in truth]


@pytest.mark.parametrize(
    ("column", "stat"),
    [
        *(("correlation", "correlation_id"), ("program", "program_id"), ("hlo_op", "hlo_op")),
        *(("hlo_module", "hlo_module"), ("scope", "name"), ("hlo_id", "unique_hlo_op_id")),
        *(("graph", "cuda_graph_id"), ("tf_op", "tf_op"), ("scope_range", "scope_range_id")),
    ],
)
def test_device_stats(recorded: tuple[XSpace, bytes], column: str, stat: str) -> None:
    space, data = recorded
    truth = Truth(data, "/device:GPU:0").events
    assert space.gpu[column].to_list() == [t[4].get(stat) for t in truth]


def test_kinds_and_details(recorded: tuple[XSpace, bytes]) -> None:
    space, data = recorded
    rows = space.gpu.iter_rows(named=True)
    for row, (*_, stats) in zip(rows, Truth(data, "/device:GPU:0").events, strict=True):
        if "kernel_details" in stats:
            parts = f"regs:{row['registers']} static_shared:{row['static_shared']} "
            parts += f"dynamic_shared:{row['dynamic_shared']} grid:{','.join(map(str, row['grid']))} "
            parts += f"block:{','.join(map(str, row['block']))} occ_pct:"
            assert stats["kernel_details"].startswith(parts)
            assert (row["kind"], row["bytes"]) == ("kernel", None)
        elif "memcpy_details" in stats:
            assert f"size:{row['bytes']} " in stats["memcpy_details"]
            assert f"kind_src:{row['source_kind']} " in stats["memcpy_details"]
            assert (row["kind"], row["grid"]) == ("memcpy", None)
        else:
            assert f"num_bytes:{row['bytes']} async:1" in stats["Memset_details"]
            assert (row["kind"], row["is_async"]) == ("memset", True)


def test_host_events(recorded: tuple[XSpace, bytes]) -> None:
    space, data = recorded
    truth = Truth(data, "/host:CPU").events
    table = space.host
    assert table.height == len(truth)
    assert table["thread"].to_list() == [t[0] for t in truth]
    assert Counter(table["name"].cast(pl.String)) == Counter(t[1] for t in truth)
    assert table["correlation"].to_list() == [t[4].get("correlation_id") for t in truth]
    assert table["producer"].to_list() == [_signed(t[4]["_p"]) if "_p" in t[4] else None for t in truth]
    assert set(space.gpu["correlation"]) <= set(table["correlation"])


def test_programs_devices_and_times(recorded: tuple[XSpace, bytes]) -> None:
    space, data = recorded
    stats = Truth(data, "/device:GPU:0").stats
    device = space.devices.row(0, named=True)
    assert device["name"] == stats["gpu_device_name"]
    assert device["memory_bytes"] == stats["memory_size"]
    assert device["multiprocessors"] == stats["core_count"]
    assert device["compute_capability"] == f"{stats['compute_cap_major']}.{stats['compute_cap_minor']}"
    task = Truth(data, "Task Environment").stats
    assert space.start_ns == task["profile_start_time"]
    assert space.versions["jax_version"] == Truth(data, "/host:metadata").stats["jax_version"]
    names = [e[2].decode() for e in Truth(data, "/host:metadata").metadata.values()]
    assert sorted(names) == sorted(f"{n}({p})" for p, n in space.programs.select("program", "name").rows())
    assert space.errors == space.warnings == ()


def test_every_kernel_leads_to_an_instruction(recorded: tuple[XSpace, bytes]) -> None:
    """The file's own HLO explains every hlo_op of its kernels, by name and by id."""
    space, _ = recorded
    modules = {p: decode_hlo(b, "x") for p, b in space.programs.select("program", "proto").rows()}
    for program, name, number in space.gpu.select("program", "hlo_op", "hlo_id").unique().rows():
        found = modules[program].instructions.filter(pl.col("name") == name)
        assert found.select("id", "top_level").rows() == [(number, True)]


def test_the_moved_layer_is_on_a_stream_of_its_own() -> None:
    moved = decode_xspace(content("streams_moved.xplane.pb"), "x").gpu
    default = decode_xspace(content("streams_default.xplane.pb"), "x").gpu
    assert (moved["stream"].n_unique(), default["stream"].n_unique()) == (3, 1)


# --- spaces built by hand -----------------------------------------------------------------------


def stat(number: int, field: int, value: Any) -> bytes:
    return message((1, number), (field, value))


def plane(name: Any, *lines: bytes, names: dict[int, Any] | None = None, more: tuple = ()) -> bytes:
    """A plane whose stats and events share the dictionary ``names``."""
    strings = [(5, message((1, k), (2, message((1, k), (2, v))))) for k, v in (names or {}).items()]
    events = [(4, message((1, k), (2, message((1, k), (2, v))))) for k, v in (names or {}).items()]
    return message((2, name), *((3, part) for part in lines), *events, *strings, *more)


def line(*events: bytes, number: int = 7, timestamp: int = 0) -> bytes:
    return message((1, number), (2, "line"), (3, timestamp), *((4, event) for event in events))


def event(name: int, offset: int, duration: int, *stats: bytes) -> bytes:
    return message((1, name), (2, offset), (3, duration), *((4, part) for part in stats))


def space_of(*planes: bytes, more: tuple = ()) -> XSpace:
    return decode_xspace(message(*((1, part) for part in planes), *more), "hand made")


def test_picoseconds_round_down_at_both_ends() -> None:
    """Neighbours that touch still touch, and what is inside stays inside."""
    times = [(1999, 1002), (3001, 999), (4000, 1), (4001, 1998)]
    table = space_of(plane("/device:GPU:3", line(*(event(1, *t) for t in times), timestamp=10**18), names={1: "k"})).gpu
    assert table["device"].to_list() == [3] * 4
    assert (table["start"] - 10**18).to_list() == [1, 3, 4, 4]
    assert table["duration"].to_list() == [2, 1, 0, 1]
    assert table["start_rest_ps"].to_list() == [999, 1, 0, 1]
    assert table["duration_ps"].to_list() == [1002, 999, 1, 1998]


def test_stats_of_any_encoding() -> None:
    names = {1: "k", 2: "correlation_id", 3: "hlo_op", 4: "fusion.1", 5: "context_id", 6: "cuda_graph_id"}
    events = (
        event(1, 0, 1, stat(2, 3, 5), stat(3, 7, 4), stat(5, 5, "$$12"), stat(6, 3, 2**64 - 1)),
        event(1, 0, 1, stat(2, 4, 6), stat(3, 5, "fusion.2"), stat(5, 5, "none"), stat(9, 3, 1)),
        event(1, 0, 1, stat(2, 4, 0), stat(3, 7, 99)),
        event(8, 0, 1),
    )
    table = space_of(plane("/device:GPU:0", line(*events), names=names)).gpu
    assert table["correlation"].to_list() == [5, 6, 0, None]
    assert table["hlo_op"].to_list() == ["fusion.1", "fusion.2", "", None]
    assert table["context"].to_list() == [12, 0, None, None]
    assert table["graph"].to_list() == [2**64 - 1, None, None, None]
    assert table["name"].to_list() == ["k", "k", "k", None]
    assert table["kind"].to_list() == ["other"] * 4


def test_stats_of_the_metadata_count_for_its_events_unless_they_have_their_own() -> None:
    metadata = message((1, 1), (2, "k"), (5, stat(2, 4, 5)))
    facts = ((4, message((1, 1), (2, metadata))), (5, message((1, 2), (2, message((2, "program_id"))))))
    events = line(event(1, 0, 1), event(1, 0, 1, stat(2, 4, 6)))
    assert space_of(plane("/host:CPU", events, more=facts)).host["program"].to_list() == [5, 6]


def test_aggregated_events_have_no_place_in_time() -> None:
    counted = message((1, 1), (5, 12), (3, 99))
    assert space_of(plane("/host:CPU", line(counted, event(1, 0, 1)), names={1: "a"})).host.height == 1


def test_broken_utf8_costs_a_character_and_not_the_file() -> None:
    found = space_of(plane("/host:CPU", line(event(1, 0, 1)), names={1: b"a\xff"})).host
    assert found["name"].to_list() == ["a\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(
    ("key", "name", "stats", "expected"),
    [
        (1, "jit_f(32)", (stat(6, 3, 31),), (31, "jit_f")),
        (1, "jit_f(32)", (), (32, "jit_f")),
        (33, "jit_f", (), (33, "jit_f")),
        (1, "jit_f(0)", (stat(6, 3, 0),), (0, "jit_f")),
    ],
)
def test_program_numbers_of_three_generations(key, name, stats, expected) -> None:
    """A stat of its own, the number after the name, the key of the metadata; in this order."""
    proto = stat(5, 6, b"proto")
    metadata = message((1, key), (2, name), *((5, part) for part in (proto, *stats)))
    named = [(5, message((1, k), (2, message((2, v))))) for k, v in ((5, "Hlo Proto"), (6, "program_id"))]
    found = space_of(plane("/host:metadata", more=((4, message((1, key), (2, metadata))), *named)))
    assert found.programs.rows() == [(*expected, b"proto")]


def test_what_the_profiler_says_about_itself() -> None:
    found = space_of(plane("/host:CPU"), more=((2, "failed"), (3, "dropped 5"), (4, "host1")))
    assert (found.errors, found.warnings, found.hostnames) == (("failed",), ("dropped 5",), ("host1",))
    assert found.start_ns is None


def test_planes_of_other_devices_are_listed_but_not_decoded() -> None:
    found = space_of(plane("/device:TPU:0", line(event(1, 0, 1)), names={1: "op"}))
    assert found.lines.rows() == [("/device:TPU:0", 7, "line", 0, 1)]
    assert dict(found.gpu.schema) == GPU_EVENTS
    assert dict(found.host.schema) == HOST_EVENTS
    assert found.gpu.is_empty()


def test_details_that_lie_are_null() -> None:
    table = parsed_details(["regs:x grid:1,2 block:4294967296,1,1", "regs:99999999999999999999 size:-5", "", ":::: a:"])
    assert table.null_count().row(0) == (4,) * table.width
    table = parsed_details(["static_shared:48", "dynamic_shared:1024 static_shared:16"])
    assert table["shared_memory"].to_list() == [48, 1040]


@pytest.mark.parametrize("data", [b"", b"hello, world", content(FILES[0])[:20_000]])
def test_damaged_bytes_are_one_error(data: bytes) -> None:
    with pytest.raises(DamagedInput, match=r"^some\.pb: "):
        decode_xspace(data, "some.pb")


def test_cut_and_flipped_files_are_read_or_refused() -> None:
    generator = random.Random(1)
    original = content("streams_default.xplane.pb")
    for _ in range(80):
        data = bytearray(original)
        if generator.random() < 0.3:
            del data[generator.randrange(len(data)) :]
        for _ in range(generator.choice((0, 1, 1, 4)) if data else 0):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            decode_xspace(bytes(data), "x")
        except DamagedInput:
            continue
