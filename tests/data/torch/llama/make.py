"""Makes the files of this folder of what ``benchmarks/gpu_roofline.py record`` wrote on a GPU.

    PYTHONPATH=tests:tests/support python tests/data/torch/llama/make.py RECORDED

Python frames other than calls of modules are left out of the traces. The names of folders, host, boot and libraries are
replaced in the recording and the labels.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

from data.recording.cut_steps import described, read
from support.archives import pack
from thence.model.column_file import encode

HERE = Path(__file__).parent
TRACES = ("eager", "checkpoints", "compiled", "captured_eager", "captured")
_BOOT = "00000000-0000-0000-0000-000000000000"
_FOLDERS = re.compile(r"/[\w./-]*/(?=benchmarks/|site-packages/|python3[\d.]*/)")


def trace(path: Path, to: Path) -> None:
    """The trace without Python frames."""
    with gzip.open(path) as file:
        document = json.load(file)
    kept = [
        event
        for event in document["traceEvents"]
        if event.get("cat") != "python_function" or event["name"].startswith("nn.Module:")
    ]
    for event in kept:
        if event.get("cat") == "python_function":
            event["args"].pop("Python parent id", None)
    document |= {"traceEvents": kept, "traceName": to.stem}
    to.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 9, mtime=0))


def recording(folder: Path, to: Path) -> None:
    """The recording, each table in one part."""
    tables = read(folder)
    names = tables["names"]
    for column in ("name", "demangled"):
        names[column] = [text and _FOLDERS.sub("/", text) for text in names[column]]
    about = described(json.loads((folder / "recording.json").read_bytes()), tables)
    files = {
        "recording.json": json.dumps(about, indent=1, sort_keys=True).encode(),
        "labels.json": labels(folder / "labels.json"),
    }
    files |= {f"{kind}-000001.npz": encode(columns) for kind, columns in tables.items()}
    pack({f"llama/host-rank0-{about['pid']}/{name}": data for name, data in files.items()}, to)


def labels(path: Path) -> bytes:
    """The labels without folders and boot."""
    document = json.loads(path.read_text())
    document["process"]["boot"] = _BOOT
    for place in document["places"]:
        place["stack"] = [_FOLDERS.sub("/", line) for line in place["stack"]]
    return json.dumps(document, separators=(",", ":")).encode()


def main(recorded: Path) -> None:
    for name in TRACES:
        trace(recorded / f"{name}.json.gz", HERE / f"{name}.json.gz")
    (HERE / "captured_labels.json.gz").write_bytes(gzip.compress(labels(recorded / "saved_capture.json"), 9, mtime=0))
    (folder,) = (recorded / "recorded").iterdir()
    recording(folder, HERE / "recorded.tar.xz")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
