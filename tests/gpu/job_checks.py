"""What thence says of the recordings of jobs.py beside what is true of them; `check` is that script's verb."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

import thence

if TYPE_CHECKING:
    from pathlib import Path

    from thence.analysis.ranks.answer import Job

KNOWN = ("module", "source", "phase")
VERBS = ("report", "ranks", "idle")
RESIDUAL_NS = 10_000
"""Half of the ends of shared collectives lie within that of each other on one host, whose ranks have one clock."""
BUBBLE = 0.06
"""How far a pipeline's bubble may be from the arithmetic, as a share of the step."""
CAUSED = (0.5, 1.15)
"""What a planted fault may make others wait, as a share of it: some of it hides behind queued work. Where steps get
longer by more than was planted, as where a sleep ends late on a busy host, others may wait for as much."""
SINCE = 1
"""Steps by which the begin of a lateness may be off."""
IDLE = 0.05
"""Share of a step that a stage's GPU may idle: where it idles longer, the hosts decide how long a step takes, and no
arithmetic says what the other stages wait."""
SAME_WALL = 0.02
"""By which share the wall times of ranks that wait for each other may differ."""


@dataclass
class Verdicts:
    """What was held against the truth."""

    wrong: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    right: int = 0

    def lacks(self, what: str, why: str) -> None:
        """Nothing could be held against the truth."""
        print(f"  {what}: NOT CHECKED: {why}")
        self.lacking.append(what)

    def say(self, what: str, detail: str, *, ok: bool) -> None:
        print(f"  {what}: {'right' if ok else 'WRONG'}: {detail}")
        if ok:
            self.right += 1
        else:
            self.wrong.append(what)


def check(out: Path, names: list[str]) -> int:
    """Check every program that was recorded; 1 if anything is wrong, or nothing was compared."""
    verdicts = Verdicts()
    for name in names:
        directory = out / name
        facts = documents(out, f"{name}.rank*.json")
        # Those of JAX are called as a program of theirs.
        references = documents(out, f"{name}.reference*.json")
        print(f"\n{name}: {len(facts)} processes ended well")
        if not facts:
            verdicts.lacks(name, f"it did not run to its end: see {out / name}.log")
            continue
        try:
            program(directory, facts, references, verdicts)
        except Exception as error:  # noqa: BLE001 - the other programs are checked all the same
            verdicts.say("analysis", f"{type(error).__name__}: {error}", ok=False)
    print(
        f"\n{verdicts.right} right, {len(verdicts.wrong)} wrong {sorted(set(verdicts.wrong))}, "
        f"{len(verdicts.lacking)} not checked {sorted(set(verdicts.lacking))}"
    )
    return int(bool(verdicts.wrong) or not verdicts.right)


