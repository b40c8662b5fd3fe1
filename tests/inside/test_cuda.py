"""Host side of instrumented CUDA C++ kernels: names, sizes, limits, launches."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from thence import MissingRequirement, UsageError
from thence.inside import cuda, launches
from thence.inside.description import Limits
from thence.inside.files import load

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
__global__ void k(THENCE_PARAMETERS) {
    THENCE_KERNEL();
    { THENCE_RANGE("load"); }
    THENCE_BEGIN( "compute" );  THENCE_END("compute");
    THENCE_INSTANT("done");
}
"""


class FakeArrays:
    """NumPy in the place of device memory."""

    chosen = 3
    shared = 227 * 1024
    memory = 1 << 30

    def zeros(self, words: int) -> np.ndarray:
        return np.zeros(words, dtype=np.uint32)

    def words(self, array: np.ndarray) -> np.ndarray:
        return array

    def limits(self) -> Limits:
        return Limits(self.shared, self.memory)

    def device(self) -> int:
        return self.chosen

    def scalar(self, value: int) -> int:
        return value


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeArrays]:
    monkeypatch.setitem(launches._LIBRARIES, "cupy", FakeArrays)
    return FakeArrays


def profile(**options: object) -> cuda.Profile:
    return cuda.Profile(SOURCE, **{"block": 256, "overhead_cycles": 30.0, **options})


def test_names_are_found_in_order_of_appearance() -> None:
    assert cuda.names_in(SOURCE) == ("load", "compute", "done")
    assert profile(names=["more", "load"]).names == ("load", "compute", "done", "more")


@pytest.mark.parametrize("name", ["", 'a"b', "a\\b", "a\nb"])
def test_a_name_that_c_cannot_spell_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid range name"):
        profile(names=[name])


def test_an_escape_in_the_source_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a valid range name"):
        cuda.names_in(r'THENCE_RANGE("a\tb");')


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "lane"}, "scope='lane'"),
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": (1 << 24) + 1}, "capacity="),
        ({"block": (1, 2, 3, 4)}, "block="),
        ({"block": 0}, "block=0"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profile(**options)


def test_definitions_come_before_the_header_and_the_source() -> None:
    text = profile(scope="warpgroup", capacity=10, staged=False, block=(64, 5)).source
    for line in (
        '#define THENCE_NAMES "load", "compute", "done"',
        "#define THENCE_CAPACITY 10",
        "#define THENCE_SCOPE 2",
        "#define THENCE_THREADS 320",
        "#define THENCE_STAGING 0",
    ):
        assert text.index(line) < text.index("#ifndef THENCE_INSIDE_CUH")
    assert text.endswith(f"#line 1\n{SOURCE}")


@pytest.mark.parametrize(
    ("scope", "block", "traces"), [("block", 1000, 1), ("warpgroup", 320, 3), ("warp", 320, 10), ("warp", 33, 2)]
)
def test_shared_memory_is_that_of_the_events(scope: str, block: int, traces: int) -> None:
    sized = profile(scope=scope, block=block, capacity=6)
    assert sized.describe(1).traces_per_block == traces
    assert sized.shared_bytes == traces * 6 * 8
    assert profile(scope=scope, block=block, staged=False).shared_bytes == 0


def test_what_a_kernel_cannot_declare_needs_dynamic_shared_memory() -> None:
    # 8 warps of 768 events of 8 bytes are 48 KiB
    assert profile(capacity=768).shared_bytes == 48 * 1024
    with pytest.raises(UsageError, match="A capacity of 768 fits"):
        profile(capacity=769)
    own = SOURCE.replace("THENCE_KERNEL()", "THENCE_KERNEL_IN(pointer)")
    assert cuda.Profile(own, block=256, capacity=769).shared_bytes == 769 * 64


def test_a_launch_has_a_buffer_of_its_own(fake: type[FakeArrays]) -> None:
    sized = profile(capacity=4)
    first, second = sized.launch((2, 3)), sized.launch(5)
    buffer, blocks = first.arguments
    assert (buffer.shape, blocks) == ((6 * 8 * (16 + 2 * 4),), 6)
    assert second.arguments[0].shape == (5 * 8 * 24,)
    assert second.arguments[0] is not buffer
    assert first.description.device == fake.chosen
    assert first.description.grid == (2, 3, 1)
    assert sized.launches == [first, second]


def test_a_launch_that_does_not_fit_is_refused_before_it(
    fake: type[FakeArrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="shared memory"):
        profile(shared_bytes_used=227 * 1024 - 100).launch(1)
    profile(shared_bytes_used=227 * 1024 - 100, staged=False).launch(1)
    monkeypatch.setattr(fake, "memory", 1000)
    with pytest.raises(UsageError, match="the buffer of 8 traces takes"):
        profile().launch(1)


@pytest.mark.usefixtures("fake")
def test_launches_are_saved_with_what_describes_them(tmp_path: Path) -> None:
    sized = profile(capacity=4, kernel="k")
    with pytest.raises(UsageError, match="Nothing was launched"):
        sized.save(tmp_path / "k.npz")
    for value in (7, 8):
        sized.launch(1).buffer[:] = value
    paths = sized.save(tmp_path / "k.npz")
    assert [path.name for path in paths] == ["k-0.npz", "k-1.npz"]
    for path, value in zip(paths, (7, 8), strict=True):
        words, description = load(path)
        assert (words == value).all()
        assert (description.kernel, description.overhead_cycles) == ("k", 30.0)
        assert description.names == sized.names


@pytest.mark.usefixtures("fake")
def test_one_launch_is_saved_under_its_own_name(tmp_path: Path) -> None:
    sized = profile(capacity=4)
    sized.launch(1)
    assert sized.save(tmp_path / "k.npz") == [tmp_path / "k.npz"]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("staged", [True, False])
def test_the_overhead_is_measured_on_the_device_of_the_launch_as_it_records(
    monkeypatch: pytest.MonkeyPatch, *, staged: bool
) -> None:
    monkeypatch.setattr(cuda, "_measured_overhead", lambda device, *, staged: 10.0 * device + staged)
    launch = profile(overhead_cycles=None, staged=staged).launch(1)
    assert launch.description.overhead_cycles == 30.0 + staged


@pytest.mark.usefixtures("fake")
def test_launches_know_when_they_and_their_neighbours_were_made_and_read() -> None:
    sized = profile()
    before = time.time_ns()
    first = sized.launch(1)
    sized.launches.clear()  # as loops do that keep the last one
    between = time.time_ns()
    second = sized.launch(1)
    after = time.time_ns()
    facts = first.description.launch
    assert before <= facts["host_ns"] <= between <= facts["next_ns"] <= after
    assert facts["next_ns"] == second.description.launch["host_ns"]
    assert facts["pid"] == os.getpid()
    assert "taken_ns" not in facts
    first.words()
    taken = first.description.launch["taken_ns"]
    assert after <= taken <= time.time_ns()
    first.words()
    assert first.description.launch["taken_ns"] == taken  # of the first reading
    assert "next_ns" not in second.description.launch


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(UsageError, match="'cupy' or 'torch'"):
        profile().launch(1, arrays="numpy")


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_missing_library_is_one_sentence(library: str) -> None:
    try:
        __import__(library)
    except ImportError:
        with pytest.raises(MissingRequirement, match="pip install"):
            profile().launch(1, arrays=library)
    else:
        pytest.skip(f"{library} is installed")
