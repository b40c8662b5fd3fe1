"""Taking the buffers of JAX's own profiler, with stand-ins for the parts of JAX that a GPU needs."""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thence import MissingRequirement, UsageError, inside
from thence.inside.pallas_kernels import describe_mosaic


class Scope(enum.IntEnum):
    WARP = 1
    WARPGROUP = 2


class Spec:
    """A ProfilerSpec as jax has had since 0.10.1."""

    def __init__(self, entries: int, scope: Scope | None = Scope.WARPGROUP) -> None:
        self.entries_per_warpgroup = entries
        self.interned_names = {"Init": 0, "store": 2, "load": 1}
        if scope is not None:
            self.trace_scope = scope

    def dump(self, _buffer: Any, f: Any, **_: Any) -> None:
        f.write("JAX's own JSON")


@dataclasses.dataclass(frozen=True)
class OldParams:  # jax 0.8
    approx_math: bool = False
    profile_space: int = 0
    profile_dir: str = ""


@dataclasses.dataclass(frozen=True)
class NewParams(OldParams):  # jax 0.11.1
    profile_trace_scope: Scope = Scope.WARPGROUP
    profile_bounds_check: bool = False


class FakeJax:
    """The modules that the profile touches; `compiled` acts as a compiled kernel does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, params: type, version: tuple[int, ...]) -> None:
        self.given: list[Any] = []
        jax, debug = types.ModuleType("jax"), types.ModuleType("jax.debug")
        jax.__version_info__ = version
        jax.local_device_count = lambda: self.devices
        jax.effects_barrier = lambda: None
        debug.callback = lambda function, *args: function(*args)
        jax.debug = debug
        self.devices = 1
        self.debug = debug
        self.pl = types.ModuleType("jax.experimental.pallas")
        self.plgpu = types.ModuleType("jax.experimental.pallas.mosaic_gpu")
        self.plgpu.CompilerParams, self.plgpu.TraceScope = params, Scope
        self.plgpu.kernel = self.pl.pallas_call = self._made
        self.pl.mosaic_gpu = self.plgpu
        profiler = types.ModuleType("jax.experimental.mosaic.gpu.profiler")
        profiler.ProfilerSpec = Spec
        gpu = types.ModuleType("jax.experimental.mosaic.gpu")
        gpu.profiler = profiler
        experimental = types.ModuleType("jax.experimental")
        experimental.pallas = self.pl
        mosaic = types.ModuleType("jax.experimental.mosaic")
        mosaic.gpu = gpu
        for module in (jax, debug, experimental, mosaic, gpu, profiler, self.pl, self.plgpu):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def _made(self, _body: Any, *, compiler_params: Any = None) -> None:
        self.given.append(compiler_params)

    def compiled(self, spec: Spec, folder: str, kernel: str = "body") -> Any:
        """Calls of it are executions; as in JAX, the file's name is chosen now, and used for all."""
        path = Path(folder) / f"{kernel}-1234-trace.json"

        def dump_profile(buffer: Any) -> None:
            try:
                with path.open("x") as f:
                    spec.dump(buffer, f, grid=(2, 3), block=(256, 1, 1))
            except FileExistsError:
                pytest.fail("an execution was lost: its file exists")

        held: list[Any] = []
        original = self.debug.callback

        def run(buffer: Any) -> None:
            held[0](buffer)

        # jax.debug.callback is called when the kernel is lowered; keep what it was given.
        if original.__name__ == "<lambda>":
            held.append(dump_profile)
        else:
            taker = original.__self__
            before, taker._callback = taker._callback, lambda function, *_: held.append(function)
            original(dump_profile, None)
            taker._callback = before
        return run


@pytest.fixture
def jax_new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeJax:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return FakeJax(monkeypatch, NewParams, (0, 11, 2))


@pytest.fixture
def jax_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeJax:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return FakeJax(monkeypatch, OldParams, (0, 7, 2))


def test_kernels_made_inside_get_the_public_parameters(jax_new: FakeJax, tmp_path: Path) -> None:
    kept = (jax_new.plgpu.kernel, jax_new.pl.pallas_call, jax_new.debug.callback, Spec.dump)
    with inside.pallas(profile_space=16) as profile:
        jax_new.plgpu.kernel(None)
        jax_new.plgpu.kernel(None, compiler_params=NewParams(approx_math=True))
        jax_new.pl.pallas_call(None)
        jax_new.pl.pallas_call(None, compiler_params=NewParams())
    on = NewParams(profile_space=16, profile_dir=str(tmp_path), profile_bounds_check=True)
    assert jax_new.given == [on, dataclasses.replace(on, approx_math=True), None, on]
    assert profile.params(NewParams(profile_space=3, profile_dir="x")).profile_space == 3
    assert kept == (jax_new.plgpu.kernel, jax_new.pl.pallas_call, jax_new.debug.callback, Spec.dump)


