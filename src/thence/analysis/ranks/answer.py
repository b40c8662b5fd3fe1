"""Analyses a job from the summaries of its ranks: which ranks made others wait, how long, since which step, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.collectives.missing import job_ranks
from thence.analysis.collectives.waits import NOT_CAUSED
from thence.analysis.ranks.job_collectives import JobCollectives, job_collectives, summary_table
from thence.analysis.ranks.lateness import Lateness, late_since, lateness, stage_causes, stages, step_keys
from thence.analysis.ranks.nodes import NETWORK, NODE, UNKNOWN, by_node, nodes_column, slow_link_of
from thence.analysis.ranks.process_groups import folded_groups, group_rows, slow_links
from thence.analysis.ranks.reasons import Reasons, reasons_of
from thence.analysis.steps.windows import left_out, without_end
from thence.errors import MissingData
from thence.model.answer import Answer, Lines, TableView
from thence.model.collective_kinds import MESSAGES
from thence.model.kernel_names import clip, short_names
from thence.model.tables import ENDLESS
from thence.model.thresholds import LATE_RANK_SHARE, MIN_STEPS_FOR_LATE_RANKS, SHOWN_CONFIDENCE, UNUSUAL_STEP_RATIO
from thence.units import format_ns, format_ranges, format_share, listed, ranges_of, several

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from thence.analysis.collectives.missing import JobRanks
    from thence.analysis.ranks.job_collectives import Clocks

_PLACE = ["rank", "device"]
_NO_MESSAGES = pl.DataFrame(
    schema={
        "rank": pl.Int32, "device": pl.Int32, "stage": pl.Int64, "key": pl.String,
        "step_ns": pl.Int64, "bubble_ns": pl.Int64, "own_ns": pl.Int64,
    }
)  # fmt: skip
"""No rows of `thence.analysis.ranks.lateness.stages`."""
_EXPLAINED = 8
"""Maximum number of ranks that are explained: those that caused the longest waits."""


_LATE_NODES: dict[str, pl.DataType | type[pl.DataType]] = {
    "node": pl.Int32,
    "ranks": pl.List(pl.Int32),
    "devices": pl.Int32,
    "mean_ns": pl.Float64,
    "low_ns": pl.Float64,
    "since_step": pl.String,
    "late_share": pl.Float64,
}
"""Columns of `Job.late_nodes`."""
_RANKS = {
    "rank": "rank",
    "device": "GPU",
    "caused_share": "caused",
    "times_last": "times last",
    "step_ns": "step",
    "compute_ns": "compute",
    "exposed_wait_ns": "waits",
    "unknown_ns": "wait or transfer",
    "idle_ns": "idle",
    "transfer_ns": "transfers",
    "copy_ns": "memcpy",
    "busy_ns": "busy",
    "steps_per_second": "steps/s",
}
_ROWS_SHOWN = 10
"""Rows of each table that a terminal shows."""
_INDENT = " " * 4
MEANINGS = {
    "slower_gpu": "slower GPU",
    "more_work": "more work",
    "compute": "compute",
    "copy": "memcpy",
    "transfer": "transfers of other groups",
    "unknown": "unknown",
}
"""Readable names of causes, except the causes of idle time, which are shown as ``idle: <cause>``."""

GROUPS = {
    "kind": "group",
    "alike": "groups",
    "size": "ranks",
    "shown": "shown",
    "collectives": "collectives",
    "exposed_wait_ns": "waits",
    "transfer_ns": "transfers",
    "link": "link",
    "members": "members",
    "description": "description",
}
"""Columns of `shown_groups`, with their headings."""
STAGES = {
    "stage": "stage",
    "rank": "rank",
    "device": "GPU",
    "step_ns": "step",
    "own_ns": "own time",
    "bubble_ns": "bubble",
    "bubble_share": "share",
}
"""Columns of `Job.stages` that are shown, with their headings."""
LINKS = {
    "members": "slow link: ranks",
    "link": "link",
    "extra_ns": "longer by (per step)",
    "low_ns": "at least",
    "since_step": "since",
}
"""Columns of `Job.links` that are shown, with their headings."""


@dataclass(frozen=True)
class Job(Answer):
    """The devices of a job, and which of them are late.

    Attributes:
        ranks: one row per device, the device that caused the longest waits first: rank, device, times_last (number
            of collectives of the steps that count in which others waited for it), awaited_ns (the wait in these
            collectives per step, whoever caused it, of the device that waited longest for it), wait_caused_ns (in
            each step, the wait that it caused for
            the device that waited longest for it; summed over the steps that count), caused_share (of `step_ns` times
            the number of these steps), straggler, mean_ns (wait caused per step, since it is late), late_share (mean_ns
            as a share of the mean time of these steps), low_ns (lower bound of mean_ns
            less the mean of what the other devices cause; null with too few steps), since_step, and as means per
            step, in ns: step_ns, busy_ns, compute_ns, copy_ns, exposed_ns (communication in which nothing computed),
            exposed_wait_ns (where a participant is missing, to the last arrival that the trace shows), transfer_ns
            (null if ranks of one of its groups are missing), unknown_ns (exposed communication that is wait or
            transfer, because the trace lacks a participant), idle_ns; steps, steps_per_second (null without steps),
            node (number of its machine, null if that is not known), slow_link (group whose slow link makes it late, or
            null).
        late_nodes: nodes of which half of the devices or more are late, and not because of a slow link, the latest
            first: node (number), ranks (list), devices (how many), and mean_ns, low_ns, since_step and late_share of
            its median device, as in ranks.
        not_caused: waits that no rank is known to have caused: code (a key of `NOT_CAUSED`), wait_ns (of the device
            that waited longest in each step, summed over the steps that count), share (as caused_share).
        arrivals: one row per collective in which a device arrived last and others waited: rank, device, start (ns, of
            its kernel, on the clock of the summaries), launched_ahead (the part of the wait since the median rank
            arrived that no rank caused, because the hosts of the waiting ranks had launched ahead; from 0 to 1).
        shown: which ranks of the job the trace shows, and which it lacks.
        reasons: why stragglers are late; without stragglers, the reasons of the devices that caused more than
            `LATE_RANK_SHARE`, or of the one that caused most.
        groups: as `thence.analysis.ranks.process_groups.group_rows` returns them.
        links: as `thence.analysis.ranks.process_groups.slow_links` returns them.
        stages: rank, device, stage, and means per step: step_ns, own_ns, bubble_ns, bubble_share; empty without
            sends and receives.
        cells: one row per device and step: rank, device, key, start (ns, on the clock of the summaries), step_ns,
            wait_ns (exposed), compute_ns, caused_ns.
        keys: keys of the steps, in order.
        counted: keys of the steps that count, in order.
        step_kind: step, program, or None if the whole recording counts as one step.
        step_ns: mean time of the steps that count, each on the device on which it took longest.
        clocks: clocks of the ranks.
        notes: what a reader of the numbers must know, one sentence each.
    """

    ranks: pl.DataFrame
    late_nodes: pl.DataFrame
    not_caused: pl.DataFrame
    arrivals: pl.DataFrame
    shown: JobRanks
    reasons: tuple[Reasons, ...]
    groups: pl.DataFrame
    links: pl.DataFrame
    stages: pl.DataFrame
    cells: pl.DataFrame
    keys: tuple[str, ...]
    counted: tuple[str, ...]
    step_kind: str | None
    step_ns: float
    clocks: Clocks
    notes: tuple[str, ...] = field(default=())

    @property
    def stragglers(self) -> pl.DataFrame:
        """The rows of `ranks` that are stragglers."""
        return self.ranks.filter("straggler")

    @property
    def statement(self) -> str:
        """One sentence on which ranks are late, or why none is named; then, which ranks are missing."""
        missing = self.shown.statement
        if not missing:
            return self._verdict
        share = self.not_caused_share("not_all_shown")
        waits = f", for which up to {format_share(share, 1)} of {self.unit} may be waits" if share else ""
        return f"{self._verdict}; the trace shows {missing}{waits}"

    @property
    def _lack(self) -> str:
        """What the traces lack to name a late rank; empty if nothing, or if there is one device."""
        count, devices = len(self.counted), self.ranks.height
        if devices < 2:
            return "one device is not enough to tell who waits for whom" if self.shown.missing else ""
        if self.step_kind is None:
            return "the traces have no steps, so a late rank cannot be told from chance"
        if self.groups.is_empty():
            return "the traces hold no collective, so nothing tells which rank the others wait for"
        if count < MIN_STEPS_FOR_LATE_RANKS:
            return (
                f"{several(count, 'step')} {'counts' if count == 1 else 'count'}, which is too few to tell a late rank "
                f"from chance ({MIN_STEPS_FOR_LATE_RANKS} are needed)"
            )
        return ""

    @property
    def _verdict(self) -> str:
        """`statement` without the missing ranks."""
        count, devices = len(self.counted), self.ranks.height
        if lack := self._lack:
            return f"no late rank is named: {lack}"
        if devices < 2:
            return "one device, so no device waits for another"
        late = [*self._late_links(), *self._late_nodes(), *self._late_ranks()]
        if late:
            parts = (
                (self.links.height, "slow link"), (self.late_nodes.height, "late node"),
                (len([*self._late_ranks()]), "straggler"),
            )  # fmt: skip
            kinds = ", ".join(several(many, what) for many, what in parts if many)
            return f"{kinds} among {devices:,} devices, {several(count, 'step')}: {listed(late)}"
        shown = " among the ranks that are shown" if self.shown.missing else ""
        most = self.ranks.row(0, named=True)
        share = format_share(most["caused_share"], 1)
        if most["caused_share"] <= LATE_RANK_SHARE:
            return (
                f"no straggler{shown}: in {several(count, 'step')} no device makes the others wait for more than "
                f"{format_share(LATE_RANK_SHARE, 1)} of a step on average (most: {_device(most)}, {share})"
            )
        return (
            f"no straggler{shown}: {_device(most)} makes the others wait most ({share} of a step on average), but that "
            f"differs so much between the {several(count, 'step')} that it can be chance"
        )

    def _late_links(self) -> Iterator[str]:
        """The slow links, in a sentence."""
        nodes = dict(self.ranks.select("rank", "node").iter_rows())
        for row in self.links.iter_rows(named=True):
            ranks = row["ranks"] or ()
            where = {
                NETWORK: f"network between {row['nodes']} nodes, ",
                NODE: f"within node {nodes.get(ranks[0]) if ranks else ''}, ",
            }.get(row["link"], "")
            named = format_ranges(ranges_of(ranks)) if ranks else row["members"]
            extra = format_share(row["extra_ns"], max(self.step_ns, 1.0))
            yield f"{where}ranks {named} (transfers take {row['times']:.1f} times as long, {extra} of a step)"

    def _late_nodes(self) -> Iterator[str]:
        """The late nodes, in a sentence."""
        for row in self.late_nodes.iter_rows(named=True):
            share = format_share(row["late_share"], 1)
            yield f"node {row['node']}, ranks {format_ranges(ranges_of(row['ranks']))} ({share} of a step)"

    def _late_ranks(self) -> Iterator[str]:
        """The stragglers that are not late with their node or because of a slow link, in a sentence."""
        of_nodes = {rank for ranks in self.late_nodes["ranks"] for rank in ranks}
        for row in self.stragglers.filter(pl.col("slow_link").is_null()).iter_rows(named=True):
            if row["rank"] not in of_nodes:
                yield f"{_device(row)} ({format_share(row['late_share'], 1)} of a step)"

    @property
    def unit(self) -> str:
        """What shares are of: a step, or the recording if it has no steps."""
        return "the recording" if self.step_kind is None else "a step"

    @property
    def per(self) -> str:
        """What times are given for: each step, or all of a recording without steps."""
        return "in all" if self.step_kind is None else "per step"

    def not_caused_share(self, code: str) -> float:
        """The share of the steps' time that is waits of this code of `not_caused`."""
        return float(self.not_caused.filter(code=code)["share"].sum())

    def reasons_for(self, rank: int, device: int) -> Reasons | None:
        """Why a device is late; None if it was not explained."""
        return next((r for r in self.reasons if (r.rank, r.device) == (rank, device)), None)

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return (self.statement,)

    def views(self) -> tuple[TableView | Lines, ...]:
        """The statement, the stragglers with their reasons, then ranks, groups and stages."""
        ranks = dict(_RANKS)
        if not self.ranks["unknown_ns"].sum():
            del ranks["unknown_ns"]
        links = dict(LINKS)
        if (self.groups["link"] == UNKNOWN).all():
            del links["link"]
        caused = (
            f"times {self.per}; caused: waits of others of which it is the cause, of {self.unit} (waits for several "
            "ranks overlap, so these shares need not add up); times last: collectives in which others waited for it; "
            "waits: exposed, so nothing was computed meanwhile"
        )
        tables = (
            (self.links, links, ""), (self.ranks, ranks, caused), (*not_caused(self), self._host_bound),
            (*shown_groups(self), "groups: times summed over all ranks and steps"), (self.stages, STAGES, ""),
        )  # fmt: skip
        stragglers = zip(straggler_lines(self), self.reasons, strict=True)
        return (
            Lines(((self.statement, "bold"),)),
            *(Lines(((sentence, ""), *_cause_lines(why, self.per))) for (_, sentence), why in stragglers),
            *(TableView(rows, names, title, rows_shown=_ROWS_SHOWN) for rows, names, title in tables if rows.height),
        )

    @property
    def _host_bound(self) -> str:
        """What waits mean for which hosts had launched ahead."""
        if not self.not_caused_share("launched_ahead"):
            return ""
        return (
            "hosts had launched ahead: their GPUs wait because the collective was launched early, not because the host "
            "of the last rank needs longer for a step; the hosts limit all ranks alike"
        )

    def remarks(self) -> tuple[str, ...]:
        """See `Answer`."""
        return self.notes

    def to_frame(self) -> pl.DataFrame:
        """The ranks."""
        return self.ranks

    def to_json(self) -> dict[str, Any]:
        """The job as JSON values."""
        rows = []
        for row in self.ranks.to_dicts():
            why = self.reasons_for(row["rank"], row["device"])
            row |= {"compared_with": None, "reasons": []}
            if why is not None:
                row["compared_with"] = {"rank": why.median_rank, "device": why.median_device}
                row["reasons"] = why.rows.to_dicts()
            rows.append(row)
        return {
            "statement": self.statement,
            "late_nodes": self.late_nodes.to_dicts(),
            "stragglers": self.stragglers.select(*_PLACE).to_dicts(),
            "missing_ranks": self.shown.missing_ranks,
            "ranks_shown": self.shown.statement or None,
            "least_share": LATE_RANK_SHARE,
            "confidence": SHOWN_CONFIDENCE,
            "steps": len(self.keys),
            "counted_steps": len(self.counted),
            "step_kind": self.step_kind,
            "step_ns": self.step_ns,
            "ranks": rows,
            "not_caused": [row | {"text": NOT_CAUSED[row["code"]]} for row in self.not_caused.to_dicts()],
            "groups": self.groups.to_dicts(),
            "slow_links": self.links.to_dicts(),
            "stages": self.stages.to_dicts(),
            "clocks": self.clocks.to_json(),
            "notes": list(self.notes),
        }


