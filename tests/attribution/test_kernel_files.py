"""Triton kernels lead to the file that the trace names: to the line where it is here, and honestly where not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import event, kernel, launch, opened, recording, unzipped

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """import triton

def triton_poi_fused_add_0_helper(x):
    pass

@triton.jit
def triton_poi_fused_add_0(in_ptr, out_ptr, xnumel, XBLOCK):
    pass
"""


def trace_of(folder: Path, file: str, *frames: dict[str, object]) -> thence.Trace:
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
    file.write_text(SOURCE)
    trace = trace_of(tmp_path, str(file))
    assert trace.tables.places["source"].to_list() == [f"{file}:7 triton_poi_fused_add_0", None]
    assert trace.tables.places["source_rule"].to_list() == ["kernel_file", "no_python_frames"]
    assert trace.tables.places["metadata"][0] == (
        f'{{"kernel_file":"{file}","kernel_hash":"cab","kernel_kwargs":"XBLOCK=16"}}'
    )


def test_ones_own_code_comes_first_and_frames_of_libraries_last(tmp_path: Path) -> None:
    own = event("python_function", "train.py(3): step", 1, 90)
    library = event("python_function", "/x/site-packages/torch/_inductor/a.py(5): run", 2, 80)
    trace = trace_of(tmp_path, "/nowhere/cab.py", own, library)
    assert trace.tables.places["source"].to_list() == 2 * ["train.py:3 step"]
    trace = trace_of(tmp_path, "/nowhere/cab.py", library)
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
        (tmp_path / "secret.txt").write_text(SOURCE)
    elif what == "another kernel":
        (tmp_path / "cab.py").write_text("def other():\n    pass\n")
    elif what == "zero":
        file = "/nowhere/\0.py"
    trace = trace_of(tmp_path, file)
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
