/* A libcupti that records nothing by itself: tests hand it records, and it delivers them as the real one
 * does, through the callbacks that were registered, from the caller's thread or from one of its own.
 * Signatures are those of cupti_activity.h, cupti_callbacks.h, cupti_result.h and cupti_version.h. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void (*Requested)(uint8_t **buffer, size_t *size, size_t *records);
typedef void (*Completed)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

enum { KINDS = 64, CALLS = 16, IDS = 1024 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Requested requested;
static Completed completed;
static int subscribed, finalized, thread_ids, zeroed, dirty, enabled[KINDS];
static uint8_t api_off[3][IDS];
static size_t sizes[KINDS], dropped;
static uint32_t version = 130001;
static uint8_t *buffer;
static size_t room, used;
static struct { char name[48]; int code; } failures[CALLS];
static uint32_t counter; /* of launches, and of calls that are called back for */
static uint8_t latency, called_back[4][IDS];
typedef void (*Callback)(void *user, int domain, uint32_t id, const void *data);
static Callback callback;
void *fake_subscriber; /* the handle of whoever subscribed */

/* Control, for the tests. */

void fake_version(uint32_t number) { version = number; }
void fake_size(int kind, size_t bytes) { sizes[kind] = bytes; }
int fake_enabled(int kind) { return enabled[kind]; }
int fake_kernels_enabled(void) { return enabled[10]; }
int fake_subscribed(void) { return subscribed; }
int fake_finalized(void) { return finalized; }
int fake_thread_ids(void) { return thread_ids; }
int fake_dirty(void) { return dirty; } /* buffers that were promised to be zero and are not */
int fake_called_back(int domain, uint32_t id) { return called_back[domain][id]; }
int fake_api_off(int domain, uint32_t id) { return api_off[domain][id]; }

struct called { int site; const char *function; void *rest[6]; uint32_t correlation; };

static uint32_t next_number(void) { return __sync_add_and_fetch(&counter, 1); }

static void call_back(int domain, uint32_t id, int site, uint32_t number) {
    struct called data = {0};
    data.site = site;
    data.correlation = number;
    if (called_back[domain][id]) callback(NULL, domain, id, &data);
}

/* A context, or a module: CUPTI_CB_DOMAIN_RESOURCE. */
void fake_resource(uint32_t id, const void *data) {
    if (subscribed && called_back[3][id]) callback(NULL, 3, id, data);
}

/* cuLaunchKernel */
uint32_t fake_driver_launch(uint32_t number) {
    if (!number) number = next_number();
    call_back(1, 2, 0, number);
    call_back(1, 2, 1, number);
    return number;
}

/* cudaLaunchKernel, which calls the driver: with a number of its own where the runtime's call has one already. */
uint32_t fake_launch(void) {
    uint32_t number = next_number();
    call_back(2, 2, 0, number);
    fake_driver_launch(called_back[2][2] ? number + 1000000 : number);
    call_back(2, 2, 1, number);
    return number;
}
void fake_count_from(uint32_t number) { counter = number; }
int fake_latency(void) { return latency; }

void fake_fail(const char *call, int code) {
    for (int i = 0; i < CALLS; i++)
        if (!failures[i].name[0] || !strcmp(failures[i].name, call)) {
            strncpy(failures[i].name, call, sizeof failures[i].name - 1);
            failures[i].code = code;
            return;
        }
}

static int while_detached; /* calls other than cuptiSubscribe after cuptiFinalize, which attach CUPTI again */
int fake_calls_while_detached(void) { return while_detached; }

int fake_failure(const char *call); /* of a call: the code that it returns */
static int failure(const char *call) { return fake_failure(call); }

int fake_failure(const char *call) {
    while_detached += finalized && strcmp(call, "cuptiFinalize") && strcmp(call, "cuptiSubscribe");
    for (int i = 0; i < CALLS; i++)
        if (!strcmp(failures[i].name, call)) return failures[i].code;
    return 0;
}

static void deliver(void) {
    uint8_t *full = buffer;
    size_t bytes = used, size = room;
    buffer = NULL;
    if (full) completed(NULL, 0, full, size, bytes);
}

/* Called with the lock held; callbacks run under it, as no test delivers from two threads at once. */
static void put(const uint8_t *record, size_t bytes) {
    if (buffer && used + bytes > room) deliver();
    if (!buffer) {
        size_t records = 0;
        requested(&buffer, &room, &records);
        used = 0;
        if (!buffer) {
            dropped++;
            return;
        }
        for (size_t i = 0; zeroed && i < room; i += 8)
            if (*(uint64_t *)(buffer + i)) {
                dirty++;
                break;
            }
    }
    memcpy(buffer + used, record, bytes);
    if (!latency && *(const uint32_t *)record == 10) memset(buffer + used + 120, 0, 8); /* queued */
    used += bytes;
}

