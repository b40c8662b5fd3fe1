"""The JAX sides of in-kernel profiles, with the real JAX: no GPU, so kernels are lowered, not run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from thence import UsageError, inside

if TYPE_CHECKING:
    from pathlib import Path

jax = pytest.importorskip("jax")
pytest.importorskip("absl", reason="Mosaic GPU needs absl-py")
if tuple(jax.__version_info__) < (0, 8, 0):
    pytest.skip("needs jax 0.8", allow_module_level=True)

from jax._src.interpreters import mlir  # noqa: E402
from jax.experimental.mosaic import gpu as mgpu  # noqa: E402
from jax.experimental.mosaic.gpu import profiler  # noqa: E402
from jaxlib.mlir import ir  # noqa: E402

from thence.inside import mosaic  # noqa: E402

SHAPE = jax.ShapeDtypeStruct((256,), np.float32)
OF_JAX = profiler.OnDeviceProfiler


def lowered(spec: Any, semantics: Any = mgpu.LoweringSemantics.Lane, block: int = 256) -> str:
    """The MLIR module of a kernel with two ranges; JAX has verified it."""
    texts = []

    def body(ctx: Any, _x: Any, _y: Any, _scratch: Any) -> None:
        with ctx.named_region("load"), ctx.named_region("wait"):
            pass
        with ctx.named_region("load"):
            texts.append(ctx.module)

    with mlir.make_ir_context(), ir.Location.unknown():
        mgpu.as_gpu_kernel(body, (2, 3, 1), (block, 1, 1), SHAPE, SHAPE, (), prof_spec=spec, thread_semantics=semantics)
        return str(texts[0])


@pytest.mark.parametrize("scope", ["warpgroup", "warp"])
@pytest.mark.parametrize("semantics", list(mgpu.LoweringSemantics))
def test_kernels_are_lowered_with_our_records(semantics: Any, scope: str) -> None:
    spec = mosaic.ProfilerSpec(capacity=9, scope=scope)
    text = lowered(spec, semantics)
    assert spec.interned_names == {"Init": 0, "load": 1, "wait": 2}
    # four ranges with an enter and an exit each; one begin; one end
    assert text.count("st.shared.v2.b32") == 8
    assert text.count("@$0 st.global.b64 [$1+32], t;") == 1
    assert text.count("ld.shared.v2.b32") == 1
    assert str(0x7E4CE001) in text
    traces = {"warpgroup": 2, "warp": 8}[scope]
    assert f"memref<{2 * 3 * traces * (16 + 2 * 9)}xi32>" in text
    assert f"memref<{traces * 2 * 9}xi32" in text


def test_specs_of_jax_still_get_the_profiler_of_jax() -> None:
    mosaic.ProfilerSpec()
    text = lowered(profiler.ProfilerSpec(64))
    assert str(0x7E4CE001) not in text
    assert "%clock" in text


def test_sizes_are_those_of_the_description() -> None:
    spec = mosaic.ProfilerSpec(capacity=5, scope="warp")
    grid, block = (4, 2), (64, 2, 1)
    description = spec.describe(grid, block)
    assert spec.smem_bytes(block) == description.shared_bytes == 4 * 5 * 8
    assert spec.jax_buffer_type(grid, block).shape == (description.words,)
    assert description.words == 8 * 4 * 26
    with mlir.make_ir_context(), ir.Location.unknown():
        assert ir.MemRefType(spec.mlir_buffer_type(grid, block)).shape == [description.words]


def test_a_block_of_broken_warpgroups_is_refused() -> None:
    with pytest.raises(UsageError, match="not a multiple of 128"):
        lowered(mosaic.ProfilerSpec(), block=64)


def test_executions_are_taken(tmp_path: Path) -> None:
    spec = mosaic.ProfilerSpec(capacity=5)
    with pytest.raises(UsageError, match="effects_barrier"):
        spec.save(tmp_path / "a.npz")
    for value in (1, 2):
        with (tmp_path / "x-trace.json").open("x") as f:
            buffer = jax.numpy.full(2 * 26, value, dtype=np.uint32)
            spec.dump(buffer, f, grid=(2, 1, 1), block=(128, 1, 1))
    first, second = (about.launch for _, about in spec.executions)
    assert second["previous_ns"] == first["taken_ns"] <= second["taken_ns"] <= time.time_ns()
    assert "previous_ns" not in first
    assert [path.name for path in spec.save(tmp_path / "a.npz")] == ["a-0.npz", "a-1.npz"]
    assert not (tmp_path / "x-trace.json").exists()


def test_the_buffers_of_jax_are_taken_at_every_execution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JAX does when it lowers a Pallas kernel: a callback with one file name for all executions."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spec = profiler.ProfilerSpec(16, dump_path=str(tmp_path))
    spec.intern_name("load")
    out_file = tmp_path / "body-1-trace.json"

    @jax.jit
    def kernel(buffer: Any) -> Any:
        def dump_profile(buffer: Any) -> None:
            with out_file.open("x") as f:
                spec.dump(buffer, f, grid=(2,), block=(128, 1, 1))

        jax.debug.callback(dump_profile, buffer)
        return buffer

    with inside.pallas(profile_space=4) as profile:
        for value in (3, 4):
            kernel(np.full(32, value, np.uint32))
    assert sorted(int(e.words[0]) for e in profile.executions) == [3, 4]
    assert profile.executions[0].description.trace_words == 16
    kernel(np.zeros(32, np.uint32)).block_until_ready()
    jax.effects_barrier()
    assert len(profile.executions) == 2
    assert not out_file.exists()


def test_the_parameters_are_those_of_this_jax() -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    with inside.pallas(profile_space=4) as profile:
        params = profile.params()
    assert isinstance(params, plgpu.CompilerParams)
    assert params.profile_space == 4
    assert params.profile_dir
