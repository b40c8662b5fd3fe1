"""Who is late in jobs of ten real steps: all verbs give one answer, a missing rank is noticed, and shares are true."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import thence
from collective_jobs import Job as ConstructedJob
from collective_jobs import joint
from fsdp_jobs import FsdpJob, collectives, recorded
from helpers import FSDP, output
from stores import stored

if TYPE_CHECKING:
    from pathlib import Path

LATE, SECOND = 2, 1
DELAY = 30_000.0  # us
JOBS: dict[str, tuple[FsdpJob, tuple[int, ...], list[int]]] = {
    "one": (FsdpJob({LATE: DELAY}), (), [LATE]),
    "two": (FsdpJob({SECOND: DELAY, LATE: DELAY}), (), [SECOND, LATE]),
    "late_missing": (FsdpJob({LATE: DELAY}), (LATE,), []),
    "other_missing": (FsdpJob({LATE: DELAY}), (SECOND,), [LATE]),
}
"""Jobs by name: the job, the ranks whose files are missing, and the ranks that are late and shown."""


@pytest.fixture(scope="module", params=sorted(JOBS))
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of a job, and the folder of its files."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    made, missing, _ = JOBS[name]
    made.write(folder, missing)
    return name, folder


def asked(capsys: pytest.CaptureFixture[str], verb: str, *inputs: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(output(capsys, verb, *inputs, "--format", "json")[0])
    return document


@pytest.mark.parametrize("job", ["two", "late_missing", "other_missing"], indirect=True)
def test_every_verb_names_the_same_ranks_from_files_and_from_a_store(
    job: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks are late; one is late and missing, also in a store; one is late where another one is missing."""
    name, folder = job
    _, missing, late = JOBS[name]
    sources = [folder]
    if name == "late_missing":
        sources.append(tmp_path / "store")
        stored(sources[1], [folder])
    statements = set()
    for source in sources:
        notes = [note["code"] for note in asked(capsys, "check", source)["notes"]]
        assert notes.count("missing_ranks") == bool(missing)
        ranks, last = asked(capsys, "ranks", source), asked(capsys, "collectives", source)
        for document in (ranks, last):
            named = sorted(row["rank"] for row in document["stragglers"])
            assert named == late, (name, source)
            assert document["missing_ranks"] == list(missing)
        first = asked(capsys, "report", source)
        statements |= {ranks["statement"], last["late_ranks"], first["late_ranks"]}
        verdict = first["verdict"]["text"]
        assert ("wait for" in verdict) == (len(late) > 0)
        assert all(f"{rank} (" in verdict for rank in late)
    assert len(statements) == 1
    (statement,) = statements
    for rank in late:
        assert f"rank {rank} GPU {rank}" in statement
    assert ("3 of 4 ranks; missing" in statement) == bool(missing)


