"""What Triton kernels state of their own work: ``launch_metadata=`` of ``triton.jit``, as marks around their launches.

Triton calls hooks around each launch and passes the metadata, which it computes only when a hook asks (Triton 3.5 and
newer; Proton asks, too). The function that computes it is the program's and may wait for the GPU, so recordings ask
only where the program says so.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from thence.capture.marks.marking import mark
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Iterator

_FLOP = {"flops": None, "flops8": "fp8", "flops16": "fp16", "flops32": "fp32", "flops64": "fp64"}
"""Keys of Triton's metadata for FLOP, and the data type of each."""


class _Opened(threading.local):
    """The launch that a thread is in, if it states its work, and its mark."""

    launch: tuple[Any, mark] | None = None


@contextmanager
def triton_work() -> Iterator[None]:
    """While it is open, launches of Triton kernels that state their FLOP or bytes are marks which state them.

    Kernels state them by ``@triton.jit(launch_metadata=...)``, a function that returns ``name`` and numbers such as
    ``flops16`` and ``bytes``. It is called at each launch, also while a CUDA graph is captured:

        with thence.record("out"), thence.torch.triton_work():
            train()

    Raises:
        MissingRequirement: Triton is not installed, or is older than 3.5.
    """
    enter, leave = _hooks()
    opened = _Opened()

    def entered(metadata: Any) -> None:
        with suppress(Exception):  # the program comes first; the launch has no work then
            facts = metadata.get()
            stated = stated_work(facts)
            if stated:
                opened.launch = metadata, mark(str(facts.get("name", "triton kernel")), **stated)
                opened.launch[1].__enter__()

    def left(metadata: Any) -> None:
        launch = opened.launch
        if launch is not None and launch[0] is metadata:
            opened.launch = None
            launch[1].__exit__(None, None, None)

    enter.add(entered)
    leave.add(left)
    try:
        yield
    finally:
        enter.remove(entered)
        leave.remove(left)


def stated_work(facts: dict[str, Any]) -> dict[str, Any]:
    """FLOP, bytes and data type, as `mark` takes them, in the metadata of a launch; empty if it states none.

    A tensor is no number, because reading it would wait for the GPU. Of FLOP of several types the type is not known.
    """
    numbers = {key: value for key, value in facts.items() if type(value) in (int, float)}
    flop = {key: numbers[key] for key in _FLOP if key in numbers}
    stated = {"flop": sum(flop.values())} if flop else {}
    if len(flop) == 1 and (dtype := _FLOP[next(iter(flop))]) is not None:
        stated["dtype"] = dtype
    return stated | ({"bytes": numbers["bytes"]} if "bytes" in numbers else {})


def _hooks() -> tuple[Any, Any]:
    """The chains of hooks at the begin and at the end of a launch."""
    try:
        from triton import knobs  # type: ignore[import-not-found, unused-ignore]

        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        _ = enter.add, leave.remove
    except (ImportError, AttributeError) as error:
        raise MissingRequirement(
            "thence.torch.triton_work() needs Triton 3.5 or newer: pip install -U triton"
        ) from error
    return enter, leave
