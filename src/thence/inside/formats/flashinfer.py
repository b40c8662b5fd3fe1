"""The layouts of FlashInfer's profiler (include/flashinfer/profiler.cuh) and of profilers derived from it.

The entries have 64 bits: the low word is a tag, the high word is the low word of %globaltimer. Entry 0
instead holds the number of blocks and the number of groups (warps or warpgroups). Each (block, group)
begins at an entry of its own and writes every (blocks * groups)-th entry from there; an entry that was
not written is 0.

    flashinfer        kind in bits 0-1, event in 2-11, block in 12-23, SM in 24-31
    flashinfer-old    kind in bits 0-1, event in 2-11, block * groups + group in 12-31
    mirage            kind in bits 0-1, event in 2-10, block * groups + group and a number above

Block and group are computed from the position of an entry, because large block numbers overflow the
tag's bits. An instant does not advance the writer's pointer, so the next event overwrites it: only an
instant at the end of a trace is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thence.errors import DamagedInput
from thence.inside.columns import COMPLETE, UNKNOWN, Columns, counted_from_start, starts_of
from thence.units import several

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.inside.description import Description
    from thence.model.arrays import Int64, UInt32

_NAME_BITS = {"flashinfer": 0x3FF, "flashinfer-old": 0x3FF, "mirage": 0x1FF}
_BLOCK_SHIFT, _BLOCK_BITS, _SM_SHIFT = 12, 0xFFF, 24


def read(words: UInt32, description: Description, path: str) -> Columns:
    """The columns of a buffer of FlashInfer's profiler.

    Raises:
        DamagedInput: the first entry of the buffer does not match its size or the description.
    """
    if len(words) < 2 or len(words) % 2:
        raise DamagedInput(path, f"holds {len(words):,} words; its entries are of two words each")
    blocks, groups = int(words[0]), int(words[1])
    traces = blocks * groups
    slots = len(words) // 2 - 1
    if not 0 < traces <= slots:
        raise DamagedInput(
            path,
            f"begins with {blocks:,} blocks and {groups:,} groups, and has {slots:,} entries: it "
            "is not a buffer of FlashInfer's profiler, or no kernel has written to it",
        )
    if description.blocks not in (1, blocks):
        raise DamagedInput(path, f"was written by {blocks:,} blocks; its description says {description.blocks:,}")
    entries = words[2:].view("<u8")[: slots // traces * traces].reshape(-1, traces)
    written = entries != 0
    # A trace has no gaps: entries behind an empty one are from another launch or another writer.
    count = np.where(written.all(axis=0), len(entries), written.argmin(axis=0)).astype(np.int64)
    behind = int(written.sum()) - int(count.sum())
    chosen = entries.T[np.arange(len(entries)) < count[:, None]]
    halves = chosen.view("<u4").reshape(-1, 2)
    tag, low = np.ascontiguousarray(halves[:, 0]), np.ascontiguousarray(halves[:, 1])
    rows = np.flatnonzero(count)
    columns = _columns(tag, low, rows, count[rows], groups)
    columns.name = (tag >> 2) & _NAME_BITS[description.flavour]
    columns.absent = traces - len(rows)
    columns.sm, columns.warnings = _multiprocessors(tag, columns, blocks, description.flavour)
    if behind:
        columns.warnings.append(
            f"{path}: {several(behind, 'entry', 'entries')} after an empty one left out: the buffer was"
            " not zeroed before the launch"
        )
    if int(count.max()) == len(entries):
        columns.warnings.append(
            f"{path}: is full; this layout has no bounds check, so further events may have overwritten other memory"
        )
    return columns


def _columns(tag: UInt32, low: UInt32, rows: Int64, count: Int64, groups: int) -> Columns:
    first = low[starts_of(count)[:-1]]
    unknown = np.full(len(rows), UNKNOWN, np.int64)
    return Columns(
        trace=rows,
        block=rows // groups,
        index=rows % groups,
        sm=unknown,
        count=count,
        dropped=np.zeros(len(rows), np.int64),
        timer=first.astype(np.int64),
        clock=unknown,
        total_ns=unknown,
        total_cycles=unknown,
        in_cycles=np.zeros(len(rows), np.bool_),
        state=np.full(len(rows), COMPLETE, np.uint8),
        name=tag,
        kind=(tag & 3).astype(np.uint8),
        counter=counted_from_start(low, first, count, unknown),
        timer_bits=32,
        scope="group",
    )


def _multiprocessors(tag: UInt32, columns: Columns, blocks: int, flavour: str) -> tuple[Int64, list[str]]:
    """SM of each trace, and warnings about the SMs and tags."""
    if flavour != "flashinfer":
        return columns.sm, []
    first: npt.NDArray[np.int64] = tag[columns.first[:-1]].astype(np.int64)
    if blocks > _BLOCK_BITS + 1:
        warning = f"SMs are unknown: the numbers of {blocks:,} blocks overflow into the bits of the SM in the tag"
        return columns.sm, [warning]
    wrong = int(((first >> _BLOCK_SHIFT & _BLOCK_BITS) != columns.block).sum())
    warnings = []
    if wrong:
        warnings.append(
            f"{several(wrong, 'trace')} with a block in the tag that differs from the position: the"
            " layout may be another one (flashinfer-old, mirage)"
        )
    return first >> _SM_SHIFT, warnings
