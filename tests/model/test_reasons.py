"""What a report says of places that a trace does not have: the fact, and what this producer can do about it."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import thence
from helpers import DATA, TORCH, event, kernel, launch, opened, recording, run_thence
from nsight_data import changed, export, report, unpacked
from thence.attribution.attribute import attribute
from thence.model import reasons as table
from thence.model.places import KINDS, LAUNCH, PLACES
from thence.model.reasons import ADVICE, CODES, OF_ACCELERATOR, REASONS, RULES, Reason, advice, text_of
from thence.model.tables import GPU, Meta, Tables

pytestmark = pytest.mark.usefixtures("read_once")

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
    JAX: {"label": "jax.named_scope", "source": "python_tracer_level", "step": "StepTraceAnnotation"},
}
# What only works with torch.profiler's own steps, activities and traces.
OF_TORCH_PROFILER_ALONE = ("profiler.step()", "ProfilerActivity", "record_function")
OF_JAX_ALONE = ("jax.", "tracer_level")


def bare(*formats: str) -> Tables:
    """One kernel, and nothing else."""
    columns = {"rank": 0, "device": 0, "kind": "kernel", "name": "k", "start": 0, "duration": 5}
    gpu = GPU.frame({name: [value] for name, value in columns.items()})
    return Tables(gpu=gpu, meta=Meta(inputs=formats, formats=formats))


MISSING = {kind.name: kind.missing for kind in LAUNCH}


def codes(tables: Tables) -> dict[str, str]:
    """Why one kernel has no place of any kind that a launch tells."""
    row = attribute(tables).places.row(0, named=True)
    assert all(row[kind] is None for kind in PLACES)
    return {kind: row[f"{kind}_rule"] for kind in MISSING}


def told(*formats: str) -> dict[str, str]:
    """The same as a reader meets it: fact and advice."""
    found = codes(bare(*formats))
    assert found == MISSING
    return {kind: str(Reason(code, 5, 1.0, text_of(code), advice(code, formats))) for kind, code in found.items()}


def outside(text: str) -> str:
    return text.partition(" (")[0]


@pytest.mark.parametrize(
    ("format_", "kind", "word"), [(f, k, w) for f, words in TYPED.items() for k, w in words.items()]
)
def test_the_advice_is_what_this_producer_understands(format_: str, kind: str, word: str) -> None:
    said = told(format_)[kind]
    assert said.endswith(")")
    assert word in said[said.index("(") :]
    summary = thence.Trace(bare(format_)).report()
    (reason,) = summary.unattributed[kind]
    assert (str(reason), reason.code, reason.total_ns, reason.share) == (said, MISSING[kind], 5, 1)


@pytest.mark.parametrize("format_", [RECORDING, NSIGHT, CSV, ARCHIVE, JAX])
def test_nobody_else_is_told_to_use_options_of_torch_profiler(format_: str) -> None:
    for said in (*told(format_).values(), *ADVICE[format_].values()):
        for word in OF_TORCH_PROFILER_ALONE:
            assert word not in said
        if "with_stack" in said:
            assert "torch.profiler's with_stack" in said


@pytest.mark.parametrize("format_", [KINETO, RECORDING, NSIGHT, CSV])
def test_nobody_is_told_to_use_jax_who_may_not(format_: str) -> None:
    said = " ".join(told(format_).values())
    assert not [word for word in OF_JAX_ALONE if word in said]


def test_the_fact_is_the_same_for_everybody() -> None:
    unknown = told("some format of tomorrow")
    assert not any("(" in said for said in unknown.values())
    for format_ in TYPED:
        assert {k: outside(said) for k, said in told(format_).items()} == unknown


def test_inputs_of_two_producers_get_facts_without_advice() -> None:
    assert told(KINETO, NSIGHT) == told()
    assert told(RECORDING, RECORDING) == told(RECORDING)
    assert told(KINETO, "labels of CUDA graphs (thence.save_labels)") == told(KINETO)


@pytest.mark.parametrize(
    "path",
    [
        TORCH / "torch_eager_rank0.json.gz",
        export("torch_graph"),
        report("torch_graph_cuda_gpu_trace"),
        DATA / "jax" / "streams_default.xplane.pb",
        DATA / "jax" / "recording",
    ],
    ids=[KINETO, NSIGHT, CSV, JAX, RECORDING],
)
def test_the_table_names_formats_as_readers_do(path: Path, request: pytest.FixtureRequest) -> None:
    (named,) = thence.open(path).meta.formats
    assert named in ADVICE
    assert named in request.node.name


def test_the_table_names_the_archives_of_nsys_jax() -> None:
    from thence.readers.nsys_jax.archive import NAME

    assert NAME in ADVICE


def test_every_code_is_documented_and_unique() -> None:
    assert len(set(CODES)) == len(CODES) == len(RULES) + len(REASONS)
    texts = [text_of(code) for code in CODES]
    assert all(text == text.strip() for text in texts)
    assert all(texts)
    for meanings in (RULES, REASONS):
        assert len(set(meanings.values())) == len(meanings)
    for code in CODES:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", code)
    for of_format in ADVICE.values():
        assert set(of_format) <= set(REASONS)
        assert all(text == text.strip() != "" for text in of_format.values())
    for kind in KINDS:
        assert {kind.missing, kind.outside} - {""} <= set(REASONS)


def test_every_code_is_written_once_in_the_source() -> None:
    """A dictionary that names a code twice would keep the last meaning, silently."""
    body = ast.parse(Path(table.__file__).read_text()).body
    for name in ("RULES", "REASONS"):
        (tree,) = [
            node.value.args[0]
            for node in body
            if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name
        ]
        keys = [key.value for key in tree.keys]
        assert len(set(keys)) == len(keys)
        assert set(keys) == set(getattr(table, name))


def test_joined_labels_are_no_advice_for_what_they_left_out() -> None:
    for format_ in (KINETO, NSIGHT):
        assert advice("graph", [format_]) == "thence label joins labels"
        assert advice("graph", [format_], labels_joined=True) is None
    assert advice("graph", [RECORDING], labels_joined=True) is None
    assert advice("no_steps", [KINETO], labels_joined=True) == "profiler.step() marks them"


@pytest.mark.parametrize("format_", [*ADVICE, "some format of tomorrow"])
def test_hlo_that_is_missing_names_the_option_that_brings_it(format_: str) -> None:
    for formats in ([format_], [format_, KINETO], []):
        assert "--hlo" in (advice("no_hlo", formats) or "")


RECORDED = {
    "eager": recording("torch_eager_rank0"),
    "graph": recording("torch-2.12_graph_replay_rank0"),
    "jax": DATA / "jax" / "jax_single_nocb.xplane.pb.gz",
    "jax recording": DATA / "jax" / "recording",
    "jax graphs": DATA / "jax" / "jax_fsdp2.xplane.pb.gz",
    "nsight": export("torch_graph"),
}


@pytest.mark.parametrize("name", ["graph", "jax recording", "nsight"])
def test_each_reason_is_printed_once_for_all_kinds_that_share_it(name: str) -> None:
    done = run_thence("report", RECORDED[name], COLUMNS="400")
    assert done.returncode == 0
    printed = done.stdout.decode()
    summary = thence.open(RECORDED[name]).typical.report()
    kinds: dict[str, list[str]] = {}
    for kind, reasons in summary.unattributed.items():
        assert sum(reason.total_ns for reason in reasons) + summary.attributed_ns[kind] == (summary.sum_ns)
        for reason in reasons:
            if reason.total_ns:
                kinds.setdefault(reason.code, []).append(kind)
    rest = printed.partition("the rest, and why")[2].partition("\nwarning: ")[0]
    rest = rest.partition("\nin separate rows")[0].partition("\n\nnext ")[0]
    rest = re.split(r"\n[\d.]+ % of the GPU time ", rest)[0]
    rows: list[list[str]] = []
    for line in filter(None, rest.splitlines()):
        cells = re.split(r"  +", line.strip())
        if len(cells) == 1:  # more kinds than fit one line
            rows[-1][0] += f" {cells[0]}"
        else:
            rows.append(cells)
    for code, sharing in kinds.items():
        (row,) = [row for row in rows if outside(row[-1]) == text_of(code)]
        assert row[0] == ", ".join(sharing)
    assert len(rows) == len(kinds)
    assert kinds or set(summary.attributed_ns.values()) == {summary.sum_ns}


def test_nvtx_ranges_that_the_advice_names_give_steps_ops_and_phases(tmp_path: Path) -> None:
    """The advice for Nsight Systems, followed: ranges around the launches of the recording."""
    source = unpacked("torch_ddp", tmp_path)
    before = thence.open(source).report()
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
    after = thence.open(changed(source, *statements)).report()
    for kind in ("op", "phase"):
        assert before.attributed_ns[kind] == 0
    for kind in ("op", "phase", "step"):
        assert after.attributed_ns[kind] > before.sum_ns // 2
        assert not any(reason.code.startswith("no_") for reason in after.unattributed[kind])


def test_a_graph_hides_ops_but_not_the_step(tmp_path: Path) -> None:
    graph = {**launch(1, 10), "name": "cudaGraphLaunch"}
    trace = opened(tmp_path, [graph, kernel(1, 20)])
    summary = trace.report()
    said = {kind: str(reason) for kind, (reason,) in summary.unattributed.items()}
    assert said["op"] == ("inside a CUDA graph: the trace holds one launch for all of it (thence label joins labels)")
    assert said["step"] == "no steps found (profiler.step() marks them)"
    places = trace.tables.places.row(0, named=True)
    assert (places["op_rule"], places["step_rule"]) == ("graph", "no_steps")
    meta = dataclasses.replace(trace.meta, formats=(RECORDING,))
    recorded = thence.Trace(dataclasses.replace(trace.recorded, meta=meta)).report()
    (of_graph,) = recorded.unattributed["op"]
    assert "thence.mark" in str(of_graph)
    assert "thence label" not in str(of_graph)


def test_what_the_autotuner_ran_is_no_lack_of_ranges_or_frames() -> None:
    """Programs that are compiled while they are recorded: their trials have one reason for every kind."""
    trace = thence.open(DATA / "jax" / "recording")
    places = trace.tables.places.with_columns(pl.col("^.*_rule$").cast(pl.String))
    tried = places["program_rule"].to_numpy() == "autotuning"
    assert text_of("autotuning") == "XLA's autotuner, while a program was being compiled"
    assert np.count_nonzero(tried) > 100
    for kind in ("label", "source", "stack", "phase"):
        absent = places.filter(tried & places[kind].is_null().to_numpy())
        assert set(absent[f"{kind}_rule"]) == {"autotuning"}


@pytest.mark.parametrize(
    ("format_", "word"), [(KINETO, "ProfilerActivity.CUDA"), (NSIGHT, "--trace=cuda"), (JAX, "device_tracer_level")]
)
def test_without_any_gpu_work_the_way_to_record_it_is_named(tmp_path: Path, format_: str, word: str) -> None:
    tables = opened(tmp_path, [launch(1, 10)]).recorded
    meta = dataclasses.replace(tables.meta, formats=(format_,))
    with pytest.raises(thence.MissingData, match=word) as caught:
        thence.Trace(dataclasses.replace(tables, meta=meta)).report()
    assert "CUPTI" in str(caught.value)


def on(accelerator: str, tmp_path: Path) -> thence.Trace:
    """A trace as torch.profiler writes it for a kind of device: one launch, and no device work."""
    category, call = {
        "cuda": ("cuda_runtime", "cudaLaunchKernel"),
        "rocm": ("cuda_runtime", "hipLaunchKernel"),
        "xpu": ("xpu_runtime", "urEnqueueKernelLaunch"),
        "mtia": ("mtia_runtime", "launch_program"),
        "privateuse1": ("privateuse1_runtime", "launch"),
    }[accelerator]
    return opened(tmp_path, [event(category, call, 10, 2, args={"correlation": 1})])


@pytest.mark.parametrize("accelerator", ["cuda", "rocm", "xpu", "mtia", "privateuse1"])
def test_without_gpu_work_nobody_is_told_of_another_makers_tools(tmp_path: Path, accelerator: str) -> None:
    trace = on(accelerator, tmp_path)
    assert trace.meta.accelerators == {accelerator}
    with pytest.raises(thence.MissingData) as caught:
        trace.report()
    said = str(caught.value)
    assert ("CUPTI" in said) == (accelerator == "cuda")
    assert ("ProfilerActivity.CUDA" in said) == (accelerator in ("cuda", "rocm"))
    assert ("ProfilerActivity.XPU" in said) == (accelerator == "xpu")
    assert ("MTIA" in said) == (accelerator == "mtia")


@pytest.mark.parametrize("accelerator", OF_ACCELERATOR)
def test_advice_for_other_devices_names_nothing_of_nvidia(accelerator: str) -> None:
    for code in REASONS:
        said = advice(code, [KINETO], accelerators=[accelerator]) or ""
        assert not [word for word in ("NVTX", "CUPTI", "CUDA graph", "nsys") if word in said]
    assert advice("no_ranges", [KINETO], accelerators=["cuda"]) == "record_function, NVTX"
    assert advice("no_ranges", [KINETO], accelerators=["cuda", accelerator]) is None


def test_hip_versions_in_the_metadata_say_rocm(tmp_path: Path) -> None:
    trace = opened(tmp_path, [launch(1, 1), kernel(1, 10)], hip_runtime_version=60300)
    assert trace.meta.accelerators == {"rocm"}
    (reason,) = trace.report().unattributed["label"]
    assert reason.advice == "record_function"
