"""Jobs of many ranks and steps made of one real step, with noise and planted faults, as summaries of their ranks.

The step is that of a recorded rank: its stretches between collectives (compute, copies, idle time), how long each
collective moved data, its kernels, places and causes of idle time. Ranks run it with their own noise and meet in
the collectives: a kernel begins when its rank comes to it, and ends on all ranks one transfer after the last came.
So who waits, and why, is known beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

import thence
from thence.analysis.ranks.summary import SUMMARY, summarise_rank

if TYPE_CHECKING:
    import numpy.typing as npt

    Float = npt.NDArray[np.float64]

RECORDING = Path(__file__).parents[1] / "data" / "torch" / "torch_fsdp_rank3.json.gz"
"""The rank that hardly waited: its stretches are its own."""
PLANTS = ("backward", "kernel", "slow_gpu", "loader", "batch", "link", "rail", "node")
EPOCH = 1_790_000_000_000_000_000
LINE, MODULE = "train.py:40 hook", "model.layers.3.mlp"
IDLE = 0.02
"""What is left of the recorded idle time: the recording is of a program that its host limits."""
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
ADDED: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("backward", "idle"): (
        ("python", "cause", ""),
        ("python", "source", LINE),
        ("python", "module", MODULE),
        ("python", "phase", "backward"),
    ),
    ("loader", "idle"): (("loader", "cause", ""), ("loader", "source", LINE), ("loader", "op", LOADER)),
    ("kernel", "places"): (("source", LINE), ("module", MODULE), ("phase", "backward")),
}
"""Rows that a fault adds to a table, as long as it takes: cause (of idle time), by, name."""
TIMES = {"slow_gpu": 1.08, "batch": 1.3}


@dataclass(frozen=True)
class Plant:
    """A fault.

    Attributes:
        kind: of `PLANTS`. backward: the host sleeps in backward. kernel: one kernel of backward takes longer.
            slow_gpu: all kernels take 1.08 times as long. loader: the host waits for data before the first collective.
            batch: kernels of other shapes take 1.3 times as long. link: transfers of the rank's small group take
            longer. rail: those of its group over the nodes, if there are nodes. node: the hosts of all ranks of its
            node sleep in backward.
        rank: where.
        share: of a step's time that backward, kernel, loader and link take more.
        since: first step that has it.
    """

    kind: str
    rank: int
    share: float = 0.1
    since: int = 0


@dataclass(frozen=True)
class RealStep:
    """A recorded step: ns by stretch (before each collective) and part (compute, copy, idle), and its tables."""

    own: Float
    moving: Float
    bytes: list[int]
    kinds: list[str]
    tables: dict[str, pl.DataFrame]

    @property
    def length(self) -> float:
        """Of the step without waits, ns."""
        return float(self.own.sum() + self.moving.sum())


@cache
def real_step() -> RealStep:
    """The second step of the recording; its idle time shortened, as of a program that the GPU limits."""
    summary = summarise_rank(thence.open(RECORDING).tables)
    rows = summary["collectives"].filter(pl.col("step") == 1).sort("start")
    before = summary["collectives"].filter(pl.col("step") == 0).sort("start").tail(1)
    every = pl.concat([before, rows])
    own = np.array(
        [
            np.maximum(every[f"{part}_start_ns"][1:].to_numpy() - every[f"{part}_end_ns"][:-1].to_numpy(), 0)
            for part in ("compute", "copy", "idle")
        ],
        np.float64,
    ).T  # fmt: skip
    own[:, 2] *= IDLE
    moving = np.maximum(rows["bytes"].to_numpy() / 200.0, 20_000.0)  # 200 GB/s
    tables = {name: summary[name].filter(pl.col("step") == 1) for name in ("kernels", "places", "idle")}
    return RealStep(own, moving, rows["bytes"].to_list(), rows["collective"].to_list(), tables)


@dataclass(frozen=True)
class RankJob:
    """A job.

    Attributes:
        ranks, steps: how many.
        plant: the fault; None for none.
        second: a further fault; kernels, places and causes of idle time do not show it.
        missing: ranks whose traces are not among the summaries.
        noise: relative standard deviation of the compute of a stretch; of its idle time, four times that.
        uneven: the same of whole ranks: some are always a little slower.
        pauses: share of the steps of each rank in which it pauses, by 2 to 10 % of a step.
        small: ranks of a small group, which alternate in the collectives with the group of all; 0 for none.
        nodes: whether small is the number of ranks of a node: its ranks share a clock, and the other group is not of
            all ranks, but of those with the same place in their nodes.
        overlapped: whether compute goes on during collectives, and only the last of a step is awaited.
        skew_ns: standard deviation of the offsets of the ranks' clocks.
        drift: of their speeds, in ns per second.
        detailed: ranks with kernels, places and idle time; None for all.
        seed: of the random numbers.
    """

    ranks: int = 8
    steps: int = 12
    plant: Plant | None = None
    second: Plant | None = None
    missing: tuple[int, ...] = ()
    noise: float = 0.02
    uneven: float = 0.002
    pauses: float = 0.02
    small: int = 0
    nodes: bool = False
    overlapped: bool = False
    skew_ns: float = 2e6
    drift: float = 0.0
    detailed: tuple[int, ...] | None = None
    seed: int = 0
    step: RealStep = field(default_factory=real_step)

    def summaries(self) -> dict[str, pl.DataFrame]:
        """The summaries of all ranks."""
        random = np.random.default_rng(self.seed)
        own, moving = self._times(random)
        begin, end, done = self._run(own, moving)
        skew, drift = self.clocks(random)
        jitter = random.normal(0, 500, end.shape)
        tables = self._collectives(own, (begin, end + jitter, done), skew, drift)
        every = {
            name: table.empty() if name not in tables else tables[name].select(
                pl.col(c.name).cast(c.dtype) for c in table.columns
            )
            for name, table in SUMMARY.items()
        } | self._work(own)  # fmt: skip
        shown = ~pl.col("rank").is_in(self.missing)
        return {name: frame.filter(shown) for name, frame in every.items()}

    def clocks(self, random: np.random.Generator) -> tuple[Float, Float]:
        """Offset (ns) and drift (ns per second) of the clock of each rank; the ranks of a node share one."""
        clocks, each = (self.ranks // self.small, self.small) if self.nodes else (self.ranks, 1)
        skew = random.normal(0, self.skew_ns, clocks)
        drift = random.normal(0, self.drift, clocks) if self.drift else np.zeros(clocks)
        return skew.repeat(each), drift.repeat(each)

    @property
    def node_of(self) -> dict[int, int]:
        """The node of each rank."""
        return {rank: rank // self.small for rank in range(self.ranks)} if self.nodes else {}

    def group_of(self, number: int) -> int:
        """Which group the collective of a step is of: 0 all, or those over the nodes; 1 the small one of each rank."""
        return 1 if self.small and number % 2 else 0

    def _late(self, step: int) -> bool:
        return self.plant is not None and step >= self.plant.since

    def _times(self, random: np.random.Generator) -> tuple[Float, Float]:
        """ns by rank, step, stretch and part; and of transfers by rank, step and collective."""
        real = self.step
        shape = (self.ranks, self.steps, *real.own.shape)
        noise = np.exp(random.normal(0, self.noise, shape) * np.array([1.0, 1.0, 4.0]))
        own = real.own * noise * (1 + random.normal(0, self.uneven, (self.ranks, 1, 1, 1)))
        pause = random.random((self.ranks, self.steps)) < self.pauses
        where = random.integers(0, real.own.shape[0], (self.ranks, self.steps))
        length = random.uniform(0.02, 0.1, (self.ranks, self.steps)) * real.length * pause
        r, s = np.indices(pause.shape)
        own[r, s, where, 2] += length
        moving = np.broadcast_to(real.moving, (self.ranks, self.steps, len(real.moving))).copy()
        for plant in filter(None, (self.plant, self.second)):
            self._planted(own, moving, plant)
        return own, moving

    def _planted(self, own: Float, moving: Float, plant: Plant) -> None:
        more = plant.share * self.step.length
        late = own[plant.rank, plant.since :]
        behind = 2 * own.shape[2] // 3  # well inside the backward pass
        if plant.kind == "backward":
            late[:, behind, 2] += more
        elif plant.kind == "kernel":
            late[:, behind, 0] += more
        elif plant.kind in TIMES:
            late[..., 0] *= TIMES[plant.kind]
        elif plant.kind == "loader":
            late[:, 0, 2] += more
        elif plant.kind == "node":
            first = plant.rank // self.small * self.small
            own[first : first + self.small, plant.since :, behind, 2] += more
        elif plant.kind == "rail":
            even = [n for n in range(moving.shape[2]) if not self.group_of(n)]
            moving[plant.rank % self.small :: self.small, plant.since :, even] += more / len(even)
        elif plant.kind == "link":
            first = plant.rank // self.small * self.small
            members = slice(first, first + self.small)
            odd = [n for n in range(moving.shape[2]) if self.group_of(n)]
            moving[members, plant.since :, odd] += more / len(odd)

    def _run(self, own: Float, moving: Float) -> tuple[Float, Float, Float]:
        """When each kernel begins, ends and is exposed on the true clock: by rank, step and collective."""
        begin, end, done = (np.zeros(moving.shape) for _ in range(3))
        computed, freed = np.zeros(self.ranks), np.zeros(self.ranks)
        count = moving.shape[2]
        for step in range(self.steps):
            for number in range(count):
                computed = computed + own[:, step, number].sum(axis=1)
                arrival = np.maximum(computed, freed)
                if self.nodes and not self.group_of(number):
                    last = np.tile(arrival.reshape(-1, self.small).max(axis=0), self.ranks // self.small)
                else:
                    size = self.small if self.group_of(number) else self.ranks
                    last = arrival.reshape(-1, size).max(axis=1).repeat(size)
                begin[:, step, number] = arrival
                freed = end[:, step, number] = last + moving[:, step, number]
                done[:, step, number] = computed
                if not self.overlapped or number == count - 1:
                    computed = freed
            if self.overlapped:  # compute goes on until all of the step is done
                done[:, step] = done[:, step, -1:]
        return begin, end, done

    def _collectives(
        self, own: Float, times: tuple[Float, Float, Float], skew: Float, drift: Float
    ) -> dict[str, pl.DataFrame]:
        begin, end, done_at = times
        ranks, steps, count = begin.shape
        r, s, n = (index.ravel() for index in np.indices(begin.shape))
        # All that is computed before the k-th collective, in order of time.
        done = np.cumsum(own.reshape(ranks, steps * count, 3), axis=1)
        group = np.array([self.group_of(number) for number in range(count)])[n]
        turn = s * count + n

        def seen(time: Float) -> npt.NDArray[np.int64]:
            return np.rint(EPOCH + time + skew[r] + drift[r] * time / 1e9).astype(np.int64)

        start, stop = seen(begin.ravel()), seen(end.ravel())
        free = np.clip(seen(done_at.ravel()), start, stop)
        parts = {
            f"{part}_{when}_ns": np.rint(done[r, turn, at]).astype(np.int64)
            for at, part in enumerate(("compute", "copy", "idle"))
            for when in ("start", "end")
        }
        if self.overlapped:
            parts = self._overlapped(own, begin, end, parts)
        every = np.arange(ranks)
        rows = pl.DataFrame(
            {
                "rank": r, "device": 0, "number": turn, "step": s, "start": start, "duration": stop - start,
                "launch": start, "correlation": turn, "replayed": False, "first_call": False, "execution": None,
                "program": None, "hlo": None, "collective": np.array(self.step.kinds)[n],
                "bytes": np.array(self.step.bytes)[n], "element_type": "Float",
                "group_size": np.where(group, self.small, ranks // self.small if self.nodes else ranks),
                "group": group, "sequence": turn,
                "source_rank": None, "destination_rank": None, "exposed_ns": stop - free,
                "exposed_start": free, "exposed_end": stop, **parts,
            }
        )  # fmt: skip
        groups = [(rank, 0, "0", "default_pg", str(list(range(ranks)))) for rank in range(ranks)]
        if self.nodes:
            places = [rank % self.small for rank in range(ranks)]
            members = [str(list(range(place, ranks, self.small))) for place in range(self.small)]
            groups = [(rank, 0, f"dp{place}", "mesh_dp", members[place]) for rank, place in enumerate(places)]
        if self.small:
            groups += [
                (
                    rank,
                    1,
                    f"tp{rank // self.small}",
                    "mesh_tp",
                    str([q for q in range(ranks) if q // self.small == rank // self.small]),
                )
                for rank in range(ranks)
            ]
        return {
            "collectives": rows,
            "groups": pl.DataFrame(groups, schema=SUMMARY["groups"].schema, orient="row"),
            "steps": self._steps(own, end),
            "devices": pl.DataFrame(
                {
                    "rank": every, "device": 0, "name": "GPU", "start": EPOCH, "end": EPOCH + int(end.max()),
                    "busy_ns": 0, "step_kind": "step", "undescribed": 0, "epoch_known": True, "job_ranks": ranks,
                }
            ),
        }  # fmt: skip

    def _overlapped(
        self, own: Float, begin: Float, end: Float, parts: dict[str, npt.NDArray[np.int64]]
    ) -> dict[str, npt.NDArray[np.int64]]:
        """What was computed when each kernel began and ended, where compute goes on during them."""
        ranks, steps, count = begin.shape
        found = {name: np.empty(begin.shape) for name in parts}
        for rank in range(ranks):
            at, total = np.zeros(1), np.zeros((1, 3))
            time, done = 0.0, np.zeros(3)
            for step in range(steps):
                for number in range(count):
                    time, done = (time + own[rank, step, number].sum(), done + own[rank, step, number])
                    at, total = np.append(at, time), np.vstack([total, done])
                time = end[rank, step, -1]
                at, total = np.append(at, time), np.vstack([total, done])
            for column, part in enumerate(("compute", "copy", "idle")):
                for when, moments in (("start", begin), ("end", end)):
                    found[f"{part}_{when}_ns"][rank] = np.interp(moments[rank], at, total[:, column])
        return {name: np.rint(values).ravel().astype(np.int64) for name, values in found.items()}

    def _steps(self, own: Float, end: Float) -> pl.DataFrame:
        finish = end[:, :, -1]
        start = np.concatenate([np.zeros((self.ranks, 1)), finish[:, :-1]], axis=1)
        sums = own.sum(axis=2)
        r, s = (index.ravel() for index in np.indices(finish.shape))
        duration = (finish - start).ravel()
        compute, copy, idle = (sums[:, :, part].ravel() for part in range(3))
        return pl.DataFrame(
            {
                "rank": r, "device": 0, "step": s, "name": [f"ProfilerStep#{x + 3}" for x in s], "number": s + 3,
                "start": np.rint(EPOCH + start.ravel()), "duration": np.rint(duration),
                "busy_ns": np.rint(duration - idle), "idle_ns": np.rint(idle), "compute_ns": np.rint(compute),
                "copy_ns": np.rint(copy), "exposed_ns": np.rint(duration - compute - copy - idle), "host_ns": None,
                "first": s == 0,
            }
        )  # fmt: skip

    def _work(self, own: Float) -> dict[str, pl.DataFrame]:
        """Kernels, places and idle time of every rank and step: those of the real step, as long as its stretches."""
        found = {}
        real = self.step.own.sum(axis=0)
        scale = own.sum(axis=2) / np.maximum(real, 1)
        r, s = (index.ravel() for index in np.indices(scale.shape[:2]))
        times = pl.DataFrame({"rank": r, "step": s, "compute": scale[..., 0].ravel(), "idle": scale[..., 2].ravel()})
        if self.detailed is not None:
            times = times.filter(pl.col("rank").is_in(self.detailed))
        for name in ("kernels", "places", "idle"):
            base = self.step.tables[name].drop("rank", "step", "device")
            factor = pl.col("idle") * IDLE if name == "idle" else pl.col("compute")
            rows = times.join(base, how="cross").with_columns(total_ns=pl.col("total_ns") * factor, device=0)
            rows = self._with_fault(rows, name, own)
            found[name] = rows.select(
                pl.col("total_ns").round().cast(pl.Int64) if c.name == "total_ns" else pl.col(c.name).cast(c.dtype)
                for c in SUMMARY[name].columns
            )  # fmt: skip
        return found

    def _with_fault(self, rows: pl.DataFrame, name: str, own: Float) -> pl.DataFrame:
        """Rows of a table with the fault in those of the late rank."""
        plant = self.plant
        if plant is None:
            return rows
        here = (pl.col("rank") == plant.rank) & (pl.col("step") >= plant.since)
        if (plant.kind, name) == ("batch", "kernels"):
            larger = pl.format("{} of the larger batch", pl.col("shape").fill_null(""))
            return rows.with_columns(shape=pl.when(here).then(larger).otherwise("shape"))
        if (plant.kind, name) == ("kernel", "kernels"):
            rest = self._without(rows, here, name, own)
            largest = rest.filter(pl.col("name").is_not_null())["name"][0]
            longer = here & (pl.col("name") == largest)
            shapes = rest.filter(longer, pl.col("step") == plant.since).height
            more = pl.col("total_ns") + self._more / max(shapes, 1)
            return rest.with_columns(total_ns=pl.when(longer).then(more).otherwise("total_ns"))
        if (plant.kind, name) in ADDED:
            rest = self._without(rows, here, name, own)
            return self._appended(rest, name, ADDED[plant.kind, name])
        return rows

    @property
    def _more(self) -> float:
        """What the fault takes in a step, ns."""
        return 0.0 if self.plant is None else self.plant.share * self.step.length

    def _without(self, rows: pl.DataFrame, here: pl.Expr, name: str, own: Float) -> pl.DataFrame:
        """Rows of the late rank as long as they are without the fault."""
        assert self.plant is not None
        part = 2 if name == "idle" else 0
        whole = own[self.plant.rank, self.plant.since :, :, part].sum(axis=1).mean()
        rest = pl.col("total_ns") * max(whole - self._more, 0) / whole
        return rows.with_columns(total_ns=pl.when(here).then(rest).otherwise("total_ns"))

    def _appended(self, rows: pl.DataFrame, name: str, added: tuple[tuple[str, ...], ...]) -> pl.DataFrame:
        """With rows of the fault: cause (of idle time), by, name."""
        assert self.plant is not None
        keys = ("cause", "by", "name")[-len(added[0]) :]
        facts = {"rank": self.plant.rank, "device": 0, "count": 1, "total_ns": self._more}
        new = pl.DataFrame(
            [
                {**facts, "step": step, **dict(zip(keys, row, strict=True))}
                for step in range(self.plant.since, self.steps)
                for row in added
            ]
        ).with_columns(name=pl.when(pl.col("by") != "cause").then("name"))
        columns = [column.name for column in SUMMARY[name].columns]
        old = rows.select(pl.col(c).cast(pl.String) if c == "cause" else pl.col(c) for c in columns)
        types = {"rank": pl.Int64, "step": pl.Int64, "device": pl.Int32}
        return pl.concat([old, new.cast(types)], how="diagonal_relaxed")
