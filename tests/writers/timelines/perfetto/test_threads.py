"""Order and names of host threads in Perfetto traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from helpers import event, kernel, launch, opened
from thence.writers.timelines.perfetto.layout import host_processes, layout

if TYPE_CHECKING:
    from pathlib import Path


def named(process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


EVENTS = [
    event("overhead", "Activity Buffer Request", 1, 5, pid=-1, tid=0),
    event("cpu_op", "aten::mm", 10, 20, pid=40, tid=41),
    event("cpu_op", "aten::add", 10, 20, pid=40, tid=40),
    event("cuda_runtime", "cudaEventQuery", 10, 1, pid=40, tid=1350576448, args={"correlation": 9}),
    event("overhead", "CUPTI", 10, 1, pid=40, tid=42),
    event("cpu_op", "aten::mm", 10, 20, pid=40, tid=-77),
    event("cpu_op", "aten::mm", 10, 20, pid=40, tid=-78),
    named(40, 40, "thread 40 (python3)"),
    named(40, 41, "thread 41 (pt_autograd_0)"),
    named(40, -77, "py_xla_execute/-77"),
    named(40, -78, "py_xla_execute/-78"),
    launch(1, 50),
    kernel(1, 60),
]


def test_the_program_comes_first_and_the_profiler_last(tmp_path: Path) -> None:
    tables = opened(tmp_path, EVENTS).recorded
    processes = host_processes(tables.host, tables.threads)
    assert [each.name for each in processes] == ["process 1", "process 40", "profiler"]
    threads = {thread.thread: thread.name for thread in processes[1].threads}
    assert threads == {
        40: "python3, main thread",
        41: "pt_autograd_0 (41)",
        -78: "py_xla_execute 1",
        -77: "py_xla_execute 2",
        1350576448: "thread 1350576448, calls only",
        42: "thread 42, profiler",
    }
    assert next(iter(threads)) == 40
    assert list(threads)[-2:] == [1350576448, 42]


def test_devices_stand_above_the_processes(tmp_path: Path) -> None:
    made = layout(opened(tmp_path, EVENTS).timeline())
    groups = [track.name for track in made.tracks.all if not track.parent]
    assert groups == ["GPU 0", "process 1", "process 40", "profiler"]
    assert made.pids == {0: 1}
