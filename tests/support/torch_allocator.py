"""A model of PyTorch's caching allocator that keeps a history, and makes snapshots of the shape that torch 2.11 to 2.15
write: an independent truth for what the reader of snapshots finds.

It follows the rules of `c10/cuda/CUDACachingAllocator.cpp` in the most direct way: a list of segments, each a list of
blocks, searched from its beginning. Requests are rounded to 512 bytes; up to 1 MiB they come from segments of 2 MiB,
below 10 MiB from segments of 20 MiB, and larger ones from segments of their own size, rounded to 2 MiB. A block is
split if enough is left: 512 bytes of small blocks, more than 1 MiB of large ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
EMPTY: list[dict[str, Any]] = []


@dataclass
class Block:
    """A part of a segment."""

    address: int
    size: int
    requested: int = 0
    state: str = "inactive"
    frames: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Segment:
    """What the allocator got from the device."""

    address: int
    size: int
    large: bool
    stream: int
    pool: tuple[int, int]
    blocks: list[Block]


class Allocator:
    """The allocator of one device.

    Attributes:
        allocated: bytes of blocks that are handed out; reserved: of segments; peak: the largest `allocated`.
    """

    def __init__(self, capacity: int = 80 << 30, device: int = 0) -> None:
        self.segments: list[Segment] = []
        self.trace: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.capacity, self.device = capacity, device
        self.allocated = self.reserved = self.peak = 0
        self.time_us = 1_790_000_000_000_000
        self.recording = True
        self._next = 0x7F0000000000

    def record(
        self,
        action: str,
        address: int,
        size: int,
        block_of: tuple[int, tuple[int, int]],
        frames: list[Any],
        **more: Any,
    ) -> None:
        """Adds an event to the history, with the keys in the order in which PyTorch adds them."""
        self.time_us += 3
        if not self.recording:
            return
        stream, pool = block_of
        entry = {"action": action, "device_free" if action == "oom" else "addr": address, "size": size}
        entry |= {"stream": stream, "time_us": self.time_us, "compile_context": "N/A"}
        self.trace.append(entry | {"user_metadata": "", "pool_id": pool, "frames": frames} | more)

    def malloc(
        self, size: int, frames: list[Any] = EMPTY, stream: int = 0, pool: tuple[int, int] = (0, 0), **more: Any
    ) -> Block | None:
        """Hands out a block; None if the device has too little memory."""
        rounded = max(512, -(-size // 512) * 512)
        large = rounded > MIB
        free = [
            (block.size, block.address, segment, block)
            for segment in self.segments
            if (segment.large, segment.stream, segment.pool) == (large, stream, pool)
            for block in segment.blocks
            if block.state == "inactive" and block.size >= rounded
        ]
        if free:
            _, _, segment, block = min(free, key=lambda found: found[:2])
        else:
            small_or_medium = 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
            length = small_or_medium if large else 2 * MIB
            if self.reserved + length > self.capacity:
                self.record("oom", self.capacity - self.reserved, size, (stream, pool), frames)
                return None
            block = Block(self._next, length)
            segment = Segment(self._next, length, large, stream, pool, [block])
            self._next += length
            self.segments.append(segment)
            self.reserved += length
            self.record("segment_alloc", block.address, length, (stream, pool), frames)
        left = block.size - rounded
        if left > MIB if large else left >= 512:
            at = segment.blocks.index(block)
            segment.blocks.insert(at + 1, Block(block.address + rounded, left))
            block.size = rounded
        block.requested, block.state, block.frames = size, "active_allocated", frames
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        self.record("alloc", block.address, size, (stream, pool), frames, **more)
        return block

    def free(self, block: Block, *, awaiting: bool = False) -> None:
        """Takes a block back; if it is awaited by another stream, it stays active until `complete`."""
        segment = self._segment(block)
        self.allocated -= block.size
        self.record("free_requested", block.address, block.requested, (segment.stream, segment.pool), block.frames)
        block.state = "active_pending_free"
        if not awaiting:
            self.complete(block)

    def complete(self, block: Block) -> None:
        """Makes a block that was taken back available."""
        segment = self._segment(block)
        self.record("free_completed", block.address, block.requested, (segment.stream, segment.pool), block.frames)
        block.state, block.requested, block.frames = "inactive", 0, EMPTY
        at = segment.blocks.index(block)
        for first in (at, at - 1):
            pair = segment.blocks[first : first + 2] if first >= 0 else []
            if len(pair) == 2 and pair[0].state == pair[1].state == "inactive":
                pair[0].size += pair[1].size
                del segment.blocks[first + 1]

    def empty_cache(self) -> None:
        """Returns the segments that are free as a whole to the device."""
        for segment in list(self.segments):
            if len(segment.blocks) == 1 and segment.blocks[0].state == "inactive":
                self.segments.remove(segment)
                self.reserved -= segment.size
                self.record("segment_free", segment.address, segment.size, (segment.stream, segment.pool), EMPTY)

    def _segment(self, block: Block) -> Segment:
        return next(s for s in self.segments if s.address <= block.address < s.address + s.size)


def snapshot(*allocators: Allocator) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot`` returns, with an allocator for each device."""
    return {
        "segments": [_segment(allocator, segment) for allocator in allocators for segment in allocator.segments],
        "device_traces": [allocator.trace for allocator in allocators],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
        },
        "external_annotations": [entry for allocator in allocators for entry in allocator.annotations],
    }


def _segment(allocator: Allocator, segment: Segment) -> dict[str, Any]:
    allocated = [block for block in segment.blocks if block.state == "active_allocated"]
    active = [block for block in segment.blocks if block.state != "inactive"]
    return {
        "device": allocator.device,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sum(block.size for block in allocated),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": segment.stream,
        "segment_type": "large" if segment.large else "small",
        "segment_pool_id": segment.pool,
        "is_expandable": False,
        "frames": EMPTY,
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": block.state,
                "frames": block.frames,
            }
            for block in segment.blocks
        ],
    }
