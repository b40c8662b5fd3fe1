"""Recordings of processes that end in every way, through real processes and the fake libcupti."""

from __future__ import annotations

import signal
import textwrap
import time
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from recorder_programs import HERE, description, program, rows
from thence.capture.launcher.content import content

if TYPE_CHECKING:
    from pathlib import Path

POOL = f"""
import os, sys, time, threading, signal
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
import multiprocessing
import fake_cupti
import thence

recording = None
fake = fake_cupti.Fake(os.environ["THENCE_LIBCUPTI"])

def begin(out):
    global recording
    recording = thence.record(out, thence.RecordOptions(flush_seconds=60))
    recording.start()

def work(number):
    fake.emit(fake.record("CONCURRENT_KERNEL", start=1000 + number, end=1500 + number,
                          name=fake.text(f"kernel{{number}}"), correlationId=number + 1))
    return os.getpid()

def child(out):
    begin(out)
    for number in range(10):
        work(number)
"""
IN_A_POOL = """
if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    with context.Pool(2, begin, (Path(sys.argv[1]),)) as pool:
        pool.map(work, range(50), chunksize=1)
"""
IN_CHILDREN = """
if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    children = [context.Process(target=child, args=(Path(sys.argv[1]),)) for _ in range(2)]
    for one in children: one.start()
    for one in children: one.join()
    assert [one.exitcode for one in children] == [0, 0]
"""


def script(path: Path, text: str) -> Path:
    """A file: spawned children import their parent's program."""
    path.write_text(textwrap.dedent(text))
    return path


def recorded_by(tmp_path: Path, text: str) -> list[str]:
    """Names of all kernels in the recording of a program."""
    file = script(tmp_path / "program.py", text)
    out = tmp_path / "out"
    body = f"""
        import subprocess
        done = subprocess.run([sys.executable, {str(file)!r}, str(OUT)], timeout=50)
        sys.exit(done.returncode)
    """
    program(body, out, env={"PYTHONWARNINGS": "ignore::DeprecationWarning"})
    names = []
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        assert not (out / f".begun-{folder.name.rsplit('-', 1)[1]}").exists()
        trace = thence.open(folder)
        assert not any("was cut" in warning for warning in trace.meta.warnings)
        names += trace.tables.gpu["name"].cast(pl.String).to_list()
    return sorted(names)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_pool_keep_every_record(tmp_path: Path, method: str) -> None:
    """A Pool ends its workers by SIGTERM. Nothing is flushed before: the interval is 60 s."""
    names = recorded_by(tmp_path, POOL + IN_A_POOL.format(method=method))
    assert names == sorted(f"kernel{number}" for number in range(50))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_that_leave_by_os_exit_keep_every_record(tmp_path: Path, method: str) -> None:
    names = recorded_by(tmp_path, POOL + IN_CHILDREN.format(method=method))
    assert names == sorted(f"kernel{number}" for number in range(10) for _ in range(2))


def test_a_signal_still_ends_a_child_and_its_own_handler_is_left_alone(tmp_path: Path) -> None:
    text = (
        POOL
        + """
def sleeps(out, own):
    if own:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    begin(out)
    work(1)
    (out / f"ready-{os.getpid()}").touch()
    time.sleep(60)

if __name__ == "__main__":
    out = Path(sys.argv[1])
    children = [multiprocessing.get_context("fork").Process(target=sleeps, args=(out, own)) for own in (False, True)]
    for one in children: one.start()
    while len(list(out.glob("ready-*"))) < 2: time.sleep(0.01)
    for one in children: one.terminate()
    for one in children: one.join()
    print(*(one.exitcode for one in children), flush=True)
"""
    )
    file = script(tmp_path / "program.py", text)
    body = f"""
        import subprocess
        command = [sys.executable, {str(file)!r}, str(OUT)]
        print(subprocess.run(command, timeout=50, capture_output=True, text=True).stdout)
    """
    done = program(body, tmp_path / "out", env={"PYTHONWARNINGS": "ignore::DeprecationWarning"})
    assert done.stdout.split() == ["-15", "7"]


def test_the_main_process_keeps_the_default_action_of_signals(tmp_path: Path) -> None:
    said = program(
        """
        import signal, multiprocessing
        with thence.record(OUT):
            print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        """,
        tmp_path,
    ).stdout
    assert said.split() == ["True"]


@pytest.mark.parametrize("ending", ["os.abort()", "os.kill(os.getpid(), 9)"])
def test_a_process_that_vanishes_before_its_first_part_is_told_of(tmp_path: Path, ending: str) -> None:
    program(
        f"""
        import subprocess
        recording = thence.record(OUT, thence.RecordOptions(flush_seconds=60))
        recording._recorder  # nothing recorded yet
        child = os.fork()
        if child == 0:
            recording.start()
            recording._recorder._due = time.monotonic() + 60  # no part before the end
            fake.emit(kernel("lost"))
            {ending}
        os.waitpid(child, 0)
        """,
        tmp_path,
        env={"PYTHONWARNINGS": "ignore::DeprecationWarning"},
    )
    recorded = content(tmp_path)
    assert (recorded.processes, recorded.unwritten) == (0, 1)
    assert content(tmp_path).unwritten == 0  # its note is gone


def test_a_cut_recording_says_how_much_may_be_missing(tmp_path: Path) -> None:
    """1,000 activities in 2 s, and parts every 0.5 s: some 250 may be missing."""
    from recording_data import BEGAN, kernel, written

    rows = [kernel(start=BEGAN + number, end=BEGAN + number + 1) for number in range(1000)]
    folder = written(
        tmp_path / "a", {"kernels": [rows]}, finished=False, written_ns=BEGAN + 2_000_000_000,
        flush_seconds=0.5,
    )  # fmt: skip
    (text,) = [w for w in thence.open(folder).meta.warnings if "was cut" in w]
    assert "later than 2.0 s" in text
    assert "at most 0.5 s" in text
    assert "about 250 activities" in text


