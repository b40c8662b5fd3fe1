// thence_inside.cuh: records when a kernel enters and leaves ranges; `thence inside` decodes the records.
//
// Compiles with NVRTC (CuPy RawKernel and RawModule), nvcc and PyTorch's inline extensions, C++14
// or newer; it includes no other header. thence.inside.cuda.Profile puts this header and a definition of
// the names that the kernel uses in front of the kernel's source.
//
//     extern "C" __global__ void scale(const float* x, float* y, THENCE_PARAMETERS) {
//         THENCE_KERNEL();
//         float v;
//         { THENCE_RANGE("load");  v = x[threadIdx.x]; }      // until the closing brace
//         THENCE_BEGIN("compute"); v = v * v; THENCE_END("compute");
//         THENCE_INSTANT("computed");
//         { THENCE_RANGE("store"); y[threadIdx.x] = v; }
//     }                                                       // the trace ends with the kernel
//
// A trace has the events of the first thread (the leader) of a thread block, warpgroup or warp. Events are
// staged in shared memory; the leader copies them to global memory when it leaves the kernel. There is no
// barrier, so threads may leave early or run different code. An event that does not fit is dropped and
// counted. A block that the buffer has no room for writes nothing. If the buffer is a null pointer, no
// block writes anything.
//
// On an H200, an event takes 33 cycles of its warp's time and 64 bits of shared memory. A kernel of
// 4.5 us with three ranges in every warp became 0.7 us longer, including the start of the trace, the
// events, the waits and the copy.
//
// The clock is read when the previous instruction has been issued, which for a load is before its
// data has arrived. The wait for the data is then in the range that uses the data. With
// THENCE_WAIT(value) inside a range, the range ends only when the value has been computed.
//
// Define before including this header (Profile does this):
//     THENCE_NAMES     "load", "compute", ...  every name, in the order of the description
//     THENCE_CAPACITY  events of one trace (64)
//     THENCE_SCOPE     1 thread block, 2 warpgroup, 3 warp (3)
//     THENCE_THREADS   most threads of a block (1024); determines the size of the shared memory
//     THENCE_STAGING   1: events are staged in shared memory; 0: they are written to global memory
//                      directly, for kernels that have no shared memory left, or record more than some
//                      dozens of events: copying 100 events in each of 8 warps made a kernel of 33 us
//                      2 us longer (1)
//     THENCE_OFF       makes all macros empty, except THENCE_PARAMETERS
// The defaults are in parentheses.

#ifndef THENCE_INSIDE_CUH
#define THENCE_INSIDE_CUH

#ifndef THENCE_CAPACITY
#define THENCE_CAPACITY 64
#endif
#ifndef THENCE_SCOPE
#define THENCE_SCOPE 3
#endif
#ifndef THENCE_THREADS
#define THENCE_THREADS 1024
#endif
#ifndef THENCE_STAGING
#define THENCE_STAGING 1
#endif

// A kernel takes these two after its own parameters; Launch.arguments holds them.
#define THENCE_PARAMETERS unsigned int *thence_buffer, unsigned int thence_blocks

