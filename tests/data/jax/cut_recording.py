"""Cuts the first execution of one XLA program out of a recording: what made ``loops_recording.tar.xz``.

    PYTHONPATH=tests:tests/support python tests/data/jax/cut_recording.py RECORDING PROGRAM MILLISECONDS OUT.tar.xz

RECORDING is the directory of one process, PROGRAM such as ``jit__fori_collect_loop``. What is kept: activities
that end at most MILLISECONDS after the program's first graph launch, their launches, the NVTX ranges that were
open or begun from the start of the execution until then, the program's first HLO module as far as
thence reads it, and the names in use.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import polars as pl

from support.archives import pack
from thence.readers.jax.protos.hlo_pb2 import HloModuleProto

_BEGINS = 2  # CUPTI_ACTIVITY_FLAG_MARKER_START
_OF_NAMES = ("name", "domain", "function", "metadata", "lane", "demangled")


def main(recording: Path, program: str, milliseconds: float, out: Path) -> None:
    """Writes the cut recording."""
    tables = {
        name: pl.concat([pl.read_ipc(part) for part in sorted(recording.glob(f"{name}-*.arrow"))])
        for name in ("kernels", "copies", "sets", "ranges", "calls", "names", "marks")
    }
    names = tables["names"]
    text = pl.coalesce("demangled", "name")
    wanted = names.filter(text.str.starts_with(f"XlaModule:#hlo_module={program},"))["number"]
    ranges = tables["ranges"]
    begun = ranges.filter((pl.col("flags") & _BEGINS) != 0)
    begins = begun.filter(pl.col("name").is_in(wanted.implode()))["time"].min()
    launch = names.filter(text.str.contains("GraphLaunch", literal=True))["number"]
    launched = (
        tables["calls"].filter(pl.col("function").is_in(launch.implode()), pl.col("start") > begins)["start"].min()
    )
    until = launched + int(milliseconds * 1e6)
    of = begun.filter(pl.col("time").is_between(begins, until))["id"]
    tables["ranges"] = ranges.filter(pl.col("id").is_in(of.implode()))
    tables["calls"] = tables["calls"].filter(pl.col("start").is_between(begins, until))
    for kind in ("kernels", "copies", "sets"):
        tables[kind] = tables[kind].filter(pl.col("start") >= begins, pl.col("end") <= until)
    used = pl.concat(
        [
            table[column].cast(pl.Int64)
            for kind, table in tables.items()
            if kind != "names"
            for column in table.columns
            if column in _OF_NAMES and table.schema[column].is_integer()
        ]
    ).unique()
    tables["names"] = names.filter(pl.col("number").cast(pl.Int64).is_in(used.implode()))
    _write(recording, program, tables, out)


def _write(recording: Path, program: str, tables: dict[str, pl.DataFrame], out: Path) -> None:
    index = json.loads((recording / "hlo" / "compiled.json").read_bytes())
    module = next(entry for entry in index["modules"] if entry["name"] == program)
    about = json.loads((recording / "recording.json").read_bytes())
    about |= {"counts": {kind: table.height for kind, table in tables.items()}, "threads": {}}
    files = {
        "recording.json": json.dumps(about).encode(),
        "hlo/compiled.json": json.dumps(index | {"modules": [module]}).encode(),
        f"hlo/{module['file']}": _module((recording / "hlo" / module["file"]).read_bytes()),
    }
    for kind, table in tables.items():
        content = io.BytesIO()
        table.write_ipc(content)
        files[f"{kind}-000001.arrow"] = content.getvalue()
    pack({f"{recording.name}/{name}": data for name, data in files.items()}, out)


def _module(proto: bytes) -> bytes:
    """An HloModuleProto without the fields that thence does not read."""
    module = HloModuleProto.FromString(proto)
    module.DiscardUnknownFields()
    return module.SerializeToString()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
