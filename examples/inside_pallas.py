"""Where the time of a Pallas kernel for Mosaic GPU goes: the named scopes of every warpgroup.

Needs an NVIDIA Hopper GPU or newer, and jax 0.8 or newer. Writes inside_pallas.npz; then

    thence inside inside_pallas.npz
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from thence.inside.pallas_kernels import PallasProfile, pallas

SIZE = 256


def body(x_ref, y_ref):  # noqa: ANN001, ANN201, D103
    i = jax.lax.axis_index("blocks")
    with jax.named_scope("load"):
        value = x_ref[pl.ds(i * SIZE, SIZE)]
    with jax.named_scope("compute"):
        for _ in range(64):
            value = jnp.exp(-value * value)
    with jax.named_scope("store"):
        y_ref[pl.ds(i * SIZE, SIZE)] = value


def run(blocks: int = 264, repeats: int = 1) -> PallasProfile:
    """Run the kernel ``repeats`` times; the buffer of every execution is taken."""
    x = jax.random.uniform(jax.random.key(0), (blocks * SIZE,))

    @jax.jit
    def smooth(x: jax.Array) -> jax.Array:
        kernel = plgpu.kernel(
            body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(blocks,), grid_names=("blocks",)
        )
        return kernel(x)

    with pallas(profile_space=6) as profile:
        for _ in range(repeats):
            smooth(x).block_until_ready()
    return profile


if __name__ == "__main__":
    print(*run().save("inside_pallas.npz"))
