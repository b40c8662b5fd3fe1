"""Cuts the steps around one window of counters out of a recording: what made ``llama_graph.tar.xz``.

    PYTHONPATH=tests python tests/data/counters/cut_window.py RECORDING WINDOW OUT.tar.xz COUNTER...

Windows are counted from 0. What is kept: samples of the named counters in the window; the boundaries of the steps of
which work ran in it; the marks, calls and activities that CUPTI numbered in these steps; all names, places and labels.
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
_AHEAD_NS = 40_000_000  # by how much the host is ahead of the device
_FOLDERS = re.compile(r"/[\w./-]*/(?=site-packages/|dist-packages/|python3[\d.]*/|\w+\.py)")
_NUMBERED = {"marks": "counter", **dict.fromkeys(("calls", "kernels", "copies", "sets"), "correlation")}


def main(recording: Path, window: int, out: Path, counters: list[str]) -> None:
    """Writes the cut recording."""
    (folder,) = (path for path in recording.iterdir() if path.is_dir())
    about = json.loads((folder / "recording.json").read_bytes())
    sampled = about["counters"]["windows"][window]
    boundaries, places = read(folder, "boundaries"), read(folder, "places")
    begins = np.flatnonzero(np.isin(boundaries["place"], places["number"][places["kind"] == _STEP]))
    low = begins[np.searchsorted(boundaries["time"][begins], sampled["start"] - _AHEAD_NS) - 1]
    high = begins[np.searchsorted(boundaries["time"][begins], sampled["end"])]
    tables = {
        "boundaries": rows(boundaries, np.arange(low, high + 1)),
        "places": places,
        "names": read(folder, "names"),
    }
    numbers = boundaries["counter"][low] + 1, boundaries["counter"][high]
    for table, number in _NUMBERED.items():
        if columns := read(folder, table):
            tables[table] = rows(columns, (columns[number] >= numbers[0]) & (columns[number] <= numbers[1]))
    samples = read(folder, "counters", counters[0])
    inside = (samples["start"] >= sampled["start"]) & (samples["end"] <= sampled["end"])
    tables["counters"] = rows({name: samples[name] for name in ("device", "start", "end", *counters)}, inside)
    names = tables["names"]
    for column in ("name", "demangled"):
        names[column] = [text and _FOLDERS.sub("/", text) for text in names[column]]
    about["counters"] |= {
        "windows": [sampled],
        "metrics": {name: about["counters"]["metrics"][name] for name in counters},
    }
    about |= {
        "boot": "00000000-0000-0000-0000-000000000000", "host": "host", "probe": None, "threads": {},
        "cupti": about["cupti"] | {"path": "libcupti.so"}, "parts": dict.fromkeys(tables, 1),
        "counts": {table: len(next(iter(columns.values()))) for table, columns in tables.items()},
    }  # fmt: skip
    files = {"recording.json": json.dumps(about, indent=1, sort_keys=True).encode()}
    files |= {f"{table}-000001.npz": encode(columns) for table, columns in tables.items()}
    files["labels.json"] = _FOLDERS.sub("/", (folder / "labels.json").read_text()).encode()
    name = out.name.split(".")[0]
    pack({f"{name}/host-rank0/{file}": data for file, data in files.items()}, out)


def read(folder: Path, table: str, having: str = "") -> dict[str, Any]:
    """All rows of a table, of the parts with a column."""
    parts = [decode(path.read_bytes()) for path in sorted(folder.glob(f"{table}-*.npz"))]
    parts = [part for part in parts if having in part or not having]
    return {
        name: np.concatenate([part[name] for part in parts])
        if isinstance(parts[0][name], np.ndarray)
        else [text for part in parts for text in part[name]]
        for name in (parts[0] if parts else ())
    }


def rows(columns: dict[str, Any], kept: Any) -> dict[str, Any]:
    """These rows of a table of numbers."""
    return {name: values[kept] for name, values in columns.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