def not_caused(job: Job) -> tuple[pl.DataFrame, dict[str, str]]:
    """The waits that no rank is known to have caused, and the headings of the columns."""
    rows = job.not_caused.select(
        why=pl.col("code").replace_strict(NOT_CAUSED, return_dtype=pl.String),
        per_step_ns=pl.col("wait_ns") / max(len(job.counted), 1),
        share="share",
    )
    headings = {"why": "waits that no rank caused", "per_step_ns": job.per, "share": f"of {job.unit}"}
    return rows, headings


def shown_groups(job: Job) -> tuple[pl.DataFrame, dict[str, str]]:
    """The groups, alike ones folded, and the headings of the columns that say something."""
    rows = folded_groups(job.groups)
    says_nothing = {
        "alike": (rows["alike"] == 1).all(),
        "link": (rows["link"] == UNKNOWN).all(),
        "shown": (rows["shown"] >= rows["size"]).fill_null(value=True).all(),
    }
    return rows, {column: title for column, title in GROUPS.items() if not says_nothing.get(column)}


def straggler_lines(job: Job) -> Iterator[tuple[dict[str, Any], str]]:
    """The row of each device that is explained (`Job.reasons`), with a sentence about it."""
    for why in job.reasons:
        row = job.ranks.filter(pl.col("rank") == why.rank, pl.col("device") == why.device).row(0, named=True)
        yield row, _sentence(job, row, why)


