"""Times of answers are possible and their parts add up: on recordings of every kind, and on random traces."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import TYPE_CHECKING

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thence
from answer_checks import possible, tiles_follow_each_other
from helpers import DATA, FSDP, STACK, examples, recording
from thence.model.answer import result_or_reason
from thence.model.tables import GPU, Tables
from thence.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from thence.model.answer import Answer

settings.register_profile("thence", deadline=None, max_examples=examples(40) // 2)
settings.load_profile("thence")

JOB = tuple((DATA / "torch" / "waits").glob("group_rank*.json.gz"))
XLA = DATA / "jax" / "recording"
PROFILE = DATA / "jax" / "streams_moved.xplane.pb"
INPUTS = (
    (STACK,),
    (recording("torch-2.12_graph_replay_rank0"),),
    FSDP,
    JOB,
    (XLA,),
    (PROFILE,),
    (DATA / "recording" / "two_ranks",),
)
"""Traces of one rank and of jobs, of PyTorch and of XLA, by profilers and by thence."""


@cache
def opened(inputs: tuple[Path, ...]) -> thence.Trace:
    return thence.open(*inputs)


def asked(trace: thence.Trace) -> dict[str, Callable[[], Answer]]:
    """The answers whose parts are checked."""
    return {
        "report": trace.report,
        "default": partial(trace.report, trace.default_kind),
        "typical": partial(trace.typical.report, "module"),
        "flame": trace.flame,
        "streams": trace.streams,
        "collectives": partial(trace.collectives, "keep"),
        "programs": partial(trace.programs, "keep"),
        "compile": trace.compile,
    }


@pytest.mark.parametrize("inputs", INPUTS, ids=lambda inputs: inputs[0].name)
def test_answers_about_recordings_are_possible(inputs: tuple[Path, ...]) -> None:
    for question in asked(opened(inputs)).values():
        answer = result_or_reason(question).result
        if answer is not None:
            possible(answer)


@pytest.mark.parametrize(
    ("inputs", "name"),
    [((STACK,), "default"), ((STACK,), "flame"), (FSDP, "streams"), (JOB, "collectives"), ((PROFILE,), "programs"),
     ((XLA,), "compile")],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_every_kind_of_answer_is_among_them(inputs: tuple[Path, ...], name: str) -> None:
    assert inputs in INPUTS
    possible(asked(opened(inputs))[name]())


@pytest.mark.parametrize("inputs", [(STACK,), (XLA,)], ids=lambda inputs: inputs[0].name)
def test_the_tiles_of_the_critical_path_follow_each_other(inputs: tuple[Path, ...]) -> None:
    tiles = opened(inputs).critical_path()
    assert tiles.height > 1
    tiles_follow_each_other(tiles)


@given(
    st.lists(
        st.tuples(
            st.integers(-5, 25), st.integers(0, 9), st.integers(0, 1), st.integers(3, 6),
            st.sampled_from(["gemm", "ncclKernel", "loop_add_fusion"]),
        ),
        min_size=1,
        max_size=30,
    )
)  # fmt: skip
def test_answers_about_random_work_are_possible(rows: list[tuple[int, int, int, int, str]]) -> None:
    start, duration, device, stream, name = zip(*rows, strict=True)
    columns = {
        "start": start, "duration": duration, "device": device, "stream": stream, "name": name,
        "rank": [0] * len(rows), "kind": ["kernel"] * len(rows),
    }  # fmt: skip
    trace = Trace(Tables(gpu=GPU.frame(columns)))
    for by in ("kernel", "stream", "device"):
        possible(trace.report(by))
    possible(trace.flame())
    possible(trace.streams())


def test_what_is_impossible_is_noticed() -> None:
    """The checks themselves can fail."""
    trace = opened((STACK,))
    streams, report, tiles = trace.streams(), trace.report(), trace.critical_path()
    longer = streams.streams.with_columns(concurrent_ns=pl.col("busy_ns") + 1)
    for broken in (
        dataclasses.replace(streams, streams=longer),
        dataclasses.replace(report, overlapped_ns=report.overlapped_ns + 1),
    ):
        with pytest.raises(AssertionError):
            possible(broken)
    with pytest.raises(AssertionError):
        tiles_follow_each_other(tiles.reverse())
