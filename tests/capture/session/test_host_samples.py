"""Recordings name the function in which a program pauses, and say what it did there."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from paused_programs import PAUSES, STEPS, recorded_pauses
from recorder_programs import description, program
from thence.capture.boundaries.probe import choose_probe
from thence.capture.boundaries.samples import why_not_sampled

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12) or why_not_sampled(choose_probe().compiled) is not None,
    reason="threads cannot be sampled here",
)
CAUSES = {
    "python": "python", "c": "host", "c_without_gil": "host", "lock": "lock", "sleep": "sleep", "queue": "lock",
    "hook": "python",
}  # fmt: skip
TRIES = 8
"""A machine with more work than cores may not let the sampler run during a pause, or the thread that is sampled."""


@pytest.mark.parametrize("kind", CAUSES)
def test_the_first_row_is_the_function_that_pauses_with_its_time_and_cause(kind: str, tmp_path: Path) -> None:
    said = []
    for number in range(TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = recorded_pauses(kind, folder)
        assert found.total_ns > STEPS * 3_000_000
        found.trace.self_check()
        first = found.rows()[0]
        named = first["name"].endswith(f" {found.function}") and first["cause"] == CAUSES[kind]
        causes = found.by_function()[found.function]
        total = sum(causes.values())
        said.append((first, causes, found.total_ns))
        # A thread that got no CPU time while it was read may run Python or C.
        if named and abs(total / found.total_ns - 1) < 0.1 and causes[CAUSES[kind]] > 0.8 * total:
            return
    raise AssertionError(said)


def test_a_function_that_does_not_pause_is_not_named(tmp_path: Path) -> None:
    found = recorded_pauses("none", tmp_path)
    assert sum(found.by_function().get(found.function, {}).values()) < 1_000_000


def test_without_samples_nothing_is_said_to_be_python(tmp_path: Path) -> None:
    found = recorded_pauses("python", tmp_path, "samples=False")
    assert {row["cause"] for row in found.rows()} == {"host"}
    assert found.trace.tables.host.filter(pl.col("category") == "sample").is_empty()
    facts = description(tmp_path / "out")
    assert facts["samples"] == {"trouble": "the option samples is off"}
    assert "samples" not in facts["counts"]


def test_samples_change_nothing_about_launches(tmp_path: Path) -> None:
    """Each kernel has the line that launched it, whatever was sampled before."""
    found = recorded_pauses("sleep", tmp_path)
    trace = found.trace
    launches = trace.tables.host.filter(pl.col("correlation").is_not_null())
    samples = trace.tables.host.filter(pl.col("category") == "sample")
    assert samples.height > STEPS // 2
    assert samples["state"].drop_nulls().len() > STEPS // 2
    starts = samples.select("thread", "start", end=pl.col("start") + pl.col("duration"))
    inside = starts.join(launches.select("thread", at="start"), on="thread").filter(
        pl.col("at") > pl.col("start"), pl.col("at") < pl.col("end")
    )
    assert inside.is_empty()


FORKS = """
import os
def pause():
    time.sleep(0.01)
with thence.record(OUT, thence.RecordOptions(own=("!fake_cupti",))):
    for number in range(5):
        launch("k")
        pause()
        child = os.fork()
        if child == 0:
            launch("child")
            pause()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_forked_child_is_not_sampled_and_its_parent_still_is(tmp_path: Path) -> None:
    program(FORKS, tmp_path)
    trace = thence.open(tmp_path)
    assert set(trace.tables.host["process"]) == {description(tmp_path)["pid"]}
    assert (trace.tables.host["state"] == "sleep").any()


FORBIDDEN = """
import ctypes, struct
# A filter of the kernel that refuses process_vm_readv with EPERM, as the profiles of some containers do.
code = [(0x20, 0, 0, 0), (0x15, 0, 1, {number}), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
text = b"".join(struct.pack("HBBI", *one) for one in code)
content = ctypes.create_string_buffer(text, len(text))
filter = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(content))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.create_string_buffer(filter, len(filter)), 0, 0) == 0
from thence.capture.boundaries.probe import choose_probe
from thence.capture.boundaries.samples import why_not_sampled
print(why_not_sampled(choose_probe().compiled))
def pause():
    time.sleep(0.01)
with thence.record(OUT, thence.RecordOptions(own=("!fake_cupti",))):
    for number in range(20):
        launch("k")
        pause()
"""


@pytest.mark.skipif("linux" not in sys.platform, reason="needs seccomp")
def test_where_process_vm_readv_is_forbidden_memory_is_read_from_its_file(tmp_path: Path) -> None:
    import platform

    number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
    said = program(FORBIDDEN.replace("{number}", str(number)), tmp_path).stdout
    assert said == "None\n"
    assert (thence.open(tmp_path).tables.host["state"] == "sleep").sum() > 5


def test_states_of_all_kinds_are_listed() -> None:
    assert set(CAUSES) | {"none"} == set(PAUSES)


def test_a_killed_program_keeps_its_samples(tmp_path: Path) -> None:
    body = """
    import os, signal
    def pause():
        time.sleep(0.01)
    options = thence.RecordOptions(own=("!fake_cupti",), flush_seconds=0.1)
    with thence.record(OUT, options):
        for number in range(60):
            launch("k")
            pause()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    program(body, tmp_path, code=-9)
    assert (thence.open(tmp_path).tables.host["state"] == "sleep").sum() > 20


def test_a_document_of_idle_time_has_no_python_by_default(tmp_path: Path) -> None:
    found = recorded_pauses("sleep", tmp_path, steps=20)
    document = json.dumps(found.trace.idle().to_json())
    causes = {cause["cause"] for cause in json.loads(document)["causes"]}
    assert "sleep" in causes