def _sentence(job: Job, row: dict[str, Any], why: Reasons) -> str:
    share = format_share(row["late_share"], 1)
    who = f"rank {row['rank']} GPU {row['device']}"
    if not row["straggler"]:
        caused = f"{format_ns(row['mean_ns'])} {job.per} ({share} of {job.unit})"
        if row["times_last"]:
            times = several(int(job.ranks["times_last"].sum()), "collective")
            text = (
                f"{who} arrived last in {row['times_last']:,} of {times} with waits, in which others waited "
                f"{format_ns(row['awaited_ns'])} {job.per}; of all waits, it caused {caused}"
            )
        else:
            text = f"{who} arrived after the median rank, but never last; of all waits, it caused {caused}"
    else:
        text = (
            f"{who} makes others wait {format_ns(row['mean_ns'])} per step ({share} of a step) since "
            f"{row['since_step']}; at least {format_ns(row['low_ns'])} more than random variation explains"
        )
    if why.median_rank is not None:
        text += f". Before its late arrivals it took longer than rank {why.median_rank} GPU {why.median_device} for:"
    return text


def reason_rows(why: Reasons) -> pl.DataFrame:
    """One row per cause: cause, per_step_ns, share, where (places with the largest part, the most precise first)."""
    rows = why.rows.with_columns(per_step_ns=pl.col("total_ns") / max(why.steps, 1))
    causes = rows.filter(pl.col("by") == "cause")
    lines = []
    columns = ("cause", "per_step_ns", "share", "detail")
    for cause, per_step, share, detail in causes.select(columns).iter_rows():
        places = rows.filter(pl.col("cause") == cause, pl.col("by") != "cause")
        if (places["by"] == "source").any():  # a source makes the name of its call redundant
            places = places.filter(pl.col("by") != "call")
        where = [_place(by, name) for by, name in places.select("by", "name").iter_rows()]
        text = "; ".join(text for text in (detail, *where) if text)
        lines.append((cause_name(cause), per_step, share, text))
    schema = {"cause": pl.String, "per_step_ns": pl.Float64, "share": pl.Float64, "where": pl.String}
    return pl.DataFrame(lines, schema=schema, orient="row")


