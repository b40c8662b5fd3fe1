/* PM sampling of the libcupti of the tests. Nothing is counted: sample i of a window has 1000 * i + m of metric m.
 * Signatures are those of cupti_pmsampling.h and cupti_profiler_host.h. Each function checks the size of its struct. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

int fake_failure(const char *call);

typedef struct { size_t size; void *private; } Nothing;
typedef struct { size_t size; void *private; size_t device; const char *name; } ChipName;
typedef struct { size_t size; void *private; size_t device, bytes; uint8_t *image; } Availability;
typedef struct { size_t size; void *private; int type; const char *chip; const uint8_t *image; void *host; } HostInit;
typedef struct { size_t size; void *private; void *host; } Host;
typedef struct { size_t size; void *private; void *host; const char **metrics; size_t count; } AddMetrics;
typedef struct { size_t size; void *private; void *host; size_t bytes; } ConfigSize;
typedef struct { size_t size; void *private; void *host; size_t bytes; uint8_t *image; } ConfigImage;
typedef struct { size_t size; void *private; size_t bytes; uint8_t *image; size_t passes; } Passes;
typedef struct { size_t size; void *private; size_t device; void *sampler; } Enable;
typedef struct { size_t size; void *private; void *sampler; } Sampler;
typedef struct {
    size_t size; void *private; void *sampler; size_t bytes; const uint8_t *image; size_t hardware;
    uint64_t interval; int trigger, append;
} SetConfig;
typedef struct {
    size_t size; void *private; void *sampler; const char **metrics; size_t count; uint32_t samples; size_t bytes;
} DataSize;
typedef struct { size_t size; void *private; void *sampler; size_t bytes; uint8_t *image; } DataInit;
typedef struct {
    size_t size; void *private; void *sampler; uint8_t *image; size_t bytes; int reason; uint8_t overflow;
} Decode;
typedef struct { size_t size; void *private; const uint8_t *image; size_t bytes, total, populated, completed; } Info;
typedef struct {
    size_t size; void *private; void *sampler; const uint8_t *image; size_t bytes, index; uint64_t start, end;
} SampleInfo;
typedef struct {
    size_t size; void *private; void *host; const uint8_t *image; size_t bytes, index; const char **metrics;
    size_t count; double *values;
} Evaluate;

enum { DEVICES = 8, SAMPLE_BYTES = 10000, IMAGE_BYTES = 100 };
static struct device {
    int enabled, sampling, full;
    const uint8_t *config;
    uint64_t interval, began, ended, first; /* the first sample that was not decoded yet */
    size_t hardware;
    uint32_t most;
} devices[DEVICES];
static char lacks[64];
static size_t fits = 64, added;
static int hosts, opened;

