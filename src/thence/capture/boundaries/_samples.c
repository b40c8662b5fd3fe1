/* Samples the Python stacks of threads that launch, while they launch nothing.
 *
 * A thread of C, which never takes the GIL, reads what another thread does from the memory of this process by
 * process_vm_readv, for which the operating system checks every address: a read cannot fault, needs no GIL and no
 * signal, and stops nobody. The thread that is read goes on meanwhile, so a stack is read twice, and only what both
 * readings share is kept, from the outermost frame inwards.
 *
 * A thread whose CPU clock has not moved since its last sample is where it was: nothing is read then. A sample during
 * which the thread made a call that CUPTI reports is dropped: it belongs to no time between two calls.
 *
 * samples.py sets the offsets of the fields, and tests them before they are used. */

#define _GNU_SOURCE
#include "_stack.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CALLERS = 256, MAX_DEPTH = 5000, MAX_PAGES = 64, PAGE = 4096, MAX_HEAD = 512, TRIES = 3, LOOKS = 8 };
enum { MAX_FRAMES = 200 };      /* of a chain: the innermost ones */
enum { MAX_CODES = 1 << 14 };   /* functions whose names are kept */
enum { MAX_PATHS = 1 << 17 };   /* distinct chains */
enum { MAX_TEXT = 1000, MAX_LINE_TABLE = 1 << 16 }; /* characters of a name; bytes of a table of lines */
enum { FUNCTION = 1 }; /* position of the innermost frame of a chain: only the function; a sample has the position */

static const int64_t
    SHARE_OF_QUIET = 100,        /* samples of a thread are a 100th of the time since its last call apart, if that is more, */
    LONGEST_NS = 100000000,      /* but no further */
    SLOW_NS = 5000000,           /* how often it is looked whether all threads are quiet, if they were not for */
    LATELY_NS = 1000000000,
    PAUSED_NS = 1000000000,      /* how long the sampler sleeps at most while calls are not followed */
    LONG_READ_NS = 500000,       /* a sample that took longer, because the sampler got no CPU time, has no certain time */
    SOON_NS = 200000,            /* when to look again at a thread that got no CPU time while it was read */
    RAN_NS = 2000,               /* CPU time in which instructions of Python would have changed */
    RUN_NS = 1000000000,         /* longest time of one row, so that rows are written while a thread waits */
    REACH_NS = 10000000;         /* longest time between two samples of one row, if the thread ran between them */

/* What a thread did (SAMPLE_STATES in thence.model.formats). RUNS: it held the GIL and did not wait, but got no CPU time
 * while it was read: whether it runs Python or C is decided by its next sample, or else by all samples of the function
 * (samples.py). */
enum { UNKNOWN_STATE, PYTHON, C, C_WITHOUT_GIL, GIL, LOCK, SLEEP, SYSTEM_CALL, RUNS };
enum { OK, TORN, FAULT, NO_FRAME, LAUNCHED, LATE, SAME, OUTCOMES };

/* A thread that makes calls of CUDA. Written by that thread, read by the sampler. */
typedef struct {
    uint32_t thread; /* 0: the entry is free; BUSY: it is being filled */
    clockid_t clock; /* its CPU time */
    char *state;     /* its PyThreadState at its last call; NULL for none */
    uint64_t calls;  /* odd while it is in a call */
    int64_t since;   /* Unix ns: when its last call ended, or when it was first seen */
} Caller;
enum { BUSY = 0xffffffff };

/* Row: consecutive samples of a thread with one result, between two of its calls. */
typedef struct {
    int64_t time, until; /* Unix ns: of the first and of the last of them */
    uint32_t thread, chain, position, count, state, call; /* call: number of the system call */
} Sample;
_Static_assert(sizeof(Sample) == 40, "samples are read as NumPy records of 40 bytes");

/* What the sampler remembers of a thread. */
typedef struct {
    uint32_t thread;
    uint64_t calls;
    int64_t due, cpu;
    int reusable, file; /* file: /proc/self/task/N/syscall; 0: not opened, -1: cannot be opened */
    Sample run;         /* count 0: none */
} Watched;

typedef struct {
    char *frame, *code, *instruction;
    int owner;
} Link;

/* A function, as its code object named it when it was first seen. */
typedef struct {
    char *address, *filename, *qualname, *lines;
    uint32_t first, size; /* line of its `def`; bytes of its instructions */
} Known;

