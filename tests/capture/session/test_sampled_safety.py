"""Recordings that run as long as their program harm it in no case, and memory and disk stay bounded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import thence
from recorder_programs import description, only_folder, program

if TYPE_CHECKING:
    from pathlib import Path

DAY = """
        import resource
        options = thence.RecordOptions(
            sampling=thence.Sampling(every=50, ring=3, ring_megabytes=1, budget=0, slow_steps=False), flush_seconds=0.05
        )
        peak, in_windows = [], 0
        with thence.record(OUT, options) as recording:
            for step in range(3_001):
                if recording._steps._recording:
                    in_windows += 20
                    for number in range(20):
                        launch(f"k{number}")
                with thence.mark("layer"):
                    pass
                if step % 200 == 100:
                    recording._steps.plan._ask_after = 0
                    recording.request("why")
                time.sleep(0.001)  # parts are written meanwhile
                recording.step()
                if step in (750, 3_000):
                    peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        print(in_windows, peak[1] - peak[0])
"""


def test_in_a_day_memory_and_disk_stay_bounded_and_all_that_is_gone_is_counted(tmp_path: Path) -> None:
    """3,001 steps, of which 120 are recorded in 60 windows, 15 more of them asked for: as in days of a real program."""
    launched, grown = map(int, program(DAY, tmp_path).stdout.split())
    about = description(tmp_path)
    assert about["counts"]["kernels"] + about["ring"]["rows"]["kernels"] == launched > 1_500
    assert about["dropped"] == 0
    assert about["lost"] == {}
    assert grown < 8_000  # kilobytes, in the last three quarters
    assert about["counts"]["names"] < 100
    assert sum(path.stat().st_size for path in only_folder(tmp_path).iterdir()) < 4 << 20
    assert about["sampling"]["requested"] == 15
    trace = thence.open(tmp_path)
    assert trace.meta.warnings == ()
    assert trace.activities.height == about["counts"]["kernels"]


def test_signals_by_the_thousand_a_fork_and_a_clock_that_is_set_harm_nothing(tmp_path: Path) -> None:
    done = program(
        """
        import signal
        from thence.capture.session import step_times
        shift = [0]
        step_times.time_ns = lambda: time.time_ns() + shift[0]
        options = thence.RecordOptions(sampling=thence.Sampling(every=100, budget=0, slow_steps=False))
        with thence.record(OUT, options) as recording:
            for step in range(900):
                launch(f"k{step % 3}")
                if step in (300, 500):
                    shift[0] += (1 if step == 300 else -2) * 3_600 * 10**9
                if 600 <= step < 700:
                    for _ in range(20):
                        os.kill(os.getpid(), signal.SIGUSR2)
                if step == 750:
                    child = os.fork()
                    if child == 0:
                        os.kill(os.getpid(), signal.SIGUSR2)
                        for _ in range(20):
                            recording.step()
                        os._exit(7)
                    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
                time.sleep(0.0005)
                recording.step()
        print(step)
        """,
        tmp_path,
    )
    assert done.stdout == "899\n"
    about = description(tmp_path)
    assert about["finished"]
    requests = about["sampling"]["requests"]
    assert 1 <= len(requests) <= 1 + 60 / 5  # one in five seconds, however long that took
    assert {request["why"] for request in requests} == {"SIGUSR2"}
    times = thence.open(tmp_path).tables.step_times
    assert times["duration"].max() < 60 * 10**9  # type: ignore[operator]


def test_a_full_disk_and_an_exception_leave_the_windows_before(tmp_path: Path) -> None:
    """The limit of file sizes stands for a full disk; then it has room again, and the program fails."""
    done = program(
        """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        options = thence.RecordOptions(
            sampling=thence.Sampling(every=10, ring=4, budget=0, slow_steps=False), flush_seconds=0.05
        )
        recording = thence.record(OUT, options)
        recording.start()
        for step in range(400):
            launch(f"k{step % 5}")
            if step == 100:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
            if step == 250:
                time.sleep(0.3)
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            time.sleep(0.001)
            recording.step()
        raise MemoryError("CUDA out of memory")
        """,
        tmp_path,
        code=1,
    )
    assert "CUDA out of memory" in done.stderr
    about = json.loads((only_folder(tmp_path) / "recording.json").read_text())
    assert about["finished"]
    kept, deleted, lost = about["counts"]["kernels"], about["ring"]["rows"]["kernels"], about["lost"]["kernels"]
    assert kept + deleted + lost == 80
    assert lost > 0
    assert 8 <= kept < 80
    trace = thence.open(tmp_path)
    assert trace.activities.height == kept
