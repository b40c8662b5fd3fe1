"""Cuts some steps out of a recording of several ranks: what made ``late_in_backward.tar.xz``.

    PYTHONPATH=tests:tests/support python tests/data/recording/cut_steps.py RECORDING FIRST END OUT.tar.xz

Steps are counted from 0. What is kept of each rank: the boundaries from the begin of step FIRST to that of step END,
the marks, calls and activities that CUPTI numbered between, NVTX ranges that began then, and all places and names.
Folders of files are left out of the names; those of the host, of its boot and of libraries are replaced.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from support.archives import pack
from thence.model.column_file import decode, encode

_STEP = 4  # kind of place
_BEGINS = 2  # CUPTI_ACTIVITY_FLAG_MARKER_START
_FOLDERS = re.compile(r"/[\w./-]*/(?=benchmarks/|site-packages/|python3[\d.]*/)")


def main(recording: Path, first: int, end: int, out: Path) -> None:
    """Writes the cut recording."""
    files: dict[str, bytes] = {}
    for folder in sorted(recording.iterdir()):
        tables = cut(read(folder), first, end)
        about = described(json.loads((folder / "recording.json").read_bytes()), tables)
        name = f"host-rank{about['rank']}-{about['pid']}"
        files[f"{name}/recording.json"] = json.dumps(about, indent=1, sort_keys=True).encode()
        files |= {f"{name}/{kind}-000001.npz": encode(columns) for kind, columns in tables.items()}
    folder = out.name.split(".")[0]
    pack({f"{folder}/{name}": data for name, data in files.items()}, out)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All rows of every table."""
    parts: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.npz")):
        parts.setdefault(path.name.split("-")[0], []).append(decode(path.read_bytes()))
    return {
        table: {
            name: np.concatenate([part[name] for part in of])
            if isinstance(of[0][name], np.ndarray)
            else [text for part in of for text in part[name]]
            for name in of[0]
        }
        for table, of in parts.items()
    }


def cut(tables: dict[str, dict[str, Any]], first: int, end: int) -> dict[str, dict[str, Any]]:
    """The tables with the rows of the steps."""
    places, boundaries = tables["places"], tables["boundaries"]
    step = places["number"][places["kind"] == _STEP]
    begins = np.flatnonzero(np.isin(boundaries["place"], step))
    low, high = begins[first], begins[end]
    time, counter = boundaries["time"], boundaries["counter"]
    ranges = tables["ranges"]
    begun = ranges["id"][
        ((ranges["flags"] & _BEGINS) != 0) & (ranges["time"] >= time[low]) & (ranges["time"] < time[high])
    ]
    kept = {
        "boundaries": np.arange(low, high + 1),
        "ranges": np.isin(ranges["id"], begun),
        "marks": _between(tables["marks"]["counter"], counter[low], counter[high]),
        **{
            table: _between(tables[table]["correlation"], counter[low] + 1, counter[high])
            for table in ("calls", "kernels", "copies", "sets")
        },
    }
    kept["collectives"] = np.isin(tables["collectives"]["serial"], tables["marks"]["serial"][kept["marks"]])
    result = {
        table: {name: values[kept[table]] for name, values in columns.items()} if table in kept else columns
        for table, columns in tables.items()
    }
    names = result["names"]
    for column in ("name", "demangled"):
        names[column] = [text and _FOLDERS.sub("/", text) for text in names[column]]
    return result


def _between(values: Any, low: int, high: int) -> Any:
    return (values >= low) & (values <= high)


def described(about: dict[str, Any], tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The description of what is left."""
    return about | {
        "boot": "00000000-0000-0000-0000-000000000000",
        "counts": {table: len(next(iter(columns.values()))) for table, columns in tables.items()},
        "cupti": about["cupti"] | {"path": "libcupti.so"},
        "host": "host",
        "parts": dict.fromkeys(tables, 1),
        "probe": None,
        "threads": {},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
