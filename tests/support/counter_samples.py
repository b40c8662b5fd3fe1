"""Kernels of known work on one device, and samples of counters as hardware would take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

import thence
from thence.model.tables import COUNTERS, GPU, Device, Meta, Tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.arrays import Float64, Int64

START = 1_000_000


@dataclass(frozen=True)
class Kernels:
    """Kernels in the order of their start.

    Attributes:
        start, end: ns.
        kind: from 0.
        work: amount of each.
        rise: ns in which each reaches its full rate, from its start.
        late: ns by which the counters are later than the records of the kernels.
    """

    start: Int64
    end: Int64
    kind: Int64
    work: Float64
    rise: float = 0.0
    late: float = 0.0

    def samples(self, interval: int, before: int = 3, after: int = 3) -> tuple[Int64, Int64, Float64]:
        """Start, end and amount of samples of so many ns, some of them before and after all kernels."""
        first = int(self.start.min()) - before * interval
        count = before + after + -(-(int(self.end.max()) - int(self.start.min())) // interval)
        start = first + interval * np.arange(count)
        amounts = np.zeros(count)
        at = np.searchsorted(start, self.start + self.late, side="right") - 1
        for step in range(int((self.end - self.start).max()) // interval + 2):
            row = np.minimum(at + step, count - 1)
            low, high = (self._done(start[row] + edge - self.late) for edge in (0, interval))
            np.add.at(amounts, row, np.where(at + step < count, self.work * (high - low), 0.0))
        return start, start + interval, amounts

    def _done(self, time: Float64) -> Float64:
        """Share of the work of each kernel that is done at a time of each."""
        lasting, since = self.end - self.start, np.clip(time - self.start, 0, self.end - self.start)
        rise = np.minimum(self.rise, lasting / 2)
        reached = np.where(since < rise, since**2 / np.maximum(2 * rise, 1), since - rise / 2)
        done: Float64 = reached / (lasting - rise / 2)
        return done

    def trace(self, amounts: dict[str, Float64], samples: tuple[Int64, Int64], names: Sequence[str]) -> thence.Trace:
        """A trace of these kernels, with what was sampled; ``names`` are those of the kinds."""
        rows = len(self.start)
        gpu = GPU.frame(
            {
                "rank": np.zeros(rows, np.int32), "device": np.zeros(rows, np.int32), "stream": np.zeros(rows),
                "kind": ["kernel"] * rows, "name": [names[kind] for kind in self.kind], "start": self.start,
                "duration": self.end - self.start, "correlation": np.arange(rows),
            }
        )  # fmt: skip
        zero = np.zeros(len(samples[0]), np.int32)
        counters = COUNTERS.frame({"rank": zero, "device": zero, "start": samples[0], "end": samples[1], **amounts})
        device = Device(0, 0, "NVIDIA H200", multiprocessors=132, compute_capability="9.0")
        meta = Meta(inputs=("planted",), formats=("planted",), devices=(device,))
        return thence.Trace(Tables(gpu=gpu, counters=counters, meta=meta))


def back_to_back(
    rng: np.random.Generator, durations: Sequence[float], rates: Sequence[float], launches: int, noise: float = 0.05
) -> Kernels:
    """Kernels of several kinds in random order, one begins when the one before ends.

    Args:
        rng: of what is random.
        durations: ns of each kind; single launches take up to 5 % more or less.
        rates: of each kind, amount in a ns.
        launches: of each kind.
        noise: standard deviation of a launch's work, as a share of it.
    """
    kind = rng.permutation(np.repeat(np.arange(len(durations)), launches))
    lasting = np.rint(np.array(durations)[kind] * rng.uniform(0.95, 1.05, len(kind))).astype(np.int64)
    end = START + np.cumsum(lasting)
    work = np.array(rates)[kind] * np.array(durations)[kind] * rng.normal(1, noise, len(kind)).clip(0.2)
    return Kernels(end - lasting, end, kind, work)


def with_gaps(kernels: Kernels, gap: int) -> Kernels:
    """The same kernels, so many ns apart."""
    later = gap * np.arange(len(kernels.start))
    return replace(kernels, start=kernels.start + later, end=kernels.end + later)