def documents(out: Path, pattern: str) -> dict[int, dict[str, Any]]:
    """By rank."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob(pattern))]
    return {document["rank"]: document for document in found}


def program(
    directory: Path, facts: dict[int, dict[str, Any]], references: dict[int, dict[str, Any]], verdicts: Verdicts
) -> None:
    """Everything that is known of one program."""
    trace = thence.open(directory)
    truth = next(iter(facts.values()), {})
    ranks, wanted = len(trace.recorded.ranks), truth.get("ranks")
    verdicts.say("ranks", f"{ranks} of {wanted}", ok=ranks == wanted)
    for warning in trace.meta.warnings:
        print(f"  warning: {warning}")
    is_jax = "devices" in truth
    coverage(trace, ("hlo", "source") if is_jax else KNOWN)
    cost(facts, references)
    spent(directory, truth)
    if is_jax:
        instructions(trace, truth, verdicts)
    else:
        if "fault" not in truth:
            collectives(trace, references, verdicts)
        per_step(trace, facts, verdicts)
    job = trace.ranks()
    clocks(job, verdicts)
    if "fault" in truth:
        wall_times(facts, verdicts)
        straggler(job, truth["fault"], verdicts)
    else:
        nobody(trace, job, truth, verdicts)
    if "bubble_share" in truth:
        bubbles(job, truth, verdicts)
    for verb in VERBS:
        verb_cost(verb, directory)


def coverage(trace: thence.Trace, kinds: tuple[str, ...]) -> None:
    """Shares of GPU time in steps with each kind of place, and of communication that is described."""
    whole = trace.tables.gpu.with_row_index("row").with_columns(
        *(trace.tables.places[kind].is_not_null().alias(f"has_{kind}") for kind in {*kinds, "step", "module"}),
        phase=trace.tables.places["phase"].cast(pl.String),
    )
    rows = whole.filter("has_step") if whole["has_step"].any() else whole
    for rank, part in rows.group_by("rank", maintain_order=True):
        total = part["duration"].sum()
        shares = [f"{kind} {part.filter(f'has_{kind}')['duration'].sum() / total:.2%}" for kind in kinds]  # fmt: skip
        nccl = part.filter(pl.col("name").cast(pl.String).str.contains("(?i)nccl"))
        told = nccl.join(trace.tables.collectives, left_on=pl.col("row").cast(pl.Int32), right_on="gpu", how="semi")
        said = told["duration"].sum() / max(nccl["duration"].sum(), 1)
        # Losses, optimizers and messages between stages are in no module.
        inside = part.filter(
            ~pl.col("name").cast(pl.String).str.contains("(?i)nccl"),
            pl.col("kind").cast(pl.String) == "kernel",
            pl.col("phase").is_in(["forward", "backward", "gradient"]),
        )
        known = inside.filter(pl.col("has_module"))["duration"].sum() / max(inside["duration"].sum(), 1)
        print(
            f"  rank {rank[0]}: {whole.filter(rank=rank[0]).height} activities, {part.height} in steps; "
            f"of their GPU time {', '.join(shares)}; of {nccl.height} NCCL kernels' time described {said:.2%}; "
            f"of what computes in forward and backward module {known:.2%}"
        )


def cost(facts: dict[int, dict[str, Any]], references: dict[int, dict[str, Any]]) -> None:
    """What recording adds to a step, of each rank."""
    for rank, found in sorted(facts.items()):
        plain = references.get(rank, {}).get("step_ms")
        profiled = references.get(rank, {}).get("profiled_step_ms")
        text = f"  rank {rank}: step recorded {found['step_ms']:.2f} ms"
        if plain:
            text += f", plain {plain:.2f} ms: +{found['step_ms'] / plain - 1:.1%}"
        if plain and profiled:
            text += f"; torch.profiler {profiled:.2f} ms: +{profiled / plain - 1:.1%}"
        print(text)


def spent(directory: Path, truth: dict[str, Any]) -> None:
    """How many records of each kind a step has, over all steps of the program."""
    for path in sorted(directory.rglob("recording.json")):
        recording = json.loads(path.read_text())
        counts = recording["counts"]
        shown = ", ".join(f"{kind} {count / truth['steps']:,.0f}" for kind, count in counts.items())
        print(f"  rank {recording['rank']}: records a step: {shown}")


def collectives(trace: thence.Trace, references: dict[int, dict[str, Any]], verdicts: Verdicts) -> None:
    """The collectives of every rank beside torch.profiler's of the same program."""
    for rank in sorted(trace.recorded.ranks):
        reference = references.get(rank, {})
        if "collectives" not in reference:
            had = "ran plain, but not under torch.profiler" if reference else "did not run"
            verdicts.lacks(f"collectives of rank {rank}", f"the program without thence {had}")
            continue
        if not reference["collectives"]:
            undescribed(trace, rank, reference, verdicts)
            continue
        theirs = Counter({tuple(sorted_ranks(row[:-1])): row[-1] for row in reference["collectives"]})
        ours = recorded(trace, rank)
        same, every = (ours & theirs).total(), (ours | theirs).total()
        verdicts.say(f"collectives of rank {rank}", f"{same} of {every} as torch.profiler", ok=same == every > 0)
        for key in sorted((ours - theirs) + (theirs - ours), key=str)[:8]:
            print(f"    {key}: {ours[key]} recorded, {theirs[key]} in the profile")


def undescribed(trace: thence.Trace, rank: int, reference: dict[str, Any], verdicts: Verdicts) -> None:
    """Where torch.profiler describes no kernel, as of sends and receives in batches: how many there are."""
    if not reference["kernels"]:
        print(f"  collectives of rank {rank}: the profile holds no kernels")
        return
    name = trace.tables.gpu["name"].cast(pl.String)
    ours = trace.tables.gpu.filter(name.str.contains("(?i)nccl"), rank=rank).height
    theirs = reference["nccl_kernels"]
    detail = f"{ours} NCCL kernels, {theirs} in the profile, which describes none"
    verdicts.say(f"collectives of rank {rank}", detail, ok=ours == theirs)


