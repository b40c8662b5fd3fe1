"""Marks: names for what runs, given once for every tool, also inside CUDA graphs.

`mark` opens one, `listen` tells a recorder of all of them, `save_labels` writes what the nodes of
captured CUDA graphs were made for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thence.marks.backward import BackwardMarks, patch_autograd
from thence.marks.captures import Captures, TorchStreams, patch_torch
from thence.marks.compiling import follow_inductor, notice_imports
from thence.marks.graph_labels import CapturedNodes, LabelledGraphs, write_whole
from thence.marks.marking import mark
from thence.marks.watching import Listener, watch

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from thence.boundaries.log import BoundaryLog
    from thence.boundaries.places import Places

__all__ = [
    "Listener",
    "captured_nodes",
    "follow_boundaries",
    "listen",
    "mark",
    "save_known_labels",
    "save_labels",
    "unlisten",
]

_graphs = LabelledGraphs()
_torch_captures: list[Captures] = []
_boundaries: tuple[BoundaryLog, Places] | None = None


def listen(listener: Listener) -> None:
    """Tell a listener of every mark from now on."""
    watch.listen(listener)


def unlisten(listener: Listener) -> None:
    """Tell it no longer."""
    watch.unlisten(listener)


def follow_boundaries(boundaries: tuple[BoundaryLog, Places] | None) -> None:
    """Has the nodes of captured CUDA graphs get the places of a recording's boundaries; None: no longer."""
    global _boundaries  # noqa: PLW0603 - captures that are yet to be made need it, too
    _boundaries = boundaries
    for captures in _torch_captures:
        captures.follow_boundaries(boundaries)


def captured_nodes() -> CapturedNodes:
    """How many nodes the CUDA graphs captured in this process have, and how many of them have a label.

    Returns:
        graphs, nodes (kernels, copies and sets) and labelled; as text, a sentence.
    """
    return _graphs.count()


def save_labels(path: str | os.PathLike[str]) -> None:
    """Writes what is known of every CUDA graph captured in this process so far.

    ``thence label`` gives the labels back to the kernels of the graphs' replays. It can be called at
    any time, again and again: the file holds all graphs of the process.

    Args:
        path: JSON file; replaced when the new one is complete.

    Raises:
        MissingData: no graph was captured; the message says why, where that is known.
        UsageError: the file cannot be written there.
    """
    for captures in _torch_captures:
        captures.complete()
    write_whole(path, _graphs.document())


def save_known_labels(path: Path, saved: int) -> int:
    """What `save_labels` writes, without asking the driver: on any thread, also during a capture.

    Executable graphs that came to be unseen lack their id, by which a join is only quicker.

    Args:
        path: JSON file.
        saved: graphs that it holds already; with no more than these nothing is written.

    Returns:
        how many graphs the file holds.

    Raises:
        UsageError: the file cannot be written there.
    """
    graphs = len(_graphs)
    if graphs > saved:
        write_whole(path, _graphs.document())
    return max(graphs, saved)


def _torch_is_there(torch: Any) -> None:
    captures = Captures(_graphs, TorchStreams(torch), watch)
    captures.follow_boundaries(_boundaries)
    _torch_captures.append(captures)
    patch_torch(torch, captures)
    backward = BackwardMarks(torch, watch, captures)
    captures.in_backward = backward.current
    patch_autograd(torch, backward)
    follow_inductor()


watch.framework = _torch_is_there
notice_imports()
watch.look()
