/* Reads the samples of hardware counters out of CUPTI's image, two calls of CUPTI for each, without the GIL: in Python
 * each sample would take it twice from a program that computes. Structs are those of cupti_pmsampling.h and
 * cupti_profiler_host.h of CUDA 12.8 to 13.5. */

#include "_stack.h"

typedef struct {
    size_t size;
    void *private, *sampler;
    const uint8_t *image;
    size_t bytes, index;
    uint64_t start, end;
} SampleInfo;
_Static_assert(sizeof(SampleInfo) == 64, "as in cupti_pmsampling.h");

typedef struct {
    size_t size;
    void *private, *host;
    const uint8_t *image;
    size_t bytes, index;
    const char **metrics;
    size_t count;
    double *values;
} Evaluate;
_Static_assert(sizeof(Evaluate) == 72, "as in cupti_profiler_host.h");

static PyObject *read_samples(PyObject *module, PyObject *arguments) {
    Py_ssize_t ask, asked, evaluate, evaluated, samples, starts, ends, values;
    int code = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "nnnnnnnn", &ask, &asked, &evaluate, &evaluated, &samples, &starts, &ends, &values))
        return NULL;
    SampleInfo *info = (SampleInfo *)asked;
    Evaluate *amounts = (Evaluate *)evaluated;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < samples && !code; i++) {
        info->index = amounts->index = (size_t)i;
        amounts->values = (double *)values + (size_t)i * amounts->count;
        code = ((int (*)(SampleInfo *))ask)(info);
        if (!code) code = ((int (*)(Evaluate *))evaluate)(amounts);
        ((int64_t *)starts)[i] = (int64_t)info->start;
        ((int64_t *)ends)[i] = (int64_t)info->end;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

static PyMethodDef functions[] = {
    {"read_samples", read_samples, METH_VARARGS,
     "read_samples(ask, asked, evaluate, evaluated, samples, starts, ends, values)\n\nReturns CUPTI's last code."},
    {NULL, NULL, 0, NULL}};

int thence_add_counters(PyObject *module) { return PyModule_AddFunctions(module, functions); }
