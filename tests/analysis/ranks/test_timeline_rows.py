"""A job of many ranks for a timeline: two ranks in full, every other a row, and times as they were planted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import output
from late_ranks import AFTER, BACKWARD, FORWARD, TRANSFER, SleepyJob
from perfetto_reading import Decoded, decoded, written_bytes
from rank_jobs import EPOCH, Plant, RankJob
from stores import stored
from thence.analysis.ranks.answer import job_of
from thence.analysis.ranks.timeline_rows import STATES, job_rows, opened, step_columns
from thence.folding import folded_timeline

if TYPE_CHECKING:
    from pathlib import Path

    from thence.analysis.ranks.answer import Job

RANKS, STEPS, LATE, SINCE = 5, 5, 3, 2
SLEEPY = SleepyJob(ranks=RANKS, steps=STEPS, late=LATE, since=SINCE)
US = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("sleepy")
    SLEEPY.write(found)
    return found


@pytest.fixture(scope="module")
def shown(folder: Path) -> Decoded:
    return decoded(written_bytes(folded_timeline(thence.open(folder))))


def groups(shown: Decoded) -> dict[str, list[str]]:
    """The titles of the outermost groups with those of the tracks in them, in the order of the file."""
    found: dict[str, list[str]] = {}
    for uuid, track in shown.tracks.items():
        if track.parent_uuid:
            root, _, rest = shown.path(uuid).partition(" > ")
            found[root].append(rest)
        else:
            found[shown.title(uuid)] = []
    return found


def test_two_ranks_are_in_full_and_every_other_is_a_row(shown: Decoded) -> None:
    titles = groups(shown)
    first, *between, last = titles
    assert first == f"job: {RANKS} ranks, {STEPS} steps"
    in_full = {int(title.split()[1].strip(":")) for title in between}
    assert len(in_full) == 2
    assert LATE in in_full
    assert last == f"other ranks: {RANKS - 2} rows, a span for each step"
    assert titles[last] == [f"rank {rank}" for rank in range(RANKS) if rank not in in_full]
    assert {f"rank {rank}" for rank in in_full} <= set(titles[first])
    # Two kernels and an all-reduce a step and rank, of those in full alone.
    kernels = [s for s in shown.slices if "stream" in shown.path(s.track) and s.category == "kernel"]
    assert len(kernels) == 2 * STEPS * 3


def test_rows_have_the_steps_as_they_were_planted(shown: Decoded) -> None:
    spans = [s for s in shown.slices if s.category == "step of a rank"]
    assert len(spans) == RANKS * STEPS
    begins = sorted({s.start for s in spans})
    for span in spans:
        # On one clock: all ranks begin a step together, though each clock is 3 ms ahead of the one before.
        near = [begin for begin in begins if abs(begin - span.start) < 100 * US]
        assert max(near) - min(near) <= US
        late = int(span.arguments["step"].partition("#")[2]) >= SINCE
        rank = int(shown.title(span.track).split()[1])
        length = FORWARD + BACKWARD + TRANSFER + AFTER + (SLEEPY.sleep if late else 0)
        assert span.arguments["step ns"] == pytest.approx(length * US, rel=0.01)
        asleep = {True: STATES[0], False: STATES[1]}[rank == LATE] if late else STATES[3]
        assert span.name == asleep


def test_counters_and_the_late_rank_are_those_of_the_job(shown: Decoded) -> None:
    counters = {shown.title(uuid): values for uuid, values in shown.counters.items()}
    caused = [value for _, value in counters["wait caused, most of one rank"]]
    assert len(caused) == STEPS + 1
    assert caused[SINCE:STEPS] == [pytest.approx(SLEEPY.sleep / 1e3, rel=0.01)] * (STEPS - SINCE)
    assert max(caused[:SINCE]) < 1
    assert caused[STEPS] == 0
    (late,) = [s for s in shown.slices if s.category == "late rank"]
    assert shown.title(late.track) == f"rank {LATE} is late"
    assert late.name == f"late since ProfilerStep#{SINCE}"
    for said in ("200.0 ms per step", "python", "train.py:40"):
        assert said in late.arguments["detail"]


def test_a_store_shows_the_same(folder: Path, tmp_path: Path, shown: Decoded) -> None:
    stored(tmp_path / "job.store", [folder], host=True)
    from_store = decoded(written_bytes(folded_timeline(thence.open(tmp_path / "job.store"))))
    assert groups(from_store) == groups(shown)
    assert [(s.name, s.start, s.end) for s in from_store.slices] == [(s.name, s.start, s.end) for s in shown.slices]


def test_ranks_are_folded_where_there_are_many_and_nobody_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "nine"
    folder.mkdir()
    SleepyJob(ranks=9, steps=5, late=LATE, since=SINCE).write(folder)

    def processes(*arguments: str) -> tuple[int, str]:
        target = tmp_path / "out.pftrace"
        _, said = output(capsys, "convert", folder, "-o", target, "--force", *arguments)
        return sum("GPU" in title for title in groups(decoded(target.read_bytes()))), said

    shown, said = processes()
    assert shown == 2
    assert f"7 of 9 ranks are folded: one row per rank, with a span for each step; shown in full: rank {LATE}" in said
    assert processes("--fold", "never")[0] == 9
    assert processes("--rank", "0", "--rank", "7", "--rank", "8", "--fold", "always")[0] == 2
    _, said = output(capsys, "convert", folder, "-o", tmp_path / "out.json", "--fold", "always", code=2)
    assert "rows for ranks that are folded" in said


@pytest.fixture(scope="module")
def planted() -> Job:
    return job_of(RankJob(ranks=16, steps=12, noise=0.01, plant=Plant("kernel", 5, 0.2, 4)).summaries())


def test_steps_share_a_span_where_there_are_more_than_fit(planted: Job) -> None:
    at, labels = step_columns(planted, most=16 * 5)
    assert at.tolist() == [step // 3 for step in range(12)]
    assert labels[1] == "ProfilerStep#6 to ProfilerStep#8"
    made = job_rows(planted, [5], {(5, 0): "why"}, EPOCH, {}, most=16 * 5)
    assert made.rows.height == 16 * 4
    sums = planted.cells.group_by("rank").agg(pl.col("step_ns", "caused_ns").sum()).sort("rank")
    again = made.rows.group_by("rank").agg(pl.col("step_ns", "caused_ns").sum()).sort("rank")
    assert again.rows() == sums.rows()
    # Counters are those of a step, not of three.
    median = made.counters.filter(pl.col("counter").str.starts_with("step"))["value"][0]
    assert median == pytest.approx(float(planted.cells["step_ns"].median() or 0) / 1e6, rel=0.3)


def test_corrections_are_taken_off(planted: Job) -> None:
    made, moved = (job_rows(planted, [5], {}, EPOCH, corrections).rows for corrections in ({}, {3: 1_000}))
    difference = (made["start"] - moved["start"]).to_list()
    assert difference == [1_000 if rank == 3 else 0 for rank in made["rank"]]


def test_without_a_late_rank_the_middle_one_is_that_of_the_step_times() -> None:
    quiet = job_of(RankJob(ranks=9, steps=6, noise=0.001, pauses=0.0, uneven=0.0).summaries())
    slowest, middle = opened(quiet)
    assert slowest[0] == quiet.ranks["rank"][0]
    if not quiet.reasons or quiet.reasons[0].median_rank is None:
        assert middle[0] == quiet.ranks.sort("step_ns", "rank")["rank"][4]
