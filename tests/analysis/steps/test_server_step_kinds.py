"""Steps of inference servers: what their names say, and time per step by batch size, layer and kernel."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

import thence
from helpers import event, kernel, launch, opened, output, written
from thence.model.server_steps import server_step

if TYPE_CHECKING:
    from pathlib import Path

# Name, and what the server's source or its tests say that it means: serving, requests, tokens.
SAID = {
    "execute_context_2(14721)_generation_0(0)": ("prefill", 2, 14721),
    "execute_context_0(0)_generation_64(64)": ("decode", 64, 64),
    "execute_context_2(6144)_generation_3(3)": ("mixed", 5, 6147),
    "execute_5_context_1(sq4sk4sqsq16sqsk16)_generation_1(sq1sk11sqsq1sqsk11)": ("mixed", 2, 5),
    "execute_64_context_0(sq0sk0sqsq0sqsk0)_generation_64(sq64sk131072sqsq64sqsk131072)": ("decode", 64, 64),
    "execute_new_3_cached_0": ("prefill", 3, None),
    "execute_new_0_cached_9": (None, 9, None),
    "execute_model": (None, None, None),
    "step[EXTEND bs=2 toks=14721]": ("prefill", 2, 14721),
    "step[EXTEND bs=1 toks=1025 c_sqsq=1050625 c_sqsk=1050625 c_sk=1025]": ("prefill", 1, 1025),
    "step[DECODE bs=64]": ("decode", 64, None),
    "step[DECODE bs=64 g_sq=128 g_sqsq=256 g_sqsk=262144 g_sk=131072]": ("decode", 64, 128),
    "step[MIXED bs=66 c=2 g=64 c_sq=2048 c_sk=2048 g_sq=64 g_sk=65600]": ("mixed", 66, 2112),
    "step[IDLE bs=0]": (None, 0, None),
    "step[decode bs=8]": ("decode", 8, None),
    "prefill[bs=2 tok=14721 ctx=[7803, 6918]]": ("prefill", 2, 14721),
    "decode[bs=117/128 tok=117 d=117]": ("decode", 117, 117),
    "decode[bs=128 tok=384 p=2 d=126 sqsq=132612 sqsk=1114112 sk=258048 tbo=1]": ("mixed", 128, 384),
    "[Executor] _forward_step 7: 1 ctx reqs, 640 ctx tokens, 14 gen reqs": ("mixed", 15, None),
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_servers_name_of_a_step_says(name: str) -> None:
    step = server_step(name)
    assert step is not None
    assert (step.serving, step.requests, step.tokens) == SAID[name]


LENGTHS = {
    # one prompt of 4 tokens, whose queries see 1 + 2 + 3 + 4 keys, and one token after 10
    "execute_5_context_1(sq4sk4sqsq16sqsk16)_generation_1(sq1sk11sqsq1sqsk11)": (5, 15, 10 + 11),
    "step[EXTEND bs=1 toks=1025 c_sqsq=1050625 c_sqsk=1050625 c_sk=1025]": (1025, 1025, 1025 * 1026 // 2),
    "step[DECODE bs=64 g_sqsq=64 g_sqsk=100032 g_sk=100032]": (64, 100032, 100032),
    # 64 requests of two tokens each after 2046: 2047 and 2048 keys
    "step[DECODE bs=64 g_sq=128 g_sqsq=256 g_sqsk=262144 g_sk=131072]": (128, 131072, 64 * (2047 + 2048)),
    "step[MIXED bs=66 c=2 g=64 c_sq=2048 c_sk=2048 g_sq=64 g_sk=65600]": None,
    "step[MIXED bs=2 c_sq=4 c_sk=4 c_sqsq=16 c_sqsk=16 g_sk=65600]": None,
    "step[DECODE bs=64 g_sqsq=1 g_sqsk=100032 g_sk=100032]": None,
    "execute_context_2(14721)_generation_0(0)": None,
}


@pytest.mark.parametrize("name", LENGTHS)
def test_sums_of_lengths_give_the_pairs_that_attention_computes(name: str) -> None:
    step = server_step(name)
    assert step is not None
    found = step.lengths
    assert (None if found is None else (found.queries, found.keys, found.pairs)) == LENGTHS[name]


@pytest.mark.parametrize(
    "name", ["step", "step[", "decode", "decode_jpeg[1]", "execute", "prefill[a]", "step[1]x", "a" * 10**6]
)
def test_other_names_are_no_steps(name: str) -> None:
    assert server_step(name) is None


def step(name: str, start: int, first: int, modules: list[str]) -> list[dict[str, object]]:
    """A step with one launch in each module; the kernel of the n-th takes n + 1 us."""
    events = [event("user_annotation", name, start, 90)]
    for number, module in enumerate(modules):
        at = start + 1 + 10 * number
        events += [
            event("python_function", f"nn.Module: {module}", at, 8),
            launch(first + number, at + 1),
            kernel(first + number, start + 2000 + 20 * number, number + 1, name=f"k{number % 2}"),
        ]
    return events


def server(profiler_steps: bool) -> list[dict[str, object]]:
    """Three steps of decode in two batch sizes, one of prefill, and work outside of all."""
    layers = ["A_0", "A_1", "B_0"]
    events = [
        *step("step[DECODE bs=4]", 100, 10, layers),
        *step("step[DECODE bs=8]", 300, 20, layers[:2]),
        *step("step[DECODE bs=4]", 500, 30, layers),
        *step("step[EXTEND bs=1 toks=70]", 700, 40, layers[:1]),
        *(launch(50, 900), kernel(50, 3000, 7)),
    ]
    if profiler_steps:
        events += [event("user_annotation", f"ProfilerStep#{n}", 90 + 400 * n, 395) for n in (0, 1)]
    return events


def test_time_per_step_by_batch_size_layer_and_kernel(tmp_path: Path) -> None:
    trace = opened(tmp_path, server(profiler_steps=False))
    found = trace.step_kinds()
    assert found.rows.rows() == [
        ("decode bs=4", "decode", 4, None, 2, 12_000, 6000.0),
        ("decode bs=8", "decode", 8, None, 1, 3000, 3000.0),
        ("prefill bs=1 tokens=70", "prefill", 1, 70, 1, 1000, 1000.0),
    ]
    decode = found.parts.filter(found.parts["step_kind"] == "decode bs=4")
    assert decode.rows() == [
        ("decode bs=4", "B_0", "k0", 2, 6000, 3000.0),
        ("decode bs=4", "A_1", "k1", 2, 4000, 2000.0),
        ("decode bs=4", "A_0", "k0", 2, 2000, 1000.0),
    ]
    assert found.parts["total_ns"].sum() == 16_000
    summary = trace.report("step-kind")
    assert dict(summary.rows.filter(summary.rows["reason"].is_null()).select("name", "total_ns").rows()) == {
        "decode bs=4": 12_000, "decode bs=8": 3000, "prefill bs=1 tokens=70": 1000,
    }  # fmt: skip
    outside = trace.tables.places.filter(trace.tables.places["step-kind"].is_null())["step-kind_rule"]
    assert outside.to_list() == ["outside_server_steps"]
    assert set(trace.tables.places["step"].drop_nulls()) == {
        "step[DECODE bs=4]", "step[DECODE bs=8]", "step[EXTEND bs=1 toks=70]",
    }  # fmt: skip
    assert trace.tables.places["label"].null_count() == trace.tables.gpu.height


def test_inside_a_profilers_steps_those_count_as_the_steps(tmp_path: Path) -> None:
    trace = opened(tmp_path, server(profiler_steps=True))
    assert set(trace.tables.places["step"].drop_nulls()) == {"ProfilerStep#0", "ProfilerStep#1"}
    assert trace.step_kinds().rows["steps"].to_list() == [2, 1, 1]


def test_the_command_line_says_it_and_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "trace.json", server(profiler_steps=False))
    said = json.loads(output(capsys, "report", path, "--by", "step-kind", "--format", "json")[0])
    assert said["step_kinds"][0]["per_step_ns"] == 6000.0
    assert {row["layer"] for row in said["step_kind_parts"]} == {"A_0", "A_1", "B_0"}
    shown = output(capsys, "report", path, "--by", "step-kind")[0]
    assert re.search(r"decode bs=4 +2 +12.0+ us +6.0+ us", shown)
    assert re.search(r"decode bs=4 +B_0 +- +k0 +2 +6.0+ us +3.0+ us", shown)
    other = written(tmp_path / "other.json", [launch(1, 10), kernel(1, 20)])
    with pytest.raises(thence.MissingData, match="no range of an inference server"):
        thence.open(other).step_kinds()
