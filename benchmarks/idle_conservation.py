"""Whether every idle nanosecond of traces has one cause, how much is unknown, and how long that and a replay take.

    python benchmarks/idle_conservation.py TRACE... [--times 1]

For each trace (files; ranks of one job joined by commas): the idle time as the report states it and as the causes add
up, the unknown share by reason and the share of Python that is told from silence, seconds of processor time of the
causes, of all that ``thence idle`` says, of the graph and of one replay, whether the replay of what was recorded is
exact, and the peak of memory. ``--times N`` also measures the first trace repeated N times, one after the other.
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl

import thence
from command_line import documented_parser
from thence.analysis.idle.answer import idle_time
from thence.analysis.idle.causes import idle_causes
from thence.analysis.report.summary import summarize
from thence.analysis.whatif.graph import program_graph
from thence.analysis.whatif.prediction import health
from thence.analysis.whatif.simulation import simulated
from thence.errors import ThenceError
from thence.model.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable


def repeated(tables: Tables, times: int) -> Tables:
    """The same tables again and again, each time later, with ids of their own."""
    end = [(frame["start"] + frame["duration"]).to_numpy().max() for frame in (tables.gpu, tables.host)]
    begin = [frame["start"].to_numpy().min() for frame in (tables.gpu, tables.host)]
    span = int(max(end)) - int(min(begin)) + 1000
    ids = int(tables.host["correlation"].max() or 0) + 1  # type: ignore[call-overload]

    def later(frame: pl.DataFrame, number: int) -> pl.DataFrame:
        moved = frame.with_columns(pl.col("start") + number * span, pl.col("correlation") + number * ids)
        if "parent" in frame.columns:
            rows = number * frame.height
            moved = moved.with_columns(pl.col("parent") + rows, pl.col("forward") + rows)
        return moved

    gpu = pl.concat([later(tables.gpu, number) for number in range(times)])
    host = pl.concat([later(tables.host, number) for number in range(times)]).with_row_index("old")
    host = host.sort("rank", "process", "thread", maintain_order=True)
    place = host.select("old").with_row_index("new").sort("old")["new"].cast(pl.Int32)
    host = host.with_columns(
        place.gather(host[name].cast(pl.UInt32)).alias(name) for name in ("parent", "forward")
    ).drop("old")
    return Tables(gpu=gpu, host=host, meta=tables.meta)


def timed(ask: Callable[[], Any]) -> tuple[Any, str]:
    """What it returns, and seconds that it took, of processor time and on the clock: one may be busy with others."""
    cpu, clock = time.process_time(), time.perf_counter()
    result = ask()
    return result, f"{time.process_time() - cpu:.2f} CPU s ({time.perf_counter() - clock:.2f} s)"


def measure(name: str, trace: thence.Trace) -> None:
    """Prints a line about one trace."""
    whole = trace.whole
    total = summarize(whole, "kernel")
    stated = total.span_ns - total.busy_ns
    pieces, took = timed(lambda: idle_causes(whole))
    found = int(pieces["duration"].sum())
    reasons = dict(pieces.drop_nulls("reason").group_by("reason").agg(pl.col("duration").sum()).sort("reason").rows())
    silent = pieces.filter(pl.col("cause") == "host", pl.col("host").is_null())["duration"].sum()
    said = "".join(f" {name} {100 * ns / max(found, 1):.1f}" for name, ns in reasons.items())
    _, placed = timed(lambda: idle_time(whole))
    of_ranks = trace._of_ranks  # noqa: SLF001 - what Trace.whatif does
    program, built = timed(lambda: program_graph(whole, *of_ranks))
    again, replay = timed(lambda: simulated(program.graph))
    exact = bool((again == program.graph.time).all())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    sums = "adds up" if found == stated else f"IS {found / 1e6:.3f} ms"
    print(
        f"{name[-44:]:44} {whole.gpu.height:8,} {whole.host.height:9,} idle {stated / 1e6:11.3f} ms {sums}, unknown "
        f"{100 * sum(reasons.values()) / max(found, 1):5.1f} %{said and f' ({said[1:]})'}, python in silence "
        f"{100 * silent / max(found, 1):4.1f} %; causes {took}, with places {placed}; graph {built}, replay {replay} "
        f"{'exact' if exact else 'NOT EXACT'}, unexplained {100 * health(whole, program).unexplained:5.1f} %; peak "
        f"{memory:.2f} GB",
        flush=True,
    )


if __name__ == "__main__":
    parser = documented_parser(__doc__)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--times", type=int, default=1)
    given = parser.parse_args()
    for path in given.traces:
        try:
            measure(path, thence.open(*path.split(",")))
        except ThenceError as error:
            print(f"{path[-44:]:44} {error}")
    if given.times > 1:
        first = thence.open(*given.traces[0].split(","))
        measure(f"{given.traces[0]} x {given.times}", replace(first, tables=repeated(first.recorded, given.times)))
