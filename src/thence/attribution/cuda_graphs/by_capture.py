"""The captures in traces of the capture itself (`captures`) as launches to which replays are matched (`by_sequence`).

If the trace names the kernels of a capture (AMD), an activity fits a launch of its own kernel (``capture_names``).
Without names (NVIDIA) the place follows from the order (``capture_order``): an activity may be any launch of its kind
whose operator can have launched the kernel (`kernel_operators`), and counts more where the operator is known to launch
such kernels. Counts alone prove nothing: at least one kernel must fit its operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.attribute import attribute
from thence.attribution.cuda_graphs.by_sequence import BySequence, Stretch
from thence.attribution.cuda_graphs.captures import names_of_kinds
from thence.attribution.cuda_graphs.kernel_operators import KernelOperators, Verdict
from thence.attribution.cuda_graphs.sequences import FITS, POSSIBLE
from thence.attribution.cuda_graphs.signatures import Names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thence.attribution.cuda_graphs.captures import Captures
    from thence.attribution.cuda_graphs.place_book import PlaceBook
    from thence.attribution.cuda_graphs.replays import Replays
    from thence.model.attributed import Attributed

_UNNAMED = -1
_Launch = tuple[str, int, str | None]
"""Kind of activity, number of the kernel's name (`_UNNAMED` where the trace has none), and innermost operator."""
_WEIGHT = {Verdict.FITS: FITS, Verdict.UNKNOWN: POSSIBLE, Verdict.CONTRADICTS: 0}


def matched_captures(
    found: Sequence[Captures], traces: Sequence[Attributed], replays: Replays, book: PlaceBook
) -> tuple[BySequence, BySequence]:
    """The captures that name all their kernels, and the others.

    Args:
        found: the captures of each trace.
        traces: the traces that hold them, and others of the same program.
        replays: the replays to be labelled.
        book: the places by number; those of the captures are added.
    """
    frame = names_of_kinds(replays.kinds.frame)
    kernels = [kernel for captures in found for kernel in captures.run.kernels]
    names = Names(kernels, frame["name"].drop_nulls().unique(maintain_order=True))
    numbers: dict[_Launch, int] = {}
    stretches: dict[bool, list[Stretch]] = {True: [], False: []}
    first_name = 0
    for captures in found:
        run = captures.run
        root = [names.of_kernel(first_name + i) for i in range(len(run.kernels))]
        first_name += len(run.kernels)
        operator = run.places["op"].gather(pl.Series(run.label)).to_list()
        kernel = [root[i] for i in run.graph.nodes["kernel"]]
        launches = [
            (kind, -2, None) if kind != "kernel" else (kind, k, None) if named else (kind, _UNNAMED, op)
            for kind, k, named, op in zip(
                captures.kinds.tolist(), kernel, captures.named.tolist(), operator, strict=True
            )
        ]  # fmt: skip
        number = np.array([numbers.setdefault(x, len(numbers)) for x in launches], np.int64)
        place = run.label + book.add(run.places)
        for title, window in zip(captures.titles, captures.windows, strict=True):
            stretch = Stretch(title, number[window], place[window])
            stretches[bool(captures.named[window].all())].append(stretch)
    weight = _weights(list(numbers), names, frame, traces, replays)
    unnamed = np.array([k == _UNNAMED and op is not None for _, k, op in numbers], np.bool_)
    named, others = (
        BySequence(
            replays, book, stretches[is_named], weight,
            "capture_names" if is_named else "capture_order", None, unnamed & (not is_named), one_stream=True,
        )
        for is_named in (True, False)
    )  # fmt: skip
    return named, others


def _weights(
    launches: Sequence[_Launch], names: Names, frame: pl.DataFrame, traces: Sequence[Attributed], replays: Replays
) -> NDArray[np.int8]:
    """Whether each kind of launch fits each variant of the replays, as `sequences.match` takes it."""
    weight = np.zeros((len(launches), frame.height), np.int8)
    variants = [
        (str(kind), name or "", names.of_trace(name)) for kind, name in frame.select("kind", "name").iter_rows()
    ]
    known: KernelOperators | None = None
    generated = {op for _, kernel, op in launches if kernel == _UNNAMED}
    for row, (kind, kernel, operator) in enumerate(launches):
        for column, (of_variant, name, number) in enumerate(variants):
            if kind != of_variant:
                continue
            if kernel != _UNNAMED:
                weight[row, column] = FITS if kind != "kernel" or kernel == number else 0
                continue
            if known is None:
                known = KernelOperators.of([*traces, attribute(replays.tables)])
            # Inductor names the range around the launch of a kernel that it generated after the kernel.
            elsewhere = name in generated and operator != name
            weight[row, column] = 0 if elsewhere else _WEIGHT[known.verdict(name, operator)]
    return weight
