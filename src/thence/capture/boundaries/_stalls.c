/* Samples of program counters by CUPTI ("PC sampling"), in its continuous mode. It is begun where a context is created,
 * on the program's thread and before modules are loaded, because CUPTI knows no functions of modules that were loaded
 * before. Images of modules are copied where they are loaded. Neither takes the GIL, for which a thread that holds a
 * lock of the driver must not wait. Structs are those of cupti_pcsampling.h and cupti_callbacks.h of CUDA 12.8 to 13.5.
 */

#include "_stack.h"
#include <stdlib.h>
#include <string.h>

enum { CONTEXT_CREATED = 1, CONTEXT_ENDS = 2, MODULE_LOADED = 6 }; /* CUpti_CallbackIdResource */
enum { MOST_CONTEXTS = 64, MOST_REASONS = 128, NAME_BYTES = 128, TAKEN_PCS = 4096, LEFT_PCS = 32768, MOST_ROUNDS = 64 };
enum { NO_MEMORY = 8 }; /* CUPTI_ERROR_OUT_OF_MEMORY: for samples, the buffer of the hardware was full */
static const size_t MOST_IMAGE_BYTES = 256 << 20; /* of images that wait to be taken */

typedef struct {
    uint32_t reason, samples;
} Reason;

typedef struct {
    size_t size;
    uint64_t cubin, pc;
    uint32_t index, pad;
    const char *function;
    size_t count;
    Reason *reasons;
    uint32_t correlation;
} Pc;
_Static_assert(sizeof(Pc) == 64, "CUpti_PCSamplingPCData");

typedef struct {
    size_t size, room;
    uint64_t samples, dropped;
    size_t count, remaining;
    uint64_t range;
    Pc *pcs;
    uint64_t unplaced;
    uint8_t full;
} Data;
_Static_assert(sizeof(Data) == 80, "CUpti_PCSamplingData");

typedef struct {
    int kind, status;
    union {
        uint64_t words[3];
        uint32_t number;
        size_t bytes;
        void *data;
        struct {
            size_t count;
            uint32_t *numbers;
        } reasons;
    } value;
} Attribute;
_Static_assert(sizeof(Attribute) == 32, "CUpti_PCSamplingConfigurationInfo");

typedef struct {
    size_t size;
    void *private, *context;
    union {
        size_t count;
        void *answer;
    } third;
    void *fourth, *fifth;
} Parameters; /* of all calls, which have as many of the fields as they need */

typedef struct {
    uint64_t cubin, pc, function;
    uint32_t reason, samples;
} Row;
_Static_assert(sizeof(Row) == 32, "rows are read as NumPy records of 32 bytes");

typedef struct {
    void *context;
    Data left; /* what is left when sampling is disabled */
    const char *failed;
    int code, device, enabled, over;
    uint64_t samples, unplaced, dropped, full;
    size_t reasons;
    uint32_t numbers[MOST_REASONS];
    char names[MOST_REASONS][NAME_BYTES];
} Context;

typedef struct Image {
    struct Image *next;
    size_t size;
    char content[];
} Image;

typedef int (*Call)(void *);
static struct {
    Call enable, count, list, configure, start, data, stop, disable;
    int (*device)(void *, uint32_t *);
} cupti;
static Attribute settings[4];
static int active;
static Context *contexts[MOST_CONTEXTS];
static size_t context_count, missed; /* contexts for which there was no room */
static Image *images;
static size_t image_bytes, lost_images;
static Data taken;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER; /* of contexts and images, not held in calls of CUPTI */

static int make_data(Data *data, size_t room) {
    Reason *reasons = calloc(room * MOST_REASONS, sizeof *reasons); /* what is not used takes no memory */
    *data = (Data){.size = sizeof *data, .room = room, .pcs = calloc(room, sizeof *data->pcs)};
    for (size_t i = 0; reasons && data->pcs && i < room; i++) {
        data->pcs[i].size = sizeof *data->pcs;
        data->pcs[i].reasons = reasons + i * MOST_REASONS;
    }
    return reasons && data->pcs ? 0 : -1;
}

/* The size of a struct of parameters ends with its last field. */
#define UP_TO(field) (offsetof(Parameters, field) + sizeof((Parameters *)0)->field)
#define DO(context, name, parameters) \
    if (((context)->code = cupti.name(&(parameters)))) return (context)->failed = #name, -1

static int begin_sampling(Context *of) {
    char *names[MOST_REASONS];
    Parameters only = {.size = UP_TO(context), .context = of->context};
    Parameters count = {.size = UP_TO(third), .context = of->context, .third.answer = &of->reasons};
    for (size_t i = 0; i < MOST_REASONS; i++) names[i] = of->names[i];
    DO(of, enable, only);
    of->enabled = 1;
    DO(of, count, count);
    if (of->reasons > MOST_REASONS || make_data(&of->left, LEFT_PCS)) return of->failed = "count", of->code = NO_MEMORY;
    Parameters list = {.size = UP_TO(fifth), .context = of->context, .third.count = of->reasons, of->numbers, names};
    DO(of, list, list);
    Attribute all[6];
    memcpy(all, settings, sizeof settings);
    all[4] = (Attribute){.kind = 2, .value.reasons = {of->reasons, of->numbers}};
    all[5] = (Attribute){.kind = 8, .value.data = &of->left};
    Parameters configure = {.size = UP_TO(fourth), .context = of->context, .third.count = 6, .fourth = all};
    DO(of, configure, configure);
    DO(of, start, only);
    return 0;
}

