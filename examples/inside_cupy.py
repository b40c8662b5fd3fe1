"""Where the time of a CUDA C++ kernel goes: load, compute and store of every warp.

Needs an NVIDIA GPU and CuPy. Writes inside_cupy.npz; then

    thence inside inside_cupy.npz
"""

import cupy

from thence.inside import cuda

SOURCE = r"""
extern "C" __global__ void smooth(const float* x, float* y, int rounds, THENCE_PARAMETERS) {
    THENCE_KERNEL();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float value;
    {
        THENCE_RANGE("load");
        value = x[i];
        THENCE_WAIT(value);   // the range ends when the value is there, not when it was asked for
    }
    {
        THENCE_RANGE("compute");
        for (int round = 0; round < rounds; ++round) value = __expf(-value * value);
        THENCE_WAIT(value);
    }
    {
        THENCE_RANGE("store");
        y[i] = value;
    }
}
"""
BLOCK = 256


def run(blocks: int = 264, rounds: int = 200, repeats: int = 1, **options: object) -> cuda.Profile:
    """Launch the kernel ``repeats`` times; every launch has a buffer of its own."""
    profile = cuda.Profile(SOURCE, block=BLOCK, capacity=8, kernel="smooth", **options)
    kernel = cupy.RawKernel(profile.source, "smooth")
    x = cupy.random.rand(blocks * BLOCK, dtype=cupy.float32)
    y = cupy.empty_like(x)
    for _ in range(repeats):
        launch = profile.launch(blocks)
        kernel((blocks,), (BLOCK,), (x, y, cupy.int32(rounds), *launch.arguments))
    return profile


if __name__ == "__main__":
    print(*run().save("inside_cupy.npz"))
