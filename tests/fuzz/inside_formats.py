"""Buffers of in-kernel events that are fuzzed: one of each layout, as .npz or as .npy with a .json beside it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from inside_data import COMPUTE, LOAD, Trace, description, flashinfer_buffer, proton_buffer, ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.mutations import Tree

_DATA = Path(__file__).parents[1] / "data" / "inside"
_EVENTS = ranges((LOAD, 0, 400), (COMPUTE, 500, 2500))
_MOSAIC_TRACES = 8


def thence_buffer() -> Tree:
    with np.load(_DATA / "merge" / "cupy-0.npz") as arrays:
        words, text = arrays["buffer"], arrays["description"]
    return {"description": json.loads(bytes(text)), "words": words.tolist()}


def mosaic_buffer() -> Tree:
    about = json.loads((_DATA / "mosaic.json").read_text()) | {"grid": [_MOSAIC_TRACES, 1, 1]}
    words = np.load(_DATA / "mosaic.npy")[: _MOSAIC_TRACES * about["entries"]]
    return {"description": about, "words": words.view(np.uint32).tolist()}


def flashinfer_tree() -> Tree:
    about = description(2, 0, flavour="flashinfer").to_json()
    words = flashinfer_buffer([Trace(_EVENTS, sm=1)] * 4, 2, 8)
    return {"description": about, "words": words.view(np.uint32).reshape(-1).tolist()}


def proton_tree() -> Tree:
    about = description(3, 0, flavour="proton").to_json()
    words = proton_buffer([[Trace(_EVENTS)] * 2] * 3, 8)
    return {"description": about, "words": words.view(np.uint32).reshape(-1).tolist()}


def array(kind: object, cells: object) -> Any:
    """An array of a type, where the cells allow it: those that do not fit wrap around, or are 0."""
    try:
        return np.array(cells, kind)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError, SyntaxError, MemoryError):
        pass
    try:
        dtype = np.dtype(str(kind))
        if dtype.kind not in "iu" or not isinstance(cells, list):
            return np.array(["x"])
        most = 1 << 8 * dtype.itemsize
        whole = [c % most if isinstance(c, int) else 0 for c in cells]
        return np.array(whole, f"u{dtype.itemsize}").view(dtype)
    except (TypeError, ValueError, OverflowError, SyntaxError, MemoryError):
        return np.array(["x"])


def buffer_writer(ending: str) -> Callable[[Tree, Path], Path]:
    """Writes a tree of ``description`` and ``words`` to files of that ending."""

    def write(tree: Tree, folder: Path) -> Path:
        parts = tree if isinstance(tree, dict) else {}
        text = json.dumps(parts.get("description"), default=repr, skipkeys=True)
        about = text.encode("utf-8", "replace")
        words = array("uint32", parts.get("words", []))
        path = folder / f"buffer{ending}"
        content = io.BytesIO()
        if ending == ".npz":
            np.savez(content, buffer=words, description=np.frombuffer(about, np.uint8))
        else:
            np.save(content, words, allow_pickle=False)
            path.with_suffix(".json").write_bytes(about)
        path.write_bytes(content.getvalue())
        return path

    return write
