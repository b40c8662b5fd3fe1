"""What a frame's line number is, which class a function is of, and how that is said."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import DATA, STACK, event, kernel, launch, opened, recording, shared, unzipped
from thence.analysis.report.summary import summarize
from thence.attribution.attribute import attribute
from thence.model.concat_tables import concat
from thence.model.tables import HOST

if TYPE_CHECKING:
    from pathlib import Path

    from thence.trace import Trace


SINGLE = DATA / "jax" / "jax_single_nocb.xplane.pb.gz"


def frame(name: str, start: int, duration: int) -> dict[str, object]:
    return event("python_function", name, start, duration)


def sources(trace: Trace) -> list[str | None]:
    return trace.activities["source"].cast(pl.String).to_list()


def test_the_class_is_that_of_the_module_whose_call_is_directly_around(tmp_path: Path) -> None:
    events = [
        frame("nn.Module: Block_12", 0, 100),
        frame("torch/nn/modules/module.py(1783): _call_impl", 1, 98),
        frame("net.py(27): forward", 2, 90),
        *(launch(1, 5), kernel(1, 200)),
        # A helper of the user's inside it is no method of the module, as far as the trace tells.
        *(frame("net.py(40): scale", 10, 10), launch(2, 12), kernel(2, 210)),
        # Called by hand, not by the module.
        *(frame("head.py(3): forward", 30, 10), launch(3, 32), kernel(3, 220)),
    ]
    assert sources(opened(tmp_path, events)) == ["net.py:27 Block.forward", "net.py:40 scale", "head.py:3 forward"]


def test_a_function_that_several_classes_share_is_named_without_one(tmp_path: Path) -> None:
    events = []
    for number, name in enumerate(("Left_0", "Right_0")):
        at = 100 * number
        events += [
            frame(f"nn.Module: {name}", at, 50),
            frame("torch/nn/modules/module.py(1783): _call_impl", at + 1, 48),
            frame("base.py(7): forward", at + 2, 40),
            *(launch(number, at + 5), kernel(number, at + 500)),
        ]
    assert sources(opened(tmp_path, events)) == ["base.py:7 forward"] * 2


def test_tables_and_json_say_that_they_are_functions() -> None:
    summary = shared(STACK).report("source")
    assert summary.heading == "function"
    rows = json.loads(json.dumps(summary.to_json()))["rows"]
    # Read in the program's text: the lines of the def statements.
    assert {row["name"]: row["position"] for row in rows} == dict.fromkeys(
        (
            "torch_gpt.py:19 Attention.forward",
            "torch_gpt.py:24 MLP.forward",
            "torch_gpt.py:27 Block.forward",
            "torch_gpt.py:32 GPT.forward",
            "torch_gpt.py:45 step",
        ),
        "function",
    )


def test_the_hlo_holds_lines() -> None:
    summary = thence.open(SINGLE).report("source")
    assert summary.heading == "source line"
    assert set(summary.rows["position"]) == {"line"}
    # Read in the program's text: the first and the last line of its functions.
    functions = {"norm": (14, 14), "attention": (15, 19), "mlp": (20, 20), "loss": (21, 28)}
    functions |= {"train_step": (30, 32), "train_step.<locals>.<lambda>": (32, 32)}
    seen = set()
    for name in summary.rows["name"]:
        match = re.fullmatch(r".*/jax_gpt\.py:(\d+) (\S+)", name)
        assert match, name
        first, last = functions[match[2]]
        assert first <= int(match[1]) <= last
        seen.add(match[2])
    assert seen >= {"norm", "attention", "mlp", "loss"}


def test_other_tables_have_no_position() -> None:
    assert "position" not in shared(STACK).report("label").rows.columns


def test_frames_that_hold_lines_are_worded_as_lines(tmp_path: Path) -> None:
    events = [frame("train.py(12): step", 0, 50), launch(1, 10), kernel(1, 100)]
    tables = opened(tmp_path, events).recorded
    position = pl.lit("line", HOST.schema["position"])
    at_line = dataclasses.replace(tables, host=tables.host.with_columns(position=position))
    rows = summarize(attribute(at_line), "source").rows
    assert rows.select("name", "position").rows() == [("train.py:12 step", "line")]
    both = summarize(attribute(concat([tables, at_line])), "source")
    assert both.heading == "function or source line"
    assert set(both.rows.select("name", "position").iter_rows()) == {
        ("train.py:12 step", "line"),
        ("train.py:12 step", "function"),
    }


def test_traces_of_both_kinds_of_producer_say_both() -> None:
    trace = thence.open(STACK, SINGLE, add=True)
    trace.self_check()
    assert trace.tables.places["position"].drop_nulls().unique().sort().to_list() == ["function", "line"]
    assert trace.report("source").heading == "function or source line"


def test_one_rule_of_own_code_for_hlo_too() -> None:
    """optax was below site-packages when this was recorded: its frames lead to the user's line, unless asked for."""
    remat = DATA / "jax" / "remat.xplane.pb.gz"
    usual = thence.open(remat).activities.select(pl.col("source", "op_name").cast(pl.String))
    assert usual["source"].drop_nulls().str.contains(r"/jtrain\.py:\d+ [\w.<>]+$").all()
    counted = thence.open(remat, own=["optax"]).activities
    update = counted.select(pl.col("source", "op_name").cast(pl.String)).filter(
        pl.col("op_name").str.contains("tree_bias_correction")
    )
    assert update["source"].str.contains(r"/site-packages/optax/.*\.py:\d+ [\w.<>]+$").all()
    assert update.height > 0
    nobody = thence.open(remat, own=["!jtrain.py"]).activities
    assert set(nobody["source_rule"].filter(nobody["source"].is_not_null())) == {"library_frame"}