namespace thence {

typedef unsigned int Word;
typedef unsigned long long Long;

// An unnamed enum, so that the compiler does not warn about unused constants.
enum : Word {
    kMagic = 0x7E4CE000u | 1u,  // the version is in the low bits
    kEnter = 0u,
    kExit = 1u << 30,
    kInstant = 2u << 30,
    kHeader = 16,
    kCapacity = THENCE_CAPACITY,
    kWords = kHeader + 2 * kCapacity,
    kScopeThreads = THENCE_SCOPE == 3 ? 32 : THENCE_SCOPE == 2 ? 128 : 1024,
    kTraces = THENCE_SCOPE == 1 ? 1 : (THENCE_THREADS + kScopeThreads - 1) / kScopeThreads,
    kStagingWords = kTraces * 2 * kCapacity,
    kUnknown = ~0u
};

static_assert(THENCE_SCOPE >= 1 && THENCE_SCOPE <= 3, "THENCE_SCOPE is 1 (thread block), 2 (warpgroup) or 3 (warp)");
static_assert(THENCE_CAPACITY >= 1 && THENCE_CAPACITY <= (1 << 24), "THENCE_CAPACITY is between 1 and 2^24 events");
static_assert(THENCE_THREADS >= 1 && THENCE_THREADS <= 1024, "THENCE_THREADS is between 1 and 1024");

#ifndef THENCE_REGISTERS  // defined by compilers that provide their own functions for these registers
__device__ __forceinline__ Word clock_low() {
    Word value;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(value)::"memory");
    return value;
}
__device__ __forceinline__ Long clock_long() {
    Long value;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(value)::"memory");
    return value;
}
__device__ __forceinline__ Long global_timer() {
    Long value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value)::"memory");
    return value;
}
__device__ __forceinline__ Word multiprocessor() {
    Word value;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(value));
    return value;
}
// The address of a trace's events. In shared memory it is a 32-bit address that is kept in a register:
// otherwise the compiler computes it again for each event, which takes longer than all other instructions
// of the event together.
#if THENCE_STAGING
typedef Word Place;
__device__ __forceinline__ Place place_of(Word *memory) {
    Word place = static_cast<Word>(__cvta_generic_to_shared(memory));
    asm volatile("" : "+r"(place));
    return place;
}
__device__ __forceinline__ void store_event(Place first, Word index, Word tag, Word clock) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(first + 8 * index), "r"(tag), "r"(clock) : "memory");
}
__device__ __forceinline__ uint2 load_event(Place first, Word index) {
    uint2 event;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(event.x), "=r"(event.y) : "r"(first + 8 * index) : "memory");
    return event;
}
#else
typedef uint2 *Place;
__device__ __forceinline__ Place place_of(Word *memory) { return reinterpret_cast<uint2 *>(memory); }
__device__ __forceinline__ void store_event(Place first, Word index, Word tag, Word clock) { first[index] = make_uint2(tag, clock); }
__device__ __forceinline__ uint2 load_event(Place first, Word index) { return first[index]; }
#endif
// A predicated instruction must wait for the value in its predicate, and all later instructions wait too.
__device__ __forceinline__ void wait_for(Word value) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x7FC05EED; @p nanosleep.u32 0; }" ::"r"(value) : "memory");
}
#endif

// A 4-byte value as a word; of an 8-byte value, a word that is available only when the whole value is.
__device__ __forceinline__ Word bits_of(Word value) { return value; }
__device__ __forceinline__ Word bits_of(int value) { return static_cast<Word>(value); }
__device__ __forceinline__ Word bits_of(float value) { return __float_as_uint(value); }
__device__ __forceinline__ Word bits_of(double value) { return static_cast<Word>(__double_as_longlong(value)); }
__device__ __forceinline__ Word bits_of(Long value) { return static_cast<Word>(value) ^ static_cast<Word>(value >> 32); }

// Compile-time lookup of a name's number.
__device__ constexpr bool same(const char *a, const char *b) {
    while (*a != 0 && *a == *b) ++a, ++b;
    return *a == *b;
}
#ifdef THENCE_NAMES
__device__ constexpr Word name_id(const char *name) {
    const char *const names[] = {THENCE_NAMES};
    for (Word i = 0; i < sizeof(names) / sizeof(names[0]); ++i)
        if (same(names[i], name)) return i;
    return kUnknown;
}
#else
__device__ constexpr Word name_id(const char *) { return kUnknown; }
#endif

// One object per thread, in registers. Only the leader of a scope writes.
class Trace {
  public:
    // staging: kStagingWords words of shared memory of the block, 8-byte aligned; null without staging.
    __device__ __forceinline__ Trace(Word *buffer, Word blocks, Word *staging) : record_(buffer), events_(), seen_(0), leader_(false) {
        const Word thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        const Long block = blockIdx.x + static_cast<Long>(gridDim.x) * (blockIdx.y + static_cast<Long>(gridDim.y) * blockIdx.z);
        const Word index = thread / kScopeThreads;
        leader_ = thread % kScopeThreads == 0 && buffer != nullptr && block < blocks && index < kTraces;
        if (!leader_) return;
        record_ = buffer + (block * kTraces + index) * kWords;
        events_ = place_of(THENCE_STAGING ? staging + index * (2 * kCapacity) : record_ + kHeader);
        const Long timer = global_timer();
        const Long clock = clock_long();
        put(0, kMagic, THENCE_SCOPE);  // events count clock64: 0 in bits 8-15
        put(2, multiprocessor(), static_cast<Word>(block));
        put(4, index, 0);
        put(6, 0, kCapacity);
        put_long(8, timer);
        put_long(10, 0);  // the end times are zero until the trace has finished
        put_long(12, clock);
        put_long(14, 0);
    }

