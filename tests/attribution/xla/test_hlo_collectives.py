"""Collectives of HLO modules built by hand: kinds, sizes and groups."""

from __future__ import annotations

import pytest

from hlo_building import BF16, F32, TOKEN, build, computation, instruction, only, shape, tuple_of
from protowire import message, pack
from thence.attribution.xla.hlo_collectives import collective_instructions

MESH = message((1, message((1, "a"), (2, 2))), (1, message((1, "b"), (2, 8))))
GROUPS = {
    "explicit": (((49, message((1, pack(0, 1, 2)))), (49, message((1, pack(3, 4, 5))))), 3, 2),
    "explicit, not packed": (((49, message((1, 0), (1, 1))),), 2, 1),
    "device list": (((87, message((1, message((1, pack(0, 1)))))),), 2, 1),
    "iota in the device list": (((87, message((2, message((1, 4), (2, 8))))),), 8, 4),
    "iota": (((92, message((1, 2), (2, 16), (3, pack(32)))),), 16, 2),
    "mesh axis": (((93, message((1, MESH), (2, message((1, 1))))),), 8, 2),
    "first mesh axis": (((93, message((1, MESH), (2, b""))),), 2, 8),
    "both mesh axes": (((93, message((1, MESH), (2, b""), (2, message((1, 1))))),), 16, 1),
    "part of a mesh axis": (((93, message((1, MESH), (2, message((1, 1), (2, message((1, 2), (2, 4))))))),), *(4, 4)),
}


@pytest.mark.parametrize("form", GROUPS)
def test_replica_groups_in_every_form(form: str) -> None:
    more, group_size, count = GROUPS[form]
    row = only(*more)
    assert (row["group_size"], row["group_count"]) == (group_size, count)
    assert only(*more, opcode="reduce-scatter")["message_bytes"] == 4096 // group_size


def test_no_groups_means_all_replicas_and_with_a_channel_all_partitions() -> None:
    devices = ((15, message((1, 2), (2, 4))),)
    assert only(module=devices)["group_size"] == 2
    assert only((26, 7), module=devices)["group_size"] == 8
    assert only()["group_size"] is None


def test_a_mesh_axis_that_does_not_exist_is_no_group() -> None:
    assert only((93, message((1, MESH), (2, message((1, 5))))))["group_size"] is None


@pytest.mark.parametrize(
    ("opcode", "name"),
    [
        ("all-gather-start", "all-gather"),
        *((name, name) for name in ("all-reduce", "all-to-all", "ragged-all-to-all", "send")),
        ("collective-broadcast", "collective-broadcast"),
    ],
)
def test_collective_names_and_sizes(opcode: str, name: str) -> None:
    row = only((49, message((1, pack(0, 1)))), opcode=opcode)
    assert (row["collective"], row["message_bytes"], row["group_size"]) == (name, 4096, 2)


def test_permutes_and_point_to_point_have_two_ends() -> None:
    pairs = tuple((52, message((1, i), (2, (i + 1) % 4))) for i in range(4))
    for opcode in ("collective-permute", "collective-permute-start"):
        row = only(*pairs, opcode=opcode)
        assert (row["collective"], row["group_size"], row["group_count"]) == (*("collective-permute", 2), 4)
    got = tuple_of(shape(F32, 1024), shape(8), shape(TOKEN))
    token = instruction("t", "after-all", 1, shape(TOKEN))
    for host, name in ((0, "recv"), (1, "host-to-device")):
        received = instruction("r", "recv", 2, got, (1,), (), (47, host))
        row = collective_instructions(build(computation(1, token, received))).row(0, named=True)
        assert (row["collective"], row["message_bytes"], row["group_size"]) == (name, 4096, 2 - host)


def test_async_start_and_fusion_count_as_what_they_hold() -> None:
    groups = (49, message((1, pack(0, 1, 2, 3))))
    inner = computation(
        1,
        instruction("p", "parameter", 1, shape(BF16, 64)),
        instruction("ag", "all-gather", 2, shape(BF16, 256), (1,), (), groups),
        instruction("ar", "all-reduce", 3, shape(BF16, 256), (2,), (), groups),
    )
    fused = computation(2, instruction("f", "fusion", 4, shape(BF16, 256), (), (1,)))
    outer = computation(3, instruction("start", "async-start", 5, shape(BF16, 256), (), (2,)))
    found = collective_instructions(build(inner, fused, outer))
    assert found["name"].to_list() == ["ag", "ar", "f", "start"]
    row = found.row(3, named=True)
    assert row["collective"] == "all-gather+all-reduce"
    assert (row["message_bytes"], row["group_size"], row["parts"]) == (128 + 512, 4, 2)


@pytest.mark.parametrize(("spaces", "name"), [((5, 0), "host-to-device"), ((0, 5), "device-to-host"), ((0, 1), None)])
def test_slices_across_memories_in_a_wrapper_are_offloads(spaces, name) -> None:
    source, result = spaces
    inner = computation(
        1,
        instruction("p", "parameter", 1, shape(F32, 64, space=source)),
        instruction("s", "dynamic-slice", 2, shape(F32, 8, space=result), (1,)),
    )
    outer = computation(2, instruction("f", "fusion", 3, shape(F32, 8), (), (1,)))
    found = collective_instructions(build(inner, outer))
    expected = [] if name is None else [("f", name, 32, 1)]
    assert found.select("name", "collective", "message_bytes", "group_size").rows() == expected


def test_updates_of_host_memory_are_offloads_of_the_update() -> None:
    inner = computation(
        1,
        instruction("p", "parameter", 1, shape(F32, 64, space=5)),
        instruction("u", "parameter", 2, shape(F32, 8)),
        instruction("s", "dynamic-update-slice", 3, shape(F32, 64, space=5), (1, 2)),
    )
    outer = computation(2, instruction("start", "async-start", 4, shape(F32, 8), (), (1,)))
    row = collective_instructions(build(inner, outer)).row(0, named=True)
    assert (row["collective"], row["message_bytes"]) == ("device-to-host", 32)


def test_custom_calls_count_only_when_they_name_a_library() -> None:
    assert only((28, "nvshmem_put"), opcode="custom-call")["collective"] == "custom-call"
    given = instruction("p", "parameter", 1, shape(F32, 4))
    inner = computation(1, instruction("a", "add", 9, shape(F32)))
    other = instruction("c", "custom-call", 2, shape(F32, 4), (1,), (1,), (28, "__cudnn$fusion"))
    assert collective_instructions(build(inner, computation(2, given, other))).is_empty()