@pytest.mark.usefixtures("jax_old")
def test_a_jax_without_bounds_checks_gets_none(tmp_path: Path) -> None:
    with inside.pallas(4) as profile:
        assert profile.params() == OldParams(profile_space=4, profile_dir=str(tmp_path))


@pytest.mark.usefixtures("jax_old")
def test_warps_need_a_jax_that_can() -> None:
    with pytest.raises(MissingRequirement, match="0\\.10\\.1"), inside.pallas(scope="warp"):
        pass


@pytest.mark.usefixtures("jax_new")
def test_warps_are_asked_for() -> None:
    with inside.pallas(scope="warp") as profile:
        assert profile.params().profile_trace_scope is Scope.WARP


def test_every_execution_is_taken_and_no_file_left(jax_new: FakeJax, tmp_path: Path) -> None:
    before = time.time_ns()
    with inside.pallas() as profile:
        run = jax_new.compiled(Spec(11), str(tmp_path))
        for value in range(3):
            run(np.full(6 * 2 * 11, value, dtype=np.uint32))
    assert [int(e.words[0]) for e in profile.executions] == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []
    description = profile.executions[0].description
    assert description.kernel == "body"
    assert description.names == ("Init", "load", "store")
    assert (description.grid, description.block) == ((2, 3, 1), (256, 1, 1))
    assert (description.traces_per_block, description.capacity) == (2, 4)
    assert (description.flavour, description.trace_words) == ("mosaic", 11)
    facts = [execution.description.launch for execution in profile.executions]
    assert facts[0]["pid"] == os.getpid()
    assert "previous_ns" not in facts[0]
    assert [f["previous_ns"] for f in facts[1:]] == [f["taken_ns"] for f in facts[:-1]]
    assert before <= facts[0]["taken_ns"] <= facts[1]["taken_ns"] <= time.time_ns()


def test_devices_that_finish_together_lose_nothing(jax_new: FakeJax, tmp_path: Path) -> None:
    jax_new.devices = 4
    with inside.pallas() as profile:
        run = jax_new.compiled(Spec(64), str(tmp_path))
        buffer = np.zeros(6 * 2 * 64, dtype=np.uint32)
        threads = [threading.Thread(target=run, args=(buffer + i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(int(e.words[0]) for e in profile.executions) == list(range(16))
    facts = [execution.description.launch for execution in profile.executions]
    assert "does not say which" in facts[0]["device"]
    # The buffer before may be another device's: it says nothing about this one's launch.
    assert not any("previous_ns" in each for each in facts)


def test_after_the_block_nothing_is_taken_or_written(jax_new: FakeJax, tmp_path: Path) -> None:
    with inside.pallas() as profile:
        run = jax_new.compiled(Spec(11), str(tmp_path))
    run(np.zeros(6 * 2 * 11, dtype=np.uint32))
    assert profile.executions == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="No kernel was profiled"):
        profile.save(tmp_path / "x.npz")


@pytest.mark.usefixtures("jax_new")
def test_blocks_do_not_nest_and_an_error_ends_one() -> None:
    with inside.pallas(), pytest.raises(UsageError, match="nested"), inside.pallas():
        pass
    with pytest.raises(KeyError), inside.pallas():
        raise KeyError
    with inside.pallas():
        pass


def test_other_callbacks_pass(jax_new: FakeJax) -> None:
    seen: list[int] = []
    with inside.pallas():
        jax_new.debug.callback(seen.append, 5)
    assert seen == [5]


@pytest.mark.usefixtures("jax_new")
@pytest.mark.parametrize("space", [0, -1])
def test_no_room_is_refused(space: int) -> None:
    with pytest.raises(UsageError, match="profile_space"), inside.pallas(space):
        pass


@pytest.mark.parametrize(
    ("version", "scope", "flavour", "traces"),
    [
        ((0, 6, 2), None, "mosaic-2024", 2),
        ((0, 7, 2), None, "mosaic-2024", 2),
        ((0, 8, 0), None, "mosaic", 2),
        ((0, 10, 2), Scope.WARP, "mosaic", 8),
        ((0, 12, 0, 1), Scope.WARPGROUP, "mosaic", 2),
    ],
)
def test_every_generation_is_described(
    version: tuple[int, ...], scope: Scope | None, flavour: str, traces: int
) -> None:
    described = describe_mosaic(Spec(64, scope), grid=(7,), block=(256,), version=version)
    assert (described.flavour, described.traces_per_block) == (flavour, traces)
    assert described.words == 7 * traces * 64


def test_without_jax_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingRequirement, match="Mosaic GPU"), inside.pallas():
        pass
