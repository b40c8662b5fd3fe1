"""The collectives of an HLO module: which instructions communicate, how much, and among how many.

Classification and message sizes follow nsys-jax (JAX-Toolbox), so that numbers can be compared. In
addition, these are classified: collectives that are not split into start and done, alone or wrapped in
async-start (the form of XLA since 2025), ragged-all-to-all, send and recv, and fused groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from thence.model.hlo import HloModule
    from thence.units import Bytes

_COLLECTIVE_INSTRUCTIONS = {
    "row": pl.UInt32(),  # of the instruction in HloModule.instructions
    "id": pl.Int64(),
    "name": pl.String(),
    "opcode": pl.String(),
    "collective": pl.String(),  # all-gather, ..., host-to-device; several kinds joined by "+"
    "message_bytes": pl.Int64(),  # of one rank, see `collective_instructions`
    "group_size": pl.Int64(),  # devices that take part; null: unknown, or the parts disagree
    "group_count": pl.Int64(),  # groups that do so at the same time; null: as above
    "parts": pl.Int64(),  # number of collectives that run as this one
}
"""Schema of the collectives of a module."""

_HOST_TO_DEVICE = "host-to-device"
_DEVICE_TO_HOST = "device-to-host"
_HOST_MEMORY = 5  # LayoutProto.memory_space of pinned host memory (xla::Layout::kHostMemorySpace)
_MAX_BYTES = (1 << 63) - 1

_KINDS = {
    **{name: name for name in ("all-to-all", "collective-broadcast", "collective-reduce")},
    **{name: name for name in ("ragged-all-to-all", "recv", "reduce-scatter", "send")},
    **{f"{name}{form}": name for name in ("all-gather", "all-reduce", "collective-permute") for form in ("", "-start")},
}
_LIBRARIES = r"(?i)nccl|nvshmem"
_WRAPPERS = ("async-start", "fusion")
_OFFLOADS = ("dynamic-slice", "dynamic-update-slice")
_READ = (
    *("row", "id", "name", "opcode", "computation", "called", "result_bytes", "operand_bytes"),
    *("memory_space", "group_size", "group_count", "is_host_transfer"),
)
_UNKNOWN = [None, None]  # size and memory space
_RECV_CONTEXT: Bytes = 4  # the result of a recv is (data, u32[], token)


def collective_instructions(module: HloModule) -> pl.DataFrame:
    """One row for each instruction that communicates, in the columns of `_COLLECTIVE_INSTRUCTIONS`.

    An async-start or fusion counts as the collectives inside it, at any depth; these also have rows of
    their own, because some traces name the wrapper and others the instruction inside. The message size is
    per rank and as NCCL's tests define it: the bytes of the input (all-gather, all-reduce, all-to-all, permute,
    broadcast, send) or of the output (reduce-scatter, recv). Copies between device and host memory inside such
    wrappers count as host-to-device and device-to-host, with group size 1. A custom call counts if
    its target names NCCL or NVSHMEM, with the bytes of its operands and no group size.
    """
    rows = [
        (*head, move.collective, move.bytes, move.size, move.count, move.parts)
        for head, move in _moves(_candidates(module))
    ]
    return pl.DataFrame(rows, schema=_COLLECTIVE_INSTRUCTIONS, orient="row")


@dataclass(frozen=True, slots=True)
class _Move:
    """One or several collectives that run as one."""

    collective: str
    bytes: Bytes
    size: int | None
    count: int | None
    parts: int = 1


def _candidates(module: HloModule) -> list[dict[str, Any]]:
    """Instructions that may communicate, with bytes and memory space of their first two operands."""
    library = pl.col("custom_call_target").str.contains(_LIBRARIES).fill_null(value=False)
    calls = pl.col("called").list.len() > 0
    rows = (
        module.instructions.lazy()
        .with_row_index("row")
        .filter(pl.col("opcode").is_in([*_KINDS, *_OFFLOADS]) | calls | library)
        .select(*_READ, pl.col("operands").list.head(2), library=library)
        .collect()
        .rows(named=True)
    )
    wanted = {n for row in rows if row["opcode"] not in _WRAPPERS for n in row["operands"]}
    operands = module.instructions.select("id", "result_bytes", "memory_space").filter(
        pl.col("id").is_in(pl.Series([*wanted], dtype=pl.Int64).implode())
    )
    first = {number: given for number, *given in reversed(operands.rows())}
    for row in rows:
        given = [first.get(n, _UNKNOWN) for n in row["operands"]] + [_UNKNOWN] * 2
        row["given_bytes"], row["spaces"] = zip(*given[:2], strict=True)
    return rows


def _moves(candidates: Iterable[dict[str, Any]]) -> Iterator[tuple[tuple[int, int, str, str], _Move]]:
    """The instructions that communicate, as (row, id, name, opcode), with kind and sizes.

    One pass without recursion: callees come before their callers.
    """
    inside: dict[int, _Move] = {}  # by computation id, the collectives that run in it
    for row in candidates:
        called = [inside[c] for c in dict.fromkeys(row["called"]) if c in inside]
        collective, offload = _own(row), _offload(row)
        move = collective or (_merged(called) if called and row["opcode"] in _WRAPPERS else None)
        if move:
            yield (row["row"], row["id"], row["name"], row["opcode"]), move
        new = [collective] if collective else [offload] if offload else called
        if new:
            home = row["computation"]
            inside[home] = _merged([*([inside[home]] if home in inside else []), *new])


def _own(row: dict[str, Any]) -> _Move | None:
    """The collective of a single instruction."""
    opcode, operands = row["opcode"], _int(row["operand_bytes"])
    size, count = _int(row["group_size"]) or None, _int(row["group_count"]) or None
    if row["library"]:
        return _Move("custom-call", operands, size, count)
    kind = _KINDS.get(str(opcode))
    if kind is None:
        return None
    if kind in ("send", "recv"):
        received = _int(row["result_bytes"]) - _RECV_CONTEXT
        sent = _int(row["given_bytes"][0]) if kind == "send" else received
        if row["is_host_transfer"]:
            return _Move(_DEVICE_TO_HOST if kind == "send" else _HOST_TO_DEVICE, max(sent, 0), 1, 1)
        return _Move(kind, max(sent, 0), size or 2, count)
    if kind == "reduce-scatter":
        operands //= size or 1
    elif kind == "ragged-all-to-all":  # operands: input, output, four lists of offsets and sizes
        operands = _int(row["given_bytes"][0])
    return _Move(kind, operands, size, count)


def _offload(row: dict[str, Any]) -> _Move | None:
    """A slice read from, or written to, host memory."""
    result, (first, second) = row["memory_space"], row["spaces"]
    if row["opcode"] == "dynamic-slice" and result != first and _HOST_MEMORY in (result, first):
        kind = _HOST_TO_DEVICE if first == _HOST_MEMORY else _DEVICE_TO_HOST
        return _Move(kind, _int(row["result_bytes"]), 1, 1)
    updates = row["opcode"] == "dynamic-update-slice" and result == first != second
    if updates and _HOST_MEMORY in (first, second):
        kind = _DEVICE_TO_HOST if first == _HOST_MEMORY else _HOST_TO_DEVICE
        return _Move(kind, _int(row["given_bytes"][1]), 1, 1)
    return None


def _merged(moves: Iterable[_Move]) -> _Move:
    parts = list(moves)
    kinds = sorted({kind for part in parts for kind in part.collective.split("+")})
    sizes, counts = {part.size for part in parts}, {part.count for part in parts}
    return _Move(
        "+".join(kinds),
        min(sum(part.bytes for part in parts), _MAX_BYTES),
        sizes.pop() if len(sizes) == 1 else None,
        counts.pop() if len(counts) == 1 else None,
        min(sum(part.parts for part in parts), _MAX_BYTES),
    )


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
