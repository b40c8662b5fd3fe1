"""A JAX program recorded with command buffers and without: do both give the same kernels to each HLO op?

Part of `jax_programs.py`, which records the programs: ``jax_programs.py check DIR``.

What counts are the activities of XLA's programs and every other kernel, without what tables keep separate as the
autotuner's. Copies outside of programs, of arguments and results, are no program's time; how many is stated.

Kernels (name, grid, block) and how often each ran must be the same for each HLO op, with these differences, that
XLA makes itself:

* A copy that XLA does with a kernel of the driver when it runs op by op is a copy node in a graph.
* For a branch or a loop on the host XLA copies the predicate there; in a graph a kernel (``set_case_condition``,
  ``set_while_condition``) takes it. Both are called a decision here, and their counts must be equal.
* A loop whose trip count is known runs on the host without its condition. In a graph the condition runs once more
  often than the body. Such ops exist only in graphs; their count must be the body's, and one for each time that
  the loop ran.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

ENOUGH = 0.97
"""Share of a program's time that shall have an HLO op."""
_SHOWN = 14
_DECISION, _COPY = "decision", "copy or set"

Ops = dict[tuple[str, str], Counter[Any]]
"""(program, HLO op) to its kernels, by name, grid and block, and how often each ran."""


@dataclass(frozen=True)
class Side:
    """One recording.

    Attributes:
        activities: of programs, and kernels of none; columns as in ``Trace.activities``, program its name.
        outside: copies and sets that belong to no program.
        modules: name of each program, and its HLO module.
        impossible: what the check of the trace says of times that cannot be.
    """

    activities: Any
    outside: int
    modules: list[tuple[str, Any]]
    impossible: list[str]

    @classmethod
    def of(cls, path: Path) -> Side:
        """What ran, as it counts here."""
        import polars as pl

        import thence

        trace = thence.open(str(path))
        names = trace.tables.programs["name"].cast(pl.String)
        activities = trace.activities.with_columns(
            pl.col("name", "kind", "hlo", "hlo_rule", "opcode").cast(pl.String),
            program=names.gather(trace.tables.gpu["program"].cast(pl.UInt32)),
            tuning=(trace.tables.places["separate"] == "autotuning").fill_null(value=False),
        ).filter(~pl.col("tuning"))
        counted = pl.col("program").is_not_null() | (pl.col("kind") == "kernel")
        counts = activities.filter(counted)
        programs = set(zip(names, trace.tables.programs["hlo"], strict=True))
        return cls(
            counts,
            activities.height - counts.height,
            [(name, trace.tables.hlo[row]) for name, row in programs if row is not None],
            [one.text for one in trace.check().findings if one.code == "impossible_time"],
        )

    def share(self, column: str) -> float:
        """Share of the time of rows that have a value in a column."""
        known = self.activities.filter(self.activities[column].is_not_null())["duration"].sum()
        return known / max(self.activities["duration"].sum(), 1)

    def by_op(self) -> Ops:
        """Kernels of each HLO op."""
        found: Ops = {}
        columns = self.activities.select("program", "hlo", "kind", "name", "opcode", "grid", "block")
        for program, hlo, kind, kernel, opcode, grid, block in columns.drop_nulls("hlo").iter_rows():
            decides = opcode in ("conditional", "while")
            if re.match(r"set_\w*condition", kernel) or (decides and kind == "memcpy"):
                key: Any = _DECISION
            elif kind != "kernel" or re.match(r"(?i)mem(cpy|set)", kernel):
                key = _COPY
            else:
                key = (kernel, tuple(grid or ()), tuple(block or ()))
            found.setdefault((program, hlo), Counter())[key] += 1
        return found


def _of_conditions(with_graphs: Side, ours: Ops, theirs: Ops) -> dict[tuple[str, str], int]:
    """Ops that run only in graphs, to show whether to run a loop of a known trip count again; and how often.

    The number of times is taken from the run without command buffers: that of the loop's body, which is
    `trip_count` for each time that the loop ran.
    """
    expected = {}
    for program, module in with_graphs.modules:
        names = module.instructions.select("computation", "name")
        for name, condition, body, trips in module.loops.select("name", "condition", "body", "trip_count").iter_rows():
            of_body = names.filter(names["computation"] == body)["name"]
            counts = Counter(theirs[program, op].total() for op in of_body if (program, op) in theirs)
            if not trips or not counts or (program, name) in theirs:
                continue
            runs = counts.most_common(1)[0][0]
            of_condition = names.filter(names["computation"] == condition)["name"]
            expected |= {(program, op): runs + runs // trips for op in (name, *of_condition) if (program, op) in ours}
    return expected


def compare(folder: Path, name: str) -> tuple[int, int, bool]:
    """Compares the recordings of a program.

    Returns:
        how many HLO ops are wrong, how many lack some, and whether enough of the time has an op.
    """
    on, off = Side.of(folder / f"{name}_on"), Side.of(folder / f"{name}_off")
    ours, theirs = on.by_op(), off.by_op()
    only_in_graphs = {
        op: count
        for op, count in _of_conditions(on, ours, theirs).items()
        if op not in theirs and list(ours[op].values()) == [count]
    }
    more = {op: found - theirs.get(op, Counter()) for op, found in ours.items()}
    wrong = {op: found for op, found in more.items() if found and op not in only_in_graphs}
    missed = {op: found - ours.get(op, Counter()) for op, found in theirs.items()}
    lacking = {op: found for op, found in missed.items() if found}
    graphs = on.activities.filter(on.activities["graph"].is_not_null())
    print(
        f"{name}: {on.activities.height:,} activities, {graphs.height:,} in graphs ({on.share('graph'):.2%} of their "
        f"time); {on.share('hlo'):.2%} has an HLO op (without command buffers {off.share('hlo'):.2%}); {len(theirs):,} "
        f"HLO ops, {len(wrong)} wrong, {len(lacking)} lack some; {on.outside} copies of no program"
    )
    for finding in (*on.impossible, *off.impossible):
        print(f"   shares of time mislead: {finding}")
    print("   how, in graphs:", dict(Counter(graphs["hlo_rule"].to_list()).most_common()))
    if only_in_graphs:
        print("   only in graphs, conditions of loops of a known trip count:", only_in_graphs)
    for title, ops in (("WRONG", wrong), ("lacks", lacking)):
        for op, found in list(ops.items())[:_SHOWN]:
            print(f"   {title}: {op} {dict(found.most_common(3))}")
    return len(wrong), len(lacking), on.share("hlo") >= ENOUGH