/* Offsets in bytes (SampleLayout in samples.py). */
static struct {
    Py_ssize_t owner, thread, gil, gil_mask, first_line, filename, qualname, lines, ascii, compact, kind_shift, ascii_bit,
        bytes, code_type, text_type, bytes_type, gil_begin, gil_end;
} layout;

static Caller callers[MAX_CALLERS];
static uint32_t caller_end; /* entries from here on were never used */
static __thread Caller *mine;
static __thread uint32_t mine_of;
static pthread_key_t ending;
static int sampling, forbidden; /* forbidden: process_vm_readv is not allowed; /proc/self/mem is read */
static pthread_t sampler;
static int64_t quiet_ns = 500000, tick_ns = 1000000; /* without a call for so long, a thread is sampled; so often */
static int memory = -1;
static pthread_mutex_t waiting = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t waker;
static int woken, waker_is_made;

/* The following is used by the sampler only, or while there is none. */
static Watched watched[MAX_CALLERS];
static Link links[2][MAX_DEPTH];
static struct {
    uintptr_t address;
    char content[PAGE];
} pages[MAX_PAGES];
static int page_count;
static int64_t last_pause; /* Unix ns: when all threads were last quiet */
static uint64_t outcomes[OUTCOMES];
static Rows rows = {.size = sizeof(Sample), .most = 1 << 20};
static Known *known;
static char **texts; /* of each code: the bytes that take_codes returns */
static size_t *text_sizes;
static uint32_t known_count, lost_codes;
static uint32_t known_slots[2 * MAX_CODES];
static ChainTable chains;