# ---- Files of Triton kernels


KERNEL_SOURCE = """import triton

def triton_poi_fused_add_0_helper(x):
    pass

@triton.jit
def triton_poi_fused_add_0(in_ptr, out_ptr, xnumel, XBLOCK):
    pass
"""


def trace_of_kernel(folder: Path, file: str, *frames: dict[str, object]) -> thence.Trace:
    """One launch of a Triton kernel, as torch._inductor records it, and one of another kernel."""
    facts = {"kernel_file": file, "kernel_hash": "cab", "kernel_kwargs": "XBLOCK=16", "kernel_backend": "triton"}
    events = [
        event("cpu_op", "triton_poi_fused_add_0", 10, 20, args={"External id": 1, **facts}),
        *(launch(1, 12), kernel(1, 100, name="triton_poi_fused_add_0")),
        *(launch(2, 50), kernel(2, 200)),
    ]
    return opened(folder, [*frames, *events])


def test_the_line_of_the_kernel_where_the_file_is_here(tmp_path: Path) -> None:
    file = tmp_path / "cab.py"
    file.write_text(KERNEL_SOURCE)
    trace = trace_of_kernel(tmp_path, str(file))
    assert trace.tables.places["source"].to_list() == [f"{file}:7 triton_poi_fused_add_0", None]
    assert trace.tables.places["source_rule"].to_list() == ["kernel_file", "no_python_frames"]
    assert trace.tables.places["metadata"][0] == (
        f'{{"kernel_file":"{file}","kernel_hash":"cab","kernel_kwargs":"XBLOCK=16"}}'
    )


def test_ones_own_code_comes_first_and_frames_of_libraries_last(tmp_path: Path) -> None:
    own = event("python_function", "train.py(3): step", 1, 90)
    library = event("python_function", "/x/site-packages/torch/_inductor/a.py(5): run", 2, 80)
    trace = trace_of_kernel(tmp_path, "/nowhere/cab.py", own, library)
    assert trace.tables.places["source"].to_list() == 2 * ["train.py:3 step"]
    trace = trace_of_kernel(tmp_path, "/nowhere/cab.py", library)
    assert trace.tables.places["source_rule"].to_list() == ["kernel_file_absent", "library_frame"]


@pytest.mark.parametrize("what", ["absent", "relative", "folder", "pipe", "not Python", "another kernel", "zero"])
def test_what_is_no_such_file_is_named_without_a_line(tmp_path: Path, what: str) -> None:
    file = str(tmp_path / "cab.py")
    if what == "relative":
        file = "cab.py"
    elif what == "folder":
        (tmp_path / "cab.py").mkdir()
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "not Python":
        file = str(tmp_path / "secret.txt")
        (tmp_path / "secret.txt").write_text(KERNEL_SOURCE)
    elif what == "another kernel":
        (tmp_path / "cab.py").write_text("def other():\n    pass\n")
    elif what == "zero":
        file = "/nowhere/\0.py"
    trace = trace_of_kernel(tmp_path, file)
    assert trace.tables.places["source"][0] == f"{file} triton_poi_fused_add_0"
    assert trace.tables.places["source_rule"][0] == "kernel_file_absent"


def test_a_recording_of_torch_compile_names_the_file_of_every_triton_kernel() -> None:
    path = recording("torch_compile_rank0")
    trace = thence.open(path)
    rows = trace.activities.filter(pl.col("name").cast(pl.String).str.starts_with("triton_"))
    named = rows["source"].cast(pl.String)
    assert rows.height == unzipped(path).count(b'"cat": "kernel", "name": "triton_')
    assert named.null_count() == 0
    files = named.str.split(" ").list.first()
    assert set(files.str.split("/").list.last().str.strip_suffix(".py")) <= {
        text.split(b'"')[0].decode() for text in unzipped(path).split(b'"kernel_hash": "')[1:]
    }
    assert set(rows["source_rule"]) == {"kernel_file_absent"}
