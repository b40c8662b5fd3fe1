"""Launches found by CUPTI's number of them: whether that is right, on a real GPU with PyTorch.

    python setup.py build_ext --inplace          # the compiled probe, where it is not installed
    python tests/gpu/launch_numbers.py record DIR
    python tests/gpu/launch_numbers.py check DIR      # needs thence's reader; no GPU

record     with the API calls recorded beside it, whether each activity lies after the same boundary of its
           thread by its number and by the time of its launch call: kernels, copies, sets, graphs, two threads at
           once, two devices where there are two. Writes DIR/truth.npz.
check      the same recording through the reader: whether the threads that it calls certain are right.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from support import documented_parser, end, judge

if TYPE_CHECKING:
    from collections.abc import Iterator


DEVICE_KINDS = (10, 1, 22, 2)
"""Kernels, copies, peer copies, sets."""


class Session:
    """CUPTI with a counter of launches, and records of device work, of when it was queued and of launch calls.

    Args:
        probe: what counts, ``c`` or ``python``.
    """

    def __init__(self, probe: str) -> None:
        from thence.capture.cuda import cupti, layouts
        from thence.capture.recorder.buffers import Buffers
        from thence.capture.recorder.counting import Counting

        os.environ["THENCE_PROBE"] = probe
        self.cupti, self.counting, self.buffers = cupti.load(), Counting(), Buffers(1 << 30)
        self.handle = self.cupti.subscribe(self.counting.callback)
        self.cupti.register(self.buffers.requested, self.buffers.completed)
        self.cupti.buffers_are_zeroed()
        self.cupti.system_thread_ids()
        self.counting.begin(self.cupti, self.handle)
        assert self.counting.log is not None, self.counting.facts()
        self.log = self.counting.log
        self.cupti.latency_timestamps(on=True)
        self.kinds = (*DEVICE_KINDS, *layouts.CALLS)
        for kind in self.kinds:
            self.cupti.enable(kind)
            if kind in layouts.CALLS:
                self._record_launches(layouts.CALLS[kind])

    def _record_launches(self, domain: int) -> None:
        from thence.capture.cuda import cupti
        from thence.capture.recorder.options import RecordOptions

        options = RecordOptions(launches=True)
        for number in range(1, cupti.MAX_CALLBACK_IDS):
            name = self.cupti.callback_name(domain, number)
            if name is None:
                break
            if not options.wants_call(name):
                self.cupti.api(domain, number, on=False)

    def end(self) -> None:
        import torch

        torch.cuda.synchronize()
        self.cupti.flush(unfinished=True)
        for kind in self.kinds:
            self.cupti.disable(kind)
        self.cupti.unsubscribe(self.handle)
        self.cupti.finalize()

    def records(self) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
        """Rows by table, of a session that has ended."""
        from thence.capture.cuda import layouts
        from thence.capture.recorder.activity_parser import ActivityParser

        parser, parts = ActivityParser(self.cupti), {}
        while not self.buffers.filled.empty():
            filled = self.buffers.filled.get()
            for kind, columns in parser.read(filled.address, filled.valid_bytes):
                parts.setdefault(layouts.LAYOUTS[kind].table, []).append(columns)
        return {
            table: {name: np.concatenate([part[name] for part in pieces]) for name in pieces[0]}
            for table, pieces in parts.items()
        }


@contextmanager
def place(log: Any, number: list[int], flags: int = 0) -> Iterator[None]:
    """A boundary at either end, each with a place of its own."""
    number[0] += 1
    log.note(number[0], flags)
    yield
    number[0] += 1
    log.note(number[0])


def program(log: Any) -> None:
    """Kernels, copies, sets, graphs, on one device after the other; then two threads by turns, then at once."""
    import torch

    from thence.capture.boundaries.log import BEGINS, ENDS

    number = [0]
    host = torch.ones(1 << 16, pin_memory=True)
    for device in range(min(2, torch.cuda.device_count())):
        with torch.cuda.device(device):
            x, y = torch.ones(64, device="cuda"), torch.ones(1 << 16, device="cuda")
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with place(log, number), torch.cuda.graph(graph):
                for _ in range(20):
                    y.add_(1)
                y.copy_(y.clone())
            for _ in range(200):
                with place(log, number):
                    x.add_(1), x.mul_(2)
                with place(log, number):
                    y.copy_(host, non_blocking=True), host.copy_(y, non_blocking=True)
                with place(log, number):
                    y.zero_(), y[:10].clone()
                with place(log, number):
                    graph.replay()
                with place(log, number):
                    float(x[0])
            if device:
                with place(log, number):
                    y.copy_(torch.ones(1 << 16, device="cuda:0"))

    def work(count: int, *, flagged: bool) -> None:
        x = torch.ones(64, device="cuda")
        with place(log, number, BEGINS if flagged else 0):
            for _ in range(count):
                with place(log, number):
                    x.add_(1)
        number[0] += 1
        log.note(number[0], ENDS)

    for turn in range(20):  # as a backward pass: one thread waits for the other
        number[0] += 1
        log.note(number[0], ENDS)
        thread = threading.Thread(target=work, args=(50,), kwargs={"flagged": True})
        thread.start(), thread.join()
        number[0] += 1
        log.note(number[0], BEGINS)
        del turn
    threads = [threading.Thread(target=work, args=(500,), kwargs={"flagged": False}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()


def record(out: Path) -> None:
    import torch

    torch.ones(1, device="cuda")
    for probe in ("c", "python"):
        session = Session(probe)
        print(session.counting.facts())
        program(session.log)
        boundaries = session.log.take()
        session.end()
        tables = session.records()
        compared(boundaries, tables)
        arrays = {f"boundaries.{name}": column for name, column in boundaries.items()}
        for table, columns in tables.items():
            arrays |= {f"{table}.{name}": column for name, column in columns.items()}
        if probe == "c":
            np.savez(out / "truth.npz", **arrays)


def compared(boundaries: dict[str, Any], tables: dict[str, Any]) -> None:
    """Prints how many activities lie after one boundary by number and by time, by kind."""
    calls = tables["calls"]
    order = np.argsort(calls["correlation"], kind="stable")
    known, first = np.unique(calls["correlation"][order], return_index=True)
    call_of = order[first]
    for table in ("kernels", "copies", "sets"):
        rows = tables.get(table)
        if rows is None:
            continue
        at = np.minimum(np.searchsorted(known, rows["correlation"]), len(known) - 1)
        has_call = known[at] == rows["correlation"]
        thread, start = calls["thread"][call_of[at]], calls["start"][call_of[at]].astype(np.int64)
        by_number, by_time = np.full(len(at), -1), np.full(len(at), -1)
        for one in np.unique(boundaries["thread"]):
            own = boundaries["thread"] == one
            here = thread == one
            counter, time_ns, which = (boundaries[c][own] for c in ("counter", "time", "place"))
            which = np.append(which.astype(np.int64), -1)
            by_number[here] = which[np.searchsorted(counter, rows["correlation"][here]) - 1]
            by_time[here] = which[np.searchsorted(time_ns, start[here], "right") - 1]
        graphed = rows["graph"] != 0
        for what, chosen in (("eager", has_call & ~graphed), ("in graphs", has_call & graphed)):
            equal = int((by_number[chosen] == by_time[chosen]).sum())
            judge(equal == int(chosen.sum()), f"{table:8} {what:10} equal {equal:,} of {int(chosen.sum()):,}")
        print(f"{table:8} without a recorded call: {int((~has_call).sum()):,}; queued set: "
              f"{int((rows['queued'] > 0).sum()) if 'queued' in rows else 0:,}")  # fmt: skip


def check(path: Path) -> None:
    """What the reader calls certain, against the launch calls."""
    import polars as pl

    from thence.model.launches import COUNTED
    from thence.readers.recording.counted_launches import boundaries_of, counted_launches

    arrays = np.load(path)

    def table(name: str, *columns: str) -> pl.DataFrame:
        return pl.DataFrame({c: arrays[f"{name}.{c}"].astype(np.int64) for c in columns})

    boundaries = boundaries_of(table("boundaries", "counter", "time", "thread", "place", "flags"))
    shared = ("correlation", "start", "graph")
    gpu = pl.concat(
        [table("kernels", *shared, "queued")]
        + [
            table(name, *shared).with_columns(queued=pl.lit(0, pl.Int64))
            for name in ("copies", "sets")
            if f"{name}.start" in arrays
        ],
        how="diagonal_relaxed",
    ).sort("start")
    gpu = gpu.with_columns(pl.when(pl.col("graph") != 0).then(pl.col("graph")).alias("graph"))
    found = counted_launches(gpu, gpu["queued"], pl.Series([], dtype=pl.Int64), boundaries)
    calls = table("calls", "correlation", "thread", "start").unique("correlation", keep="first")
    both = found.join(calls, on="correlation", suffix="_call")
    certain = both.filter(pl.col("name").cast(pl.String).is_in(COUNTED))
    right = certain.filter(pl.col("thread") == pl.col("thread_call")).height
    late = certain.filter(pl.col("latest") == pl.col("start"))
    away = (late["start"] - late["start_call"]).abs()
    text = f"{both.height:,} launches, {certain.height:,} certain, of these {right:,} of the right thread"
    judge(right == certain.height > 0, text)
    print(found["name"].value_counts(sort=True))
    print(f"queued is {away.median():.0f} ns from the call (90 %: {away.quantile(0.9):.0f}) in {late.height:,}")


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("path", type=Path)
    given = parser.parse_args()
    if given.what == "check":
        check(given.path / "truth.npz")
    else:
        given.path.mkdir(parents=True, exist_ok=True)
        record(given.path)
    end()


if __name__ == "__main__":
    main()