/* Records one after the other, of the kinds that are enabled. */
void fake_emit(const uint8_t *records, size_t bytes) {
    pthread_mutex_lock(&lock);
    for (size_t at = 0; at + 4 <= bytes;) {
        uint32_t kind;
        memcpy(&kind, records + at, 4);
        if (kind >= KINDS || !sizes[kind]) break;
        if (enabled[kind] && completed) put(records + at, sizes[kind]);
        at += sizes[kind];
    }
    pthread_mutex_unlock(&lock);
}

/* Deliver a buffer as it is, whatever is in it. */
void fake_deliver_raw(const uint8_t *content, size_t bytes) {
    size_t records = 0;
    pthread_mutex_lock(&lock);
    requested(&buffer, &room, &records);
    if (buffer) {
        memcpy(buffer, content, bytes);
        used = bytes;
        deliver();
    }
    pthread_mutex_unlock(&lock);
}

uint32_t fake_launch(void);

struct many { const uint8_t *record; size_t count; uint64_t start, step; };

/* The same kernel over and over: times go up by `step`, correlations as launches are counted. */
static void *emit_many(void *argument) {
    struct many *many = argument;
    uint8_t record[512];
    size_t bytes = sizes[10];
    memcpy(record, many->record, bytes);
    for (size_t i = 0; i < many->count; i++) {
        uint64_t start = many->start + i * many->step, end = start + many->step / 2;
        uint64_t queued = start - many->step / 2;
        uint32_t correlation = fake_launch();
        memcpy(record + 16, &start, 8);
        memcpy(record + 24, &end, 8);
        memcpy(record + 92, &correlation, 4);
        memcpy(record + 120, &queued, 8);
        pthread_mutex_lock(&lock);
        if (enabled[10] && completed) put(record, bytes);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

void fake_kernels(const uint8_t *record, size_t count, uint64_t start, uint64_t step, int own_thread) {
    struct many many = {record, count, start, step};
    pthread_t thread;
    if (!own_thread) {
        emit_many(&many);
        return;
    }
    pthread_create(&thread, NULL, emit_many, &many);
    pthread_join(thread, NULL);
}

/* CUPTI. */

int cuptiGetVersion(uint32_t *number) {
    *number = version;
    return failure("cuptiGetVersion");
}

int cuptiGetTimestamp(uint64_t *ns) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    return failure("cuptiGetTimestamp");
}

int cuptiSubscribe(void **handle, void *function, void *data) {
    int code = failure("cuptiSubscribe");
    (void)data;
    if (code) return code;
    if (subscribed) return 39;
    callback = (Callback)(uintptr_t)function;
    subscribed = 1;
    finalized = 0;
    *handle = fake_subscriber = &subscribed;
    return 0;
}

int cuptiUnsubscribe(void *handle) {
    if (handle != &subscribed) return 1;
    subscribed = 0;
    memset(called_back, 0, sizeof called_back);
    return failure("cuptiUnsubscribe");
}

int cuptiEnableCallback(uint32_t on, void *handle, int domain, uint32_t id) {
    int code = failure("cuptiEnableCallback");
    if (code) return code;
    if (handle != &subscribed || id >= IDS) return 1;
    called_back[domain][id] = on != 0;
    return 0;
}

int cuptiActivityEnableLatencyTimestamps(uint8_t on) {
    int code = failure("cuptiActivityEnableLatencyTimestamps");
    if (!code) latency = on;
    return code;
}

/* CUDA's functions, of which CUPTI tells. */
int cudaDriverGetVersion(int *number) {
    uint32_t called = called_back[2][1] ? next_number() : 0;
    *number = 13000;
    call_back(2, 1, 0, called);
    call_back(2, 1, 1, called);
    return 0;
}

/* cudaStreamSynchronize, which lasts so many ns. */
void fake_wait(uint32_t ns) {
    struct timespec time = {0, ns};
    uint32_t called = called_back[2][8] ? next_number() : 0;
    call_back(2, 8, 0, called);
    nanosleep(&time, NULL);
    call_back(2, 8, 1, called);
}

/* cudaHostAlloc */
void fake_allocate(void) {
    uint32_t called = called_back[2][9] ? next_number() : 0;
    call_back(2, 9, 0, called);
    call_back(2, 9, 1, called);
}

/* cudaHostAlloc, which makes this record of memory, with the time of the call. */
void fake_allocate_memory(uint8_t *record, size_t bytes) {
    uint32_t called = called_back[2][9] ? next_number() : 0;
    struct timespec now;
    uint64_t ns;
    call_back(2, 9, 0, called);
    clock_gettime(CLOCK_REALTIME, &now);
    ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    memcpy(record + 12, &called, 4);
    memcpy(record + 32, &ns, 8);
    fake_emit(record, bytes);
    call_back(2, 9, 1, called);
}

/* cudaGraphLaunch, whose launch has this number. */
uint32_t fake_graph_launch(void) {
    uint32_t called = next_number();
    call_back(2, 5, 0, called);
    call_back(2, 5, 1, called);
    return called;
}

int cuptiActivityRegisterCallbacks(Requested ask, Completed take) {
    requested = ask;
    completed = take;
    return failure("cuptiActivityRegisterCallbacks");
}

int cuptiSetThreadIdType(int type) {
    thread_ids = type;
    return failure("cuptiSetThreadIdType");
}

int cuptiActivitySetAttribute(int attribute, size_t *size, void *value) {
    zeroed = attribute == 5 && *size == 1 && *(uint8_t *)value;
    return failure("cuptiActivitySetAttribute");
}

int cuptiActivityEnable(int kind) {
    int code = failure("cuptiActivityEnable");
    if (!code) enabled[kind] = 1;
    return code;
}

int cuptiActivityDisable(int kind) {
    enabled[kind] = 0;
    return failure("cuptiActivityDisable");
}

int cuptiActivityEnableRuntimeApi(uint32_t id, uint8_t on) {
    api_off[2][id] = !on;
    return 0;
}

int cuptiActivityEnableDriverApi(uint32_t id, uint8_t on) {
    api_off[1][id] = !on;
    return 0;
}

int cuptiGetCallbackName(int domain, uint32_t id, const char **name) {
    static const char *const runtime[] = {
        NULL, "cudaDriverGetVersion_v3020", "cudaLaunchKernel_v7000", "cudaGetLastError_v3020",
        "cudaMemcpyAsync_ptsz_v7000", "cudaGraphLaunch_v10000", "cudaLaunchHostFunc_v10000",
        "cudaLaunchKernelExC_v11060", "cudaStreamSynchronize_v3020", "cudaHostAlloc_v3020"};
    static const char *const driver[] = {
        NULL, "cuInit", "cuLaunchKernel", "cuMemcpyHtoDAsync_v2_ptsz", "cuLaunchKernelEx"};
    size_t count = domain == 2 ? sizeof runtime / sizeof *runtime : sizeof driver / sizeof *driver;
    if (id == 0 || id >= count) return 1;
    *name = domain == 2 ? runtime[id] : driver[id];
    return 0;
}

int cuptiActivityFlushAll(uint32_t forced) {
    pthread_mutex_lock(&lock);
    (void)forced;
    if (completed) deliver();
    pthread_mutex_unlock(&lock);
    return failure("cuptiActivityFlushAll");
}

int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *count) {
    (void)context, (void)stream;
    *count = dropped;
    dropped = 0;
    return failure("cuptiActivityGetNumDroppedRecords");
}

