/* PC sampling of the libcupti of the tests: tests hand it samples. A module's CRC is 1000 plus its size, and the line
 * of an instruction its offset over 16, in /w/kernels.py. Signatures are those of cupti_pcsampling.h. Each function
 * checks the size of its struct. */

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int fake_failure(const char *call);
void fake_resource(uint32_t id, const void *data); /* calls the subscriber back */
int fake_kernels_enabled(void);

typedef struct { uint32_t reason, samples; } Reason;
typedef struct {
    size_t size; uint64_t cubin, pc; uint32_t index, pad; const char *function; size_t count; Reason *reasons;
    uint32_t correlation;
} Pc;
typedef struct {
    size_t size, room; uint64_t samples, dropped; size_t count, remaining; uint64_t range; Pc *pcs; uint64_t unplaced;
    uint8_t full;
} Data;
typedef struct { size_t size; void *private, *context; } Only;
typedef struct { size_t size; void *private, *context; size_t *count; } Count;
typedef struct { size_t size; void *private, *context; size_t count; uint32_t *numbers; char **names; } List;
typedef struct { int kind, status; uint64_t words[3]; } Attribute;
typedef struct { size_t size; void *private, *context; size_t count; Attribute *attributes; } Configure;
typedef struct { size_t size; void *private, *context; Data *data; } Ask;
typedef struct { size_t size, bytes; const void *image; uint64_t crc; } Crc;
typedef struct {
    size_t size; const void *image; const char *function; size_t bytes; uint32_t line; uint64_t pc; char *file, *folder;
} Line;

enum { CONTEXTS = 8, SAMPLES = 64 };
static struct { void *context; int sampling; } enabled[CONTEXTS];
static struct { void *context; uint64_t cubin, pc; const char *function; uint32_t reason, samples; } waiting[SAMPLES];
static size_t waits, looked;
static uint64_t unplaced, dropped;
static uint32_t period;
static int over;
static const char *const names[] = {
    "smsp__pcsamp_warps_issue_stalled_long_scoreboard", "smsp__pcsamp_warps_issue_stalled_long_scoreboard_not_issued",
    "smsp__pcsamp_warps_issue_stalled_selected"};

int fake_pc_sampling(void) { /* contexts that are sampled */
    int count = 0;
    for (int i = 0; i < CONTEXTS; i++) count += enabled[i].sampling;
    return count;
}
int fake_pc_enabled(void) {
    int count = 0;
    for (int i = 0; i < CONTEXTS; i++) count += enabled[i].context != NULL;
    return count;
}
uint32_t fake_pc_period(void) { return period; }
size_t fake_lines_looked_up(void) { return looked; }
void fake_context(void *context, int begins) {
    struct { void *context, *stream, *descriptor; } data = {context, NULL, NULL};
    fake_resource(begins ? 1 : 2, &data);
    for (int i = 0; i < CONTEXTS && !begins; i++)
        if (enabled[i].context == context) enabled[i].context = NULL, enabled[i].sampling = 0;
}
void fake_module(void *context, const char *content, size_t size) {
    struct { uint32_t number; size_t size; const char *content; } module = {7, size, content};
    struct { void *context, *stream; const void *descriptor; } data = {context, NULL, &module};
    fake_resource(6, &data);
}
void fake_sampled(void *context, uint64_t cubin, uint64_t pc, const char *function, uint32_t reason, uint32_t samples) {
    waiting[waits].context = context, waiting[waits].cubin = cubin, waiting[waits].pc = pc;
    waiting[waits].function = function, waiting[waits].reason = reason, waiting[waits++].samples = samples;
}
void fake_unplaced(uint64_t samples, uint64_t lost, int full) { unplaced = samples, dropped = lost, over = full; }

#define BEGIN(name, last)                                                                                              \
    int code = fake_failure(name);                                                                                     \
    if (code) return code;                                                                                             \
    if (p->size != offsetof(__typeof__(*p), last) + sizeof p->last) return 1

static int place_of(const void *context) {
    for (int i = 0; i < CONTEXTS; i++)
        if (enabled[i].context == context) return i;
    return -1;
}

int cuptiGetDeviceId(void *context, uint32_t *device) {
    *device = (uint32_t)(uintptr_t)context % 2;
    return fake_failure("cuptiGetDeviceId");
}

int cuptiPCSamplingEnable(Only *p) {
    BEGIN("cuptiPCSamplingEnable", context);
    if (!fake_kernels_enabled()) return 14; /* records of activities can only be enabled before */
    int place = place_of(NULL);
    if (place_of(p->context) >= 0 || place < 0) return 7;
    enabled[place].context = p->context;
    return 0;
}

int cuptiPCSamplingGetNumStallReasons(Count *p) {
    BEGIN("cuptiPCSamplingGetNumStallReasons", count);
    *p->count = 3;
    return 0;
}

int cuptiPCSamplingGetStallReasons(List *p) {
    BEGIN("cuptiPCSamplingGetStallReasons", names);
    for (uint32_t i = 0; i < p->count; i++) p->numbers[i] = 10 + i, strcpy(p->names[i], names[i]);
    return 0;
}

int cuptiPCSamplingSetConfigurationAttribute(Configure *p) {
    BEGIN("cuptiPCSamplingSetConfigurationAttribute", attributes);
    for (size_t i = 0; i < p->count; i++)
        if (p->attributes[i].kind == 1) period = (uint32_t)p->attributes[i].words[0];
    return 0;
}

int cuptiPCSamplingStart(Only *p) {
    BEGIN("cuptiPCSamplingStart", context);
    enabled[place_of(p->context)].sampling = 1;
    return 0;
}

int cuptiPCSamplingStop(Only *p) {
    BEGIN("cuptiPCSamplingStop", context);
    enabled[place_of(p->context)].sampling = 0;
    return 0;
}

/* One instruction at a time, so that more remain. */
int cuptiPCSamplingGetData(Ask *p) {
    BEGIN("cuptiPCSamplingGetData", data);
    p->data->unplaced = unplaced;
    p->data->samples = unplaced + dropped;
    p->data->dropped = dropped;
    p->data->full = over != 0;
    unplaced = dropped = 0;
    for (size_t i = 0; i < waits; i++) {
        if (waiting[i].context != p->context) continue;
        Pc *pc = p->data->pcs;
        pc->cubin = waiting[i].cubin, pc->pc = waiting[i].pc, pc->function = waiting[i].function;
        pc->count = 1;
        pc->reasons[0] = (Reason){waiting[i].reason, waiting[i].samples};
        p->data->samples += waiting[i].reason == 11 ? 0 : waiting[i].samples;
        p->data->count = 1;
        waiting[i] = waiting[--waits];
        break;
    }
    for (size_t i = 0; i < waits; i++) p->data->remaining += waiting[i].context == p->context;
    if (over) return over = 0, 8;
    return 0;
}

int cuptiPCSamplingDisable(Only *p) {
    BEGIN("cuptiPCSamplingDisable", context);
    enabled[place_of(p->context)].context = NULL;
    return 0;
}

int cuptiGetCubinCrc(Crc *p) {
    BEGIN("cuptiGetCubinCrc", crc);
    p->crc = 1000 + p->bytes;
    return 0;
}

int cuptiGetSassToSourceCorrelation(Line *p) {
    BEGIN("cuptiGetSassToSourceCorrelation", folder);
    looked++;
    p->line = (uint32_t)(p->pc / 16);
    p->file = strdup("kernels.py");
    p->folder = strdup("/w");
    return 0;
}
