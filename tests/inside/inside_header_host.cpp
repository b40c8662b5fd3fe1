// Runs thence_inside.cuh on the host, thread after thread, with clocks that count their readings.
// Prints the memory around and of the buffer, a word a line.
#include <cstdio>

#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
struct uint2 { unsigned int x, y; };
static inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
struct Dimensions { unsigned int x, y, z; };
static Dimensions threadIdx, blockIdx, blockDim, gridDim;
static inline unsigned int __float_as_uint(float value) { return static_cast<unsigned int>(value); }
static inline long long __double_as_longlong(double value) { return static_cast<long long>(value); }

#define THENCE_REGISTERS
namespace thence {
typedef unsigned int Word;
typedef unsigned long long Long;
static Long readings = 0;
static inline Long global_timer() { return 0x500000000ull + 32 * readings++; }
static inline Long clock_long() { return 0x3FFFFFFF0ull + 10 * readings++; }
static inline Word clock_low() { return static_cast<Word>(clock_long()); }
static inline Word multiprocessor() { return 100 + blockIdx.x; }
static inline void wait_for(Word) {}
typedef uint2 *Place;
static inline Place place_of(Word *memory) { return reinterpret_cast<uint2 *>(memory); }
static inline void store_event(Place first, Word index, Word tag, Word clock) { first[index] = {tag, clock}; }
static inline uint2 load_event(Place first, Word index) { return first[index]; }
}  // namespace thence

#define THENCE_NAMES "load", "hit", "store"
#include "thence_inside.cuh"

static void kernel(THENCE_PARAMETERS) {
    THENCE_KERNEL();
    if (threadIdx.x == 32) return;  // the leader of the second warp leaves early
    {
        THENCE_RANGE("load");
        THENCE_INSTANT("hit");
        THENCE_WAIT(1.5f);
    }
    THENCE_BEGIN("store");
    THENCE_END("store");
    THENCE_FINISH();
    THENCE_INSTANT("hit");  // after the end: not recorded
}

int main() {
    constexpr unsigned int guard = 16, fill = 0xEEEEEEEEu;
    blockDim = {HOST_BLOCK_X, HOST_BLOCK_Y, 1};
    gridDim = {3, 2, 1};
    constexpr unsigned int blocks = HOST_BLOCKS;  // of the buffer
    static unsigned int memory[2 * guard + blocks * thence::kTraces * thence::kWords];
    for (unsigned int &word : memory) word = fill;
    for (unsigned int block = 0; block < 6; ++block) {
        blockIdx = {block % 3, block / 3, 0};
        for (unsigned int y = 0; y < blockDim.y; ++y)
            for (unsigned int x = 0; x < blockDim.x; ++x) {
                threadIdx = {x, y, 0};
                kernel(HOST_OFF ? nullptr : memory + guard, blocks);
            }
    }
    for (unsigned int word : memory) std::printf("%u\n", word);
}