@pytest.mark.parametrize("job", ["one", "late_missing", "other_missing"], indirect=True)
def test_where_a_rank_is_missing_transfers_are_unknown_and_waits_are_nobodys(
    job: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    name, folder = job
    missing = JOBS[name][1]
    document = asked(capsys, "ranks", folder)
    for row in document["ranks"]:
        assert (row["transfer_ns"] is None) == bool(missing)
        parts = row["exposed_wait_ns"] + row["unknown_ns"] + (row["transfer_ns"] or 0)
        assert parts == pytest.approx(row["exposed_ns"], abs=1)
        assert (row["unknown_ns"] > 0) == bool(missing)
    (group,) = document["groups"]
    assert (group["size"], group["shown"]) == (4, 4 - len(missing))
    assert (group["transfer_ns"] is None) == bool(missing)
    unknown = sum(row["share"] for row in document["not_caused"] if row["code"] == "not_all_shown")
    # Each step lasts the recorded 50 ms or so, and the delay.
    delayed = name == "late_missing"
    assert unknown > 0.3 if delayed else unknown < 0.3
    notes = asked(capsys, "check", folder)["notes"]
    said = [note["text"] for note in notes if note["code"] == "missing_ranks"]
    assert len(said) == bool(missing)
    assert all(f"3 of 4 ranks; missing {missing[0]}" in text for text in said)


def test_a_planted_delay_is_found_as_long_as_it_was_planted(tmp_path: Path) -> None:
    FsdpJob({LATE: DELAY}).write(tmp_path)
    found = thence.open(tmp_path).ranks()
    (row,) = found.stragglers.iter_rows(named=True)
    # Before the sleep, the recorded hosts are late by some ms, too, each in some of the steps.
    scatters = sorted(collectives(events)[-1]["ts"] for events in recorded())
    natural = scatters[-1] - scatters[1]
    assert 1000 * DELAY <= row["mean_ns"] <= 1000 * (DELAY + natural + 15_000)
    # The label, the operator and the call in which the host slept.
    named = set(found.reasons[0].rows["name"].drop_nulls())
    assert any("post_backward_reduce" in name for name in named)


def test_the_recorded_job_of_two_steps_names_nobody_in_any_verb(capsys: pytest.CaptureFixture[str]) -> None:
    ranks, last = asked(capsys, "ranks", *FSDP), asked(capsys, "collectives", *FSDP)
    assert ranks["stragglers"] == last["stragglers"] == []
    assert ranks["statement"] == last["late_ranks"]
    assert ranks["statement"].startswith("no late rank is named: 1 step counts")
    # Waits that no rank caused are a row of their own in both.
    for rows in (ranks["not_caused"], last["last_arrivals"]):
        assert {row["code"] for row in rows} - {None} == {"launched_ahead", "early"}


def test_shares_of_a_recording_without_steps_are_of_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 runs for 10 ms, rank 0 for 1 s, of which it waits 980 ms for rank 1."""
    calls = [joint([0, 990_000_000], 10_000_000, sequence=2)]
    compute = [(0, -1_000_000, 900_000), (1, 989_000_000, 900_000)]
    ConstructedJob(calls, compute=compute).write(tmp_path)
    document = asked(capsys, "ranks", tmp_path)
    assert document["step_kind"] is None
    first = document["ranks"][0]
    assert first["rank"] == 1
    # Rank 0's trace lasts from -1 to 1,000 ms.
    assert first["caused_share"] == pytest.approx(990 / 1001, rel=1e-6)
    assert first["steps_per_second"] is None
    assert "no steps" in document["statement"]
    text, _ = output(capsys, "ranks", tmp_path)
    assert "of a step" not in text
    assert "per step" not in text


def test_eight_of_512_ranks_keep_the_figures_of_the_group_that_is_complete(tmp_path: Path) -> None:
    """Ranks 0 to 7 are a node with a group of its own; a group of all 512 is known by its size and its first ranks."""
    everyone = f"[{', '.join(map(str, range(30)))}, ..., 511]"
    paths = []
    for rank in range(8):
        events: list[dict[str, Any]] = []
        for step in range(6):
            begin = 1_000_000.0 + 10_000 * step
            late = 2_000.0 if rank == 3 else 0.0
            events.append(_event("user_annotation", f"ProfilerStep#{step}", begin, 10_000.0))
            for turn, (members, size, name) in enumerate(((str(list(range(8))), 8, "tp"), (everyone, 512, "dp"))):
                # In the group of all, each rank waits until 9 ms for a rank that the trace does not show.
                start = begin + (1_000.0 + late if turn == 0 else 3_200.0)
                end = begin + (3_100.0 if turn == 0 else 9_000.0)
                number = 10 * step + turn + 1
                events.append(_event("cuda_runtime", "cudaLaunchKernel", begin + 10 + turn, 5.0, correlation=number))
                args = {
                    "device": 0, "stream": 7 + turn, "correlation": number, "Collective name": "allreduce",
                    "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": size, "dtype": "Float",
                    "Process Group Name": name, "Process Group Ranks": members, "Seq": step + 2,
                }  # fmt: skip
                events.append(_event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL()", start, end - start, **args))
            work = 900.0 + late
            events.append(_event("cuda_runtime", "cudaLaunchKernel", begin + 5, 4.0, correlation=10 * step + 9))
            where = {"device": 0, "stream": 3, "correlation": 10 * step + 9}
            events.append(_event("kernel", "gemm", begin + 100, work, **where))
        info = {"backend": "nccl", "rank": rank, "world_size": 512}
        path = tmp_path / f"rank{rank}.json"
        path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}))
        paths.append(path)
    found = thence.open(*paths).ranks()
    assert found.shown.statement == "8 of 512 ranks; missing 8-511"
    assert found.shown.missing_ranks == list(range(8, 512))
    groups = {row["name"]: row for row in found.groups.to_dicts()}
    # In each of 6 steps, 8 devices move data for 100 us after rank 3 has arrived.
    assert groups["tp"]["transfer_ns"] == 6 * 8 * 100_000
    assert groups["tp"]["exposed_wait_ns"] == 6 * 7 * 2_000_000
    assert groups["dp"]["transfer_ns"] is None
    assert (groups["dp"]["size"], groups["dp"]["shown"]) == (512, 8)
    # Rank 3 is late in the group that is complete; no rank is late in the other one.
    assert found.stragglers["rank"].to_list() == [3]
    assert found.stragglers["mean_ns"].to_list() == [2_000_000]
    assert found.ranks["unknown_ns"].to_list() == [5_800_000] * 8


def _event(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    on_gpu = category == "kernel"
    place = {"pid": 0, "tid": args.get("stream", 7)} if on_gpu else {"pid": 1, "tid": 2}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args, **place}
