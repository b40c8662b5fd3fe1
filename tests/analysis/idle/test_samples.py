"""What the host did according to samples: causes of idle time by evidence."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from thence.analysis.idle.causes import idle_causes
from thence.analysis.idle.host_causes import CAUSES, host_causes
from thence.attribution.attribute import attribute
from thence.model.tables import GPU, HOST, Meta, Tables

RECORDING = ("thence recording",)
MAIN, WORKER = 100, 101


def host(*rows: tuple[Any, ...]) -> pl.DataFrame:
    """Rows of thread, category, name, start, end (us), state, parent."""
    names = ("thread", "category", "name", "start", "end", "state", "parent")
    columns = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    start = [1000 * value for value in columns["start"]]
    end = [1000 * value for value in columns.pop("end")]
    made = {
        **columns, "start": start, "duration": [b - a for a, b in zip(start, end, strict=True)],
        "rank": [0] * len(rows), "process": [MAIN] * len(rows),
    }  # fmt: skip
    correlation = [number if row[1] == "runtime" else None for number, row in enumerate(rows)]
    return HOST.frame({**made, "correlation": correlation})


def causes(frame: pl.DataFrame, formats: tuple[str, ...] = RECORDING) -> list[str]:
    return [CAUSES[number] for number in host_causes(frame, formats)]


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("python", "python"), ("c", "host"), ("c_without_gil", "host"), ("gil", "lock"), ("lock", "lock"),
        ("sleep", "sleep"), ("system_call", "host"), (None, "host"),
    ],
)  # fmt: skip
def test_the_state_of_a_sample_is_its_cause(state: str | None, cause: str) -> None:
    row = (MAIN, "sample", "train.py(12): augment", 0, 10, state, None)
    assert causes(host(row)) == [cause]


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        ("/x/site-packages/torch/utils/data/dataloader.py(733): _BaseDataLoaderIter.__next__", "loader"),
        ("/x/train.py(10): next_batch", "loader"),
        ("/x/site-packages/torch/_dynamo/convert_frame.py(600): _compile", "compile"),
        ("/x/site-packages/triton/compiler/compiler.py(230): compile", "compile"),
        ("/x/site-packages/jax/_src/array.py(60): ArrayImpl.block_until_ready", "sync"),
        ("/x/site-packages/torch/cuda/__init__.py(900): synchronize", "sync"),
        ("/x/site-packages/numpy/core/numeric.py(5): resynchronized", "lock"),
        ("/usr/lib/python3.12/json/decoder.py(3): loads", "lock"),
    ],
)
def test_a_frame_around_a_sample_says_what_it_waits_for(frame: str, cause: str) -> None:
    found = causes(
        host(
            (MAIN, "sample", frame, 0, 10, None, None),
            (MAIN, "sample", "/usr/lib/python3.12/threading.py(355): Condition.wait", 0, 10, "lock", 0),
        )
    )
    assert found[1] == cause


def test_a_function_around_two_launches_is_no_evidence_of_python_and_a_traced_frame_is() -> None:
    row = host((MAIN, "python", "train.py(12): augment", 0, 10, None, None))
    assert causes(row) == ["host"]
    assert causes(row, ("torch.profiler (Kineto JSON)",)) == ["python"]
    assert causes(row, (*RECORDING, "torch.profiler (Kineto JSON)")) == ["python"]


@pytest.mark.parametrize(
    ("name", "us", "cause"),
    [
        ("<built-in function sleep>", 5000, "sleep"),
        ("<built-in method acquire of _thread.lock object at 0x7f00>", 5000, "lock"),
        ("<built-in method __enter__ of _thread.RLock object at 0x7f00>", 5000, "lock"),
        ("<built-in method sort of list object at 0x7f00>", 5000, "host"),
        ("<built-in function isinstance>", 1, "python"),
        ("<built-in method __enter__ of torch._C.Guard object at 0x7f00>", 1, "python"),
        ("train.py(12): <lambda>", 5000, "python"),
    ],
)
def test_a_traced_call_of_a_c_function_is_what_it_does(name: str, us: int, cause: str) -> None:
    row = host((MAIN, "python", name, 0, us, None, None))
    assert causes(row, ("torch.profiler (Kineto JSON)",)) == [cause]


def test_a_range_or_module_in_a_traced_frame_is_that_frame_running() -> None:
    rows = host(
        (MAIN, "python", "train.py(12): step", 0, 9000, None, None),
        (MAIN, "range", "forward", 0, 5000, None, 0),
        (MAIN, "module", "Linear_0", 0, 4000, None, 1),
        (MAIN, "python", "<built-in method run_backward of Engine object at 0x7f>", 5000, 9000, None, 0),
        (MAIN, "range", "inside", 6000, 7000, None, 3),
        (WORKER, "range", "without a frame", 0, 5000, None, None),
    )
    kineto = ("torch.profiler (Kineto JSON)",)
    assert causes(rows, kineto) == ["python", "python", "python", "host", "host", "host"]
    assert causes(rows) == ["host"] * 6


def trace(*rows: tuple[Any, ...]) -> Any:
    """Two kernels of 10 us, launched by the two API calls among the rows, idle between them from 20 us on."""
    frame = host(*rows)
    launches = [number for number, row in enumerate(rows) if row[1] == "runtime"]
    gpu = GPU.frame({
        "rank": [0, 0], "device": [0, 0], "stream": [7, 7], "kind": ["kernel"] * 2, "name": ["a", "b"],
        "start": [10_000, 100_000], "duration": [10_000, 10_000], "correlation": launches,
    })  # fmt: skip
    return attribute(Tables(gpu=gpu, host=frame, meta=Meta(inputs=("x",), formats=RECORDING)))


def outcome(*rows: tuple[Any, ...]) -> list[tuple[str, int, int | None]]:
    """Cause, us and host row of what is idle before the second launch at 90 us."""
    found = idle_causes(trace(*rows)).filter(pl.col("cause") != "launch")
    return found.select(pl.col("cause").cast(pl.String), pl.col("duration") // 1000, "host").rows()


FIRST = (MAIN, "runtime", "cudaLaunchKernel", 2, 5, None, None)
SECOND = (MAIN, "runtime", "cudaLaunchKernel", 90, 95, None, None)


def test_a_gap_is_divided_among_the_samples_of_the_launching_thread() -> None:
    found = outcome(
        FIRST,
        (MAIN, "sample", "a.py(1): f", 20, 50, "python", None),
        (MAIN, "sample", "a.py(2): f", 50, 80, "sleep", None),
        SECOND,
    )
    # From 80 to 90 there is no sample: nothing tells what the main thread ran.
    assert found == [("python", 30, 1), ("sleep", 30, 2), ("host", 10, None)]


def test_a_thread_that_waits_for_another_is_explained_by_the_one_that_runs() -> None:
    """Autograd's thread runs a hook, while the main thread, which launches next, waits for it."""
    found = outcome(
        FIRST,
        (MAIN, "sample", "a.py(1): backward", 20, 90, "lock", None),
        SECOND,
        (WORKER, "sample", "a.py(9): hook", 30, 70, "python", None),
    )
    assert found == [("lock", 10, 1), ("python", 40, 3), ("lock", 20, 1)]


def test_a_thread_that_waits_is_not_explained_by_another_one_that_waits_or_sleeps_little() -> None:
    found = outcome(
        FIRST,
        (MAIN, "sample", "a.py(1): get", 20, 90, "lock", None),
        SECOND,
        (WORKER, "sample", "a.py(9): idle", 20, 90, "gil", None),
    )
    assert found == [("lock", 70, 1)]


def test_a_thread_that_runs_is_not_explained_by_others() -> None:
    found = outcome(
        FIRST,
        (MAIN, "sample", "a.py(1): augment", 20, 90, "python", None),
        SECOND,
        (WORKER, "sample", "a.py(9): other", 20, 90, "c_without_gil", None),
    )
    assert found == [("python", 70, 1)]