SUDDEN = ("os._exit(0)", "os.execv('/bin/true', ['true'])", "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)")


@pytest.mark.parametrize("ending", SUDDEN)
def test_a_sudden_end_keeps_every_kernel_that_has_ended(tmp_path: Path, ending: str) -> None:
    """Nothing was flushed before: the interval is 60 s, and the first part is not due yet."""
    program(
        f"""
        import signal
        recording = thence.record(OUT, thence.RecordOptions(flush_seconds=60))
        child = os.fork()
        if child == 0:
            recording.start()
            recording._recorder._due = time.monotonic() + 60
            with thence.mark("last"):
                launch("kept")
                {ending}
        os.waitpid(child, 0)
        """,
        tmp_path,
        env={"PYTHONWARNINGS": "ignore::DeprecationWarning"},
    )
    assert rows(tmp_path).select("name", "label").rows() == [("kept", "last")]
    assert description(tmp_path)["finished"]
    assert list(tmp_path.glob(".begun-*")) == []


def test_sigterm_ends_a_program_whose_main_thread_is_in_c(tmp_path: Path) -> None:
    """A handler in Python would not run until the sleep of 60 s is over."""
    began = time.monotonic()
    program(
        """
        import ctypes, signal
        with thence.record(OUT, thence.RecordOptions(flush_seconds=60)):
            launch("kept")
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            sleep = ctypes.CDLL(None).sleep
            while True: sleep(60)
        """,
        tmp_path,
        code=-signal.SIGTERM,
    )
    assert time.monotonic() - began < 30
    assert rows(tmp_path)["name"].to_list() == ["kept"]


def test_sigterm_ends_a_program_that_never_releases_the_gil(tmp_path: Path) -> None:
    program(
        """
        import ctypes, signal
        with thence.record(OUT):
            os.system(f"(sleep 0.5; kill -TERM {os.getpid()}) &")
            ctypes.PyDLL(None).sleep(60); ctypes.PyDLL(None).sleep(60)
        """,
        tmp_path,
        code=-signal.SIGTERM,
    )


@pytest.mark.parametrize("first", ["handler", "recording"])
@pytest.mark.parametrize("ending", ["signal.raise_signal(15)", "os.kill(os.getpid(), 15); time.sleep(60)"])
def test_a_server_that_handles_sigterm_and_raises_it_again_keeps_every_record(
    first: str, ending: str, tmp_path: Path
) -> None:
    """As uvicorn: its handler ends its loop, then it restores the default action and sends itself the signal."""
    program(
        f"""
        import signal
        recording = thence.record(OUT, thence.RecordOptions(flush_seconds=60))
        if {first == "recording"}: recording.start()
        told = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        assert before is signal.SIG_DFL
        if {first == "handler"}: recording.start()
        recording._recorder._due = time.monotonic() + 60  # no part before the end
        launch("kept")
        os.kill(os.getpid(), signal.SIGTERM)
        while not told: time.sleep(0.01)
        signal.signal(signal.SIGTERM, before)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        {ending}
        """,
        tmp_path,
        code=-signal.SIGTERM,
        fresh=True,
    )
    assert rows(tmp_path)["name"].to_list() == ["kept"]
    assert description(tmp_path)["finished"]


def test_sigterm_is_not_watched_again_after_the_recording(tmp_path: Path) -> None:
    """A watch that nobody looks for would delay the signal by seconds."""
    said = program(
        """
        import signal
        original = signal.signal
        def wrapped(*arguments): return inside(*arguments)
        with thence.record(OUT):
            inside = signal.signal  # a library that keeps what it replaced
            signal.signal = wrapped
        signal.signal = original
        inside(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        print("still there")
        """,
        tmp_path,
        code=-signal.SIGTERM,
    ).stdout
    assert "still there" not in said


def test_a_program_that_goes_on_after_a_failed_exec_is_recorded_to_its_end(tmp_path: Path) -> None:
    program(
        """
        with thence.record(OUT):
            launch("before")
            try: os.execv("/no/such/file", ["file"])
            except FileNotFoundError: pass
            launch("after")
        """,
        tmp_path,
    )
    assert rows(tmp_path)["name"].to_list() == ["before", "after"]
    assert description(tmp_path)["finished"]


def test_functions_of_the_standard_library_are_the_programs_own_again_after_the_recording(tmp_path: Path) -> None:
    said = program(
        """
        import signal
        def functions(): return [os._exit, os.execv, os.execve, signal.signal]
        before = functions()
        with thence.record(OUT): during = functions()
        print(before == functions(), any(map(dict.fromkeys(during).__contains__, before)), signal.getsignal(15))
        """,
        tmp_path,
    ).stdout
    assert said.split() == ["True", "False", "0"]


def test_a_handler_in_c_that_python_does_not_know_of_still_runs(tmp_path: Path) -> None:
    """As that of a worker of torch's DataLoader, which ends by _exit(0) if its parent sends SIGTERM."""
    program(
        """
        import ctypes, signal
        libc = ctypes.CDLL(None)
        exits = ctypes.cast(libc._exit, ctypes.c_void_p)
        with thence.record(OUT, thence.RecordOptions(flush_seconds=60)) as recording:
            pass
        libc.signal(signal.SIGTERM, exits)  # ends with the number of the signal
        with thence.record(OUT, thence.RecordOptions(flush_seconds=60)):
            launch("kept")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        """,
        tmp_path,
        code=signal.SIGTERM,
    )
    assert rows(tmp_path)["name"].to_list() == ["kept"]
