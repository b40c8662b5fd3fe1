"""The CUDA C++ header: its records word by word on the host, and that nvcc takes it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from thence.inside import cuda
from thence.inside.decoding import decode

HOST = Path(__file__).with_name("inside_header_host.cpp")
GUARD, FILL = 16, 0xEEEEEEEE
COMPILER = shutil.which("g++") or shutil.which("clang++")
NVCC = shutil.which("nvcc")
SCOPE_THREADS = {1: 1024, 2: 128, 3: 32}

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def run(folder: Path, **macros: int) -> np.ndarray:
    """Words of guard, buffer and guard after six blocks."""
    assert COMPILER is not None
    program = folder / "host"
    defined = {"HOST_BLOCK_X": 64, "HOST_BLOCK_Y": 1, "HOST_BLOCKS": 6, "HOST_OFF": 0, "THENCE_THREADS": 64, **macros}
    command = [COMPILER, "-std=c++14", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined"]
    command += [f"-D{name}={value}" for name, value in defined.items()]
    command += [f"-I{cuda.HEADER.parent}", str(HOST), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    assert not printed.stderr
    return np.array(printed.stdout.split(), dtype=np.uint64).astype(np.uint32)


def expected(*, threads: int, traces: int, capacity: int, scope: int, blocks: int = 6) -> np.ndarray:
    """The records as the description of the format says, for the kernel of the host program."""
    words = 16 + 2 * capacity
    result = np.full((6, traces, words), FILL, dtype=np.uint64)
    reading = 0

    def timer() -> int:
        nonlocal reading
        reading += 1
        return 0x500000000 + 32 * (reading - 1)

    def clock() -> int:
        nonlocal reading
        reading += 1
        return 0x3FFFFFFF0 + 10 * (reading - 1)

    for block in range(min(blocks, 6)):
        for index in range(traces):
            leader = index * SCOPE_THREADS[scope]
            if leader >= threads:
                continue
            start, start_clock = timer(), clock()
            # enter load, instant hit, exit load, enter store, exit store
            tags = [0, 2 << 30 | 1, 1 << 30, 2, 1 << 30 | 2]
            events = [] if leader == 32 else [(tag, clock() & 0xFFFFFFFF) for tag in tags]
            end, end_clock = timer(), clock()
            stored = events[:capacity]
            low = 0xFFFFFFFF
            header = [0x7E4CE001, scope, 100 + block % 3, block, index]
            header += [len(stored), len(events) - len(stored), capacity]
            header += [start & low, start >> 32, end & low, end >> 32]
            header += [start_clock & low, start_clock >> 32, end_clock & low, end_clock >> 32]
            flat = header + [word for event in stored for word in event]
            result[block, index, : len(flat)] = flat
    return result[:blocks].reshape(-1).astype(np.uint32)


@needs_compiler
@pytest.mark.parametrize("staging", [0, 1])
@pytest.mark.parametrize("scope", [1, 2, 3])
@pytest.mark.parametrize("capacity", [1, 2, 5, 7])
def test_records_are_those_of_the_format(tmp_path: Path, capacity: int, scope: int, staging: int) -> None:
    words = run(tmp_path, THENCE_CAPACITY=capacity, THENCE_SCOPE=scope, THENCE_STAGING=staging)
    traces = {1: 1, 2: 1, 3: 2}[scope]
    records = expected(threads=64, traces=traces, capacity=capacity, scope=scope)
    np.testing.assert_array_equal(words[GUARD:-GUARD], records)
    assert (words[:GUARD] == FILL).all()
    assert (words[-GUARD:] == FILL).all()


@needs_compiler
def test_threads_are_numbered_through_all_dimensions(tmp_path: Path) -> None:
    words = run(tmp_path, HOST_BLOCK_X=16, HOST_BLOCK_Y=6, THENCE_THREADS=96, THENCE_CAPACITY=5)
    records = words[GUARD:-GUARD].reshape(6, 3, 26)
    assert records[..., 4].tolist() == [[0, 1, 2]] * 6
    # No thread has threadIdx.x == 32 here, so no leader leaves early.
    assert (records[..., 5] == 5).all()


@needs_compiler
@pytest.mark.parametrize("blocks", [0, 1, 4])
def test_blocks_without_room_write_nothing(tmp_path: Path, blocks: int) -> None:
    words = run(tmp_path, HOST_BLOCKS=blocks, THENCE_CAPACITY=3)
    records = expected(threads=64, traces=2, capacity=3, scope=3, blocks=blocks)
    np.testing.assert_array_equal(words[GUARD:-GUARD], records)
    assert (words[-GUARD:] == FILL).all()


@needs_compiler
def test_warps_beyond_the_declared_threads_write_nothing(tmp_path: Path) -> None:
    words = run(tmp_path, HOST_BLOCK_X=128, THENCE_THREADS=64, THENCE_CAPACITY=5)
    records = expected(threads=64, traces=2, capacity=5, scope=3)
    np.testing.assert_array_equal(words[GUARD:-GUARD], records)


@needs_compiler
def test_without_a_buffer_nothing_is_written(tmp_path: Path) -> None:
    assert (run(tmp_path, HOST_OFF=1) == FILL).all()


@needs_compiler
def test_what_the_header_writes_is_what_the_decoder_reads(tmp_path: Path) -> None:
    words = run(tmp_path, THENCE_CAPACITY=5)
    profile = cuda.Profile("", block=64, capacity=5, names=["load", "hit", "store"], overhead_cycles=0.0)
    decoded = decode(words[GUARD:-GUARD], profile.describe((3, 2)))
    assert decoded.traces.height == 12
    names = decoded.ranges.filter(decoded.ranges["index"] == 0)["name"].cast(str).to_list()
    assert sorted(names) == sorted(["load", "hit", "store"] * 6)
    assert decoded.traces["sm"].to_list() == [s for s in (100, 101, 102) * 2 for _ in range(2)]
    assert decoded.traces["dropped"].sum() == 0


KERNEL = """
extern "C" __global__ void k(const float* x, float* y, double d, THENCE_PARAMETERS) {
    THENCE_KERNEL();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float value;
    { THENCE_RANGE("load"); value = x[i]; THENCE_WAIT(value); THENCE_WAIT(d); THENCE_WAIT(i); }
    if (i == 7) return;
    THENCE_BEGIN("store"); y[i] = value; THENCE_END("store");
    THENCE_INSTANT("stored");
}
"""


def compiled(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    assert NVCC is not None
    path = folder / "kernel.cu"
    path.write_text(source)
    command = [NVCC, "-ptx", *options, "-o", str(folder / "kernel.ptx"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_nvcc
@pytest.mark.parametrize(("architecture", "staged"), [("sm_80", False), ("sm_90", True)])
def test_nvcc_takes_it_without_a_warning(tmp_path: Path, architecture: str, *, staged: bool) -> None:
    profile = cuda.Profile(KERNEL, block=128, staged=staged)
    done = compiled(tmp_path, profile.source, f"-arch={architecture}", "-Werror", "all-warnings")
    assert done.returncode == 0, done.stderr
    ptx = (tmp_path / "kernel.ptx").read_text()
    assert ptx.count("%globaltimer") >= 2
    assert ("st.shared.v2.u32" in ptx) == staged


@needs_nvcc
def test_switched_off_nothing_is_left(tmp_path: Path) -> None:
    source = "#define THENCE_OFF\n" + cuda.Profile(KERNEL, block=128).source
    done = compiled(tmp_path, source, "-arch=sm_80")
    assert done.returncode == 0, done.stderr
    assert "clock" not in (tmp_path / "kernel.ptx").read_text()


@needs_nvcc
def test_a_name_that_is_not_listed_is_an_error_of_the_compiler(tmp_path: Path) -> None:
    source = cuda.Profile(KERNEL, block=128).source.replace('THENCE_RANGE("load")', 'THENCE_RANGE("lod")')
    done = compiled(tmp_path, source, "-arch=sm_80")
    assert done.returncode != 0
    assert "this name is not in THENCE_NAMES" in done.stderr
