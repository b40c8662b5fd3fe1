"""Marks: names for the work of a program, given once for all tools, also inside CUDA graphs.

`mark` opens a mark, `listen` registers a recorder for all marks, `save_labels` writes the labels of the nodes of
captured CUDA graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thence.capture.marks.backward import BackwardMarks, patch_autograd
from thence.capture.marks.captures import Captures, TorchStreams, patch_torch
from thence.capture.marks.compiling import follow_inductor, notice_imports
from thence.capture.marks.graph_labels import CapturedNodes, LabelledGraphs, write_whole
from thence.capture.marks.marking import mark
from thence.capture.marks.watching import Listener, watch

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from thence.capture.boundaries.log import BoundaryLog
    from thence.capture.boundaries.places import Places

__all__ = [
    "Listener",
    "captured_nodes",
    "follow_boundaries",
    "listen",
    "mark",
    "save_known_labels",
    "save_labels",
    "unlisten",
    "watch_backward",
]

_graphs = LabelledGraphs()
_torch_captures: list[Captures] = []
_boundaries: tuple[BoundaryLog, Places] | None = None


def listen(listener: Listener) -> None:
    """Call a listener for every mark from now on."""
    watch.listen(listener)


def unlisten(listener: Listener) -> None:
    """Stop calling a listener."""
    watch.unlisten(listener)


def follow_boundaries(boundaries: tuple[BoundaryLog, Places] | None) -> None:
    """Give the nodes of captured CUDA graphs the places of a recording's boundaries; None: stop doing so."""
    global _boundaries  # noqa: PLW0603 - needed when torch is imported later
    _boundaries = boundaries
    for captures in _torch_captures:
        captures.follow_boundaries(boundaries)


def captured_nodes() -> CapturedNodes:
    """How many nodes the CUDA graphs captured in this process have, and how many of them have a label.

    Returns:
        graphs, nodes (kernels, memcpys and memsets) and labelled; as text, a sentence.
    """
    return _graphs.count()


def save_labels(path: str | os.PathLike[str]) -> None:
    """Writes the labels of all CUDA graphs captured in this process so far.

    ``thence label`` assigns the labels to the kernels of the graphs' replays. `save_labels` can be called
    at any time and repeatedly: the file holds all graphs of the process.

    Args:
        path: JSON file; replaced when the new one is complete.

    Raises:
        MissingData: no graph was captured; the message gives the reason, if it is known.
        UsageError: the file cannot be written there.
    """
    for captures in _torch_captures:
        captures.complete()
    write_whole(path, _graphs.document())


def save_known_labels(path: Path, saved: int) -> int:
    """Writes the same file as `save_labels`, without calls of the driver: on any thread, also during a capture.

    The ids of executable graphs whose instantiation was not observed are missing; they only make a join faster.

    Args:
        saved: number of graphs that it already holds; without further graphs nothing is written.

    Returns:
        the number of graphs in the file.

    Raises:
        UsageError: the file cannot be written there.
    """
    graphs = len(_graphs)
    if graphs > saved:
        write_whole(path, _graphs.document())
    return max(graphs, saved)


def watch_backward(*, on: bool) -> None:
    """Whether listeners are told of the nodes of backward passes, which takes a hook for each node."""
    watch.backward = on


def _on_torch_imported(torch: Any) -> None:
    captures = Captures(_graphs, TorchStreams(torch), watch)
    captures.follow_boundaries(_boundaries)
    _torch_captures.append(captures)
    patch_torch(torch, captures)
    backward = BackwardMarks(torch, watch, captures)
    captures.in_backward = backward.current
    patch_autograd(torch, backward)
    follow_inductor()


watch.framework = _on_torch_imported
notice_imports()
watch.look()