/* Where it does not start, nothing of it stays enabled. */
static void begin(Context *of) {
    Parameters only = {.size = UP_TO(context), .context = of->context};
    if (begin_sampling(of) && of->enabled) of->enabled = cupti.disable(&only) != 0;
}

static void begin_context(void *context) {
    pthread_mutex_lock(&guard);
    size_t number = context_count;
    int known = 0;
    for (size_t i = 0; i < number; i++) known |= contexts[i]->context == context && !contexts[i]->over;
    Context *of = !known && number < MOST_CONTEXTS ? calloc(1, sizeof *of) : NULL;
    missed += !known && !of;
    pthread_mutex_unlock(&guard);
    if (!of) return;
    uint32_t device = 0;
    of->context = context;
    of->device = cupti.device(context, &device) ? -1 : (int)device;
    begin(of);
    pthread_mutex_lock(&guard);
    if (context_count < MOST_CONTEXTS) contexts[context_count++] = of;
    pthread_mutex_unlock(&guard);
}

static void end_context(const void *context) {
    pthread_mutex_lock(&guard);
    for (size_t i = 0; i < context_count; i++)
        if (contexts[i]->context == context) contexts[i]->over = 1;
    pthread_mutex_unlock(&guard);
}

static void keep_image(const char *content, size_t size) {
    pthread_mutex_lock(&guard);
    Image *image = image_bytes + size <= MOST_IMAGE_BYTES ? malloc(sizeof *image + size) : NULL;
    if (image) {
        memcpy(image->content, content, size);
        image->size = size;
        image->next = images;
        images = image;
        image_bytes += size;
    } else lost_images++;
    pthread_mutex_unlock(&guard);
}

/* CUpti_ResourceData, and CUpti_ModuleResourceData behind its descriptor. */
typedef struct {
    void *context, *stream;
    const struct {
        uint32_t number;
        size_t size;
        const char *content;
    } *module;
} Resource;

void thence_on_resource(uint32_t what, const void *data) {
    const Resource *of = data;
    if (!active) return;
    if (what == CONTEXT_CREATED) begin_context(of->context);
    else if (what == CONTEXT_ENDS) end_context(of->context);
    else if (what == MODULE_LOADED && of->module && of->module->content)
        keep_image(of->module->content, of->module->size);
}

/* In a child: CUPTI's threads and the contexts are the parent's. */
void thence_forget_stalls(void) {
    active = 0;
    context_count = 0;
    images = NULL;
    image_bytes = 0;
    pthread_mutex_init(&guard, NULL);
}

static void add(Context *of, const Data *data, Rows *rows) {
    of->samples += data->samples;
    of->unplaced += data->unplaced;
    of->dropped += data->dropped;
    of->full += data->full != 0;
    for (size_t i = 0; i < data->count && i < data->room; i++) {
        const Pc *pc = &data->pcs[i];
        for (size_t j = 0; j < pc->count && j < MOST_REASONS; j++) {
            Row row = {pc->cubin, pc->pc, (uintptr_t)pc->function, pc->reasons[j].reason, pc->reasons[j].samples};
            if (row.samples) thence_append(rows, &row);
        }
    }
}

static void fails(Context *of, const char *call, int code) {
    if (code && !of->code) of->failed = call, of->code = code;
}

static void take(Context *of, Rows *rows) {
    Parameters ask = {.size = UP_TO(third), .context = of->context, .third.answer = &taken};
    int code = 0;
    for (int round = 0; round < MOST_ROUNDS && !code && (!round || taken.remaining); round++) {
        taken.samples = taken.dropped = taken.unplaced = taken.count = taken.remaining = taken.full = 0;
        code = cupti.data(&ask);
        taken.full |= code == NO_MEMORY;
        add(of, &taken, rows);
    }
    if (code != NO_MEMORY) fails(of, "data", code);
}

static void end(Context *of, Rows *rows) {
    Parameters only = {.size = UP_TO(context), .context = of->context};
    if (!of->code) {
        fails(of, "stop", cupti.stop(&only));
        take(of, rows);
    }
    int code = of->enabled ? cupti.disable(&only) : 0;
    fails(of, "disable", code);
    if (of->enabled && !code) add(of, &of->left, rows);
    of->enabled = code != 0; /* else CUPTI may still write to what is left */
}