def cause_name(cause: str) -> str:
    """The readable name of a cause."""
    return MEANINGS.get(cause, f"idle: {cause}")


def _place(by: str, name: str) -> str:
    if by == "kernel":
        name = clip(short_names([name]).get(name, name), 60)
    return f"{by} {name}"


def _cause_lines(why: Reasons, per: str) -> Iterator[tuple[str, str]]:
    """A line for each cause, and below it the places of the cause; ``per`` tells what its time is for."""
    rows = reason_rows(why)
    width = max((len(cause) for cause in rows["cause"]), default=0)
    for cause, per_step, share, where in rows.iter_rows():
        yield f"{cause:{width}}   {format_ns(per_step)} {per}   {format_share(share, 1)}", "bold"
        if where:
            yield _INDENT + where, ""


def _device(row: Mapping[str, Any]) -> str:
    """The device of a row of `Job.ranks`, in a sentence."""
    return f"rank {row['rank']} GPU {row['device']}"


def job_of(
    summaries: Mapping[str, pl.DataFrame | pl.LazyFrame],
    nodes: Mapping[int, int] = MappingProxyType({}),
    *,
    explain: bool = True,
) -> Job:
    """Finds which ranks are late, since when, and why.

    Args:
        summaries: the tables of `thence.analysis.ranks.summary.SUMMARY` with the rows of all ranks; if they
            are lazy, kernels, places and idle are read only for the ranks that are explained or compared.
        nodes: number of the node of each rank, as `thence.analysis.ranks.nodes.nodes_of` returns it.
        explain: whether to find the reasons; otherwise kernels, places and idle may be empty.

    Raises:
        MissingData: there is no device activity.
    """
    devices = summary_table(summaries, "devices").sort(_PLACE)
    if devices.is_empty():
        raise MissingData("the ranks have no device activity")
    collectives = job_collectives(summaries, nodes)
    steps = step_keys(summary_table(summaries, "steps"))
    keys, counted, remarks = _counted(steps, devices)
    waits = lateness(collectives, steps)
    used = steps.filter(pl.col("key").is_in(counted))
    lengths = _lengths(used, counted)
    step_ns = float(lengths.mean()) if counted else 0.0
    shown = job_ranks(devices["rank"], devices["job_ranks"].max(), collectives.groups["members"])  # type: ignore[arg-type] # an integer
    groups = group_rows(collectives, shown.shown + len(shown.missing_ranks))
    lacking = groups.filter(pl.col("shown") < pl.col("size")).select("group")
    messages = _stages(collectives, used)
    beyond = _stage_causes(collectives, messages, waits, used, lacking)
    waits = replace(waits, late=pl.concat([waits.late, beyond], how="diagonal_relaxed"))
    caused = _sums([waits.caused, beyond.select(*_PLACE, "key", caused_ns="own_ns")])
    late = _late(devices, caused, counted, lengths)
    kinds = devices["step_kind"].drop_nulls()
    ranks = _rows(late, used, counted, collectives, waits, _lacking_devices(collectives, lacking))
    links = slow_links(collectives, steps, counted, step_ns)
    places, every, usual = _to_explain(ranks, caused, counted, step_ns) if explain else ([], [], [])
    remarks += _left_out_of_causes(places, every, usual)
    explained = list(zip(places, usual, strict=True))
    return Job(
        ranks=ranks.with_columns(slow_link_of(ranks, links), node=nodes_column(ranks["rank"], nodes)),
        late_nodes=_late_nodes(devices, caused, counted, lengths, nodes, links),
        not_caused=_not_caused(waits, beyond, counted, step_ns),
        arrivals=_arrivals(waits, collectives.origin),
        shown=shown,
        reasons=reasons_of(summaries, waits, steps, explained, links),
        groups=groups,
        links=links,
        stages=_per_stage(messages),
        cells=_cells(steps, waits, caused),
        keys=tuple(keys),
        counted=tuple(counted),
        step_kind=None if kinds.is_empty() else str(kinds[0]),
        step_ns=step_ns,
        clocks=collectives.clocks,
        notes=(*remarks, *collectives.clocks.statements, *collectives.notes, *_undescribed(devices)),
    )


