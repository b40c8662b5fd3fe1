"""What a report says of places that a trace does not have: the fact, and what this producer can do about it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest
from nsight_data import changed, export, report, unpacked
from thence.attribution.combined import attribution_of
from thence.attribution.places import PLACES, attribute

import thence
from helpers import DATA, kernel, launch, opened
from thence.attribution.reasons import ADVICE, EVERY_REASON, missing
from thence.model.tables import GPU, Meta, Tables

if TYPE_CHECKING:
    from pathlib import Path

KINETO = "torch.profiler (Kineto JSON)"
RECORDING = "thence recording"
NSIGHT = "Nsight Systems export"
CSV = "Nsight Systems cuda_gpu_trace (CSV)"
ARCHIVE = "nsys-jax archive"
JAX = "jax.profiler (XSpace)"

# Per producer: a word that has to be in the advice, per kind, because it is what the user types there.
TYPED = {
    KINETO: {
        "label": "record_function",
        "module": "with_stack=True",
        "op": "ProfilerActivity.CPU",
        "source": "with_stack=True",
        "step": "profiler.step()",
    },
    RECORDING: {
        "label": "thence.mark",
        "module": "thence.mark",
        "source": "thence.mark",
        "phase": "thence.mark",
        "step": "recording.step()",
    },
    NSIGHT: {
        "label": "NVTX",
        "module": "thence.mark",
        "op": "emit_nvtx()",
        "source": "thence.mark",
        "phase": "emit_nvtx()",
        "step": "ProfilerStep#1",
    },
    CSV: dict.fromkeys(("label", "module", "op", "source", "phase", "step"), "export"),
    ARCHIVE: {"label": "jax.named_scope"},
    JAX: {
        "label": "jax.named_scope",
        "source": "python_tracer_level",
        "step": "StepTraceAnnotation",
    },
}
# What only works with torch.profiler's own steps, activities and traces.
OF_TORCH_PROFILER_ALONE = ("profiler.step()", "ProfilerActivity", "record_function")
OF_JAX_ALONE = ("jax.", "tracer_level")


def bare(*formats: str) -> Tables:
    """One kernel, and nothing else."""
    gpu = GPU.frame({"rank": [0], "device": [0], "kind": ["kernel"], "start": [0], "duration": [5]})
    return Tables(gpu=gpu, meta=Meta(inputs=formats, formats=formats))


def reasons(tables: Tables) -> dict[str, str]:
    row = attribute(tables).row(0, named=True)
    assert all(row[kind] is None for kind in PLACES)
    return {kind: row[f"{kind}_rule"] for kind in PLACES}


def outside(text: str) -> str:
    return text.partition(" (")[0]


@pytest.mark.parametrize(
    ("format_", "kind", "word"), [(f, k, w) for f, words in TYPED.items() for k, w in words.items()]
)
def test_the_advice_is_what_this_producer_understands(format_: str, kind: str, word: str) -> None:
    said = reasons(bare(format_))[kind]
    assert said.endswith(")")
    assert word in said[said.index("(") :]


@pytest.mark.parametrize("format_", [RECORDING, NSIGHT, CSV, ARCHIVE, JAX])
def test_nobody_else_is_told_to_use_options_of_torch_profiler(format_: str) -> None:
    for said in reasons(bare(format_)).values():
        for word in OF_TORCH_PROFILER_ALONE:
            assert word not in said
        if "with_stack" in said:
            assert "torch.profiler's with_stack" in said


@pytest.mark.parametrize("format_", [KINETO, RECORDING, NSIGHT, CSV])
def test_nobody_is_told_to_use_jax_who_may_not(format_: str) -> None:
    said = " ".join(reasons(bare(format_)).values())
    assert not [word for word in OF_JAX_ALONE if word in said]


def test_the_fact_is_the_same_for_everybody() -> None:
    unknown = reasons(bare("some format of tomorrow"))
    assert not any("(" in said for said in unknown.values())
    for format_ in TYPED:
        assert {k: outside(said) for k, said in reasons(bare(format_)).items()} == unknown


def test_inputs_of_two_producers_get_facts_without_advice() -> None:
    assert reasons(bare(KINETO, NSIGHT)) == reasons(bare())
    assert reasons(bare(RECORDING, RECORDING)) == reasons(bare(RECORDING))
    labelled = bare(KINETO, "labels of CUDA graphs (thence.save_labels)")
    assert reasons(labelled) == reasons(bare(KINETO))


@pytest.mark.parametrize(
    "path",
    [
        DATA / "torch_eager_rank0.json.gz",
        export("torch_graph"),
        report("torch_graph_cuda_gpu_trace"),
        DATA.parent / "jax" / "streams_default.xplane.pb",
        DATA.parent / "jax" / "recording",
    ],
    ids=[KINETO, NSIGHT, CSV, JAX, RECORDING],
)
def test_the_table_names_formats_as_readers_do(path: Path, request: pytest.FixtureRequest) -> None:
    (named,) = thence.open(path).meta.formats
    assert named in ADVICE
    assert named in request.node.name


def test_the_table_names_the_archives_of_nsys_jax() -> None:
    from thence.readers.nsys_jax import NAME

    assert NAME in ADVICE


def test_every_reason_can_be_written() -> None:
    told = {missing(kind, [name]) for name in (*ADVICE, "") for kind in PLACES}
    assert told <= set(EVERY_REASON)


def test_nvtx_ranges_that_the_advice_names_give_steps_ops_and_phases(tmp_path: Path) -> None:
    """The advice for Nsight Systems, followed: ranges around the launches of the recording."""
    source = unpacked("torch_ddp", tmp_path)
    before = thence.open(source).summary()
    assert {before.attributed_ns[kind] for kind in ("op", "phase", "step")} == {0}
    names = ("ProfilerStep#1", "autograd::engine::evaluate_function: MulBackward0, op_id = 7")
    around_calls = (
        "insert into NVTX_EVENTS (start, end, eventType, textId, globalTid)"
        " select min(start) - {0}, max(end), 59, {0}, globalTid"
        " from CUPTI_ACTIVITY_KIND_RUNTIME group by globalTid"
    )
    statements = []
    for number, name in enumerate(names, 900_001):
        statements.append(f"insert into StringIds (id, value) values ({number}, '{name}')")
        statements.append(around_calls.format(number))
    after = thence.open(changed(source, *statements)).summary()
    for kind in ("op", "phase", "step"):
        assert after.attributed_ns[kind] > before.sum_ns // 2
        assert not any("recorded" in reason for reason in after.unattributed_ns[kind])


def test_a_graph_hides_ops_but_not_the_step(tmp_path: Path) -> None:
    graph = {**launch(1, 10), "name": "cudaGraphLaunch"}
    trace = opened(tmp_path, [graph, kernel(1, 20)])
    row = attribution_of(trace.tables).places.row(0, named=True)
    assert row["op_rule"] == (
        "inside a CUDA graph: the trace holds one launch for all of it; thence label joins labels"
    )
    assert row["step_rule"] == "no profiler steps recorded (profiler.step() marks them)"
    meta = dataclasses.replace(trace.meta, formats=(RECORDING,))
    recorded = attribute(dataclasses.replace(trace.tables, meta=meta)).row(0, named=True)
    assert "thence.mark" in recorded["op_rule"]
    assert "thence label" not in recorded["op_rule"]


def test_what_the_autotuner_ran_is_no_lack_of_ranges_or_frames() -> None:
    """Programs that are compiled while they are recorded: their trials have one reason for every kind."""
    trace = thence.open(DATA.parent / "jax" / "recording")
    places = trace.attribution.places.with_columns(pl.col("^.*_rule$").cast(pl.String))
    tried = places["program_rule"].to_numpy() == (
        "XLA's autotuner ran it, while a program was being compiled"
    )
    assert np.count_nonzero(tried) > 100
    for kind in ("label", "source", "stack", "phase"):
        absent = places.filter(tried & places[kind].is_null().to_numpy())
        assert set(absent[f"{kind}_rule"]) == set(places.filter(tried)["program_rule"])


@pytest.mark.parametrize(
    ("format_", "word"),
    [(KINETO, "ProfilerActivity.CUDA"), (NSIGHT, "--trace=cuda"), (JAX, "device_tracer_level")],
)
def test_without_any_gpu_work_the_way_to_record_it_is_named(
    tmp_path: Path, format_: str, word: str
) -> None:
    tables = opened(tmp_path, [launch(1, 10)]).tables
    meta = dataclasses.replace(tables.meta, formats=(format_,))
    with pytest.raises(thence.MissingData, match=word) as caught:
        thence.Trace(dataclasses.replace(tables, meta=meta)).summary()
    assert "CUPTI" in str(caught.value)
