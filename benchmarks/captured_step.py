"""Captures a step of a program as a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def warm_up(torch: Any, step: Callable[[], object]) -> None:
    """Runs the step three times on a stream of its own, as is needed before it is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)


def captured(torch: Any, step: Callable[[], object]) -> Any:
    """A CUDA graph of the step."""
    warm_up(torch, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