def _stage_causes(
    collectives: JobCollectives, messages: pl.DataFrame, waits: Lateness, used: pl.DataFrame, lacking: pl.DataFrame
) -> pl.DataFrame:
    """As `stage_causes`; no rows if a group of messages lacks ranks, because a missing stage may be the late one."""
    beyond = stage_causes(messages, waits.messages, used)
    if beyond.is_empty():
        return beyond
    lacks = _message_groups(collectives).join(lacking, on="group", how="semi", nulls_equal=True).height
    return beyond.clear() if lacks else beyond


def _counted(steps: pl.DataFrame, devices: pl.DataFrame) -> tuple[list[str], list[str], list[str]]:
    """The keys of the steps in order, the keys of those that count, and notes on the others."""
    order = steps.group_by("key").agg(pl.col("start", "duration", "compute_ns").median(), pl.len()).sort("start", "key")
    keys = order["key"].to_list()
    if devices["step_kind"].null_count() == devices.height:
        return keys, keys, ["the traces have no steps: the whole recording counts as one step"]
    endless = bool(devices["step_kind"].is_in(ENDLESS).any())
    last = without_end(order["compute_ns"].to_numpy(), endless=endless)
    codes = left_out(order["duration"].to_numpy(), last, outliers=True)
    counted = [key for key, code in zip(keys, codes, strict=True) if code is None]
    remarks = []
    if len(counted) < len(keys):
        names = [key for key, code in zip(keys, codes, strict=True) if code is not None]
        remarks.append(
            f"steps left out as the first, warm-up or incomplete: {', '.join(names[:6])}"
            + (", ..." if len(names) > 6 else "")
        )
    missing = order["len"].max() != order["len"].min()
    if missing:
        remarks.append("some steps are missing on some devices: a missing step counts as a step without waits")
    return keys, counted, remarks


