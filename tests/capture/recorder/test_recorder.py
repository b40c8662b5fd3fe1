"""What the recorder records, driven by a libcupti that calls it as the real one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from recorder_programs import description, only_folder, program, rows
from thence.capture.boundaries.probe import choose_probe
from thence.capture.recorder.options import RecordOptions
from thence.capture.recorder.process_facts import process_facts

if TYPE_CHECKING:
    from pathlib import Path


def test_kernels_copies_and_sets_come_back_as_recorded(tmp_path: Path) -> None:
    program(
        """
        with thence.record(OUT):
            fake.emit(
                kernel(start=1000, end=1600, deviceId=1, streamId=7, correlationId=11, gridX=2, gridY=3,
                       gridZ=4, blockX=32, blockY=2, blockZ=1, registersPerThread=40,
                       staticSharedMemory=16, dynamicSharedMemory=1024),
                kernel("plain", start=2000, end=2001, deviceId=1, graphNodeId=(5 << 32) | 9, graphId=5),
                fake.record("MEMCPY", start=3000, end=3500, deviceId=1, copyKind=1, srcKind=2, dstKind=3,
                            bytes=4096, correlationId=12, graphNodeId=(5 << 32) | 10, graphId=5),
                fake.record("MEMCPY2", start=4000, end=4500, deviceId=1, copyKind=10, srcKind=3, dstKind=3,
                            bytes=512, correlationId=13),
                fake.record("MEMSET", start=5000, end=5010, deviceId=1, memoryKind=3, bytes=64),
            )
        """,
        tmp_path,
    )
    trace = thence.open(tmp_path)
    gpu = trace.tables.gpu.with_columns(pl.col("name", "kind").cast(pl.String))
    began = trace.meta.epoch_ns
    assert began is not None
    assert (gpu["start"] + began).to_list() == [1000, 2000, 3000, 4000, 5000]
    assert gpu["duration"].to_list() == [600, 1, 500, 500, 10]
    assert gpu["name"].to_list() == [
        "add(float*, int)",
        "plain",
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy PtoP (Device -> Device)",
        "Memset (Device)",
    ]
    assert gpu["kind"].to_list() == ["kernel", "kernel", "memcpy", "memcpy", "memset"]
    assert gpu["graph"].to_list() == [None, 5, 5, None, None]
    assert gpu["node"].to_list() == [None, (5 << 32) | 9, (5 << 32) | 10, None, None]
    assert gpu["bytes"].to_list() == [None, None, 4096, 512, 64]
    assert gpu["correlation"].to_list() == [11, 0, 12, 13, 0]
    first = gpu.row(0, named=True)
    assert (first["grid"], first["block"]) == ([2, 3, 4], [32, 2, 1])
    assert (first["device"], first["stream"]) == (1, 7)
    assert (first["registers"], first["shared_memory"]) == (40, 1040)
    assert trace.meta.warnings == ()


def test_work_gets_the_mark_that_was_open_on_the_launching_thread(tmp_path: Path) -> None:
    program(
        """
        def other():
            with thence.mark("other"):
                launch("there", 3)
        with thence.record(OUT, thence.RecordOptions(launches=True)):
            with thence.mark("outer", layer=3):
                with thence.mark("inner"):
                    launch("deep", 1)
                thread = threading.Thread(target=other)
                thread.start(); thread.join()
                launch("shallow", 2)
            launch("outside", 4)
        """,
        tmp_path,
    )
    assert "MainThread" in thence.open(tmp_path).tables.threads["name"].to_list()
    found = dict(rows(tmp_path).select("name", "label").iter_rows())
    assert found == {"deep": "outer/inner", "shallow": "outer", "there": "other", "outside": None}


@pytest.mark.parametrize("probe", ["c", "python"])
def test_work_gets_its_mark_by_the_number_of_its_launch(tmp_path: Path, probe: str) -> None:
    """Whatever the clock said when it was queued. The probe in C notes the thread of each launch; for that in
    Python there is the reason where two threads can have launched it."""
    program(
        """
        def other():
            with thence.mark("other"):
                launch("there")
        with thence.record(OUT, thence.RecordOptions(flush_seconds=0.1)):
            launch("first")
            with thence.mark("outer"):
                with thence.mark("inner"):
                    launch("deep")
                launch("shallow")
            launch("outside")
            thread = threading.Thread(target=other)
            thread.start(); thread.join()
            launch("both")
            time.sleep(1)  # until it is noticed that the thread has ended
            with thence.mark("alone"):
                launch("again")
        """,
        tmp_path,
        env={"THENCE_PROBE": probe},
    )
    about = description(tmp_path)
    if probe == "c" and about["probe"]["kind"] == "python":
        pytest.skip("the probe was not compiled")
    assert about["probe"]["kind"] == probe
    assert about["probe"]["function"].startswith("cudaDriverGetVersion of ")
    assert about["launches"] is False
    assert about["counts"].get("calls", 0) == (7 if probe == "c" else 0)
    found = {name: rest for name, *rest in rows(tmp_path).select("name", "label", "label_rule").rows()}
    assert {name: label for name, (label, _) in found.items()} == {
        "first": None, "deep": "outer/inner", "shallow": "outer", "outside": None,
        "there": "other" if probe == "c" else None, "both": None, "again": "alone",
    }  # fmt: skip
    if probe == "python":
        assert found["there"][1] == found["both"][1] == "launched_together"
    else:
        assert found["both"][1] == "outside_ranges"
    assert found["first"][1] == found["outside"][1] == "outside_ranges"


@pytest.mark.parametrize("probe", ["c", "python"])
def test_few_calls_are_noted_without_recording_launches(tmp_path: Path, probe: str) -> None:
    program(
        """
        with thence.record(OUT):
            with thence.mark("waiting"):
                launch("k")
                fake.library.fake_wait(2_000_000)
        """,
        tmp_path,
        env={"THENCE_PROBE": probe},
    )
    trace = thence.open(tmp_path)
    assert description(tmp_path)["counts"]["calls"] == (2 if probe == "c" else 1)  # with the launch
    (call,) = trace.tables.host.filter(pl.col("name").cast(pl.String) == "cudaStreamSynchronize").to_dicts()
    (mark,) = trace.tables.host.filter(pl.col("name").cast(pl.String) == "waiting").to_dicts()
    assert call["category"] == "runtime"
    assert call["duration"] >= 2_000_000
    assert mark["start"] < call["start"] < call["start"] + call["duration"] < mark["start"] + mark["duration"]
    assert call["thread"] == mark["thread"]
    assert rows(tmp_path)["label"].to_list() == ["waiting"]


def test_a_profiler_that_the_program_starts_gets_cupti(tmp_path: Path) -> None:
    """The profile of the program comes first; a profile of the CPU alone does not matter."""
    said = program(
        """
        import enum, types
        Activity = enum.Enum("Activity", ["CPU", "CUDA"])
        profiler = types.ModuleType("torch.autograd.profiler")
        def prepare(config, activities):
            print([one.name for one in activities], "free:", not fake.library.fake_subscribed())
        profiler._prepare_profiler = prepare
        sys.modules["torch.autograd.profiler"] = profiler
        recording = thence.record(OUT)
        recording.start()
        launch("before")
        profiler._prepare_profiler("config", {Activity.CPU})
        launch("still")
        profiler._prepare_profiler("config", {Activity.CUDA})
        launch("after")
        print(profiler._prepare_profiler is prepare)
        with thence.record(OUT): launch("again")
        """,
        tmp_path,
    )
    assert said.stdout.splitlines() == ["['CPU'] free: False", "['CUDA'] free: True", "True"]
    assert "the program started torch.profiler" in said.stderr
    trace = thence.open(tmp_path)
    assert sorted(trace.tables.gpu["name"].cast(pl.String)) == ["again", "before", "still"]
    assert any("the recording ended at that point" in warning for warning in trace.meta.warnings)


def test_cuspy_gets_cupti(tmp_path: Path) -> None:
    """The activities of a profile with a CuspyConfig lack CUDA, but it subscribes to CUPTI all the same."""
    said = program(
        """
        import types
        class Profile:
            def __init__(self, cuspy): self._use_cuspy = cuspy
            def prepare_trace(self): print(self._use_cuspy, "free:", not fake.library.fake_subscribed())
        original = Profile.prepare_trace
        sys.modules["torch.profiler.profiler"] = module = types.ModuleType("torch.profiler.profiler")
        module._KinetoProfile = Profile
        recording = thence.record(OUT)
        recording.start()
        launch("before")
        Profile(False).prepare_trace()
        launch("still")
        Profile(True).prepare_trace()
        launch("after")
        print(Profile.prepare_trace is original)
        """,
        tmp_path,
    )
    assert said.stdout.splitlines() == ["False free: False", "True free: True", "True"]
    assert "the program started torch.profiler" in said.stderr
    assert sorted(thence.open(tmp_path).tables.gpu["name"].cast(pl.String)) == ["before", "still"]


@pytest.mark.parametrize("probe", ["c", "python"])
def test_launches_of_several_threads_at_once(tmp_path: Path, probe: str) -> None:
    """The probe in C is called back for every launch; for that in Python they have a reason.

    Without lines, whose moments tell more launches apart where Python has events of them.
    """
    program(
        """
        go = threading.Event()
        def other():
            with thence.mark("other"):
                launch("early")
                go.wait()
                for _ in range(5): launch("there")
        options = thence.RecordOptions(flush_seconds=0.1, lines=False)
        with thence.record(OUT, options):
            thread = threading.Thread(target=other)
            thread.start()
            time.sleep(1)
            with thence.mark("main"):
                for _ in range(5): launch("here")
                go.set(); thread.join()  # a launch after this is certain if a flush came first
        """,
        tmp_path,
        env={"THENCE_PROBE": probe},
    )
    found = rows(tmp_path).select("name", "label", "label_rule").unique().sort("name").rows()
    labels = {"early": "other", "here": "main", "there": "other"}
    if probe == "c":
        assert found == [(name, label, "launch_ranges") for name, label in labels.items()]
    else:
        assert found == [(name, None, "launched_together") for name in labels]
    # The made kernels take 5 ns, which the check notices.
    assert {finding.code for finding in thence.open(tmp_path).check().findings} == {"impossible_time"}


def test_where_the_counter_cannot_be_read_launches_are_recorded(tmp_path: Path) -> None:
    program(
        """
        fake.fail("cuptiEnableCallback", 15)
        with thence.record(OUT):
            with thence.mark("here"):
                launch("k")
        """,
        tmp_path,
    )
    about = description(tmp_path)
    assert about["launches"] is True
    assert about["probe"]["kind"] is None
    assert any("launches cannot be counted here" in warning for warning in about["warnings"])
    assert rows(tmp_path)["label"].to_list() == ["here"]


def test_launches_of_jax_that_comes_later_are_recorded_and_not_said_to_be_a_defect(tmp_path: Path) -> None:
    """A recording that begins before CUDA does cannot count launches; those of JAX are recorded in any case."""
    program(
        """
        fake.fail("cuptiEnableCallback", 15)
        with thence.record(OUT) as recording:
            time.sleep(0.2)  # a round without anything
            recording._recorder._uses_xla = lambda: True
            launch("k")
        """,
        tmp_path,
    )
    about = description(tmp_path)
    assert (about["launches"], about["warnings"]) == (True, [])


def test_excluded_launches_that_cannot_be_counted_either_are_stated(tmp_path: Path) -> None:
    program(
        """
        fake.fail("cuptiEnableCallback", 15)
        with thence.record(OUT, thence.RecordOptions(launches=False)):
            with thence.mark("here"):
                launch("k")
        """,
        tmp_path,
    )
    assert description(tmp_path)["launches"] is False
    assert any("remove launches=False" in text for text in thence.open(tmp_path).meta.warnings)
    assert rows(tmp_path)["label"].to_list() == [None]


def test_programs_that_use_jax_have_their_launches_recorded(tmp_path: Path) -> None:
    program(
        """
        with thence.record(OUT, thence.RecordOptions(flush_seconds=0.1)):
            launch("before")
            time.sleep(0.5)
            sys.modules["jax_plugins.xla_cuda13"] = os  # as JAX imports it when it looks for GPUs
            time.sleep(1)
            with thence.mark("jitted"):
                launch("after")
        """,
        tmp_path,
    )
    about = description(tmp_path)
    noted = about["probe"]["kind"] == "c"  # then the launch before is a call too
    assert (about["launches"], about["counts"]["calls"]) == (True, 2 if noted else 1)
    assert dict(rows(tmp_path).select("name", "label").iter_rows()) == {"before": None, "after": "jitted"}


def test_nothing_is_flushed_beside_launches_of_xla(tmp_path: Path) -> None:
    """A flush on another thread makes cuGraphLaunch crash: records come with full buffers, or at the end."""
    said = program(
        """
        import json
        flushed = []
        recording = thence.record(OUT, thence.RecordOptions(flush_seconds=0.1))
        recording.start()
        cupti, flush = recording._recorder._cupti, recording._recorder._cupti.flush
        cupti.flush = lambda *, unfinished: (flushed.append(unfinished), flush(unfinished=unfinished))
        launch("before")
        time.sleep(0.5)
        before = len(flushed)
        sys.modules["jax_plugins.xla_cuda13"] = os  # as JAX imports it when it looks for GPUs
        del flushed[:]
        launch("after")
        time.sleep(0.5)
        print(before > 0, flushed, json.load(open(next(recording.folder.glob("*.json"))))["flush_seconds"])
        recording.stop()
        print(flushed)
        """,
        tmp_path,
    )
    assert said.stdout.splitlines() == ["True [] None", "[True]"]
    assert rows(tmp_path)["name"].to_list() == ["before", "after"]


def test_marks_that_were_open_before_the_recording_count(tmp_path: Path) -> None:
    program(
        """
        with thence.mark("before"):
            recording = thence.record(OUT)
            recording.start()
            with thence.mark("during"):
                launch("k", 1)
        recording.stop()
        """,
        tmp_path,
    )
    assert rows(tmp_path)["label"].to_list() == ["before/during"]


def test_backward_work_gets_the_mark_of_its_forward_op(tmp_path: Path) -> None:
    program(
        """
        with thence.record(OUT) as recording:
            log = recording._log
            log.opened(41, "attention", None, {})
            launch("forward", 1)
            log.closed(41)
            log.backward_opened(41, "MulBackward0")
            launch("backward", 2)
            log.backward_opened(None, "AccumulateGrad")
            launch("accumulate", 3)
            log.backward_closed()
            log.backward_closed()
        """,
        tmp_path,
    )
    found = {name: rest for name, *rest in rows(tmp_path).select("name", "label", "phase").rows()}
    assert found["forward"] == ["attention", "forward"]
    assert found["backward"] == ["attention", "backward"]
    assert found["accumulate"][1] == "backward"


def test_launches_of_the_runtime_are_noted_by_the_calls_of_the_driver(tmp_path: Path) -> None:
    """CUPTI calls back twice a launch then, not four times, and the number is that of the kernel."""
    said = program(
        """
        with thence.record(OUT):
            print([fake.library.fake_called_back(domain, 2) for domain in (2, 1)])
            for n in range(5):
                launch(f"k{n}")
        """,
        tmp_path,
    ).stdout
    if description(tmp_path)["probe"]["kind"] == "python":
        pytest.skip("the probe was not compiled")
    assert said.strip() == "[0, 1]"  # cudaLaunchKernel, cuLaunchKernel
    trace = thence.open(tmp_path)
    calls = trace.tables.host.filter(pl.col("category").is_in(["runtime", "driver"])).sort("start")
    assert calls["name"].cast(str).to_list() == ["cuLaunchKernel"] * 5
    assert calls["correlation"].to_list() == trace.tables.gpu["correlation"].to_list()
    assert calls["thread"].n_unique() == 1


def test_only_launches_are_recorded_of_all_api_calls(tmp_path: Path) -> None:
    said = program(
        """
        with thence.record(OUT, thence.RecordOptions(launches=True)):
            off = {d: [i for i in range(1, n) if fake.library.fake_api_off(d, i)] for d, n in ((2, 8), (1, 5))}
            print(off, fake.library.fake_thread_ids())
            launch("k", 1)
            fake.emit(fake.record("RUNTIME", kind=4, start=5, end=6, cbid=3, correlationId=8, threadId=1))
        """,
        tmp_path,
    ).stdout
    # Of the fake's names: 1 cudaDriverGetVersion, 3 cudaGetLastError, 6 cudaLaunchHostFunc; 1 cuInit.
    assert said.strip() == "{2: [1, 3, 6], 1: [1]} 1"
    calls = thence.open(tmp_path).tables.host.filter(pl.col("category").is_in(["runtime", "driver"]))
    assert sorted(calls.select(pl.col("category", "name").cast(pl.String)).iter_rows()) == [
        ("driver", "cuMemcpyHtoDAsync"),
        ("runtime", "cudaLaunchKernel"),
    ]


def test_xla_flags_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert process_facts(None)["xla_flags"] == "--xla_gpu_enable_command_buffer="
    monkeypatch.delenv("XLA_FLAGS")
    assert process_facts(None)["xla_flags"] is None


def test_calls_that_build_graphs_are_recorded_with_those_that_launch() -> None:
    options = RecordOptions(launches=True)
    building = ("cuGraphAddKernelNode_v2", "cuGraphAddNode_v2", "cuGraphInstantiateWithFlags")
    building += ("cudaGraphInstantiate_v10000", "cuGraphConditionalHandleCreate")
    building += ("cuStreamBeginCaptureToGraph", "cuStreamEndCapture")
    assert all(map(options.wants_call, building))
    assert not options.wants_call("cuGraphGetNodes")
    assert not any(map(RecordOptions(launches=False).wants_call, building))


def test_calls_that_wait_are_recorded_with_launches_unless_callbacks_note_them() -> None:
    waits = ("cudaStreamSynchronize_v3020", "cuCtxSynchronize", "cudaStreamWaitEvent_v3020")
    waits += ("cuEventSynchronize", "cudaEventRecordWithFlags_v11010", "cuEventRecord")
    recorded, counted = RecordOptions(launches=True), RecordOptions()
    for name in waits:
        assert recorded.wants_call(name)
        assert not counted.wants_call(name)
        assert counted.calls_back(name, launches=True)
        assert counted.calls_back(name, launches=False)
    assert not recorded.wants_call("cudaEventQuery_v3020")


def test_overhead_is_recorded_on_request(tmp_path: Path) -> None:
    program(
        """
        options = thence.RecordOptions(launches=False, nvtx=False, overhead=True)
        now = time.time_ns()
        with thence.record(OUT, options):
            thread = {"objectId.pt.threadId": 5}
            fake.emit(kernel(),
                      fake.record("OVERHEAD", overheadKind=1, objectKind=2, start=now, end=now + 70, **thread),
                      fake.record("OVERHEAD", overheadKind=5 << 16, objectKind=1, start=now, end=now + 9))
        """,
        tmp_path,
    )
    host = thence.open(tmp_path).tables.host.with_columns(pl.col("category", "name").cast(pl.String))
    # Lines and samples, which Python has since 3.12, are left out.
    other = host.filter(~pl.col("category").is_in(["python", "sample"]))
    assert other.select("thread", "category", "name", "duration").rows() == [
        (0, "overhead", "Lazy Function Loading", 9),
        (5, "overhead", "Driver Compiler", 70),
    ]


def test_nvtx_ranges_of_each_thread_and_domain(tmp_path: Path) -> None:
    program(
        """
        now = time.time_ns()
        def marker(flags, time, id, name="", domain="", thread=9):
            return fake.record("MARKER", flags=flags, timestamp=now + time, id=id,
                               name=fake.text(name) if name else 0, domain=fake.text(domain) if domain else 0,
                               **{"objectId.pt.threadId": thread})
        with thence.record(OUT):
            fake.emit(kernel(), marker(2, 0, 1, "outer"), marker(2, 10, 2, "inner"), marker(4, 20, 2),
                      marker(2, 12, 3, "ncclAllReduce", "NCCL", thread=8), marker(4, 40, 3, thread=8),
                      marker(4, 30, 1), marker(1, 33, 4, "a moment"), marker(2, 35, 5, "never ends"))
        """,
        tmp_path,
    )
    trace = thence.open(tmp_path)
    host = trace.tables.host.select("thread", pl.col("category", "name").cast(pl.String), "duration", "parent")
    host = host.filter(host["thread"].is_in([8, 9]))  # samples are of the main thread
    assert host.filter(host["name"] != "never ends").rows() == [
        (8, "framework", "ncclAllReduce", 28, None),
        (9, "range", "outer", 30, None),
        (9, "range", "inner", 10, 1),
    ]
    assert host["name"].to_list().count("never ends") == 1
    assert any("1 NVTX range still open" in warning for warning in trace.meta.warnings)


def test_a_range_of_nccl_whose_end_cupti_does_not_see_names_nothing_that_comes_later(tmp_path: Path) -> None:
    program(
        """
        me = threading.get_native_id()
        def marker(flags, id, name="", domain=""):
            return fake.record("MARKER", flags=flags, timestamp=time.time_ns(), id=id,
                               name=fake.text(name) if name else 0, domain=fake.text(domain) if domain else 0,
                               **{"objectId.pt.threadId": me})
        with thence.record(OUT):
            fake.emit(marker(2, 1, "ncclCommInitRankConfig", "NCCL"))
            launch("later", 5)
            fake.emit(marker(2, 2, "ncclAllReduce", "NCCL"))
            launch("inside", 6)
            fake.emit(marker(4, 2))
        """,
        tmp_path,
    )
    trace = thence.open(tmp_path)
    labels = trace.activities.select(pl.col("name", "label").cast(pl.String)).rows()
    assert dict(labels) == {"later": None, "inside": "ncclAllReduce"}
    assert trace.tables.host.filter(pl.col("name").cast(pl.String) == "ncclCommInitRankConfig")[
        "duration"
    ].to_list() == [0]
    assert trace.meta.warnings == ()


@pytest.mark.parametrize("own_thread", [False, True])
def test_many_kernels_are_all_there_in_many_buffers(tmp_path: Path, own_thread: bool) -> None:
    count = 150_000  # a buffer holds about 19,000
    program(
        f"""
        with thence.record(OUT) as recording:
            fake.kernels(kernel(), {count}, 10**9, 1000, own_thread={own_thread})
        assert recording.dropped == 0
        assert fake.library.fake_dirty() == 0
        """,
        tmp_path,
    )
    gpu = thence.open(tmp_path).tables.gpu.sort("correlation")
    assert (gpu.height, gpu["correlation"].diff().drop_nulls().unique().to_list()) == (count, [1])
    assert gpu["start"].diff().drop_nulls().unique().to_list() == [1000]
    assert gpu["duration"].unique().to_list() == [500]


def test_kinds_that_alternate_and_kinds_that_nobody_knows(tmp_path: Path) -> None:
    program(
        """
        fake.library.fake_size(37, 24)
        with thence.record(OUT, thence.RecordOptions(launches=True)):
            fake.library.cuptiActivityEnable(37)
            stranger = (37).to_bytes(4, "little") + bytes(20)
            for i in range(3000):
                call = fake.record("RUNTIME", start=i, end=i, cbid=2, correlationId=i, threadId=1)
                fake.emit(call, kernel(correlationId=i), *[stranger] * (i % 3))
        """,
        tmp_path,
    )
    told = description(tmp_path)
    assert told["counts"]["kernels"] == told["counts"]["calls"] == 3000
    assert told["unknown_kinds"] == {"37": sum(i % 3 for i in range(3000))}
    trace = thence.open(tmp_path)
    assert sorted(trace.tables.gpu["correlation"]) == list(range(3000))
    assert any("CUPTI's kind 37" in warning for warning in trace.meta.warnings)


def test_a_name_that_changes_under_its_address_is_read_again(tmp_path: Path) -> None:
    program(
        """
        with thence.record(OUT, thence.RecordOptions(flush_seconds=0.1)) as recording:
            place = fake.text("first_name")
            record = fake.record("CONCURRENT_KERNEL", start=5, end=6, name=place)
            fake.emit(record)
            fake.library.cuptiActivityFlushAll(0)
            while not recording.counts: time.sleep(0.01)
            fake.kept[-1].value = b"other_name"
            fake.emit(record)
        """,
        tmp_path,
    )
    assert set(rows(tmp_path)["name"]) == {"first_name", "other_name"}


def test_a_process_that_does_nothing_on_a_gpu_leaves_no_folder(tmp_path: Path) -> None:
    program(
        """
        with thence.record(OUT / "new") as recording:
            with thence.mark("only the host"):
                pass
        try:
            recording.open()
        except thence.MissingData as error:
            print(error)
        """,
        tmp_path,
    )
    assert list((tmp_path / "new").iterdir()) == []


def test_the_recording_is_finished_when_the_program_ends(tmp_path: Path) -> None:
    program("thence.record(OUT).start(); fake.emit(kernel())", tmp_path)
    assert description(tmp_path)["finished"]


def test_one_recording_at_a_time_and_another_one_afterwards(tmp_path: Path) -> None:
    said = program(
        """
        with thence.record(OUT):
            fake.emit(kernel())
            try:
                thence.record(OUT).start()
            except thence.UsageError as error:
                print(error)
        assert fake.library.fake_finalized() and not fake.library.fake_subscribed()
        with thence.record(OUT):
            fake.emit(kernel(), kernel())
        """,
        tmp_path,
    ).stdout
    assert "is already being recorded" in said
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert len(folders) == 2
    assert folders[1] == folders[0] + "-2"
    assert thence.open(tmp_path / folders[0]).tables.gpu.height == 1
    assert thence.open(tmp_path / folders[1]).tables.gpu.height == 2


def test_a_recording_can_be_stopped_by_another_thread_and_twice(tmp_path: Path) -> None:
    program(
        """
        recording = thence.record(OUT)
        recording.start()
        fake.emit(kernel())
        thread = threading.Thread(target=recording.stop)
        thread.start(); thread.join()
        recording.stop()
        print(recording.open().tables.gpu.height)
        """,
        tmp_path,
    )
    assert description(tmp_path)["counts"]["kernels"] == 1


def test_a_rank_stays_known_when_the_framework_has_forgotten_it(tmp_path: Path) -> None:
    program(
        """
        import types
        state = types.SimpleNamespace(client=None, process_id=0)
        sys.modules["jax._src.distributed"] = types.SimpleNamespace(global_state=state)
        for out in (OUT / "before", OUT / "during"):
            recording = thence.record(out, thence.RecordOptions(flush_seconds=0.05))
            recording.start()
            if out.name == "before":  # the folder is there before the rank is known
                fake.emit(kernel())
                fake.library.cuptiActivityFlushAll(0)
                while not recording.counts.get("kernels"): time.sleep(0.01)
            state.client, state.process_id = object(), 1
            fake.emit(kernel())
            before = recording.counts.get("kernels", 0)
            while recording.counts.get("kernels", 0) == before: time.sleep(0.01)
            state.client, state.process_id = None, 0
            recording.stop()
        """,
        tmp_path,
        env={"SLURM_PROCID": "0"},
    )
    assert description(tmp_path / "before")["rank"] == 1
    assert description(tmp_path / "during")["rank"] == 1
    assert "-rank1-" in only_folder(tmp_path / "during").name


def test_a_schedule_records_the_steps_that_it_names(tmp_path: Path) -> None:
    program(
        """
        schedule = thence.Schedule(skip=1, wait=1, active=2, repeat=2)
        with thence.record(OUT, schedule=schedule) as recording:
            for step in range(10):
                launch(f"step{step}", step + 1)
                recording.step()
        """,
        tmp_path,
    )
    # 0 skipped; 1 waits, 2 and 3 are recorded; 4 waits, 5 and 6; then no more.
    trace = thence.open(tmp_path)
    found = trace.activities.select(pl.col("name", "step").cast(pl.String)).rows()
    assert found == [(f"step{n}", f"step {n}") for n in (2, 3, 5, 6)]
    about = description(tmp_path)
    noted = about["probe"]["kind"] == "c"  # launches that are not recorded are not noted either
    assert about["counts"].get("calls", 0) == (4 if noted else 0)
    assert trace.check().sound


def test_cupti_is_detached_while_a_schedule_waits_and_numbers_of_launches_go_on(tmp_path: Path) -> None:
    if choose_probe().compiled is None:
        pytest.skip("the probe was not compiled")
    said = program(
        """
        schedule = thence.Schedule(skip=1, wait=2, active=2, repeat=2)
        attached = []
        with thence.record(OUT, schedule=schedule) as recording:
            for step in range(12):
                attached.append(int(not fake.library.fake_finalized()))
                with thence.mark(f"mark{step}"):
                    launch(f"first{step}", 2 * step + 1)
                    launch(f"second{step}", 2 * step + 2)
                recording.step()
        print(*attached, fake.library.fake_calls_while_detached())
        """,
        tmp_path,
    ).stdout.split()
    recorded = [3, 4, 7, 8]
    assert said == [str(int(step in recorded)) for step in range(12)] + ["0"]
    trace = thence.open(tmp_path)
    found = trace.activities.select(pl.col("name", "step", "label").cast(pl.String)).rows()
    assert found == [(f"{which}{n}", f"step {n}", f"mark{n}") for n in recorded for which in ("first", "second")]
    assert description(tmp_path)["detachments"] == 3  # before step 0, and after steps 4 and 8
    assert trace.check().sound
    assert not trace.meta.warnings


@pytest.mark.parametrize(
    ("does", "detachments"),
    [('launch("other", 1)', 1), ("fake.library.fake_wait(1000)", 1), ("fake.library.fake_allocate()", 2)],
    ids=["launches", "waits", "pins memory"],
)
def test_cupti_stays_attached_if_another_thread_launches_or_waits(tmp_path: Path, does: str, detachments: int) -> None:
    if choose_probe().compiled is None:
        pytest.skip("the probe was not compiled")
    program(
        f"""
        finish = threading.Event()
        def other():
            {does}
            finish.wait()
        schedule = thence.Schedule(active=2, wait=2, repeat=1)
        with thence.record(OUT, schedule=schedule) as recording:
            for step in range(6):
                if step == 2:
                    threading.Thread(target=other).start()
                    time.sleep(0.2)
                launch(f"step{{step}}", step + 2)
                recording.step()
            assert fake.library.fake_finalized() == {detachments - 1}
            finish.set()
        """,
        tmp_path,
    )
    assert description(tmp_path)["detachments"] == detachments  # the first is before step 0, when nobody had launched
    warnings = thence.open(tmp_path).meta.warnings
    assert len(warnings) == 2 - detachments
    assert all("several threads launch or wait" in warning for warning in warnings)


GRAPH_LAUNCHES = {
    "noted by a callback": "fake.library.fake_graph_launch()",
    "seen in a record": 'fake.emit(kernel("k", 1, 2, correlationId=fake.launch(), graphId=3, graphNodeId=4))',
}


@pytest.mark.parametrize("launched", GRAPH_LAUNCHES.values(), ids=GRAPH_LAUNCHES.keys())
@pytest.mark.parametrize("baseline", [True, False])
def test_cupti_stays_attached_once_a_cuda_graph_was_launched_while_it_was_attached(
    tmp_path: Path, launched: str, *, baseline: bool
) -> None:
    if choose_probe().compiled is None:
        pytest.skip("the probe was not compiled")
    schedule = "None" if baseline else "thence.Schedule(active=30, wait=10)"
    program(
        f"""
        with thence.record(OUT, schedule={schedule}) as recording:
            recording.step()
            for step in range(100):
                launch("k")
                if step == 12:
                    {launched}
                recording.step()
                assert step < 12 or not fake.library.fake_finalized(), step
        """,
        tmp_path,
    )
    reason = "CUDA graphs were captured or launched"
    # With the schedule, CUPTI is detached before step 0, when nothing has run.
    assert description(tmp_path)["detachments"] == (0 if baseline else 1)
    trace = thence.open(tmp_path)
    if baseline:
        assert reason in description(tmp_path)["plain_steps"]["trouble"]
        assert trace.tables.step_times["recorded"].all()
    else:
        (warning,) = trace.meta.warnings
        assert reason in warning


@pytest.mark.parametrize("launched", GRAPH_LAUNCHES.values(), ids=GRAPH_LAUNCHES.keys())
def test_cupti_stays_attached_after_a_recording_with_cuda_graphs(tmp_path: Path, launched: str) -> None:
    """Launches of a graph that was captured under CUPTI failed once it was detached, and the program may go on."""
    program(
        f"""
        with thence.record(OUT):
            launch("k")
            {launched}
        assert not fake.library.fake_finalized() and not fake.library.fake_subscribed()
        with thence.record(OUT):
            launch("k")
        assert not fake.library.fake_finalized(), "the program still has the graph"
        """,
        tmp_path,
    )
    assert {thence.open(folder).activities.height > 0 for folder in tmp_path.iterdir()} == {True}


def test_a_recording_ends_quietly_if_another_profiler_took_cupti_while_it_was_detached(tmp_path: Path) -> None:
    if choose_probe().compiled is None:
        pytest.skip("the probe was not compiled")
    said = program(
        """
        import ctypes
        schedule = thence.Schedule(active=1, wait=1)
        with thence.record(OUT, schedule=schedule) as recording:
            for step in range(4):
                if step == 2:
                    fake.library.cuptiSubscribe(ctypes.byref(ctypes.c_void_p()), None, None)
                launch(f"step{step}", step + 1)
                recording.step()
        print(fake.library.fake_subscribed())
        """,
        tmp_path,
    ).stdout
    assert said.split() == ["1"]  # the other profiler has it still
    trace = thence.open(tmp_path)
    assert trace.activities["name"].cast(pl.String).to_list() == ["step1"]
    assert any("could not be continued" in warning for warning in trace.meta.warnings)


def test_schedules_that_make_no_sense() -> None:
    with pytest.raises(thence.UsageError, match="active is 1 or more"):
        thence.Schedule(active=0)
    assert not thence.Schedule(repeat=3).over(2)
    assert thence.Schedule(repeat=3).over(3)


def test_ranks_of_a_job_are_read_together(tmp_path: Path) -> None:
    for rank in (1, 0):
        body = f"""
        with thence.record(OUT):
            now = time.time_ns()
            fake.emit(*[kernel(start=now, end=now + 5)] * {rank + 1})
        """
        program(body, tmp_path, env={"RANK": str(rank)})
    trace = thence.open(tmp_path)
    counts = trace.tables.gpu.group_by("rank").len().sort("rank").rows()
    assert counts == [(0, 1), (1, 2)]
    assert all(f"-rank{r}-" in " ".join(trace.meta.inputs) for r in (0, 1))
    assert any("several runs" in warning for warning in trace.meta.warnings)


def test_recordings_one_after_the_other_need_the_memory_of_one(tmp_path: Path) -> None:
    """A recording has four buffers of 4 MB, which it gives back."""
    done = program(
        """
        for number in range(8):
            with thence.record(OUT / str(number)):
                launch("k")
            print(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        """,
        tmp_path,
    )
    resident = [int(line) for line in done.stdout.split()]
    assert resident[-1] - resident[1] < 50e6  # 6 x 16 MB if they were kept
