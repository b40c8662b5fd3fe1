"""Hardware counters in a recording, with the PM sampling of the tests' libcupti.

Sample number i of a window has 1000 * i + m of the m-th counter that is sampled (``fake_pm_sampling.c``).
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import thence
from recorder_programs import description, only_folder, program, rows
from thence.capture.recorder.counter_windows import graphs_loops
from thence.capture.recorder.options import options_of
from thence.model.column_file import decode

if TYPE_CHECKING:
    from pathlib import Path

DEVICES = """
from thence.capture.recorder import counter_windows
counter_windows.load_driver = lambda: None
counter_windows.active_devices = lambda driver: [0, 1]

def options(window=0.02, **more):
    return thence.RecordOptions(counters=thence.Counters(
        window_seconds=window, metrics=("tensor_cycles", "dram_read_bytes", "nvlink_receive_bytes"), **more))

def until(holds):
    while not holds():
        time.sleep(0.005)
"""


def sampled(body: str, out: Path, **how: Any) -> None:
    """Runs a program on two devices."""
    program(DEVICES + textwrap.dedent(body), out, **how)


def parts(directory: Path) -> list[dict[str, Any]]:
    return [decode(path.read_bytes()) for path in sorted(only_folder(directory).glob("counters-*.npz"))]


@pytest.mark.parametrize("probe", ["c", "python"])
def test_samples_of_all_devices_come_back(tmp_path: Path, probe: str) -> None:
    sampled(
        """
        fake.library.fake_lacks(b"nvlrx")
        with thence.record(OUT, options()):
            launch("k")
            until(lambda: fake.library.fake_pm_opened() == 2 and not fake.library.fake_pm_enabled())
        assert not fake.library.fake_pm_hosts() and not fake.library.fake_pm_enabled()
        assert not fake.library.fake_finalized_while_sampled()
        """,
        tmp_path,
        env={"THENCE_PROBE": probe},
    )
    about = description(tmp_path)["counters"]
    assert about["interval_ns"] == 10_000
    assert about["metrics"] == {
        "tensor_cycles": "TPC.TriageCompute.sm__pipe_tensor_op_hmma_cycles_active_realtime.sum",
        "dram_read_bytes": "dram__bytes_read.sum",
    }
    assert about["left_out"] == {"nvlink_receive_bytes": "GH100 cannot sample nvlrx__bytes.sum"}
    assert about["trouble"] is None
    part = parts(tmp_path)[0]  # of the first windows; the next ones may have begun before the end
    for device, window in enumerate(about["windows"][:2]):
        of_device = (part["device"] == device) & (part["start"] < window["end"])
        count = int(of_device.sum())
        assert count == window["samples"] > 0  # some 2,000 in 20 ms, fewer on a busy machine
        assert (window["device"], window["overflow"]) == (device, False)
        start = part["start"][of_device]
        assert np.array_equal(np.diff(start), np.full(count - 1, 10_000))
        assert np.array_equal(part["end"][of_device] - start, np.full(count, 10_000))
        assert (window["start"], window["end"]) == (start[0], start[-1] + 10_000)
        assert np.array_equal(part["tensor_cycles"][of_device], 1000.0 * np.arange(1, count + 1))
        assert np.array_equal(part["dram_read_bytes"][of_device], 1000.0 * np.arange(1, count + 1) + 1)
    assert thence.open(tmp_path).meta.warnings == ()


def test_without_counters_no_device_is_touched(tmp_path: Path) -> None:
    sampled(
        """
        with thence.record(OUT):
            launch("k"); time.sleep(0.3)
        assert not fake.library.fake_pm_opened()
        """,
        tmp_path,
    )
    assert description(tmp_path)["counters"] is None


def test_what_cannot_be_sampled_is_said_and_the_recording_goes_on(tmp_path: Path) -> None:
    sampled(
        """
        from pathlib import Path
        host = Path(os.environ["THENCE_LIBCUPTI"]).with_name("libnvperf_host.so")
        def attempt(name):
            with thence.record(OUT / name, options()) as recording:
                launch("k")
                until(lambda: len(recording._recorder._counters._failed) == 2)
            assert not fake.library.fake_pm_hosts(), name
        for call, code in (("cuptiPmSamplingEnable", 35), ("cuptiPmSamplingStart", 7),
                           ("cuptiDeviceGetChipName", 43), ("cuptiProfilerHostEvaluateToGpuValues", 9)):
            fake.fail(call, code)
            attempt(call)
            fake.fail(call, 0)
        host.rename(host.with_name("other.so"))
        attempt("nvperf")
        host.with_name("other.so").rename(host)
        fake.library.fake_lacks(b"_")
        attempt("chip")
        fake.library.fake_lacks(b"")
        fake.library.fake_version(25)
        attempt("old")
        """,
        tmp_path,
    )
    for name, reason in {
        "cuptiPmSamplingEnable": "the user has no right to profile",
        "cuptiPmSamplingStart": "cuptiPmSamplingStart failed with CUPTI error 7",
        "cuptiDeviceGetChipName": "profiling is not supported on this MIG device",
        "cuptiProfilerHostEvaluateToGpuValues": "the hardware reported an error",
        "nvperf": "libnvperf_host.so is not beside",
        "chip": "the chip of this device (GH100) can sample none of them",
        "old": "is older than that of CUDA 12.8",
    }.items():
        about = description(tmp_path / name)
        assert about["counters"]["trouble"].startswith("hardware counters of device ")
        assert reason in about["counters"]["trouble"]
        assert about["counters"]["trouble"] in about["warnings"]
        assert about["finished"]
        assert rows(tmp_path / name)["name"].to_list() == ["k"]


def test_a_device_that_another_process_samples_is_tried_again(tmp_path: Path) -> None:
    sampled(
        """
        with thence.record(OUT, options(every_seconds=0.1)) as recording:
            for call in ("cuptiPmSamplingSetConfig", "cuptiPmSamplingGetCounterAvailability"):  # it ends in between
                recording._recorder._counters._trouble = None
                fake.fail(call, 26)
                launch("k")
                until(lambda: recording._recorder._counters._trouble)
                fake.fail(call, 0)
            until(lambda: recording._recorder._counters._windows)
        """,
        tmp_path,
    )
    about = description(tmp_path)
    counted = [warning for warning in about["warnings"] if "another process, samples the counters" in warning]
    # One sentence a device, whichever call found it.
    assert sorted(warning.partition(" cannot ")[0][-8:] for warning in counted) == ["device 0", "device 1"]
    assert about["counters"]["trouble"] is None
    assert about["counters"]["windows"][0]["samples"] > 0


def test_loops_in_command_buffers_are_not_sampled(tmp_path: Path) -> None:
    sampled(
        """
        recording = thence.record(OUT, options())
        recording.start()
        recording._recorder._uses_xla = lambda: True
        launch("k")
        until(lambda: recording._recorder._counters._trouble)
        recording.stop()
        assert not fake.library.fake_pm_opened()
        """,
        tmp_path,
        env={"XLA_FLAGS": "--xla_a=1 --xla_gpu_enable_command_buffer=+FUSION,+WHILE"},
    )
    about = description(tmp_path)
    assert "XLA_FLAGS puts loops or branches into command buffers" in about["counters"]["trouble"]
    assert about["counters"]["trouble"] in about["warnings"]


@pytest.mark.parametrize(
    ("flags", "loops"),
    [
        ("", False),
        ("--xla_gpu_enable_command_buffer=", False),
        ("--xla_gpu_enable_command_buffer=+FUSION,-WHILE", False),
        ("--xla_dump_to=WHILE --xla_gpu_enable_command_buffer=FUSION", False),
        ("--xla_gpu_enable_command_buffer=FUSION,WHILE", True),
        ("--xla_gpu_enable_command_buffer=+conditional", True),
    ],
)
def test_loops_are_told_from_flags(monkeypatch: pytest.MonkeyPatch, flags: str, loops: bool) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert graphs_loops() is loops


def test_a_window_that_overflows_is_said(tmp_path: Path) -> None:
    sampled(
        """
        with thence.record(OUT, options()) as recording:
            launch("k")
            recording._recorder._counters._sample_bytes = 100  # of 10 KB
            until(lambda: recording._recorder._counters._windows)
        """,
        tmp_path,
    )
    about = description(tmp_path)
    first = about["counters"]["windows"][0]
    assert (first["samples"], first["overflow"]) == (0, True)
    assert "a window of hardware counters is lost" in about["warnings"][0]


def test_a_window_is_shorter_where_its_samples_do_not_fit_into_memory(tmp_path: Path) -> None:
    """Of 3,000 samples (2,000 of 20 ms, and some more) a third fits beside the buffer of the hardware."""
    sampled(
        """
        counter_windows.MAX_COUNTER_BYTES = 3000 * counter_windows.HARDWARE_BYTES + 1000 * 100
        with thence.record(OUT, options()) as recording:
            launch("k")
            until(lambda: recording._recorder._counters._windows)
        """,
        tmp_path,
    )
    for window in description(tmp_path)["counters"]["windows"]:
        assert 0 < window["samples"] < 1000  # some 670


def test_a_window_ends_before_cupti_is_detached(tmp_path: Path) -> None:
    sampled(
        """
        with thence.record(OUT, options(0.9, interval_us=500.0)) as recording:
            launch("k")
            until(fake.library.fake_pm_enabled)
            recording.pause()
            assert fake.library.fake_finalized() or recording._recorder.attached
            assert not fake.library.fake_pm_enabled()
            time.sleep(0.3)
            assert not fake.library.fake_pm_enabled()
            recording.resume(None)
        assert not fake.library.fake_finalized_while_sampled()
        """,
        tmp_path,
    )
    first = description(tmp_path)["counters"]["windows"][0]
    assert first["end"] - first["start"] < 0.8e9


def test_a_process_that_ends_in_a_window_keeps_its_samples(tmp_path: Path) -> None:
    sampled(
        """
        recording = thence.record(OUT, options(0.9, interval_us=500.0))
        recording.start()
        launch("k")
        until(fake.library.fake_pm_enabled)
        time.sleep(0.05)
        os._exit(3)
        """,
        tmp_path,
        code=3,
    )
    assert all(window["samples"] > 30 for window in description(tmp_path)["counters"]["windows"])
    assert sum(len(part["start"]) for part in parts(tmp_path)) == sum(
        window["samples"] for window in description(tmp_path)["counters"]["windows"]
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"metrics": ["sm"]}, "there is no counter 'sm'"),
        ({"metrics": ["energy_joules"]}, "there is no counter 'energy_joules'"),
        ({"interval_us": 1}, "each 5 us to 10000 us, not each 1 us"),
        ({"window_seconds": 0.0005}, "at least 100 samples"),
        ({"window_seconds": 2.0, "interval_us": 1000}, "lasts at most 1 s"),
        ({"every_seconds": 0.01}, "ends before the next one begins"),
        ({"window_seconds": 1}, "more than the 300 MB"),
        ({"last_seconds": 5}, "each 100 us or less often, not each 10 us"),
        ({"last_seconds": 200, "interval_us": 100}, "the last 200 s would need .* more than the 300 MB"),
        ({"window_seconds": "long"}, "is a number, not 'long'"),
    ],
)
def test_counters_that_make_no_sense_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(thence.UsageError, match=reason):
        options_of({"counters": given})


def test_the_defaults_fit_into_memory() -> None:
    wanted = options_of({"counters": {}}).counters
    assert wanted is not None
    assert wanted.bytes <= 300_000_000
    assert options_of({"counters": None}).counters is None


LASTING = "options(interval_us=100.0, last_seconds=0.1)"
"""1,000 samples."""


def test_the_last_seconds_are_kept_when_the_recording_ends(tmp_path: Path) -> None:
    sampled(
        f"""
        with thence.record(OUT, {LASTING}) as recording:
            launch("k")
            until(lambda: len(recording._recorder._counters._last) == 2)  # a part was decoded, 0.2 s after the begin
            time.sleep(0.3)
            assert not recording._recorder._counters._windows
        assert not fake.library.fake_pm_hosts() and not fake.library.fake_pm_enabled()
        assert fake.library.fake_pm_opened() == 2
        assert not fake.library.fake_finalized_while_sampled()
        """,
        tmp_path,
    )
    about = description(tmp_path)
    windows = about["counters"]["windows"]
    assert [(window["device"], window["overflow"]) for window in windows] == [(0, False), (1, False)]
    part = parts(tmp_path)[-1]
    for window in windows:
        of_device = part["device"] == window["device"]
        assert window["samples"] == of_device.sum() == 1000
        assert window["end"] - window["start"] == 100_000_000
        first = round(part["tensor_cycles"][of_device][0] / 1000)
        assert first > 2000  # of more than 5,000 in 0.5 s
        assert np.array_equal(part["tensor_cycles"][of_device], 1000.0 * np.arange(first, first + 1000))


def test_the_last_seconds_are_kept_when_somebody_asks(tmp_path: Path) -> None:
    sampled(
        f"""
        import signal
        with thence.record(OUT, {LASTING}) as recording:
            launch("k")
            windows = recording._recorder._counters._windows
            until(fake.library.fake_pm_enabled)
            for asked, ask in ((2, lambda: os.kill(os.getpid(), signal.SIGUSR2)), (4, (OUT / "record-now").touch)):
                time.sleep(0.02)
                ask()
                until(lambda: len(windows) == asked)
                assert fake.library.fake_pm_enabled() == 2  # sampling goes on
        """,
        tmp_path,
    )
    windows = description(tmp_path)["counters"]["windows"]
    assert [window["device"] for window in windows] == [0, 1] * 3
    starts = [window["start"] for window in windows if window["device"] == 0]
    ends = [window["end"] for window in windows if window["device"] == 0]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_a_part_that_overflows_is_said_and_sampling_begins_again(tmp_path: Path) -> None:
    sampled(
        f"""
        with thence.record(OUT, {LASTING}) as recording:
            launch("k")
            counters = recording._recorder._counters
            counters._sample_bytes = 100  # of 10 KB
            until(lambda: counters._windows)
            until(lambda: len(counters._windows) > 2 or fake.library.fake_pm_opened() > 2)
        """,
        tmp_path,
    )
    about = description(tmp_path)
    assert about["counters"]["windows"][0]["overflow"]
    assert "a window of hardware counters is lost" in about["warnings"][0]


def test_what_is_sampled_all_the_time_is_refused_with_windows_of_steps() -> None:
    last = thence.Counters(interval_us=1000, last_seconds=5)
    with pytest.raises(thence.UsageError, match="windows of steps"):
        thence.RecordOptions(counters=last, sampling=thence.Sampling())
    with pytest.raises(thence.UsageError, match="schedule"):
        thence.record("unused", thence.RecordOptions(counters=last), schedule=thence.Schedule(active=1))
