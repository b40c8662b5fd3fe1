"""Labels graph replays from a trace of the capture itself (`captures`).

A replay holds the nodes of one capture, so the numbers of kernels, memcpys and memsets agree exactly. Activities are
matched to captured calls by order: by node number if the trace has node numbers, which increase as nodes are created;
by start time if the replay ran on a single stream, on which no activity can overtake another.

If the capture has kernel names (AMD), the names must agree as well, at every position (``capture_names``); if the
order of a replay on several streams is unknown, an activity gets the places that all calls of its kernel have in
common. Without names (NVIDIA), the place follows from the order alone (``capture_order``), and no kernel may contradict
its operator (`kernel_operators`). If several captures fit, such as those of equal layers, or of batch sizes that run
equal kernels, an activity gets the places that they have in common (``capture_shared``); where they differ it gets
none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.attribute import attribute
from thence.attribution.cuda_graphs.captures import names_of_kinds
from thence.attribution.cuda_graphs.kernel_operators import KernelOperators, Verdict
from thence.attribution.cuda_graphs.signatures import Names, short_name
from thence.model.reasons import CODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thence.attribution.cuda_graphs.captures import Captures
    from thence.attribution.cuda_graphs.join_labels import Numbered
    from thence.attribution.cuda_graphs.place_book import PlaceBook
    from thence.attribution.cuda_graphs.replays import Replays
    from thence.model.attributed import Attributed

__all__ = ["ByCapture"]

_COPY, _SET, _FOREIGN = -1, -2, -3
"""Numbers that stand for memcpys, for memsets, and for kernels whose name is in no capture."""
_NODE = np.uint64((1 << 32) - 1)


@dataclass(frozen=True)
class _Window:
    """The calls of one capture.

    Attributes:
        title: its name in messages.
        kind: for each call, 0 for kernels, `_COPY` or `_SET`.
        kernel: for each call, number of its kernel's name, `_FOREIGN` where the trace has none, `_COPY` or `_SET`.
        place: number of the places of each call, as in the book.
        operators: innermost operator around each call, None without one.
    """

    title: str
    kind: NDArray[np.int64]
    kernel: NDArray[np.int64]
    place: NDArray[np.int64]
    operators: list[str | None]

    @property
    def named(self) -> bool:
        """Whether the trace names all its kernels."""
        return not (self.kernel == _FOREIGN).any()


@dataclass
class ByCapture:
    """The captures to which the replays of one rank can belong.

    Attributes:
        replays: the replays to be labelled.
        book: the places by number; labelling adds to it.
        traces: the traces that hold the captures.
        windows: the captures.
        kernel: number of the name of each variant of the replays, `_FOREIGN`, `_COPY` or `_SET`.
        ordered: rows of gpu that were labelled by order alone.
        kernels, confirmed: how many of these are kernels, and how many kernels have a name that fits their operator.
    """

    replays: Replays
    book: PlaceBook
    traces: Sequence[Attributed]
    windows: list[_Window]
    kernel: NDArray[np.int64]
    ordered: list[NDArray[np.int64]] = field(default_factory=list)
    kernels: int = 0
    confirmed: int = 0

    @classmethod
    def of(
        cls,
        found: Sequence[Captures],
        traces: Sequence[Attributed],
        replays: Replays,
        book: PlaceBook,
    ) -> ByCapture:
        """Prepares the captures; their places are added to the book."""
        frame = names_of_kinds(replays.kinds.frame)
        named = [kernel for captures in found for kernel in captures.run.kernels]
        names = Names(named, frame["name"].drop_nulls().unique(maintain_order=True))
        windows, first_name = [], 0
        for captures in found:
            run = captures.run
            root = np.array(
                [names.of_kernel(first_name + i) for i in range(len(run.kernels))], np.int64
            )
            first_name += len(run.kernels)
            kind = np.select(
                [captures.kinds == "memcpy", captures.kinds == "memset"], [_COPY, _SET], 0
            )
            kernel = root[run.graph.nodes["kernel"].to_numpy()]
            kernel = np.where(kind < 0, kind, np.where(captures.named, kernel, _FOREIGN))
            place = run.label + book.add(run.places)
            operator = run.places["op"].gather(pl.Series(run.label)).to_list()
            windows += [
                _Window(title, kind[w], kernel[w], place[w], [operator[i] for i in w.tolist()])
                for title, w in zip(captures.titles, captures.windows, strict=True)
            ]
        of_variant = [
            _COPY if kind == "memcpy" else _SET if kind == "memset" else names.of_trace(name)
            for kind, name in frame.select("kind", "name").iter_rows()
        ]
        of_kernel = np.array(of_variant, np.int64)
        of_kernel[(of_kernel == -1) & (frame["kind"] == "kernel").to_numpy()] = _FOREIGN
        return cls(replays, book, traces, windows, of_kernel)

    @cached_property
    def operators(self) -> KernelOperators:
        """Which operators launch which kernels, in the traces of the captures and of the replays."""
        return KernelOperators.of([*self.traces, attribute(self.replays.tables)])

    def by_names(self, labels: Numbered, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Labels launches by captures that name their kernels; returns which were labelled.

        Args:
            labels: what is known so far; changed in place.
            rows: of gpu, (launches, activities): launches with equal kernels.
        """
        done = np.zeros(len(rows), np.bool_)
        windows = [w for w in self._with_equal_counts(rows) if w.named]
        for launches, ordered, known in self._sequences(rows):
            kernel = self.kernel[self.replays.variant[ordered[0]]]
            if known:
                fits = [w for w in windows if (w.kernel == kernel).all()]
                numbers = self._merged(np.stack([w.place for w in fits], axis=1)) if fits else None
            else:
                wanted = np.sort(kernel)
                fits = [w for w in windows if (np.sort(w.kernel) == wanted).all()]
                numbers = self._alike(fits, kernel) if fits else None
            if numbers is not None:
                self._put(labels, ordered, numbers, "capture_names", fits)
                done[launches] = True
        return done

    def by_order(
        self, labels: Numbered, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], list[str]]:
        """Labels launches by captures that do not name all their kernels.

        Args:
            labels: what is known so far; changed in place.
            rows: of gpu, (launches, activities): launches with equal kernels.

        Returns:
            which launches were labelled, and why others were not.
        """
        done = np.zeros(len(rows), np.bool_)
        windows = self._with_equal_counts(rows)
        reasons = []
        for launches, ordered, known in self._sequences(rows):
            variant = self.replays.variant[ordered[0]]
            if not windows:
                reasons.append(self._no_length(variant))
            elif not known:
                reasons.append(
                    "it ran on several streams and its nodes have no numbers, so the order in which it was captured "
                    "is unknown"
                )
            else:
                fits, why, confirmed = self._fitting(windows, variant)
                if fits:
                    self._put(
                        labels, ordered, self._merged(np.stack([w.place for w in fits], axis=1)),
                        "capture_order", fits,
                    )  # fmt: skip
                    done[launches] = True
                    self.ordered.append(ordered.reshape(-1))
                    self.kernels += len(launches) * int((fits[0].kind == 0).sum())
                    self.confirmed += len(launches) * confirmed
                else:
                    reasons.append(why)
        return done, reasons

    def _with_equal_counts(self, rows: NDArray[np.int64]) -> list[_Window]:
        """Captures with as many kernels, memcpys and memsets as a launch has activities of these kinds."""
        counts = np.sort(np.minimum(self.kernel[self.replays.variant[rows[0]]], 0))
        counts[counts == _FOREIGN] = 0
        counts.sort()
        return [
            w
            for w in self.windows
            if len(w.kind) == len(counts) and (np.sort(w.kind) == counts).all()
        ]

    def _sequences(
        self, rows: NDArray[np.int64]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64], bool]]:
        """Groups launches by the order of their kernels.

        Returns:
            For each group: its launches, their rows in order, and whether that order is known.
        """
        gpu = self.replays.tables.gpu
        flat = pl.Series(rows.reshape(-1))
        node = gpu["node"].gather(flat)
        if node.null_count() == 0 and len(node):
            number = (node.to_numpy() & _NODE).reshape(rows.shape)
            ordered = np.take_along_axis(rows, np.argsort(number, axis=1, kind="stable"), axis=1)
            known = np.ones(len(rows), np.bool_)
        else:
            stream = gpu["stream"].gather(flat).to_numpy().reshape(rows.shape)
            ordered, known = rows, (stream == stream[:, :1]).all(axis=1)
        variant = self.replays.variant[ordered]
        alike: dict[tuple[bytes, bool], list[int]] = {}
        for launch in range(len(rows)):
            alike.setdefault((variant[launch].tobytes(), bool(known[launch])), []).append(launch)
        return [
            (np.array(launches), ordered[launches], is_known)
            for (_, is_known), launches in alike.items()
        ]

    def _fitting(
        self, windows: Sequence[_Window], variant: NDArray[np.int64]
    ) -> tuple[list[_Window], str, int]:
        """The captures that nothing contradicts; why there are none; how many kernels at least fit their operators."""
        frame = self.replays.kinds.frame
        names = frame["name"].gather(pl.Series(variant)).to_list()
        kernel = self.kernel[variant]
        kind = np.where(kernel == _COPY, _COPY, np.where(kernel == _SET, _SET, 0))
        fits, least, why = [], len(kernel), ""
        for window in windows:
            unlike = np.flatnonzero(
                (kind != window.kind) | ((window.kernel >= 0) & (window.kernel != kernel))
            )
            if len(unlike):
                place = int(unlike[0])
                why = (
                    why
                    or f"activity {place}, `{short_name(names[place])}`, is of another kind or kernel in {window.title}"
                )
                continue
            verdicts = [
                self.operators.verdict(names[i], window.operators[i])
                for i in np.flatnonzero(kind == 0).tolist()
            ]
            if Verdict.CONTRADICTS in verdicts:
                place = int(np.flatnonzero(kind == 0)[verdicts.index(Verdict.CONTRADICTS)])
                why = (
                    f"activity {place}, `{short_name(names[place])}`, would have been launched by "
                    f"{window.operators[place]} in {window.title}, which launches no such kernel"
                )
                continue
            shifted = _shifted(variant, window)
            if shifted is not None:
                why = (
                    f"starting at activity {shifted} (`{short_name(names[shifted])}`), the order of the kernels "
                    f"differs from that of the operators in {window.title}"
                )
                continue
            fits.append(window)
            least = min(least, verdicts.count(Verdict.FITS))
        return fits, why, least

    def _no_length(self, variant: NDArray[np.int64]) -> str:
        kernel = self.kernel[variant]
        copies, sets = int((kernel == _COPY).sum()), int((kernel == _SET).sum())
        lengths = sorted({len(window.kind) for window in self.windows})
        shown = ", ".join(str(n) for n in lengths[:5]) + (" ..." if len(lengths) > 5 else "")
        return (
            f"no capture has its {len(variant) - copies - sets} kernels, {copies} memcpys and {sets} memsets; "
            f"{len(self.windows)} captures have {shown} calls"
        )

    def _alike(self, fits: Sequence[_Window], kernel: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each kernel, the number in the book of the places that all its calls have in common."""
        calls = np.concatenate([window.kernel for window in fits])
        places = np.concatenate([window.place for window in fits])
        of_kernel = {
            number: self.book.shared(places[calls == number])
            for number in np.unique(kernel).tolist()
        }
        return np.array([of_kernel[number] for number in kernel.tolist()], np.int64)

    def _merged(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each call, the number in the book of the places that several captures have in common.

        Args:
            places: of shape (calls, captures).
        """
        result = places[:, 0].copy()
        for row in np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist():
            result[row] = self.book.shared(places[row])
        return result

    def _put(
        self,
        labels: Numbered,
        rows: NDArray[np.int64],
        numbers: NDArray[np.int64],
        rule: str,
        fits: Sequence[_Window],
    ) -> None:
        """Stores the places of launches; ``numbers`` has one entry for each activity of a launch, in order."""
        own = np.isin(numbers, np.concatenate([window.place for window in fits]))
        codes = np.where(own, CODES.index(rule), CODES.index("capture_shared"))
        every = np.broadcast_to(numbers, rows.shape).reshape(-1)
        flat = rows.reshape(-1)
        labels.put(flat, every, np.broadcast_to(codes, rows.shape).reshape(-1))
        labels.confidence[flat] = np.nan


def _shifted(variant: NDArray[np.int64], window: _Window) -> int | None:
    """The position from which kernels are paired with operators of other kernels; None if there is none.

    A launch in another position shifts all pairs after it. The position is the first of two neighbours whose pair of
    kernel and operator occurs only once, although the kernel and the operator each occur several times in another
    pair, as in equal layers. A single such kernel proves nothing.

    Args:
        variant: number of the kernel of each activity, in order.
        window: a capture of the same length.
    """
    distinct = {name: i for i, name in enumerate(dict.fromkeys(window.operators))}
    operator = np.array([distinct[name] for name in window.operators], np.int64)
    named = np.array([name is not None for name in window.operators], np.bool_) & (window.kind == 0)
    pair = variant * np.int64(len(distinct)) + operator
    pairs, of_place, count = np.unique(pair, return_inverse=True, return_counts=True)
    most_of_kernel = np.zeros(int(variant.max(initial=0)) + 1, np.int64)
    most_of_operator = np.zeros(len(distinct), np.int64)
    np.maximum.at(most_of_kernel, pairs // len(distinct), count)
    np.maximum.at(most_of_operator, pairs % len(distinct), count)
    odd = (
        named
        & (count[of_place] == 1)
        & (most_of_kernel[variant] > 1)
        & (most_of_operator[operator] > 1)
    )
    places = np.flatnonzero(odd[:-1] & odd[1:])
    return int(places[0]) if len(places) else None
