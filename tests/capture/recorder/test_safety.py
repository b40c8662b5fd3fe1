"""The recorder when something goes wrong: kills, full disks, refusals, forks, damage, and want of memory."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from recorder_programs import PREAMBLE, description, fake_libraries, program, rows
from thence.capture.boundaries.probe import choose_probe
from thence.capture.boundaries.samples import why_not_sampled
from thence.capture.recorder.buffers import BUFFER_BYTES, Buffers

if TYPE_CHECKING:
    from pathlib import Path


def test_dropped_records_are_counted_and_said(tmp_path: Path) -> None:
    said = program(
        """
        options = thence.RecordOptions(buffer_megabytes=8)  # of full ones: two
        recording = thence.record(OUT, options)
        recording.start()
        read, gate = recording._recorder._read, threading.Event()
        def slow(filled):
            gate.wait(); read(filled)
        recording._recorder._read = slow
        fake.kernels(kernel(), 100_000, 10**9, 1000)
        gate.set()
        recording.stop()
        print(recording.dropped, recording.counts["kernels"])
        """,
        tmp_path,
    )
    dropped, kept = map(int, said.stdout.split())
    assert dropped > 0
    assert dropped + kept == 100_000
    assert "records are being dropped" in said.stderr
    trace = thence.open(tmp_path)
    assert trace.tables.gpu.height == kept
    assert any(f"dropped {dropped:,} record" in warning for warning in trace.meta.warnings)


def test_a_program_that_fails_keeps_its_exit_code_and_its_recording(tmp_path: Path) -> None:
    body = "thence.record(OUT).start(); fake.emit(kernel()); raise SystemExit(3)"
    program(body, tmp_path, code=3)
    assert description(tmp_path)["finished"]
    assert thence.open(tmp_path).tables.gpu.height == 1


def test_a_killed_program_keeps_the_labels_of_its_graphs(tmp_path: Path) -> None:
    body = """
        from thence.capture import marks
        from thence.capture.marks.graph_nodes import CapturedGraph, Nodes

        nodes = Nodes(number=[0], type=["empty"], label=[-1], kernel=[-1], grid=[None], block=[None],
                      shared_memory=[None], parent=[-1], place=[-1])
        thence.record(OUT, thence.RecordOptions(flush_seconds=0.1)).start()
        number = 0
        while not list(OUT.glob("*/labels.json")):
            number += 1
            fake.emit(kernel(correlationId=number))
            if number == 20:  # captured while it records
                marks._graphs._graphs.append(CapturedGraph(7, 0, nodes, []))
            time.sleep(0.02)
        os.kill(os.getpid(), 9)
    """
    program(body, tmp_path, code=-signal.SIGKILL)
    [path] = tmp_path.glob("*/labels.json")
    assert [graph["id"] for graph in json.loads(path.read_text())["graphs"]] == [7]
    trace = thence.open(tmp_path)
    assert [graph.id for labels in trace.recorded.graph_labels for graph in labels.graphs] == [7]


def test_a_killed_program_leaves_what_was_on_disk(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PREAMBLE
            + textwrap.dedent(
                """
                thence.record(OUT, thence.RecordOptions(flush_seconds=0.2)).start()
                number = 0
                while True:
                    number += 1
                    fake.emit(kernel(correlationId=number))
                    print(number, time.monotonic_ns(), flush=True)
                    time.sleep(0.005)
                """
            ),
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **fake_libraries()},
    )
    end = time.monotonic() + 30
    while time.monotonic() < end and len(list(tmp_path.glob("*/kernels-*.npz"))) < 3:
        time.sleep(0.05)
    assert time.monotonic() < end, "no three parts within 30 s"
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    emitted = int(output.splitlines()[-1].split()[0])
    trace = thence.open(tmp_path)
    correlations = trace.tables.gpu["correlation"].to_list()
    assert correlations == list(range(1, len(correlations) + 1))  # no gap
    assert 3 <= len(correlations) <= emitted
    assert any("was cut" in warning for warning in trace.meta.warnings)
    assert not description(tmp_path)["finished"]


def test_a_full_disk_is_said_once_and_harms_nothing(tmp_path: Path) -> None:
    said = program(
        """
        import resource
        recording = thence.record(OUT, thence.RecordOptions(flush_seconds=0.1))
        recording.start()
        fake.emit(kernel())
        while recording.folder is None or not recording.counts.get("kernels"): time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        for lost in (50, 100, 150):
            fake.emit(*[kernel()] * 50)
            while recording._recorder.parts.lost.get("kernels", 0) < lost: time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        fake.emit(kernel(), kernel())
        recording.stop()
        print("still running")
        """,
        tmp_path,
        fresh=True,  # what a fork says goes to a file, which the limit cuts, too
    )
    assert said.stdout.strip() == "still running"
    assert said.stderr.count("cannot be written to") == 1
    told = description(tmp_path)
    assert told["finished"]
    assert (told["counts"]["kernels"], told["lost"]["kernels"]) == (3, 150)
    trace = thence.open(tmp_path)
    assert trace.tables.gpu.height == 3
    assert any("150 rows of the table kernels" in warning for warning in trace.meta.warnings)


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(thence.UsageError, match="a recording cannot be written there"):
        thence.record(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("call", "code", "expected"),
    [
        ("cuptiSubscribe", 39, "serves one at a time (error 39)"),
        ("cuptiSubscribe", 35, "no right to profile"),
        ("cuptiSubscribe", 15, "NVIDIA driver"),
        ("cuptiActivityEnable", 35, "no right to profile"),
        ("cuptiActivityEnable", 12345, "CUPTI error 12345: CUPTI_ERROR_SOMETHING"),
    ],
)
def test_what_cupti_refuses_is_told(tmp_path: Path, call: str, code: int, expected: str) -> None:
    said = program(
        f"""
        fake.fail({call!r}, {code})
        try:
            thence.record(OUT).start()
        except thence.MissingRequirement as error:
            print(error)
        print(fake.library.fake_subscribed())
        """,
        tmp_path,
    ).stdout.splitlines()
    assert expected in said[0]
    assert said[1] == "0"  # given back


def test_the_holder_of_cupti_is_named(tmp_path: Path) -> None:
    body = """
    import types
    torch = sys.modules["torch"] = types.ModuleType("torch")
    torch.autograd = types.SimpleNamespace(_profiler_enabled=lambda: {profiling})
    from thence.capture.cuda.cupti_owner import taken
    print(taken())
    """
    said = program(body.format(profiling="True"), tmp_path).stdout
    assert "torch.profiler has it: end that profile first" in said
    said = program(body.format(profiling="False"), tmp_path).stdout
    assert "torch.profiler, probably" in said
    body = "from thence.capture.cuda.cupti_owner import taken; print(taken())"
    assert "nsys" in program(body, tmp_path, env={"NSYS_PROFILING_SESSION_ID": "1"}).stdout


def test_versions_that_are_not_known_are_refused(tmp_path: Path) -> None:
    for version, refused in ((16, True), (140000, True), (130900, False), (17, False)):
        said = program(
            f"""
            fake.library.fake_version({version})
            try:
                thence.record(OUT).start()
            except thence.MissingRequirement as error:
                print(error)
            """,
            tmp_path,
        ).stdout
        assert (f"version {version}" in said) == refused


@pytest.mark.parametrize("wheel", ["11.7.101", "12.0.146", "12.9.79", "13.1.115", "13.5.25"])
def test_records_of_every_version_are_read(tmp_path: Path, wheel: str) -> None:
    program(
        f"""
        fake = fake_cupti.Fake(os.environ["THENCE_LIBCUPTI"], {wheel!r})
        with thence.record(OUT):
            for i in range(5):
                launch(f"k{{i}}", i + 1)
            fake.emit(fake.record("MEMCPY", start=9, end=10, bytes=77, copyKind=2))
        """,
        tmp_path,
    )
    gpu = thence.open(tmp_path).tables.gpu
    # The program's calls in between, such as those that note a line, have numbers, too.
    by_number = gpu.sort("correlation")["name"].cast(str).to_list()
    assert by_number[1:] == [f"k{i}" for i in range(5)]
    assert gpu["correlation"].n_unique() == 6
    assert gpu["correlation"].min() == 0
    assert gpu["bytes"].drop_nulls().to_list() == [77]


def test_no_libcupti_and_no_file_where_one_is_named(tmp_path: Path) -> None:
    body = """
    try:
        thence.record(OUT).start()
    except thence.MissingRequirement as error:
        print(error)
    """
    (tmp_path / "text").write_text("this is no library")
    for path, expected in ((tmp_path / "text", "cannot be loaded"), (tmp_path / "none", "not a file")):
        prepared = f"os.environ['THENCE_LIBCUPTI'] = {str(path)!r}\n" + textwrap.dedent(body)
        assert expected in program(prepared, tmp_path / "out").stdout


def test_a_forked_child_leaves_its_parents_recording_alone(tmp_path: Path) -> None:
    program(
        """
        recording = thence.record(OUT)
        recording.start()
        fake.emit(kernel("parent"))
        fake.library.cuptiActivityFlushAll(0)
        if os.fork() == 0:
            recording.stop()  # not the child's
            with thence.mark("x"):
                pass
            with thence.record(OUT) as own:
                fake.emit(kernel("child"))
            sys.exit(0)
        os.wait()
        fake.emit(kernel("parent"))
        """,
        tmp_path,
        env={"PYTHONWARNINGS": "ignore::DeprecationWarning"},
    )
    found = {tuple(thence.open(folder).tables.gpu["name"].cast(pl.String).to_list()) for folder in tmp_path.iterdir()}
    assert found == {("parent", "parent"), ("child",)}


def test_a_forked_child_notes_its_own_thread(tmp_path: Path) -> None:
    said = program(
        """
        recording = thence.record(OUT / "parent")
        recording.start()
        with thence.mark("before"):
            launch("parent", 1)
        fake.library.cuptiActivityFlushAll(0)
        child = os.fork()
        if child == 0:
            with thence.record(OUT / "child"), thence.mark("in the child"):
                launch("child", 2)
            print(threading.get_native_id(), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        recording.stop()
        print(threading.get_native_id())
        """,
        tmp_path,
        env={"PYTHONWARNINGS": "ignore::DeprecationWarning"},
    ).stdout.split()
    assert said[0] != said[1]
    for name, thread, label in (("child", said[0], "in the child"), ("parent", said[1], "before")):
        trace = thence.open(tmp_path / name)
        marks = trace.tables.host.filter(pl.col("name").cast(pl.String) == label)
        assert marks["thread"].to_list() == [int(thread)]
        assert rows(tmp_path / name)["label"].to_list() == [label]


def test_what_comes_before_damage_in_a_buffer_is_kept(tmp_path: Path) -> None:
    said = program(
        """
        with thence.record(OUT) as recording:
            content = b"".join([kernel(correlationId=i) for i in range(100)]) + b"\\xee" * 64
            fake.library.fake_deliver_raw(content, len(content))
            fake.emit(kernel(correlationId=100))
        print(recording._recorder._buffers.outstanding)
        """,
        tmp_path,
    )
    assert "could not be read" in said.stderr
    assert said.stdout.strip() == "0"
    trace = thence.open(tmp_path)
    assert sorted(trace.tables.gpu["correlation"]) == list(range(101))
    assert any("could not be read" in warning for warning in trace.meta.warnings)


def test_threads_that_hardly_record_do_not_use_up_the_memory() -> None:
    buffers = Buffers(2 * BUFFER_BYTES)

    def request() -> int | None:
        address, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        buffers.requested(*map(ctypes.pointer, (address, size, most)))
        assert size.value == (BUFFER_BYTES if address.value else 0)
        return address.value

    given = [request() for _ in range(200)]  # a thread's own each, as CUPTI does
    assert None not in given
    assert buffers.refused == 0
    buffers.stock()  # there are empty ones, but that is not what counts
    for address in given[:2]:  # these are full, and nobody reads them
        buffers.completed(None, 0, address, BUFFER_BYTES, BUFFER_BYTES)
    assert request() is None
    assert buffers.refused == 1
    buffers.recycle(buffers.filled.get())
    assert request() == given[0]


def test_what_another_profiler_lost_is_not_counted(tmp_path: Path) -> None:
    said = program(
        """
        from thence.capture.cuda import cupti
        library = cupti.load()
        handle = library.subscribe()
        library.register(lambda *_: None, lambda *_: None)  # it has no buffers
        library.enable(10)
        fake.emit(kernel(), kernel(), kernel())
        library.disable(10)
        library.unsubscribe(handle)
        with thence.record(OUT) as recording:
            fake.emit(kernel())
        print(recording.dropped, recording.counts["kernels"])
        """,
        tmp_path,
    )
    assert said.stdout.split() == ["0", "1"]


@pytest.mark.parametrize("samples", [True, False])
def test_a_recorded_program_gets_a_thread_or_two_and_no_heavy_import(samples: bool, tmp_path: Path) -> None:
    """One of Python that writes, and one of C that samples; Polars would bring some 70 threads into the program."""
    said = program(
        """
        before = threading.active_count(), len(os.listdir("/proc/self/task"))
        with thence.record(OUT, thence.RecordOptions(samples=OUT.name == "True")) as recording:
            with thence.mark("a", n=1):
                launch("k", 1)
            fake.library.cuptiActivityFlushAll(0)
            time.sleep(0.3)  # the first part has been written
            after = threading.active_count(), len(os.listdir("/proc/self/task"))
        third = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
        print(after[0] - before[0], after[1] - before[1], *sorted(third - {"__main__", "fake_cupti"}))
        """,
        tmp_path / str(samples),
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        fresh=True,
    ).stdout.split()
    threads, tasks, *modules = said
    sampled = samples and why_not_sampled(choose_probe().compiled) is None
    assert (threads, tasks) == ("1", "2" if sampled else "1")
    of_the_fake = {"pytest", "_pytest", "pluggy", "iniconfig", "pygments", "py", "packaging"}
    started_with_python = {"sitecustomize", "usercustomize", "coverage", "_distutils_hack"}
    of_traceback = {"_missing_stdlib_info"}  # 3.15; missing in sys.stdlib_module_names
    others = of_the_fake | started_with_python | of_traceback
    assert set(modules) - others == {"numpy", "thence"}
    assert rows(tmp_path / str(samples))["label"].to_list() == ["a"]
