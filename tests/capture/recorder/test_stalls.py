"""Samples of program counters in a recording, with the PC sampling of the tests' libcupti.

A module's CRC is 1000 plus its size, and the line of an instruction its offset over 16 (``fake_pc_sampling.c``).
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

import thence
from recorder_programs import description, program, rows
from thence.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

CONTEXTS = """
import ctypes
from thence.capture.cuda import pc_sampling
pc_sampling.load_driver = lambda: None
pc_sampling.primary_contexts = lambda driver: [5]  # of device 1; the program makes 4, of device 0
sampling = fake.library.fake_pc_sampling
WITH_LINES = b".debug_line" + bytes(89)

def context(number, begins=1):
    fake.library.fake_context(ctypes.c_void_p(number), begins)

def module(image):
    fake.library.fake_module(ctypes.c_void_p(4), image, ctypes.c_size_t(len(image)))

def sampled(context, cubin, pc, name, reason, samples):
    fake.library.fake_sampled(ctypes.c_void_p(context), ctypes.c_uint64(cubin), ctypes.c_uint64(pc),
                              ctypes.c_void_p(fake.text(name)), ctypes.c_uint32(reason), ctypes.c_uint32(samples))

def unplaced(samples, lost, full):
    fake.library.fake_unplaced(ctypes.c_uint64(samples), ctypes.c_uint64(lost), full)

STALLS = thence.RecordOptions(stalls=True)
"""


def recorded(body: str, out: Path, **how: Any) -> str:
    """Runs a program; returns what it said."""
    return program(CONTEXTS + textwrap.dedent(body), out, **how).stderr


def test_samples_have_lines_and_reasons(tmp_path: Path) -> None:
    recorded(
        """
        with thence.record(OUT, STALLS):
            assert sampling() == 1  # a context that there was
            context(4)
            assert sampling() == 2
            module(WITH_LINES)  # its CRC is 1100
            module(bytes(200))  # of a library: 1200
            sampled(4, 1100, 320, "_Z3addPfi", 10, 70)
            sampled(4, 1100, 328, "_Z3addPfi", 10, 2)
            sampled(4, 1100, 320, "_Z3addPfi", 11, 60)  # the same samples again
            sampled(4, 1100, 336, "_Z3addPfi", 12, 5)
            sampled(5, 1200, 48, "gemm", 12, 9)
            sampled(5, 1200, 64, "gemm", 12, 4)
            launch("_Z3addPfi")
        assert sampling() == 0
        assert fake.library.fake_lines_looked_up() == 3
        """,
        tmp_path,
    )
    stalls = thence.open(tmp_path).tables.stalls
    assert stalls.select("device", "kernel", "file", "line", "reason", "samples").rows() == [
        (0, "add(float*, int)", "/w/kernels.py", 20, "long_scoreboard", 72),
        (0, "add(float*, int)", "/w/kernels.py", 21, "selected", 5),
        (1, "gemm", None, None, "selected", 13),
    ]
    about = description(tmp_path)["stalls"]
    assert about["samples"] == 72 + 5 + 13
    assert (about["unplaced"], about["trouble"]) == (0, None)
    assert rows(tmp_path)["name"].to_list() == ["add(float*, int)"]


def test_what_is_missing_is_counted(tmp_path: Path) -> None:
    recorded(
        """
        with thence.record(OUT, STALLS):
            context(4)
            sampled(5, 1100, 320, "k", 10, 2)
            unplaced(11, 3, 1)
            launch("k")
            context(4, begins=0)  # it ends: nothing is asked for it any more
        """,
        tmp_path,
    )
    about = description(tmp_path)["stalls"]
    assert (about["unplaced"], about["dropped"], about["overflows"]) == (11, 3, 1)
    assert (about["unseen"], about["ended"]) == (2, 1)


def test_a_program_that_is_killed_has_the_samples_until_then(tmp_path: Path) -> None:
    recorded(
        """
        recording = thence.record(OUT, thence.RecordOptions(stalls=True, flush_seconds=0.1))
        recording.start()
        context(4)
        module(WITH_LINES)
        sampled(4, 1100, 320, "k", 10, 8)
        launch("k")
        while not recording.counts.get("stalls"):
            time.sleep(0.01)
        os._exit(3)
        """,
        tmp_path,
        code=3,
    )
    assert thence.open(tmp_path).tables.stalls["line"].to_list() == [20]


def test_what_cannot_be_sampled_is_said_and_the_recording_goes_on(tmp_path: Path) -> None:
    recorded(
        """
        def attempt(name):
            with thence.record(OUT / name, STALLS):
                context(4)
                assert fake.library.fake_pc_enabled() == sampling(), name
                launch("k")
                context(4, begins=0)
        for call, code in (("cuptiPCSamplingEnable", 35), ("cuptiPCSamplingSetConfigurationAttribute", 43),
                           ("cuptiPCSamplingStart", 26), ("cuptiPCSamplingGetData", 999)):
            fake.fail(call, code)
            attempt(call)
            fake.fail(call, 0)
        fake.library.fake_version(25)
        attempt("old")
        """,
        tmp_path,
    )
    for name, reason in {
        "cuptiPCSamplingEnable": "the user has no right to profile",
        "cuptiPCSamplingSetConfigurationAttribute": "profiling is not supported on this MIG device",
        "cuptiPCSamplingStart": "samples the counters of this device, and meanwhile CUPTI may record no kernels",
        "cuptiPCSamplingGetData": "an unknown internal error",
        "old": "is older than that of CUDA 12.8",
    }.items():
        about = description(tmp_path / name)
        assert reason in about["stalls"]["trouble"]
        assert about["stalls"]["trouble"] in about["warnings"]
        assert about["finished"]
        assert rows(tmp_path / name)["name"].to_list() == ["k"]


def test_without_the_compiled_probe_there_are_none(tmp_path: Path) -> None:
    recorded("with thence.record(OUT, STALLS): launch('k')", tmp_path, env={"THENCE_PROBE": "python"})
    assert "the compiled probe was not built" in description(tmp_path)["stalls"]["trouble"]


def test_a_fork_samples_nothing(tmp_path: Path) -> None:
    recorded(
        """
        with thence.record(OUT, STALLS):
            launch("k")
            child = os.fork()
            if not child:
                context(6)
                os._exit(sampling())
            assert os.waitpid(child, 0)[1] >> 8 == 1  # what it copied
        assert sampling() == 0
        """,
        tmp_path,
    )


def test_without_stalls_nothing_is_sampled(tmp_path: Path) -> None:
    recorded(
        """
        with thence.record(OUT):
            context(4)
            launch("k")
            assert sampling() == 0
        """,
        tmp_path,
    )
    assert description(tmp_path)["stalls"] is None


@pytest.mark.parametrize("other", [{"counters": thence.Counters()}, {"sampling": thence.Sampling()}])
def test_what_needs_cupti_for_itself_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="stalls"):
        thence.RecordOptions(stalls=True, **other)


def test_a_schedule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a schedule of steps cannot have them"):
        thence.record(tmp_path, thence.RecordOptions(stalls=True), schedule=thence.Schedule())