def recorded(trace: thence.Trace, rank: int) -> Counter[tuple[Any, ...]]:
    """How often a rank's kernels moved what: collective, elements in and out, type, size and ranks of the group."""
    of_rank = trace.tables.gpu.with_row_index("gpu").select(pl.col("gpu").cast(pl.Int32), "rank")
    even = (pl.col("collective").cast(pl.String) == "all_to_allv") & (pl.col("in_splits") == "[]")
    rows = (
        trace.tables.collectives.join(of_rank.filter(rank=rank), on="gpu")
        .with_columns(pl.when(even).then(pl.lit("all_to_all")).otherwise(pl.col("collective").cast(pl.String)).alias("collective"))
        .select(
            "collective", "in_elements", "out_elements", pl.col("element_type").cast(pl.String), "group_size",
            pl.col("group_ranks").cast(pl.String),
        )
    )  # fmt: skip
    return Counter(tuple(sorted_ranks(row)) for row in rows.rows())


def sorted_ranks(row: Any) -> list[Any]:
    """A row with the ranks of its group as numbers."""
    *others, ranks = row
    return [*others, tuple(sorted(map(int, re.findall(r"\d+", ranks or ""))))]


def per_step(trace: thence.Trace, facts: dict[int, dict[str, Any]], verdicts: Verdicts) -> None:
    """Collectives beside the program's own arithmetic."""
    truth = next(iter(facts.values()))
    expected = truth.get("collectives_per_step", {})
    name = trace.tables.collectives["collective"].cast(pl.String).str.replace_all("_", "")
    for kind, count in expected.items():
        found = int(name.str.starts_with(kind.replace("_", "")).sum())
        wanted = count * truth["steps"] * truth["ranks"]
        verdicts.say(f"{kind} by arithmetic", f"{found} of {wanted}", ok=found == wanted)
    if "messages_per_step" in truth:
        # The stages tell each other first what they will send, in other messages; 1F1B sends and receives in one.
        size = trace.tables.collectives["in_elements"]
        single = size.filter(name.is_in(["send", "recv"])).max()
        found = int((size.filter(name.is_in(["send", "recv", "coalesced"])) // single).sum())
        wanted = sum(one["steps"] * one["messages_per_step"] for one in facts.values())  # the ends have one neighbour
        verdicts.say("messages by arithmetic", f"{found} of {wanted}", ok=found == wanted)


def instructions(trace: thence.Trace, truth: dict[str, Any], verdicts: Verdicts) -> None:
    """Communication of JAX: activities of every kind of instruction, beside the compiled program's text."""
    opcode = trace.tables.places["opcode"].cast(pl.String).str.strip_suffix("-start")
    hlo = trace.tables.places["hlo"].cast(pl.String)
    rows = trace.tables.gpu.with_columns(opcode=opcode, hlo=hlo)
    # Communicators copy some bytes when they are made, for the instruction that comes first.
    print(rows.group_by("rank", "device", "opcode").len().sort("rank", "device", "opcode"))
    nccl = rows.filter(pl.col("name").cast(pl.String).str.contains("(?i)nccl"))
    unknown = nccl.filter(pl.col("hlo").is_null()).height
    verdicts.say("NCCL kernels with an HLO op", f"{unknown} of {nccl.height} without", ok=unknown == 0)
    places = rows.select("rank", "device").unique().height
    # XLA makes one kernel of a small all-reduce and what is computed around it, named after JAX's operation.
    fused = rows.filter(pl.col("hlo").str.contains("^psum.*fusion"))
    for kind, count in truth["collectives_per_step"].items():
        found = nccl.filter(opcode=kind)["hlo"].n_unique()
        ran = nccl.filter(opcode=kind).height
        own = fused.height if kind == "all-reduce" else 0
        wanted = count * truth["steps"] * places
        verdicts.say(
            kind,
            f"{ran} NCCL kernels of {found} instructions, {own} of XLA's own; {wanted} executions",
            ok=ran + own == wanted,
        )


def clocks(job: Job, verdicts: Verdicts) -> None:
    """What is left of the distances of ends after the clocks are aligned; the ranks of one host have one clock."""
    rows = job.clocks.rows
    if rows.height < 2:
        return
    detail = " ".join(job.clocks.statements)
    if not job.stages.is_empty() and job.clocks.unaligned:
        print(f"  clocks: {detail}")  # a send may end before its receive begins
        return
    half, most = rows["residual_median_ns"].max(), rows["residual_p90_ns"].max()
    known = isinstance(half, float) and not job.clocks.unaligned
    moved = rows["offset_ns"].abs().max()
    verdicts.say(
        "clocks",
        f"half of the ends within {half} ns, nine in ten within {most} ns, moved by {moved} ns; {detail}",
        ok=known and half <= RESIDUAL_NS and moved == 0,
    )


def nobody(trace: thence.Trace, job: Job, truth: dict[str, Any], verdicts: Verdicts) -> None:
    """No rank is late where none was planted.

    The last stage of a pipeline may be: it has the loss, and unlike the first the gradient of its input. On a busy host
    any rank may be; then its kernels start after those of all others.
    """
    named = job.stragglers["rank"].to_list()
    more = {why.rank for why in job.reasons if why.rows["cause"].first() == "more_work"}
    allowed = {truth["stages"] - 1} & more if "stages" in truth else set()
    for why in job.reasons if named else ():
        print(f"  named: rank {why.rank}")
        causes(why.rows)
    last = {rank: starts_last(trace, rank) / truth["steps"] for rank in set(named) - allowed}
    means = dict(job.stragglers.select("rank", "mean_ns").iter_rows())
    if last and all(ns >= CAUSED[0] * means[rank] for rank, ns in last.items()):
        told = ", ".join(f"rank {rank} by {ns / 1e6:.2f} ms a step" for rank, ns in last.items())
        verdicts.lacks("no straggler", f"{job.statement}; kernels of collectives do start last there: {told}")
    else:
        verdicts.say("no straggler", job.statement, ok=not last)


def starts_last(trace: thence.Trace, rank: int) -> int:
    """Ns by which a rank's kernels of collectives of all ranks start after the last other one, summed over the job."""
    every = len(trace.recorded.ranks)
    starts = trace.tables.gpu.with_row_index("gpu").select(pl.col("gpu").cast(pl.Int32), "rank", "start")
    rows = trace.tables.collectives.filter(group_size=every).join(starts, on="gpu").sort("rank", "start")
    rows = rows.with_columns(number=pl.int_range(pl.len()).over("rank", "group_name"))
    own = pl.col("start").filter(pl.col("rank") == rank).max()
    others = pl.col("start").filter(pl.col("rank") != rank).max()
    met = rows.group_by("group_name", "number").agg(late=own - others, ranks=pl.len())
    return int(met.filter(pl.col("ranks") == every, pl.col("late") > 0)["late"].sum())


def wall_times(facts: dict[int, dict[str, Any]], verdicts: Verdicts) -> None:
    """Ranks that wait for each other take equally long, so that wall times do not tell who is late."""
    times = [found["step_ms"] for _, found in sorted(facts.items())]
    detail = ", ".join(f"{ms:.1f} ms" for ms in times)
    verdicts.say("equal wall times", detail, ok=max(times) <= min(times) * (1 + SAME_WALL))


def straggler(job: Job, fault: dict[str, Any], verdicts: Verdicts) -> None:
    """The planted rank, since when, by how much and why."""
    named = job.stragglers["rank"].to_list()
    planted = f"{job.statement}; planted rank {fault['rank']}"
    before, after = step_times(job, fault["since"])
    noise = 2 * after.std() / len(after) ** 0.5
    if not named and fault["ms"] and noise > fault["ms"] / 2:
        verdicts.lacks("straggler", f"{planted}, {fault['ms']} ms, in steps known to +-{noise:.1f} ms")
        return
    verdicts.say("straggler", planted, ok=named == [fault["rank"]])
    row = job.stragglers.filter(rank=fault["rank"])
    if row.is_empty():
        print(job.ranks)
        return
    since = job.keys.index(row["since_step"][0])
    caused_in = job.cells.filter(rank=fault["rank"]).with_columns(pl.col("caused_ns").fill_null(0))
    early = caused_in.filter(pl.col("key").is_in(job.keys[since : fault["since"]]))["caused_ns"]
    # By chance it may have been as late in the steps just before.
    off = abs(since - fault["since"]) <= SINCE or bool(len(early) and (early > CAUSED[0] * row["mean_ns"][0]).all())
    detail = f"step {since} of {len(job.keys)}; planted {fault['since']}"
    verdicts.say("since", detail, ok=off)
    caused = row["mean_ns"][0] / 1e6
    if fault["ms"]:
        longer = float(np.median(after) - np.median(before))
        ok = CAUSED[0] * fault["ms"] <= caused <= CAUSED[1] * max(fault["ms"], longer)
        verdicts.say("waits", f"{caused:.2f} ms a step; planted {fault['ms']} ms, steps {longer:.2f} ms longer", ok=ok)
    else:
        print(f"  waits: {caused:.2f} ms a step")
    rows = next(one for one in job.reasons if one.rank == fault["rank"]).rows
    cause = rows["cause"][0]
    verdicts.say("cause", f"{cause}; planted {fault['causes']}", ok=cause in fault["causes"])
    causes(rows)
    if fault["places"]:
        lines = rows.filter(pl.col("by") == "source")["name"].to_list()
        found = [line for line in lines if line and inside(line, fault["places"])]
        verdicts.say("line", f"{lines}; planted {fault['places']}", ok=bool(found))
    if fault["module"]:
        modules = rows.filter(pl.col("by") == "module")["name"].to_list()
        ok = any(fault["module"] in (module or "") for module in modules)
        verdicts.say("module", f"{modules}; planted {fault['module']}", ok=ok)


def step_times(job: Job, since: int) -> tuple[Any, Any]:
    """Ms of the steps before and since one, by the first rank; not those in which anything starts or ends."""
    steps = job.cells.filter(rank=job.cells["rank"].min()).sort("start").filter(pl.col("key").is_in(job.keys))
    times = steps["step_ns"].to_numpy() / 1e6
    return times[3:since], times[since:-1]


def causes(rows: pl.DataFrame) -> None:
    """What is said to be the cause."""
    for reason in rows.head(8).iter_rows(named=True):
        told = (reason["cause"], reason["by"], reason["name"], f"{reason['share']:.0%}")
        print("   ", *told, reason["detail"] or "")


def inside(line: str, places: list[list[Any]]) -> bool:
    """Whether a line as thence writes it lies in one of the functions."""
    match = re.search(r"([\w.-]+\.py):(\d+)", line)
    return any(
        match is not None and match[1] == file and first <= int(match[2]) <= last for file, _, first, last in places
    ) or any(file in line and function in line for file, function, _, _ in places)


def bubbles(job: Job, truth: dict[str, Any], verdicts: Verdicts) -> None:
    """Bubbles of the stages beside (p - 1) / (m + p - 1), as thence has them and as time without compute."""
    expected = truth["bubble_share"]
    idle = (job.ranks["idle_ns"] / job.ranks["step_ns"]).max()
    if isinstance(idle, float) and idle > IDLE:
        shares = ", ".join(f"{share:.3f}" for share in job.stages["bubble_share"])
        why = f"{shares} of the step, arithmetic {expected:.3f}: a stage's GPU idles for {idle:.1%} of it"
        verdicts.lacks("bubbles", f"{why}, so the hosts decide how long a step takes")
        return
    compute = job.ranks.select("rank", "device", none=1 - pl.col("compute_ns") / pl.col("step_ns"))
    for stage in job.stages.join(compute, on=["rank", "device"]).iter_rows(named=True):
        share = stage["bubble_share"]
        verdicts.say(
            f"bubble of stage {stage['stage']}",
            f"{share:.3f} of the step; without compute {stage['none']:.3f}; arithmetic {expected:.3f}",
            ok=abs(share - expected) <= BUBBLE,
        )


def verb_cost(verb: str, directory: Path) -> None:
    """Seconds and peak memory of a verb on all ranks."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "thence", verb, str(directory), "--format", "json"]
    child = os.posix_spawn(
        sys.executable, command, os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )  # fmt: skip
    _, status, used = os.wait4(child, 0)
    print(
        f"  thence {verb}: exit code {os.waitstatus_to_exitcode(status)}, {time.perf_counter() - begin:.2f} s, "
        f"{used.ru_utime + used.ru_stime:.2f} s of CPU, {used.ru_maxrss / 1e3:.0f} MB"
    )