def _sums(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """caused_ns of the parts, added up by device and step."""
    return pl.concat(parts).group_by(*_PLACE, "key").agg(pl.col("caused_ns").sum())


def _lengths(used: pl.DataFrame, counted: list[str]) -> npt.NDArray[np.float64]:
    """The length of each step that counts: a step lasts until its last device is done, so no wait in it is longer."""
    longest = dict(used.group_by("key").agg(pl.col("duration").max()).iter_rows())
    return np.array([longest.get(key, 0) for key in counted], np.float64)


def _late(
    devices: pl.DataFrame, caused: pl.DataFrame, counted: list[str], lengths: npt.NDArray[np.float64]
) -> pl.DataFrame:
    """For every device: the result of `late_since`, with since_step and the shares of `Job.ranks`.

    Args:
        devices: rank and device of all devices.
        caused: rank, device, key and caused_ns.
        counted: keys of the steps that count, in order.
        lengths: ns that each of these steps took.
    """
    matrix = _matrix(devices, caused, counted)
    step_ns = float(lengths.mean()) if counted else 0.0
    return devices.select(_PLACE).hstack(
        [
            *_tested(matrix, counted, lengths).get_columns(),
            pl.Series("wait_caused_ns", np.rint(matrix.sum(axis=1)).astype(np.int64)),
            pl.Series("caused_share", matrix.sum(axis=1) / max(step_ns * len(counted), 1.0)),
        ]
    )


def _tested(matrix: npt.NDArray[np.float64], counted: list[str], lengths: npt.NDArray[np.float64]) -> pl.DataFrame:
    """straggler, mean_ns, low_ns, since_step and late_share, as in `Job.ranks`, of rows of shape (rows, steps)."""
    tested = late_since(matrix, float(lengths.mean()) if counted else 0.0)
    # The mean length of the steps since each step.
    since = np.cumsum(lengths[::-1])[::-1] / np.arange(len(counted), 0, -1)
    begin = tested["since"].fill_null(0).cast(pl.UInt32)
    return tested.drop("since", "steps").with_columns(
        pl.Series(counted, dtype=pl.String).gather(tested["since"].cast(pl.UInt32)).alias("since_step"),
        (tested["mean_ns"] / pl.Series(since).gather(begin).clip(lower_bound=1.0)).alias("late_share"),
    )


def _late_nodes(
    devices: pl.DataFrame,
    caused: pl.DataFrame,
    counted: list[str],
    lengths: npt.NDArray[np.float64],
    nodes: Mapping[int, int],
    links: pl.DataFrame,
) -> pl.DataFrame:
    """As `Job.late_nodes`; the arguments are those of `_late`, `job_of` and `slow_link_of`."""
    if len(set(nodes.values())) < 2:
        return pl.DataFrame(schema=_LATE_NODES)
    places, matrix = by_node(devices, _matrix(devices, caused, counted), nodes)
    if places.is_empty():
        return pl.DataFrame(schema=_LATE_NODES)
    tested = places.hstack(_tested(matrix, counted, lengths).get_columns()).with_columns(
        rank=pl.col("ranks").list.first()
    )
    late = tested.filter("straggler", slow_link_of(tested, links).is_null())
    return late.select(*_LATE_NODES).sort("late_share", "node", descending=[True, False])


def _matrix(devices: pl.DataFrame, rows: pl.DataFrame, keys: list[str]) -> npt.NDArray[np.float64]:
    """caused_ns by device and step, 0 where there is no row."""
    rows_of_devices = devices.select(*_PLACE, at=pl.int_range(pl.len()))
    step = pl.DataFrame({"key": keys, "step": range(len(keys))}, schema={"key": pl.String, "step": pl.Int64})
    placed = rows.join(rows_of_devices, on=_PLACE).join(step, on="key")
    matrix = np.zeros((devices.height, len(keys)))
    matrix[placed["at"].to_numpy(), placed["step"].to_numpy()] = placed["caused_ns"].to_numpy()
    return matrix


def _to_explain(
    ranks: pl.DataFrame, caused: pl.DataFrame, counted: list[str], step_ns: float
) -> tuple[list[tuple[int, int]], list[list[str]], list[list[str]]]:
    """The devices to explain, the keys of the steps in which each is late, and those of them that are usual."""
    named = ranks.filter("straggler").head(_EXPLAINED)
    if named.is_empty():
        delays = (pl.int_range(pl.len()) == 0) | (pl.col("caused_share") > LATE_RANK_SHARE)
        named = ranks.filter(delays, pl.col("wait_caused_ns") > 0).head(_EXPLAINED)
    places = list(named.select(_PLACE).iter_rows())
    since = [counted[counted.index(key) if key in counted else 0 :] for key in named["since_step"]]
    usual = [_usual(caused, place, late_keys, step_ns) for place, late_keys in zip(places, since, strict=True)]
    return places, since, usual


def _usual(caused: pl.DataFrame, place: tuple[int, int], keys: list[str], step_ns: float) -> list[str]:
    """The steps but those in which a device caused far more waiting than its median in a step.

    All steps if that median is below `LATE_RANK_SHARE`.
    """
    rows = caused.filter(pl.col("rank") == place[0], pl.col("device") == place[1], pl.col("key").is_in(keys))
    caused_in = dict(rows.select("key", "caused_ns").iter_rows())
    median = float(np.median([caused_in.get(key, 0) for key in keys])) if keys else 0.0
    if median < LATE_RANK_SHARE * step_ns:
        return keys
    return [key for key in keys if caused_in.get(key, 0) <= UNUSUAL_STEP_RATIO * median]


def _not_caused(lateness: Lateness, beyond: pl.DataFrame, counted: list[str], step_ns: float) -> pl.DataFrame:
    """`Job.not_caused`: the codes that occur."""
    of_stages = beyond.group_by("key").agg(wait_ns=pl.col("host_bound_ns").max())
    waits = {
        "launched_ahead": pl.concat([lateness.ahead, of_stages.cast(lateness.ahead.schema)]),
        "early": lateness.early,
        "not_all_shown": lateness.missing,
    }
    sums = [(code, int(rows.filter(pl.col("key").is_in(counted))["wait_ns"].sum())) for code, rows in waits.items()]
    frame = pl.DataFrame(sums, schema={"code": pl.String, "wait_ns": pl.Int64}, orient="row")
    share = pl.col("wait_ns") / max(step_ns * len(counted), 1.0)
    return frame.filter(pl.col("wait_ns") > 0).with_columns(share=share)


def _arrivals(lateness: Lateness, origin: int) -> pl.DataFrame:
    """`Job.arrivals`."""
    rows = lateness.late.filter("last", pl.col("recorded").is_not_null())
    return rows.select(
        *_PLACE,
        start=pl.col("recorded") + origin,
        launched_ahead=(pl.col("host_bound_ns") / pl.col("wait_ns")).fill_nan(0),
    )


def _left_out_of_causes(places: list[tuple[int, int]], every: list[list[str]], usual: list[list[str]]) -> list[str]:
    """Notes on the steps that are left out of the search for causes."""
    remarks = []
    for (rank, device), keys, kept in zip(places, every, usual, strict=True):
        names = [key for key in keys if key not in kept]
        if names:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            remarks.append(
                f"rank {rank} GPU {device} made others wait more than {UNUSUAL_STEP_RATIO} times as long as usual "
                f"in {shown}; the causes shown do not include those of these steps"
            )
    return remarks


def _lacking_devices(collectives: JobCollectives, lacking: pl.DataFrame) -> pl.DataFrame:
    """rank, device and lacks (true) of the devices with collectives in a group of which the trace lacks a rank."""
    rows = collectives.rows.filter(~pl.col("complete")).join(lacking, on="group", how="semi", nulls_equal=True)
    return rows.select(_PLACE).unique().with_columns(lacks=pl.lit(value=True))


def _rows(
    late: pl.DataFrame,
    used: pl.DataFrame,
    counted: list[str],
    collectives: JobCollectives,
    lateness: Lateness,
    lacking: pl.DataFrame,
) -> pl.DataFrame:
    """`Job.ranks`; ``used``: the rows of the steps that count, ``counted``: their keys."""
    times = used.group_by(_PLACE).agg(
        pl.len().alias("steps"),
        pl.col("duration").mean().alias("step_ns"),
        pl.col("name").is_not_null().any().alias("has_steps"),
        *(pl.col(f"{what}_ns").mean() for what in ("busy", "compute", "copy", "exposed", "idle")),
    )
    waited = lateness.waited.join(used.select(*_PLACE, "key"), on=[*_PLACE, "key"], how="semi")
    waits = waited.group_by(_PLACE).agg(waited=pl.col("wait_ns").sum(), unknown=pl.col("unknown_ns").sum())
    last = (
        collectives.rows.select(*_PLACE, "step", "late_rank", "late_device", "instance", "exposed_wait_ns")
        .filter(pl.col("exposed_wait_ns") > 0)
        .join(used.select(*_PLACE, "step"), on=[*_PLACE, "step"], how="semi")
        .group_by(rank="late_rank", device="late_device")
        .agg(times_last=pl.col("instance").n_unique())
    )
    awaited = lateness.awaited.filter(pl.col("key").is_in(counted)).group_by(_PLACE).agg(pl.col("caused_ns").sum())
    exposed_wait, unknown = (pl.col(c).fill_null(0) / pl.col("steps") for c in ("waited", "unknown"))
    transfer = pl.col("exposed_ns") - pl.col("exposed_wait_ns") - pl.col("unknown_ns")
    known = pl.col("lacks").is_null() | (pl.col("unknown_ns") == 0)
    return (
        late.join(times, on=_PLACE, how="left")
        .join(waits, on=_PLACE, how="left")
        .join(last, on=_PLACE, how="left")
        .join(awaited, on=_PLACE, how="left")
        .join(lacking, on=_PLACE, how="left")
        .with_columns(
            exposed_wait_ns=exposed_wait, unknown_ns=unknown, times_last=pl.col("times_last").fill_null(0),
            awaited_ns=pl.col("caused_ns").fill_null(0) / max(len(counted), 1),
        )
        .select(
            *_PLACE, "times_last", "awaited_ns", "wait_caused_ns", "caused_share", "straggler", "mean_ns",
            "late_share", "low_ns", "since_step",
            "steps", "step_ns", "busy_ns", "compute_ns", "copy_ns", "exposed_ns", "exposed_wait_ns",
            pl.when(known).then(transfer.clip(lower_bound=0)).alias("transfer_ns"), "unknown_ns", "idle_ns",
            steps_per_second=pl.when("has_steps").then(1e9 / pl.col("step_ns")),
        )
        .sort("wait_caused_ns", *_PLACE, descending=[True, False, False])
    )  # fmt: skip


def _message_groups(collectives: JobCollectives) -> pl.DataFrame:
    """The groups in which devices send and receive."""
    return collectives.rows.filter(pl.col("collective").is_in(MESSAGES)).select("group").unique()


def _stages(collectives: JobCollectives, used: pl.DataFrame) -> pl.DataFrame:
    """`thence.analysis.ranks.lateness.stages` for the devices that send or receive."""
    rows = collectives.rows.filter(pl.col("collective").is_in(MESSAGES))
    if rows.is_empty():
        return _NO_MESSAGES
    groups = collectives.groups.select("group", "ranks")
    listed = rows.select(*_PLACE, "group").unique().join(groups, on="group", how="left")
    exploded = listed.explode("ranks")
    place = exploded.with_columns(place=pl.int_range(pl.len()).over(*_PLACE, "group")).filter(
        pl.col("ranks") == pl.col("rank")
    )
    stage_of_device = (
        listed.select(_PLACE)
        .unique()
        .join(place.group_by(_PLACE).agg(stage=pl.col("place").min()), on=_PLACE, how="left")
        .with_columns(stage=pl.col("stage").fill_null(pl.col("rank").cast(pl.Int64)))
    )
    waits = (
        rows.join(used.select(*_PLACE, "step", "key"), on=[*_PLACE, "step"])
        .group_by(*_PLACE, "key")
        .agg(wait_ns=pl.col("exposed_wait_ns").sum())
    )
    return stages(waits, used, stage_of_device)


def _per_stage(rows: pl.DataFrame) -> pl.DataFrame:
    means = rows.group_by("stage", *_PLACE).agg(pl.col("step_ns", "own_ns", "bubble_ns").mean())
    share = pl.col("bubble_ns") / pl.col("step_ns")
    return means.with_columns(bubble_share=share).sort("stage", *_PLACE)


def _cells(steps: pl.DataFrame, lateness: Lateness, caused: pl.DataFrame) -> pl.DataFrame:
    on = [*_PLACE, "key"]
    return (
        steps.select(*on, "start", "compute_ns", step_ns="duration")
        .join(lateness.waited, on=on, how="left")
        .join(caused, on=on, how="left")
        .select(*on, "start", "step_ns", pl.col("wait_ns").fill_null(0), "compute_ns", pl.col("caused_ns").fill_null(0))
        .sort(on)
    )


def _undescribed(devices: pl.DataFrame) -> list[str]:
    count = int(devices["undescribed"].sum())
    if not count:
        return []
    kernels = "1 kernel communicates" if count == 1 else f"{count:,} kernels communicate"
    return [f"{kernels} without a description (message size, group), so waits there are unknown"]
