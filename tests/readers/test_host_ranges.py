"""Categories and nesting of host ranges: one rule for the ranges of all readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import helpers
import nsight_data
import thence
from helpers import FSDP, TORCH, examples, opened, recording
from protowire import message
from recording_data import BEGAN, kernel, written
from thence.model.intervals import NO_ROW
from thence.model.tables import HOST_CATEGORIES
from thence.readers.compiled import SCANNER
from thence.readers.host_ranges import host_order, host_parents, ranges_among_ops
from thence.readers.recording.folder import SCHEMAS
from thence.readers.registry import read

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from thence.model.tables import Tables


# ---- Nesting


Row = tuple[str, int, int]
"""Name, first nanosecond, first nanosecond after."""

ROWS: list[Row] = [
    ("outer", 1_000, 9_000),
    ("cudaMalloc", 1_000, 9_500),  # begins with the range and outlasts it
    ("inner", 2_000, 5_000),
    ("cudaLaunchKernel", 4_000, 5_001),  # ends one nanosecond after the range that it was made in
    ("cuLaunchKernel", 4_200, 4_900),
    ("within", 4_300, 4_400),
    ("cudaFree", 5_000, 5_000),  # begins as the inner range ends, and takes no time
    ("cudaMemcpyAsync", 8_999, 12_000),
    ("cudaDeviceSynchronize", 9_000, 9_100),
]
AROUND = {
    "outer": None, "cudaMalloc": "outer", "inner": "outer", "cudaLaunchKernel": "inner",
    "cuLaunchKernel": "inner", "within": "inner", "cudaFree": "outer", "cudaMemcpyAsync": "outer",
    "cudaDeviceSynchronize": None,
}  # fmt: skip
"""What the rule says of these rows, by hand: nothing lies in an API call, and each lies where it begins."""


def api(name: str) -> str | None:
    """Of which API a call is; None for a range."""
    return "runtime" if name.startswith("cuda") else "driver" if name.startswith("cu") else None


def kineto(folder: Path) -> Path:
    categories = {"runtime": "cuda_runtime", "driver": "cuda_driver", None: "user_annotation"}
    events = [
        helpers.event(categories[api(name)], name, start / 1000, (end - start) / 1000) for name, start, end in ROWS
    ]
    return helpers.written(folder / "trace.json", events)


def nsight(folder: Path) -> Path:
    texts = {name: number for number, (name, _, _) in enumerate(ROWS, 1)}
    here = nsight_data.thread(5, 6)
    times = [(name, {"start": start, "end": end, "globalTid": here}) for name, start, end in ROWS]
    calls = [
        {**row, "correlationId": texts[name], "nameId": texts[name],
         "eventClass": int(api(name) == "driver")}
        for name, row in times if api(name)
    ]  # fmt: skip
    ranges = [
        {**row, "eventType": 59, "text": name, "textId": None, "domainId": None} for name, row in times if not api(name)
    ]
    strings = [{"id": number, "value": name} for name, number in texts.items()]
    return nsight_data.written(
        folder / "report.sqlite", {"NVTX_EVENTS": ranges, "CUPTI_ACTIVITY_KIND_RUNTIME": calls, "StringIds": strings}
    )


def own_recording(folder: Path) -> Path:
    names = [{"number": number, "name": name, "demangled": None} for number, (name, _, _) in enumerate(ROWS, 1)]
    calls, marks = [], []
    for number, (name, start, end) in enumerate(ROWS, 1):
        if api(name):
            calls.append(
                {"start": BEGAN + start, "end": BEGAN + end, "thread": 9, "correlation": number,
                 "function": number, "api": 5 if api(name) == "runtime" else 4}
            )  # fmt: skip
            continue
        nothing = dict.fromkeys(SCHEMAS["marks"], 0) | {"serial": number, "forward": -1}
        marks += [
            {**nothing, "what": 0, "time": BEGAN + start, "thread": 9, "name": number},
            {**nothing, "what": 1, "time": BEGAN + end},
        ]
    tables = {"names": [names], "calls": [calls], "marks": [marks]}
    return written(folder / "recording", tables)


def xspace(folder: Path) -> Path:
    names = [message((1, number), (2, message((1, number), (2, name)))) for number, (name, _, _) in enumerate(ROWS, 1)]
    events = [
        message((1, number), (2, start * 1000), (3, (end - start) * 1000))
        for number, (_, start, end) in enumerate(ROWS, 1)
    ]
    line = message((1, 6), *((4, event) for event in events))
    plane = message((2, "/host:CPU"), (3, line), *((4, name) for name in names))
    path = folder / "host.xplane.pb"
    path.write_bytes(message((1, plane)))
    return path


def around(tables: Tables) -> dict[str, str | None]:
    """Name of the parent of each host row, by name."""
    names = tables.host["name"].cast(pl.String)
    return dict(zip(names, names.gather(tables.host["parent"]), strict=True))


@pytest.mark.parametrize("write", [kineto, nsight, own_recording, xspace])
def test_every_reader_nests_alike(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    tables = read([write(tmp_path)])
    assert around(tables) == AROUND
    of_call = tables.host.filter(pl.col("category").is_in(["runtime", "driver"]))
    assert set(of_call["name"].cast(pl.String)) == {name for name, _, _ in ROWS if api(name)}


def test_a_launch_that_ends_after_its_mark_keeps_its_label(tmp_path: Path) -> None:
    """Of a recording: the mark's end and the call's end are read from two clocks."""
    import thence

    names = [{"number": 1, "name": "forward", "demangled": None}]
    common = dict.fromkeys(SCHEMAS["marks"], 0) | {"serial": 1, "forward": -1}
    marks = [
        {**common, "what": 0, "time": BEGAN + 10, "thread": 9, "name": 1},
        {**common, "what": 1, "time": BEGAN + 100},
    ]
    call = dict.fromkeys(SCHEMAS["calls"], 0) | {
        "api": 5, "start": BEGAN + 60, "end": BEGAN + 101, "thread": 9, "correlation": 70,
    }  # fmt: skip
    tables = {
        "names": [names], "marks": [marks], "calls": [[call]],
        "kernels": [[kernel(start=BEGAN + 120, end=BEGAN + 150, correlation=70)]],
    }  # fmt: skip
    trace = thence.open(written(tmp_path / "a", tables))
    trace.self_check()
    assert trace.tables.places["label"].cast(pl.String).to_list() == ["forward"]


RANGES = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 12), st.integers(0, 9),
        st.sampled_from([HOST_CATEGORIES.index(c) for c in ("step", "range", "op", "runtime", "driver")]),
    ),
    max_size=30,
)  # fmt: skip
CALLS = {HOST_CATEGORIES.index("runtime"), HOST_CATEGORIES.index("driver")}


@settings(max_examples=examples(200), deadline=None)
@given(RANGES)
def test_order_and_parents_by_definition(rows: list[tuple[int, int, int, int]]) -> None:
    def end(row: tuple[int, int, int, int]) -> int:
        return row[1] + (1 if row[3] in CALLS else max(row[2], 1))

    expected = sorted(range(len(rows)), key=lambda i: (rows[i][0], rows[i][1], -end(rows[i]), rows[i][3], i))
    columns = [np.array([row[n] for row in rows], np.int64) for n in (0, 3, 1, 2)]
    order = host_order(*columns)
    assert order.tolist() == expected
    ordered = [rows[i] for i in expected]
    inside = [
        max((j for j in range(i) if ordered[j][0] == row[0] and end(ordered[j]) >= end(row)), default=NO_ROW)
        for i, row in enumerate(ordered)
    ]
    for way in ("c", "python"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SCANNER.variable, way)
            assert host_parents(*(column[order] for column in columns)).tolist() == inside


# ---- Categories


def labels_of(trace: thence.Trace) -> set[str]:
    ranges = trace.tables.host.filter(pl.col("category") == "range")
    return set(ranges["name"].cast(pl.String).to_list())


@pytest.mark.parametrize("shapes", [0, 1])
def test_ranges_that_pytorch_records_as_operators_are_labels_and_nothing_else_is(shapes: int) -> None:
    """Recorded by torch 2.13: attention and mlp by _RecordFunctionFast, F is an autograd.Function,
    mine::op a custom operator; torch.compile names its phases in the same way as the user."""
    trace = thence.open(TORCH / "ranges" / f"torch-2.13_cpu_shapes{shapes}.json.gz")
    assert labels_of(trace) == {"attention", "mlp", "user", "classic"}
    ops = trace.tables.host.filter(pl.col("category") == "op")["name"].cast(pl.String).unique().to_list()
    assert {"F", "detach", "mine::op", "aten::linear", "AddmmBackward0"} <= set(ops)


def test_recordings_without_such_ranges_keep_their_labels() -> None:
    user = {"forward", "backward", "optimizer", "attention", "mlp"}
    assert labels_of(thence.open(recording("torch_compile_rank0"))) == {"forward", "backward", "optimizer"}
    for path in (recording("torch_eager_rank0"), FSDP[0]):
        assert labels_of(thence.open(path)) == user


def op(name: str, ts: int, dur: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


def test_kernels_get_such_a_label_and_keep_their_operator(tmp_path: Path) -> None:
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 14, "dur": 2}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 20, "dur": 5}
    trace = opened(
        tmp_path,
        [
            op("attention", 10, 10, **{"External id": 1, "Record function id": 0}),
            op("aten::mm", 12, 6, **{"External id": 2}),
            launch | {"args": {"correlation": 5}},
            kernel | {"args": {"correlation": 5, "device": 0, "stream": 7}},
        ],
    )
    assert trace.tables.places.select("label", "op").cast(pl.String).rows() == [("attention", "aten::mm")]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("attention", True),
        ("layer0/mlp", True),
        ("gc", False),  # a phase of the compiler: gc_data lies beside
        ("detach", False),  # inside aten::detach
        ("MyFunction", False),  # PyTorch recorded a sequence number with it
        ("AddmmBackward0", False),
        ("triton_poi_fused_add_0", False),
        ("record_param_comms", False),
        ("build_guards (dynamo_timed)", False),
        ("Torch-Compiled Region: 0/0", False),
    ],
)
def test_names_among_operators(name: str, *, label: bool) -> None:
    ops = {name, "aten::detach", "aten::add"}
    found = ranges_among_ops(ops, {"MyFunction", "aten::add"}, {"gc_data: compile_id=0/0"})
    assert found == ({name} if label else set())