    __device__ __forceinline__ ~Trace() { finish(); }

    __device__ __forceinline__ void event(Word tag) {
        if (!leader_) return;
        const Word clock = clock_low();
        if (seen_ < kCapacity) store_event(events_, seen_, tag, clock);
        ++seen_;
    }

    // Ends the trace; later events are not recorded.
    __device__ __forceinline__ void finish() {
        if (!leader_) return;
        leader_ = false;
        const Long timer = global_timer();
        const Long clock = clock_long();
        const Word stored = seen_ < kCapacity ? seen_ : kCapacity;
        record_[5] = stored;
        record_[6] = seen_ - stored;
        put_long(10, timer);
        put_long(14, clock);
        if (!THENCE_STAGING) return;
        uint2 *const to = reinterpret_cast<uint2 *>(record_ + kHeader);
        for (Word i = 0; i < stored; ++i) to[i] = load_event(events_, i);
    }

    Trace(const Trace &) = delete;
    Trace &operator=(const Trace &) = delete;

  private:
    __device__ __forceinline__ void put(Word at, Word first, Word second) { *reinterpret_cast<uint2 *>(record_ + at) = make_uint2(first, second); }
    __device__ __forceinline__ void put_long(Word at, Long value) { put(at, static_cast<Word>(value), static_cast<Word>(value >> 32)); }

    Word *record_;
    Place events_;
    Word seen_;
    bool leader_;
};

class Range {
  public:
    __device__ __forceinline__ Range(Trace &trace, Word name) : trace_(trace), name_(name) { trace_.event(name_ | kEnter); }
    __device__ __forceinline__ ~Range() { trace_.event(name_ | kExit); }
    Range(const Range &) = delete;
    Range &operator=(const Range &) = delete;

  private:
    Trace &trace_;
    const Word name_;
};

template <Word id>
struct Name {
    static_assert(id != kUnknown, "this name is not in THENCE_NAMES: give it to thence.inside.cuda.Profile(names=...)");
    static constexpr Word value = id;
};

}  // namespace thence

#define THENCE_JOIN_(a, b) a##b
#define THENCE_JOIN(a, b) THENCE_JOIN_(a, b)

#ifndef THENCE_OFF
// First statement of the kernel. Functions that the kernel calls take `thence::Trace &thence_trace`.
#if THENCE_STAGING
#define THENCE_KERNEL()                                                          \
    __shared__ __align__(16) thence::Word thence_staging[thence::kStagingWords]; \
    thence::Trace thence_trace(thence_buffer, thence_blocks, thence_staging)
#else
#define THENCE_KERNEL() thence::Trace thence_trace(thence_buffer, thence_blocks, nullptr)
#endif
// Like THENCE_KERNEL(), but `staging` points to kStagingWords words of the kernel's own (dynamic) shared memory.
#define THENCE_KERNEL_IN(staging) thence::Trace thence_trace(thence_buffer, thence_blocks, staging)
#define THENCE_NAME(name) (thence::Name<thence::name_id(name)>::value)
#define THENCE_RANGE(name) thence::Range THENCE_JOIN(thence_range_, __LINE__)(thence_trace, THENCE_NAME(name))
#define THENCE_BEGIN(name) thence_trace.event(THENCE_NAME(name) | thence::kEnter)
#define THENCE_END(name) thence_trace.event(THENCE_NAME(name) | thence::kExit)
#define THENCE_INSTANT(name) thence_trace.event(THENCE_NAME(name) | thence::kInstant)
#define THENCE_WAIT(value) thence::wait_for(thence::bits_of(value))
#define THENCE_FINISH() thence_trace.finish()
#else
#define THENCE_KERNEL() static_cast<void>(0)
#define THENCE_KERNEL_IN(staging) static_cast<void>(0)
#define THENCE_RANGE(name) static_cast<void>(0)
#define THENCE_BEGIN(name) static_cast<void>(0)
#define THENCE_END(name) static_cast<void>(0)
#define THENCE_INSTANT(name) static_cast<void>(0)
#define THENCE_WAIT(value) static_cast<void>(0)
#define THENCE_FINISH() static_cast<void>(0)
#endif

#endif  // THENCE_INSIDE_CUH
