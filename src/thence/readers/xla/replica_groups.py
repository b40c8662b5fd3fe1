"""Who takes part in a collective: the forms in which an HLO instruction says so.

Explicit lists (``{{0,1},{2,3}}``), a reshaped iota (``[2,2]<=[4]``) and axes of a device mesh
(``mesh['data'=2] {'data'}``), each in a field of its own; HloInstructionProto of hlo.proto.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from thence.readers.xla.shapes import MAX_INT64, MAX_RANK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.readers.protos.hlo_pb2 import (
        DeviceAssignmentProto,
        HloInstructionProto,
        IotaReplicaGroupListProto,
        MeshAxesReplicaGroupListProto,
        ReplicaGroup,
    )

__all__ = ["Groups", "replica_groups"]


@dataclass(frozen=True, slots=True)
class Groups:
    """How many groups of how many devices each.

    Attributes:
        size: devices of one group; of the largest, should explicit groups differ.
        count: number of groups.
    """

    size: int
    count: int


def replica_groups(
    instruction: HloInstructionProto, devices: DeviceAssignmentProto
) -> Groups | None:
    """The groups of a collective, or None where neither it nor the module says.

    A collective-permute names pairs instead of groups: size 2, and one group a pair.

    Args:
        instruction: of a module of any age; each form is looked for.
        devices: the module's assignment: an empty list of groups means everyone in one group.
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


def _from_lists(groups: Iterable[ReplicaGroup]) -> Groups | None:
    sizes = [len(group.replica_ids) for group in groups]
    largest = max(sizes, default=0)
    return Groups(largest, len(sizes)) if largest else None


def _from_iota(iota: IotaReplicaGroupListProto) -> Groups | None:
    return _sane(iota.num_devices_per_group, iota.num_replica_groups)


def _from_mesh(grouped: MeshAxesReplicaGroupListProto) -> Groups | None:
    """A group spans the named axes or parts of axes; the rest of the mesh counts the groups."""
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


def _everyone(instruction: HloInstructionProto, devices: DeviceAssignmentProto) -> Groups | None:
    """No groups at all: all replicas, and with a channel all partitions of them too."""
    replicas, partitions = devices.replica_count, devices.computation_count
    if replicas <= 0 or partitions <= 0:
        return None
    across = instruction.channel_id > 0
    return _sane(replicas * partitions if across else replicas, 1 if across else partitions)


def _sane(size: int, count: int) -> Groups | None:
    return Groups(size, count) if 0 < size <= MAX_INT64 and 0 < count <= MAX_INT64 else None
