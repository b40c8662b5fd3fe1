"""The pipeline of a matrix product, seen from inside: C = A B^T in half precision on tensor cores.

Each block computes 128 x 128 elements of C; tiles of A and B come through three buffers in shared
memory with cp.async, so that copies run under the mma instructions. "wait" is the time in which they
did not come soon enough. Needs an NVIDIA GPU (Ampere or newer) and CuPy. Writes inside_gemm.npz; then

    thence inside inside_gemm.npz
    python docs/make_inside_picture.py inside_gemm.npz inside_gemm.svg
"""

import cupy

from thence.inside import cuda

TILE, DEPTH, STAGES, PITCH, BLOCK = 128, 32, 3, 40, 256
TILES_BYTES = STAGES * 2 * TILE * PITCH * 2

SOURCE = r"""
typedef unsigned int u32;
constexpr int kTile = 128, kDepth = 32, kStages = 3, kPitch = 40;  // halves; 40 avoids bank conflicts
struct Stage { unsigned short a[kTile * kPitch], b[kTile * kPitch]; };

// 128 rows of 32 halves, 16 bytes a thread and step.
__device__ __forceinline__ void copy(unsigned short* to, const unsigned short* from, int pitch) {
    for (int piece = threadIdx.x; piece < kTile * kDepth / 8; piece += blockDim.x) {
        const int row = piece / (kDepth / 8), column = piece % (kDepth / 8) * 8;
        const u32 target = static_cast<u32>(__cvta_generic_to_shared(to + row * kPitch + column));
        const unsigned short* source = from + (size_t)row * pitch + column;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source));
    }
}
__device__ __forceinline__ u32 pair(const unsigned short* at) { return *reinterpret_cast<const u32*>(at); }

extern "C" __global__ void __launch_bounds__(256)
gemm(const unsigned short* a, const unsigned short* b, float* c, int n, int depth, THENCE_PARAMETERS) {
    extern __shared__ __align__(16) unsigned char memory[];
    Stage* stages = reinterpret_cast<Stage*>(memory);
    THENCE_KERNEL_IN(reinterpret_cast<unsigned int*>(memory + kStages * sizeof(Stage)));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, part = lane % 4;
    const int top = warp / 4 * 64, left = warp % 4 * 32;  // of this warp's 64 x 32 elements
    a += (size_t)blockIdx.y * kTile * depth;
    b += (size_t)blockIdx.x * kTile * depth;
    float sum[4][4][4] = {};
    const int steps = depth / kDepth;
    for (int step = 0; step < kStages - 1; ++step) {
        THENCE_RANGE("issue copies");
        copy(stages[step].a, a + step * kDepth, depth);
        copy(stages[step].b, b + step * kDepth, depth);
        asm volatile("cp.async.commit_group;");
    }
    for (int step = 0; step < steps; ++step) {
        {
            THENCE_RANGE("wait");
            asm volatile("cp.async.wait_group 1;" ::: "memory");
            __syncthreads();
        }
        {
            THENCE_RANGE("issue copies");
            const int next = step + kStages - 1;
            if (next < steps) {
                copy(stages[next % kStages].a, a + next * kDepth, depth);
                copy(stages[next % kStages].b, b + next * kDepth, depth);
            }
            asm volatile("cp.async.commit_group;");
        }
        THENCE_RANGE("mma");
        const Stage& stage = stages[step % kStages];
        for (int k = 0; k < kDepth; k += 16) {
            u32 fa[4][4], fb[4][2];
            for (int i = 0; i < 4; ++i) {
                const unsigned short* at = stage.a + (top + 16 * i + group) * kPitch + k + 2 * part;
                fa[i][0] = pair(at), fa[i][1] = pair(at + 8 * kPitch);
                fa[i][2] = pair(at + 8), fa[i][3] = pair(at + 8 * kPitch + 8);
            }
            for (int j = 0; j < 4; ++j) {
                const unsigned short* at = stage.b + (left + 8 * j + group) * kPitch + k + 2 * part;
                fb[j][0] = pair(at), fb[j][1] = pair(at + 8);
            }
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j)
                    asm volatile(
                        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
                        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                        : "+f"(sum[i][j][0]), "+f"(sum[i][j][1]), "+f"(sum[i][j][2]), "+f"(sum[i][j][3])
                        : "r"(fa[i][0]), "r"(fa[i][1]), "r"(fa[i][2]), "r"(fa[i][3]), "r"(fb[j][0]), "r"(fb[j][1]));
        }
    }
    THENCE_RANGE("store");
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
            for (int half = 0; half < 2; ++half) {
                const size_t row = blockIdx.y * kTile + top + 16 * i + group + 8 * half;
                float* to = c + row * n + blockIdx.x * kTile + left + 8 * j + 2 * part;
                to[0] = sum[i][j][2 * half], to[1] = sum[i][j][2 * half + 1];
            }
}
"""


def run(m: int = 2048, n: int = 1536, depth: int = 512, *, staged: bool = False) -> tuple[cuda.Profile, float]:
    """One product; returns the profile and the relative error of the result.

    A warp records 100 events and more. Copied from shared memory at the end (``staged``), they make
    the kernel longer than written at once.
    """
    profile = cuda.Profile(
        SOURCE,
        block=BLOCK,
        capacity=2 * (3 * depth // DEPTH + STAGES + 1),
        kernel="gemm",
        staged=staged,
        shared_bytes_used=TILES_BYTES,
    )
    kernel = cupy.RawKernel(profile.source, "gemm")
    shared = TILES_BYTES + profile.shared_bytes
    kernel.max_dynamic_shared_size_bytes = shared
    a = cupy.random.rand(m, depth, dtype=cupy.float32).astype(cupy.float16)
    b = cupy.random.rand(n, depth, dtype=cupy.float32).astype(cupy.float16)
    c = cupy.empty((m, n), dtype=cupy.float32)
    grid = (n // TILE, m // TILE)
    for _ in range(3):  # the last one is kept: caches and clocks are warm
        profile.launches.clear()
        launch = profile.launch(grid)
        sizes = (cupy.int32(n), cupy.int32(depth))
        kernel(grid, (BLOCK,), (a, b, c, *sizes, *launch.arguments), shared_mem=shared)
    exact = a.astype(cupy.float64) @ b.astype(cupy.float64).T
    return profile, float(cupy.linalg.norm(c - exact) / cupy.linalg.norm(exact))


if __name__ == "__main__":
    profile, error = run()
    print(*profile.save("inside_gemm.npz"), f"relative error {error:.1e}")
