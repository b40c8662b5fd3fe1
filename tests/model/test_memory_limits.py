"""An input for which the memory does not suffice is refused in a sentence, before it is read."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import thence
from helpers import TORCH, event, kernel, opened, written
from thence import memory_limits
from thence.memory_limits import check_memory, free_bytes

if TYPE_CHECKING:
    from pathlib import Path

REPLAY = TORCH / "graphs" / "block_replay.json.gz"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the limit")


def limited(limit: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs thence with a limited address space and two threads, which the sizes below fit."""
    run = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2);"
        "os.environ['POLARS_MAX_THREADS'] = '2';"
        "os.execv(sys.executable, [sys.executable, '-m', 'thence', *sys.argv[2:]])"
    )
    command = [sys.executable, "-c", run, str(limit), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@on_linux
@pytest.mark.parametrize("megabytes", [200, 1400])
def test_an_address_space_that_is_too_small_is_a_sentence_and_no_abort(megabytes: int) -> None:
    done = limited(megabytes * 10**6, "report", REPLAY)
    assert done.returncode == 2
    assert done.stderr == (
        f"thence: the address space of this process is limited to {megabytes:,} MB (ulimit -v), "
        "and 1,420 MB are needed; with POLARS_MAX_THREADS=1 1,110 MB\n"
    )


@on_linux
def test_what_is_said_to_suffice_suffices() -> None:
    done = limited(1_430_000_000, "report", REPLAY)
    assert (done.returncode, done.stderr) == (0, "")


@on_linux
def test_a_larger_input_needs_a_larger_address_space(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json", [kernel(1, 10), event("cpu_op", "x" * 20_000_000, 0, 5)])
    size = path.stat().st_size
    done = limited(1_430_000_000, "report", path)
    assert done.returncode == 2
    assert "trace.json: the address space of this process is limited to 1,430 MB" in done.stderr
    assert f"and {(1_420_000_000 + 5 * size) / 1e6:,.0f} MB are needed" in done.stderr


def test_an_input_larger_than_the_free_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a trace of 5 GB where 4 GB are free; one of 2 GB is read."""
    monkeypatch.setattr(memory_limits, "free_bytes", lambda: 4 * 10**9)
    with pytest.raises(thence.MissingRequirement) as told:
        check_memory("trace.json", 5 * 10**9)
    assert "trace.json: needs more than 5,000 MB of memory, and 4,000 MB are free" in str(told.value)
    check_memory("trace.json", 2 * 10**9)
    monkeypatch.setattr(memory_limits, "free_bytes", lambda: 100)
    monkeypatch.setattr(memory_limits, "_SMALL", 1)
    with pytest.raises(thence.MissingRequirement, match="0 MB are free"):
        opened(tmp_path, [kernel(1, 10)])


V2 = ("memory.max", "memory.current", "anon 2000000\ninactive_file 1000000\n")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "cache 5\ntotal_inactive_file 1000000\n")


@pytest.mark.parametrize(
    ("own", "folder", "files"),
    [
        ("0::/\n", "", V2),  # a container
        ("0::/system.slice/slurm/job_7/step_0\n", "system.slice/slurm/job_7/step_0", V2),
        ("0::/system.slice/slurm/job_7/step_0\n", "system.slice/slurm/job_7", V2),
        ("5:cpu:/\n4:memory:/slurm/job_7\n0::/\n", "memory/slurm/job_7", V1),
        ("4:cpu,memory:/docker/0123\n0::/\n", "memory", V1),  # whose group is the root that it sees
        ("4:cpu:/\n0::/user.slice\n", "unified/user.slice", V2),
    ],
)
def test_a_container_or_job_has_the_memory_that_its_limit_leaves(
    own: str, folder: str, files: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = free_bytes()
    assert whole is None or whole > 10**7
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(memory_limits, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory_limits, "_CGROUP", tmp_path / "groups")
    place = tmp_path / "groups" / folder
    place.mkdir(parents=True)
    limit, used, stat = files
    (place / limit).write_text("5000000\n")
    (place / used).write_text("3000000\n")
    (place / "memory.stat").write_text(stat)
    assert free_bytes() == 3_000_000
    (place / limit).write_text("max\n")
    assert free_bytes() is None or free_bytes() != 3_000_000


def test_no_limit_is_no_refusal() -> None:
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        check_memory("x", 10**6)