static PyObject *stalls_begin(PyObject *module, PyObject *arguments) {
    Py_ssize_t f[9];
    unsigned int period, milliseconds;
    Py_ssize_t hardware;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "(nnnnnnnnn)InI", f, f + 1, f + 2, f + 3, f + 4, f + 5, f + 6, f + 7, f + 8, &period,
                          &hardware, &milliseconds))
        return NULL;
    cupti = (__typeof__(cupti)){(Call)f[0], (Call)f[1], (Call)f[2], (Call)f[3], (Call)f[4],
                                (Call)f[5], (Call)f[6], (Call)f[7], (int (*)(void *, uint32_t *))f[8]};
    settings[0] = (Attribute){.kind = 1, .value.number = period};
    settings[1] = (Attribute){.kind = 4, .value.bytes = (size_t)hardware};
    settings[2] = (Attribute){.kind = 6, .value.number = 1}; /* started and stopped by calls */
    settings[3] = (Attribute){.kind = 9, .value.number = milliseconds};
    if (!taken.pcs && make_data(&taken, TAKEN_PCS)) return PyErr_NoMemory();
    context_count = missed = lost_images = 0;
    active = 1;
    RETURN_NONE;
}

static PyObject *stalls_context(PyObject *module, PyObject *context) {
    void *address = PyLong_AsVoidPtr(context);
    (void)module;
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    begin_context(address);
    Py_END_ALLOW_THREADS
    RETURN_NONE;
}

static void free_context(Context *of) {
    if (of->left.pcs) free(of->left.pcs->reasons);
    free(of->left.pcs);
    free(of);
}

static PyObject *described(const Context *of, Rows *rows) {
    Py_ssize_t size = (Py_ssize_t)(rows->count * sizeof(Row));
    PyObject *reasons = PyDict_New(), *content = PyBytes_FromStringAndSize(rows->content, size);
    for (size_t i = 0; reasons && i < of->reasons && i < MOST_REASONS; i++) {
        PyObject *number = PyLong_FromUnsignedLong(of->numbers[i]), *name = PyUnicode_FromString(of->names[i]);
        if (number && name) PyDict_SetItem(reasons, number, name);
        Py_XDECREF(number);
        Py_XDECREF(name);
    }
    if (!reasons || !content) return Py_XDECREF(reasons), Py_XDECREF(content), NULL;
    return Py_BuildValue("{sisiszsisKsKsKsKsNsN}", "device", of->device, "ended", of->over, "failed", of->failed, "code",
                         of->code, "samples", of->samples, "unplaced", of->unplaced, "dropped", of->dropped, "full",
                         of->full, "reasons", reasons, "rows", content);
}

static PyObject *stalls_take(PyObject *module, PyObject *last) {
    int ends = PyObject_IsTrue(last);
    PyObject *all = PyList_New(0);
    (void)module;
    if (ends) active = 0;
    for (size_t i = 0; all && i < context_count; i++) {
        Rows rows = {.size = sizeof(Row), .most = 1 << 22};
        Py_BEGIN_ALLOW_THREADS
        if (!contexts[i]->over && ends) end(contexts[i], &rows);
        else if (!contexts[i]->over && !contexts[i]->code) take(contexts[i], &rows);
        Py_END_ALLOW_THREADS
        PyObject *one = described(contexts[i], &rows);
        free(rows.content);
        if (!one || PyList_Append(all, one)) Py_CLEAR(all);
        Py_XDECREF(one);
        if (ends && !contexts[i]->enabled) free_context(contexts[i]);
    }
    pthread_mutex_lock(&guard);
    if (ends) context_count = 0;
    pthread_mutex_unlock(&guard);
    return all;
}

static PyObject *stalls_images(PyObject *module, PyObject *unused) {
    PyObject *all = PyList_New(0);
    (void)module, (void)unused;
    pthread_mutex_lock(&guard);
    Image *first = images;
    images = NULL;
    image_bytes = 0;
    size_t lost = lost_images;
    pthread_mutex_unlock(&guard);
    for (Image *next; first; first = next) {
        next = first->next;
        PyObject *one = PyBytes_FromStringAndSize(first->content, (Py_ssize_t)first->size);
        if (!one || !all || PyList_Append(all, one)) Py_CLEAR(all);
        Py_XDECREF(one);
        free(first);
    }
    return all ? Py_BuildValue("Nnn", all, (Py_ssize_t)lost, (Py_ssize_t)missed) : NULL;
}

static PyMethodDef functions[] = {
    {"stalls_begin", stalls_begin, METH_VARARGS,
     "stalls_begin(functions, period, hardware, milliseconds)\n\nSamples the contexts that are created from now on."},
    {"stalls_context", stalls_context, METH_O, "stalls_context(context)\n\nSamples a context that there is already."},
    {"stalls_images", stalls_images, METH_NOARGS,
     "stalls_images()\n\nReturns the images of modules that were loaded since the last call, how many were lost for lack "
     "of memory, and contexts that were not sampled for the same reason."},
    {"stalls_take", stalls_take, METH_O,
     "stalls_take(last)\n\nReturns a dictionary for each context: rows of samples since the last call as bytes, names of "
     "reasons by number, sums of samples so far, and the call that failed with its code. `last`: sampling ends."},
    {NULL, NULL, 0, NULL}};

int thence_add_stalls(PyObject *module) { return PyModule_AddFunctions(module, functions); }