void fake_lacks(const char *metric) { strncpy(lacks, metric, sizeof lacks - 1); } /* the chip has no such metric */
void fake_fits(size_t metrics) { fits = metrics; }                                 /* so many fit into one pass */
int fake_pm_hosts(void) { return hosts; }                                          /* host objects that are left */
int fake_pm_opened(void) { return opened; }                                        /* times a device was enabled */
int fake_pm_enabled(void) {
    int count = 0;
    for (int i = 0; i < DEVICES; i++) count += devices[i].enabled;
    return count;
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

#define BEGIN(name, last)                                                                                              \
    int code = fake_failure(name);                                                                                     \
    if (code) return code;                                                                                             \
    if (p->size != offsetof(__typeof__(*p), last) + sizeof p->last) return 1

int cuptiProfilerInitialize(Nothing *p) {
    BEGIN("cuptiProfilerInitialize", private);
    return 0;
}

int cuptiDeviceGetChipName(ChipName *p) {
    BEGIN("cuptiDeviceGetChipName", name);
    p->name = "GH100";
    return 0;
}

int cuptiPmSamplingGetCounterAvailability(Availability *p) {
    BEGIN("cuptiPmSamplingGetCounterAvailability", image);
    p->bytes = 16;
    if (p->image) memset(p->image, 7, 16);
    return 0;
}

int cuptiProfilerHostInitialize(HostInit *p) {
    BEGIN("cuptiProfilerHostInitialize", host);
    if (p->type != 1 || strcmp(p->chip, "GH100") || p->image[15] != 7) return 1;
    hosts++;
    added = 0;
    p->host = &hosts;
    return 0;
}

int cuptiProfilerHostDeinitialize(Host *p) {
    BEGIN("cuptiProfilerHostDeinitialize", host);
    hosts--;
    return 0;
}

int cuptiProfilerHostConfigAddMetrics(AddMetrics *p) {
    BEGIN("cuptiProfilerHostConfigAddMetrics", count);
    for (size_t i = 0; i < p->count; i++)
        if (lacks[0] && strstr(p->metrics[i], lacks)) return 999;
    added += p->count;
    return 0;
}

int cuptiProfilerHostGetConfigImageSize(ConfigSize *p) {
    BEGIN("cuptiProfilerHostGetConfigImageSize", bytes);
    p->bytes = 32;
    return 0;
}

int cuptiProfilerHostGetConfigImage(ConfigImage *p) {
    BEGIN("cuptiProfilerHostGetConfigImage", image);
    memset(p->image, 5, p->bytes);
    return 0;
}

int cuptiProfilerHostGetNumOfPasses(Passes *p) {
    BEGIN("cuptiProfilerHostGetNumOfPasses", passes);
    p->passes = added > fits ? 2 : 1;
    return 0;
}

int cuptiPmSamplingEnable(Enable *p) {
    BEGIN("cuptiPmSamplingEnable", sampler);
    struct device *device = &devices[p->device];
    if (device->enabled) return 7;
    memset(device, 0, sizeof *device);
    device->enabled = 1;
    opened++;
    p->sampler = device;
    return 0;
}

int cuptiPmSamplingDisable(Sampler *p) {
    BEGIN("cuptiPmSamplingDisable", sampler);
    ((struct device *)p->sampler)->enabled = 0;
    return 0;
}

int cuptiPmSamplingSetConfig(SetConfig *p) {
    BEGIN("cuptiPmSamplingSetConfig", append);
    struct device *device = p->sampler;
    if (p->trigger != 1 || p->append != 0 || p->bytes != 32) return 1;
    device->config = p->image;
    device->interval = p->interval;
    device->hardware = p->hardware;
    return 0;
}

int cuptiPmSamplingGetCounterDataSize(DataSize *p) {
    BEGIN("cuptiPmSamplingGetCounterDataSize", bytes);
    ((struct device *)p->sampler)->most = p->samples;
    p->bytes = (size_t)IMAGE_BYTES * p->samples;
    return 0;
}

int cuptiPmSamplingCounterDataImageInitialize(DataInit *p) {
    BEGIN("cuptiPmSamplingCounterDataImageInitialize", image);
    memset(p->image, 0, p->bytes);
    return 0;
}

int cuptiPmSamplingStart(Sampler *p) {
    BEGIN("cuptiPmSamplingStart", sampler);
    struct device *device = p->sampler;
    if (device->config[31] != 5) return 1; /* libcupti keeps its address */
    device->sampling = 1;
    device->began = now();
    return 0;
}

int cuptiPmSamplingStop(Sampler *p) {
    BEGIN("cuptiPmSamplingStop", sampler);
    struct device *device = p->sampler;
    device->sampling = 0;
    device->ended = now();
    return 0;
}

int cuptiPmSamplingDecodeData(Decode *p) { /* what was sampled since the last call; a full buffer takes no more */
    BEGIN("cuptiPmSamplingDecodeData", overflow);
    struct device *device = p->sampler;
    uint64_t first = device->first, last = ((device->sampling ? now() : device->ended) - device->began) / device->interval;
    uint64_t samples = last - first;
    if (p->image[8] || device->full) return 7; /* it was not made anew */
    p->overflow = device->full = samples * SAMPLE_BYTES > device->hardware;
    if (p->overflow) samples = 0;
    if (samples > device->most) samples = device->most;
    memcpy(p->image, &device, sizeof device);
    memcpy(p->image + 8, &samples, sizeof samples);
    memcpy(p->image + 16, &first, sizeof first);
    device->first = last;
    return p->overflow ? 8 : 0;
}

int cuptiPmSamplingGetCounterDataInfo(Info *p) {
    BEGIN("cuptiPmSamplingGetCounterDataInfo", completed);
    memcpy(&p->completed, p->image + 8, sizeof p->completed);
    return 0;
}

int cuptiPmSamplingCounterDataGetSampleInfo(SampleInfo *p) {
    BEGIN("cuptiPmSamplingCounterDataGetSampleInfo", end);
    struct device *device = p->sampler;
    uint64_t number;
    memcpy(&number, p->image + 16, sizeof number);
    number += p->index;
    p->start = number ? device->began + number * device->interval : device->began - 3000000000u;
    p->end = device->began + (number + 1) * device->interval;
    return 0;
}

int cuptiProfilerHostEvaluateToGpuValues(Evaluate *p) {
    BEGIN("cuptiProfilerHostEvaluateToGpuValues", values);
    uint64_t first;
    memcpy(&first, p->image + 16, sizeof first);
    for (size_t i = 0; i < p->count; i++) p->values[i] = 1000. * (double)(first + p->index) + (double)i;
    return 0;
}