int cuptiActivityGetNextRecord(uint8_t *content, size_t valid, uint8_t **record) {
    uint32_t kind;
    uint8_t *next = content;
    if (*record) {
        memcpy(&kind, *record, 4);
        if (kind >= KINDS || !sizes[kind]) return 21;
        next = *record + sizes[kind];
    }
    if (next >= content + valid) return 12;
    *record = next;
    return 0;
}

/* Forgets everything: the subscriber, kinds, attributes. */
int fake_pm_enabled(void);
static int finalized_while_sampled; /* devices whose counters were not given back before */
int fake_finalized_while_sampled(void) { return finalized_while_sampled; }

int cuptiFinalize(void) {
    finalized_while_sampled += fake_pm_enabled();
    finalized = 1;
    counter = 0; /* as CUPTI 13.0 does: it counts from 1 when it is attached again */
    requested = NULL;
    completed = NULL;
    subscribed = thread_ids = zeroed = 0;
    latency = 0;
    memset(enabled, 0, sizeof enabled);
    memset(called_back, 0, sizeof called_back);
    memset(api_off, 0, sizeof api_off);
    return failure("cuptiFinalize");
}

int cuptiGetResultString(int code, const char **text) {
    *text = code == 999 ? "CUPTI_ERROR_UNKNOWN" : "CUPTI_ERROR_SOMETHING";
    return 0;
}