static uint32_t load32(const uint32_t *from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
static uint64_t load64(const uint64_t *from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }

/* What threads that make calls do. */

static void thread_ends(void *caller) {
    if (caller == mine && mine_of == thence_forks) __atomic_store_n(&mine->thread, 0, __ATOMIC_RELEASE);
}

static Caller *new_caller(void) {
    for (uint32_t number = 0; number < MAX_CALLERS; number++) {
        Caller *caller = &callers[number];
        uint32_t nobody = 0, end;
        if (!__atomic_compare_exchange_n(&caller->thread, &nobody, BUSY, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
        if (pthread_getcpuclockid(pthread_self(), &caller->clock) || pthread_setspecific(ending, caller)) {
            __atomic_store_n(&caller->thread, 0, __ATOMIC_RELEASE);
            return NULL;
        }
        caller->state = (char *)PyGILState_GetThisThreadState();
        caller->calls &= ~(uint64_t)1;
        caller->calls += 2; /* another thread's samples must not seem to be of this one */
        caller->since = thence_now();
        end = load32(&caller_end);
        while (end <= number && !__atomic_compare_exchange_n(&caller_end, &end, number + 1, 0, __ATOMIC_ACQ_REL,
                                                             __ATOMIC_RELAXED)) {}
        __atomic_store_n(&caller->thread, thence_thread(), __ATOMIC_RELEASE);
        return caller;
    }
    return NULL;
}

/* The entry of the calling thread; NULL if there is no room. */
static Caller *caller_here(void) {
    if (mine_of != thence_forks) mine = new_caller(), mine_of = thence_forks;
    return mine;
}

void thence_call_begins(void) {
    Caller *caller = sampling ? caller_here() : NULL;
    if (!caller) return;
    caller->state = (char *)PyGILState_GetThisThreadState();
    __atomic_store_n(&caller->calls, caller->calls | 1, __ATOMIC_RELEASE);
}

void thence_call_is_over(int64_t time) {
    Caller *caller = sampling ? caller_here() : NULL;
    if (!caller) return;
    caller->since = time;
    __atomic_store_n(&caller->calls, (caller->calls | 1) + 1, __ATOMIC_RELEASE);
}

/* Reading memory. */

static int read_memory(void *to, const char *from, size_t size) {
    struct iovec local = {to, size}, remote = {(void *)(uintptr_t)from, size};
    if (forbidden) return memory >= 0 && pread(memory, to, size, (off_t)(uintptr_t)from) == (ssize_t)size;
    return syscall(SYS_process_vm_readv, getpid(), &local, 1UL, &remote, 1UL, 0UL) == (ssize_t)size;
}

/* Reads by whole pages, which are kept until page_count is set to 0: frames lie next to each other. */
static int peek(void *to, const char *from, size_t size) {
    while (size) {
        uintptr_t address = (uintptr_t)from & ~(uintptr_t)(PAGE - 1), offset = (uintptr_t)from - address;
        size_t part = size < PAGE - offset ? size : PAGE - offset;
        int number = page_count - 1;
        while (number >= 0 && pages[number].address != address) number--;
        if (number < 0) {
            if (page_count == MAX_PAGES) page_count = 0;
            if (!read_memory(pages[page_count].content, (char *)address, PAGE)) return 0;
            pages[number = page_count++].address = address;
        }
        memcpy(to, pages[number].content + offset, part);
        to = (char *)to + part, from += part, size -= part;
    }
    return 1;
}

static int64_t time_of(clockid_t clock) {
    struct timespec time;
    return clock_gettime(clock, &time) ? -1 : (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Walking a stack. */

/* Finds the word that holds the pointer to the innermost frame. */
static int top_of(const char *state, char **address) {
    if (thence_layout.through >= 0 && !read_memory(&state, state + thence_layout.through, sizeof state)) return 0;
    *address = (char *)(uintptr_t)state + thence_layout.top;
    return 1;
}

/* Lists the frames of a thread, innermost first. NO_FRAME: it has none, or its PyThreadState is another thread's. */
static int walk(const char *state, uint32_t thread, Link *to, int *depth) {
    unsigned long owner_id;
    char *place, *again, *frame, *first;
    int count = 0;
    page_count = 0;
    *depth = 0;
    if (!peek(&owner_id, state + layout.thread, sizeof owner_id)) return FAULT;
    if (owner_id != thread) return NO_FRAME;
    if (!top_of(state, &place) || !read_memory(&first, place, sizeof first)) return FAULT;
    for (frame = first; frame; count++) {
        Link *link = &to[count];
        char owner;
        if (count == MAX_DEPTH) return TORN;
        if (!peek(&link->code, frame, sizeof link->code) || !peek(&owner, frame + layout.owner, 1)
            || !peek(&link->instruction, frame + thence_layout.instruction, sizeof link->instruction)) return FAULT;
        link->frame = frame, link->code = thence_untagged(link->code), link->owner = owner;
        if (!peek(&frame, frame + thence_layout.previous, sizeof frame)) return FAULT;
    }
    *depth = count;
    if (!count) return NO_FRAME;
    if (to[count - 1].owner == 1) return TORN; /* a generator that is being suspended has no caller any more */
    if (!top_of(state, &again) || again != place || !read_memory(&frame, place, sizeof frame)) return FAULT;
    return frame == first ? OK : TORN;
}

static int is_function(const Link *link) { return link->owner < 3; } /* others are entries of the evaluation loop */

static int64_t offset_of(const Link *link) { return link->instruction - link->code - thence_layout.code; }

/* Names of functions. */

/* Appends a str or bytes object to a text: its number of bytes, the width of a character (1, 2 or 4; 0: ASCII or
 * bytes), and its content. */
static int copy_object(char **to, size_t *size, const char *object, Py_ssize_t type, size_t most) {
    char *its_type, *more;
    Py_ssize_t length;
    uint32_t state, width = 0;
    const char *content = object + layout.bytes;
    if (!read_memory(&its_type, object + 8, sizeof its_type) || (Py_ssize_t)its_type != type) return 0;
    if (!read_memory(&length, object + 16, sizeof length) || length < 0 || (size_t)length > most) return 0;
    if (type == layout.text_type) {
        if (!read_memory(&state, object + 32, sizeof state)) return 0;
        width = state >> layout.kind_shift & 7;
        if (width != 1 && width != 2 && width != 4) return 0;
        int ascii = state >> layout.ascii_bit & 1;
        content = object + (ascii ? layout.ascii : layout.compact);
        length *= width;
        if (ascii) width = 0;
    }
    if (!(more = realloc(*to, *size + 8 + (size_t)length))) return 0;
    *to = more;
    uint32_t head[2] = {(uint32_t)length, width};
    memcpy(more + *size, head, sizeof head);
    if (length && !read_memory(more + *size + 8, content, (size_t)length)) return 0;
    *size += 8 + (size_t)length;
    return 1;
}

static int head_of(const char *address, const char *content, Known *head) {
    Py_ssize_t units;
    char *type;
    int32_t first;
    memcpy(&type, content + 8, sizeof type);
    memcpy(&units, content + 16, sizeof units);
    if ((Py_ssize_t)type != layout.code_type || units < 1 || units > 1 << 24) return 0;
    *head = (Known){.address = (char *)(uintptr_t)address, .size = (uint32_t)units * 2};
    memcpy(&first, content + layout.first_line, sizeof first), head->first = (uint32_t)first;
    memcpy(&head->filename, content + layout.filename, sizeof head->filename);
    memcpy(&head->qualname, content + layout.qualname, sizeof head->qualname);
    memcpy(&head->lines, content + layout.lines, sizeof head->lines);
    return 1;
}

/* Returns the number of a function from 1 on; 0 if this is none. Addresses are reused, so a code object is known by
 * its address and by the addresses of its names. A new one is read while a frame that was seen holds a reference;
 * whether the frame still does is checked by the second walk, before the number is used. MAX_CODES + 1 is for functions
 * for which there is no room. */
static uint32_t code_number(const Known *head) {
    uint64_t hash = (uint64_t)(uintptr_t)head->address ^ (uint64_t)(uintptr_t)head->qualname * 31
        ^ (uint64_t)(uintptr_t)head->lines * 131 ^ (uint64_t)(uintptr_t)head->filename * 7;
    char content[MAX_HEAD], *text = NULL;
    size_t size = 0;
    Known again;
    uint32_t slot;
    hash *= 0x9E3779B97F4A7C15u;
    for (slot = hash >> 40 & (2 * MAX_CODES - 1); known_slots[slot]; slot = (slot + 1) & (2 * MAX_CODES - 1))
        if (!memcmp(&known[known_slots[slot] - 1], head, sizeof *head)) return known_slots[slot];
    if (known_count == MAX_CODES) return lost_codes++, MAX_CODES + 1;
    if (copy_object(&text, &size, head->qualname, layout.text_type, MAX_TEXT)
        && copy_object(&text, &size, head->filename, layout.text_type, MAX_TEXT)
        && copy_object(&text, &size, head->lines, layout.bytes_type, MAX_LINE_TABLE)
        && read_memory(content, head->address, (size_t)thence_layout.code)
        && head_of(head->address, content, &again) && !memcmp(&again, head, sizeof again)) {
        known[known_count] = *head, texts[known_count] = text, text_sizes[known_count] = size;
        __atomic_store_n(&known_count, known_count + 1, __ATOMIC_RELEASE);
        return known_slots[slot] = known_count;
    }
    free(text);
    return 0;
}

/* Sets the numbers of the functions of the innermost frames; returns whether all are functions. */
static int name_frames(const Link *from, int depth, uint32_t *numbers, uint32_t *sizes) {
    static char heads[MAX_FRAMES][MAX_HEAD];
    struct iovec local[MAX_FRAMES], remote[MAX_FRAMES];
    size_t size = (size_t)thence_layout.code;
    int pieces = 0, of[MAX_FRAMES], last = -1;
    for (int at = 0; at < depth; at++) {
        if (!is_function(&from[at])) continue;
        if (last >= 0 && from[last].code == from[at].code) { /* a recursion */
            of[at] = pieces - 1;
            continue;
        }
        last = at, of[at] = pieces;
        local[pieces] = (struct iovec){heads[pieces], size}, remote[pieces] = (struct iovec){from[at].code, size};
        pieces++;
    }
    if (forbidden) {
        for (int piece = 0; piece < pieces; piece++)
            if (!read_memory(local[piece].iov_base, remote[piece].iov_base, size)) return 0;
    } else if (pieces) {
        ssize_t got = syscall(SYS_process_vm_readv, getpid(), local, (unsigned long)pieces, remote,
                              (unsigned long)pieces, 0UL);
        if (got != (ssize_t)(size * (size_t)pieces)) return 0;
    }
    for (int at = 0; at < depth; at++) {
        Known head;
        numbers[at] = 0;
        if (!is_function(&from[at])) continue;
        if (!head_of(from[at].code, heads[of[at]], &head)) return 0;
        if (!(numbers[at] = code_number(&head))) return 0;
        sizes[at] = head.size;
    }
    return 1;
}

/* One sample. */

typedef struct {
    uint32_t chain, position;
    int moved, ran; /* during a few us: whether the innermost frame or its instruction changed, whether it got CPU time */
    char *frame, *instruction;
} Stack;

static int read_once(const char *state, uint32_t thread, int last_try, Stack *stack) {
    uint32_t numbers[MAX_FRAMES], sizes[MAX_FRAMES], key[2 * MAX_FRAMES];
    int depth[2], common = 0, length = 0, from, outcome = walk(state, thread, links[0], &depth[0]);
    if (outcome != OK) return outcome;
    int named = depth[0] < MAX_FRAMES ? depth[0] : MAX_FRAMES;
    if (!name_frames(links[0], named, numbers, sizes)) return FAULT;
    outcome = walk(state, thread, links[1], &depth[1]);
    if (outcome != OK) return outcome;
    const Link *a = &links[0][depth[0] - 1], *b = &links[1][depth[1] - 1];
    int least = depth[0] < depth[1] ? depth[0] : depth[1];
    stack->frame = links[1][0].frame, stack->instruction = links[1][0].instruction;
    while (common < least && a->frame == b->frame && a->code == b->code && a->instruction == b->instruction)
        common++, a--, b--;
    from = depth[0] - common;
    if (common < least && a->frame == b->frame && a->code == b->code) from--, common++; /* its instruction has moved */
    if (!common || from >= named || ((from || common < depth[1]) && !last_try)) return TORN;
    for (int at = from; at < named; at++) {
        const Link *link = &links[0][at];
        if (!is_function(link)) continue;
        int64_t offset = offset_of(link);
        if (!length && offset < 0) continue; /* a frame that has not begun: its caller may not be set yet */
        if (offset < -2 || offset >= sizes[at]) return TORN;
        if (!length) stack->position = (uint32_t)offset;
        key[length] = numbers[at], key[length + 1] = length ? (uint32_t)(offset < 0 ? 0 : offset) : FUNCTION;
        length += 2;
    }
    if (!length) return NO_FRAME;
    pthread_mutex_lock(&thence_lock);
    stack->chain = thence_chain_number(&chains, key, (size_t)length, MAX_PATHS);
    pthread_mutex_unlock(&thence_lock);
    return stack->chain ? OK : TORN;
}

static int read_stack(const char *state, uint32_t thread, clockid_t clock, Stack *stack) {
    int outcome = NO_FRAME;
    char *place, *frame, *instruction;
    int64_t since;
    for (int attempt = 1; attempt <= TRIES; attempt++) {
        outcome = read_once(state, thread, attempt == TRIES, stack);
        if (outcome == OK || outcome == NO_FRAME) break;
    }
    /* Python goes on to other instructions within these few us. A loop that calls short C functions is at the
     * instruction of a call most of the time, so there are several looks. */
    since = time_of(clock);
    for (int left = LOOKS; outcome == OK && !stack->moved && left--;)
        if (top_of(state, &place) && read_memory(&frame, place, sizeof frame)
            && read_memory(&instruction, stack->frame + thence_layout.instruction, sizeof instruction))
            stack->moved = frame != stack->frame || instruction != stack->instruction;
    stack->ran = time_of(clock) - since >= RAN_NS;
    return outcome;
}

static int holds_gil(const char *state) {
    uint32_t word;
    return read_memory(&word, state + layout.gil, sizeof word) && word & (uint32_t)layout.gil_mask;
}

/* What a thread does that runs and holds the GIL: Python, if its instruction changes; else C. If the thread did not get
 * any CPU time while it was read, it does what its last sample in the same function showed, or else the next one. */
static uint32_t of_runner(const Sample *before, const Stack *stack) {
    if (stack->moved) return PYTHON;
    if (stack->ran) return C;
    int told = before->count && before->chain == stack->chain && (before->state == PYTHON || before->state == C);
    return told ? before->state : RUNS;
}

static uint32_t state_of(Watched *last, const char *state, const Stack *stack, uint32_t *call) {
    char line[256], *rest;
    ssize_t size;
    int holds = holds_gil(state);
    if (!last->file) {
        snprintf(line, sizeof line, "/proc/self/task/%u/syscall", last->thread);
        last->file = open(line, O_RDONLY | O_CLOEXEC);
    }
    size = last->file > 0 ? pread(last->file, line, sizeof line - 1, 0) : -1;
    if (size <= 0) return holds ? of_runner(&last->run, stack) : UNKNOWN_STATE;
    line[size] = 0;
    if (line[0] == 'r' || line[0] == '-') return holds ? of_runner(&last->run, stack) : C_WITHOUT_GIL;
    *call = (uint32_t)strtoul(line, &rest, 10);
    if (*call == SYS_futex) {
        Py_ssize_t address = (Py_ssize_t)strtoull(rest, NULL, 16);
        return !holds && address >= layout.gil_begin && address < layout.gil_end ? GIL : LOCK;
    }
    if (*call == SYS_clock_nanosleep) return SLEEP;
#ifdef SYS_nanosleep
    if (*call == SYS_nanosleep) return SLEEP;
#endif
    return SYSTEM_CALL;
}

static void end_run(Watched *last) {
    if (last->run.count) {
        pthread_mutex_lock(&thence_lock);
        thence_append(&rows, &last->run);
        pthread_mutex_unlock(&thence_lock);
    }
    last->run.count = 0;
}

/* Adds a sample to the run of the thread, or begins another one. */
static void add(Watched *last, const Sample *sample, int certain) {
    Sample *run = &last->run;
    int same = run->count && run->chain == sample->chain && run->position == sample->position
        && run->state == sample->state && run->call == sample->call;
    if (same && sample->time - run->time < RUN_NS && (certain || sample->time - run->until <= REACH_NS)) {
        run->until = sample->time, run->count++;
        return;
    }
    end_run(last);
    *run = *sample;
}

/* Returns when to sample the thread again at the earliest, in ns from now. */
static int64_t sample_thread(const Caller *caller, Watched *last, int64_t period) {
    int64_t time = thence_now(), cpu = time_of(caller->clock);
    Sample sample = {.time = time, .until = time, .thread = last->thread, .count = 1};
    const char *state = caller->state;
    Stack stack = {0};
    int certain = last->reusable && cpu == last->cpu && last->run.count, outcome = SAME;
    if (certain) {
        sample.chain = last->run.chain, sample.position = last->run.position;
        sample.state = last->run.state, sample.call = last->run.call;
    } else {
        outcome = state ? read_stack(state, last->thread, caller->clock, &stack) : NO_FRAME;
        sample.chain = stack.chain, sample.position = stack.position;
        if (outcome == OK) {
            sample.state = state_of(last, state, &stack, &sample.call);
            if (last->run.state == RUNS && last->run.chain == sample.chain && (sample.state == PYTHON || sample.state == C))
                last->run.state = sample.state;
        }
        last->reusable = outcome == OK && time_of(caller->clock) == cpu;
    }
    last->cpu = cpu;
    if (load64(&caller->calls) != last->calls || load32(&caller->thread) != last->thread) outcome = LAUNCHED;
    else if ((outcome == OK || outcome == SAME) && thence_now() - time > LONG_READ_NS) outcome = LATE;
    outcomes[outcome]++;
    if (outcome == OK || outcome == SAME) add(last, &sample, certain);
    else if (outcome != LATE) end_run(last), last->reusable = 0;
    return outcome == LATE || (last->run.count && last->run.state == RUNS) ? SOON_NS : period;
}

static void forget(Watched *last, uint32_t thread) {
    end_run(last);
    if (last->file > 0) close(last->file);
    *last = (Watched){.thread = thread};
}

/* Samples the threads that are due; returns the Unix ns at which to look again. While calls come one after the other,
 * that is seldom: a program that only launches costs next to nothing. */
static int64_t look(uint32_t own) {
    int64_t now = thence_now(), due = now + LONGEST_NS, latest = 0;
    uint32_t end = load32(&caller_end);
    for (uint32_t number = 0; number < end; number++) {
        const Caller *caller = &callers[number];
        Watched *last = &watched[number];
        uint32_t thread = load32(&caller->thread);
        if (thread != last->thread) forget(last, thread);
        if (!thread || thread == BUSY || thread == own) continue;
        uint64_t calls = load64(&caller->calls);
        int64_t since = calls & 1 ? now : caller->since, quiet = now - since;
        if (calls != last->calls) end_run(last), last->calls = calls, last->reusable = 0, last->due = 0;
        if (since > latest) latest = since;
        if (quiet < quiet_ns) continue;
        if (now >= last->due) {
            int64_t period = quiet / SHARE_OF_QUIET;
            period = period < tick_ns ? tick_ns : period > LONGEST_NS ? LONGEST_NS : period;
            last->due = now + sample_thread(caller, last, period);
        }
        if (last->due < due) due = last->due;
    }
    if (now - latest >= quiet_ns) return last_pause = now, due;
    if (now - last_pause >= LATELY_NS) return now + SLOW_NS;
    if (latest + quiet_ns < due) due = latest + quiet_ns;
    return due > now + tick_ns ? due : now + tick_ns;
}

/* Sleeps for so many ns, or until it is woken. */
static void sleep_for(int64_t ns) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    ns = ns < 0 ? 0 : ns;
    until.tv_nsec += ns % 1000000000, until.tv_sec += ns / 1000000000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&waiting);
    while (!woken && pthread_cond_timedwait(&waker, &waiting, &until) != ETIMEDOUT) {}
    woken = 0;
    pthread_mutex_unlock(&waiting);
}

void thence_wake_sampler(void) {
    if (!sampling) return;
    pthread_mutex_lock(&waiting);
    woken = 1;
    pthread_cond_signal(&waker);
    pthread_mutex_unlock(&waiting);
}

static void *sample_until_the_end(void *unused) {
    uint32_t own = thence_thread();
    (void)unused;
    pthread_setname_np(pthread_self(), "thence-samples");
    while (__atomic_load_n(&sampling, __ATOMIC_ACQUIRE)) {
        int64_t next = thence_calls_are_followed() ? look(own) : thence_now() + PAUSED_NS;
        sleep_for(next - thence_now());
    }
    for (uint32_t number = 0; number < MAX_CALLERS; number++) forget(&watched[number], 0);
    return NULL;
}

static int make_waker(void) {
    pthread_condattr_t attribute;
    if (waker_is_made) return 1;
    if (pthread_condattr_init(&attribute)) return 0;
    waker_is_made = !pthread_condattr_setclock(&attribute, CLOCK_MONOTONIC) && !pthread_cond_init(&waker, &attribute);
    pthread_condattr_destroy(&attribute);
    return waker_is_made;
}

/* Allocates the tables of names, once; returns 0 if there is no memory. */
static int make_room(void) {
    if (!known) known = calloc(MAX_CODES, sizeof *known);
    if (!texts) texts = calloc(MAX_CODES, sizeof *texts);
    if (!text_sizes) text_sizes = calloc(MAX_CODES, sizeof *text_sizes);
    return known && texts && text_sizes;
}

static void forget_names(void) {
    for (uint32_t number = 0; number < known_count; number++) free(texts[number]);
    memset(known_slots, 0, sizeof known_slots);
    known_count = lost_codes = 0;
    thence_empty_chains(&chains);
}

void thence_forget_samples(void) { /* in a forked child */
    for (uint32_t number = 0; number < MAX_CALLERS; number++)
        if (watched[number].file > 0) close(watched[number].file);
    memset(watched, 0, sizeof watched);
    memset(callers, 0, sizeof callers);
    if (memory >= 0) close(memory), memory = -1; /* it shows the memory of the parent */
    caller_end = 0;
    sampling = woken = waker_is_made = 0;
    rows.count = 0;
    forget_names();
    waiting = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* Functions that Python calls. */

/* Takes the offsets. Chooses how memory is read; returns "process_vm_readv" or "/proc/self/mem", or None and the error
 * number of process_vm_readv if neither is allowed. */
static PyObject *use_sample_layout(PyObject *module, PyObject *arguments) {
    static const char *const ways[] = {"process_vm_readv", "/proc/self/mem"};
    uint64_t word = 0x7468656e6365, copy = 0;
    int error = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "nnnnnnnnnnnnnnnnnn", &layout.owner, &layout.thread, &layout.gil, &layout.gil_mask,
                          &layout.first_line, &layout.filename, &layout.qualname, &layout.lines, &layout.ascii,
                          &layout.compact, &layout.kind_shift, &layout.ascii_bit, &layout.bytes, &layout.code_type,
                          &layout.text_type, &layout.bytes_type, &layout.gil_begin, &layout.gil_end))
        return NULL;
    Py_ssize_t fields[] = {layout.first_line, layout.filename, layout.qualname, layout.lines};
    for (size_t at = 0; at < sizeof fields / sizeof *fields; at++) /* they are taken from a copy of the object's head */
        if (fields[at] < 0 || fields[at] > thence_layout.code - 8 || thence_layout.code > MAX_HEAD)
            return PyErr_SetString(PyExc_ValueError, "a field of code objects is not in their head"), NULL;
    if (layout.kind_shift < 0 || layout.kind_shift > 29 || layout.ascii_bit < 0 || layout.ascii_bit > 31)
        return PyErr_SetString(PyExc_ValueError, "a bit of the state of a str is not in it"), NULL;
    for (forbidden = 0; forbidden < 2; forbidden++) {
        if (forbidden && memory < 0) memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
        if (read_memory(&copy, (char *)&word, sizeof copy) && copy == word)
            return Py_BuildValue("si", ways[forbidden], 0);
        if (!forbidden) error = errno;
    }
    return Py_BuildValue("Oi", Py_None, error);
}

/* Lists the calling thread's frames as a sample would show them, innermost first: number of the function, position. */
static PyObject *try_sample(PyObject *module, PyObject *unused) {
    Stack stack = {0};
    (void)module, (void)unused;
    if (sampling) return PyErr_SetString(PyExc_RuntimeError, "another thread is sampling"), NULL;
    if (!make_room()) return PyErr_NoMemory();
    int outcome = read_stack((char *)PyGILState_GetThisThreadState(), thence_thread(), CLOCK_THREAD_CPUTIME_ID, &stack);
    if (outcome != OK) RETURN_NONE;
    return Py_BuildValue("IIi", stack.chain, stack.position, holds_gil((char *)PyGILState_GetThisThreadState()));
}

static PyObject *begin_samples(PyObject *module, PyObject *arguments) {
    sigset_t every, before;
    long long quiet = 500000, tick = 1000000;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "|LL", &quiet, &tick)) return NULL;
    if (quiet < 0 || tick < 10000) return PyErr_SetString(PyExc_ValueError, "samples are at least 10 us apart"), NULL;
    if (sampling) return PyErr_SetString(PyExc_RuntimeError, "this process is sampled already"), NULL;
    if (!make_waker() || !make_room()) return PyErr_NoMemory();
    rows.count = rows.lost = 0;
    forget_names();
    memset(outcomes, 0, sizeof outcomes);
    quiet_ns = quiet, tick_ns = tick;
    woken = 0;
    sampling = 1;
    caller_here();
    sigfillset(&every); /* signals are for the program's threads */
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int failed = pthread_create(&sampler, NULL, sample_until_the_end, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) RETURN_NONE;
    sampling = 0;
    errno = failed;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *end_samples(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    if (!sampling) RETURN_NONE;
    pthread_mutex_lock(&waiting);
    __atomic_store_n(&sampling, 0, __ATOMIC_RELEASE);
    woken = 1;
    pthread_cond_signal(&waker);
    pthread_mutex_unlock(&waiting);
    PyThreadState *saved = PyEval_SaveThread();
    pthread_join(sampler, NULL);
    PyEval_RestoreThread(saved);
    RETURN_NONE;
}

static PyObject *take_samples(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return thence_take(&rows);
}

/* Returns the chains from a number on, as bytes: the length and the words of each. */
static PyObject *sample_chains(PyObject *module, PyObject *first) {
    (void)module;
    return thence_chains_from(&chains, first);
}

/* Returns (first line, bytes of instructions, texts) of the functions from a number on. */
static PyObject *sample_codes(PyObject *module, PyObject *first) {
    unsigned long number = PyLong_AsUnsignedLong(first);
    (void)module;
    if (PyErr_Occurred()) return NULL;
    PyObject *result = PyList_New(0);
    uint32_t end = load32(&known_count);
    for (uint32_t at = number ? (uint32_t)number - 1 : 0; result && at < end; at++) {
        PyObject *row = Py_BuildValue("IIy#", known[at].first, known[at].size, texts[at], (Py_ssize_t)text_sizes[at]);
        if (!row || PyList_Append(result, row)) Py_CLEAR(result);
        Py_XDECREF(row);
    }
    return result;
}

/* Returns how many samples were read, torn, refused by the system, without a frame, dropped for a launch, dropped
 * because they took too long, and of threads that had not run; and how many rows and functions were lost for lack of
 * room. */
static PyObject *count_samples(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return Py_BuildValue("KKKKKKKnI", outcomes[OK], outcomes[TORN], outcomes[FAULT], outcomes[NO_FRAME],
                         outcomes[LAUNCHED], outcomes[LATE], outcomes[SAME], (Py_ssize_t)rows.lost, lost_codes);
}

static PyMethodDef functions[] = {
    {"use_sample_layout", use_sample_layout, METH_VARARGS, "Sets the offsets that samples need (samples.py)."},
    {"try_sample", try_sample, METH_NOARGS,
     "Returns chain, position, and whether the GIL is held, of the calling thread; None if its stack cannot be read."},
    {"begin_samples", begin_samples, METH_VARARGS,
     "begin_samples(quiet=500000, tick=1000000)\n\nForgets earlier samples, and starts the thread that samples."},
    {"end_samples", end_samples, METH_NOARGS, "Ends that thread. What was sampled can still be taken."},
    {"take_samples", take_samples, METH_NOARGS, "Returns the samples since the last call, as bytes."},
    {"sample_chains", sample_chains, METH_O, "Returns the chains of samples from a number on, as bytes."},
    {"sample_codes", sample_codes, METH_O, "Returns the functions in chains of samples from a number on."},
    {"count_samples", count_samples, METH_NOARGS,
     "Counts samples: read, torn, refused, without frame, dropped, late, unmoved; lost rows and functions."},
    {NULL, NULL, 0, NULL}};

int thence_add_samples(PyObject *module) {
    return pthread_key_create(&ending, thread_ends) || PyModule_AddFunctions(module, functions);
}
