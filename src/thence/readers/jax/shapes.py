"""Sizes of XLA shapes (elements, bytes, memory space), and the device groups of HLO collectives.

HloInstructionProto of hlo.proto has a separate field for each form of device groups: explicit lists
(``{{0,1},{2,3}}``), a reshaped iota (``[2,2]<=[4]``), and axes of a device mesh
(``mesh['data'=2] {'data'}``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.readers.jax.protos.hlo_pb2 import (
        DeviceAssignmentProto,
        HloInstructionProto,
        IotaReplicaGroupListProto,
        MeshAxesReplicaGroupListProto,
        ReplicaGroup,
        ShapeProto,
    )
    from thence.units import Bytes

MAX_INT64 = (1 << 63) - 1
MAX_RANK = 64
"""More dimensions than any XLA shape has; keeps a damaged shape with millions of dimensions from hanging the reader."""
# PrimitiveType of xla_data.proto: number to width in bits. TUPLE (13), OPAQUE_TYPE (14), TOKEN (17)
# and BUFFER (34) have no elements of their own.
_ELEMENT_BITS = {
    **dict.fromkeys((30, 31), 1),  # S1 U1
    **dict.fromkeys((26, 27), 2),  # S2 U2
    **dict.fromkeys((21, 22), 4),  # S4 U4
    32: 4,  # F4E2M1FN
    **dict.fromkeys((35, 36), 6),  # F6E3M2FN F6E2M3FN
    1: 8,  # PRED: a byte each
    **dict.fromkeys((2, 6), 8),  # S8 U8
    **dict.fromkeys((19, 20, 23, 24, 25, 28, 29, 33), 8),  # F8 variants, the scale F8E8M0FNU among them
    **dict.fromkeys((3, 7, 10, 16), 16),  # S16 U16 F16 BF16
    **dict.fromkeys((4, 8, 11), 32),  # S32 U32 F32
    **dict.fromkeys((5, 9, 12, 15), 64),  # S64 U64 F64 C64
    18: 128,  # C128
    **dict.fromkeys((13, 14, 17, 34), 0),
}
"""Width of each PrimitiveType in bits; tuples, opaque values, tokens and buffers have none."""


def elements(shape: ShapeProto) -> int:
    """Number of elements of an array shape; 0 for others, an upper bound for dynamic dimensions."""
    return _count(shape) if _ELEMENT_BITS.get(shape.element_type) else 0


def _count(shape: ShapeProto) -> int:
    dimensions = shape.dimensions
    if len(dimensions) > MAX_RANK:
        return 0
    return min(prod(d for d in dimensions if d >= 0), MAX_INT64)


def shape_bytes(shape: ShapeProto) -> Bytes:
    """Bytes of an array shape or of all leaves of a tuple; at most `MAX_INT64`.

    Elements narrower than a byte are packed and the last byte is padded: s4[3] has 2 bytes. An element
    size in the layout (element_size_in_bits) takes precedence over the width of the type.
    """
    if shape.tuple_shapes:  # the parts of a tuple, or the element of a BUFFER
        return min(sum(shape_bytes(part) for part in shape.tuple_shapes), MAX_INT64)
    bits = _ELEMENT_BITS.get(shape.element_type, 0)
    if not bits:
        return 0
    stored = shape.layout.element_size_in_bits
    return min(-(-_count(shape) * (stored if 0 < stored <= 128 else bits) // 8), MAX_INT64)


def memory_space(shape: ShapeProto) -> int:
    """Memory space of an array shape: 0 device, 5 host, 1 the one for collectives."""
    return shape.layout.memory_space


@dataclass(frozen=True, slots=True)
class Groups:
    """Number and size of device groups.

    Attributes:
        size: devices of one group; of the largest group if explicit groups differ in size.
        count: number of groups.
    """

    size: int
    count: int


def replica_groups(instruction: HloInstructionProto, devices: DeviceAssignmentProto) -> Groups | None:
    """The device groups of a collective, or None where neither instruction nor module specifies them.

    A collective-permute names pairs instead of groups; each pair counts as a group of size 2.

    Args:
        instruction: from any version of XLA; all forms of groups are tried.
        devices: the module's device assignment; an empty list of groups means all devices in it.
    """
    if instruction.source_target_pairs:
        return Groups(2, len(instruction.source_target_pairs))
    if instruction.HasField("mesh_axes_replica_group_list"):
        return _from_mesh(instruction.mesh_axes_replica_group_list)
    if instruction.HasField("iota_collective_device_list"):
        return _from_iota(instruction.iota_collective_device_list)
    if instruction.HasField("collective_device_list"):
        listed = instruction.collective_device_list
        if listed.HasField("iota_replica_group_list"):
            return _from_iota(listed.iota_replica_group_list)
        if listed.replica_groups:
            return _from_lists(listed.replica_groups)
    return _from_lists(instruction.replica_groups) or _everyone(instruction, devices)


def _from_mesh(grouped: MeshAxesReplicaGroupListProto) -> Groups | None:
    """A group spans the named axes or parts of axes; the number of groups is the size of the remaining mesh."""
    axes = [axis.size for axis in grouped.mesh.axes]
    if len(axes) > MAX_RANK or len(grouped.axes) > MAX_RANK:
        return None
    size = 1
    for reference in grouped.axes:
        if not 0 <= reference.mesh_axis_index < len(axes):
            return None
        part = reference.HasField("sub_axis_info")
        size *= reference.sub_axis_info.size if part else axes[reference.mesh_axis_index]
    return _sane(size, prod(axes) // size) if size > 0 else None


def _sane(size: int, count: int) -> Groups | None:
    return Groups(size, count) if 0 < size <= MAX_INT64 and 0 < count <= MAX_INT64 else None


def _from_iota(iota: IotaReplicaGroupListProto) -> Groups | None:
    return _sane(iota.num_devices_per_group, iota.num_replica_groups)


def _from_lists(groups: Iterable[ReplicaGroup]) -> Groups | None:
    sizes = [len(group.replica_ids) for group in groups]
    largest = max(sizes, default=0)
    return Groups(largest, len(sizes)) if largest else None


def _everyone(instruction: HloInstructionProto, devices: DeviceAssignmentProto) -> Groups | None:
    """The groups of a collective that lists none: all replicas, and, if it has a channel, all partitions too."""
    replicas, partitions = devices.replica_count, devices.computation_count
    if replicas <= 0 or partitions <= 0:
        return None
    across = instruction.channel_id > 0
    return _sane(replicas * partitions if across else replicas, 1 if across else partitions)
