"""Thunk metadata: the number of each step of an XLA GPU program, and the HLO instruction behind it.

Kernels are shared between instructions, so a kernel's name does not lead to one; the order of the
thunks does. Written by ``--xla_dump_to`` as ``*.thunk_metadata.pb`` (or as text, not read here).
"""

from __future__ import annotations

import polars as pl

from thence.errors import DamagedInput
from thence.readers.protos.thunk_metadata_pb2 import ThunkMetadataList
from thence.readers.xla.parsing import parse, unpacked

__all__ = ["THUNKS", "decode_thunk_metadata"]

THUNKS = {
    "thunk": pl.Int64(),  # number in the order of execution, from 1; null: a container of others
    "name": pl.String(),  # of the HLO instruction, or command_buffer_N; null: a plain sequence
    "kind": pl.String(),  # kCustomKernel, kCopy, kCublasLtMatmul, kCommandBuffer, ...
}
"""Schema of a list of thunks; containers (kCommandBuffer, kSequential) follow what they hold."""


def decode_thunk_metadata(data: bytes, path: str) -> pl.DataFrame:
    """The thunks of one program in the order of the file, in the columns of `THUNKS`.

    Raises:
        DamagedInput: the bytes are no thunk metadata, or empty.
    """
    thunks = parse(ThunkMetadataList, unpacked(data, path), path).thunk_metadata
    if not any(thunk.thunk_kind for thunk in thunks):
        raise DamagedInput(path, "is cut or damaged: it holds no thunks")
    rows = [
        (
            thunk.thunk_info.thunk_id or None,
            thunk.thunk_info.profile_annotation or None,
            thunk.thunk_kind or None,
        )
        for thunk in thunks
    ]
    return pl.DataFrame(rows, schema=THUNKS, orient="row")
