/* The callback of CUPTI: the compiled counterpart of PythonProbe in probe.py.
 *
 * CUPTI calls `on_call` for one cheap CUDA function, with the number of the call; so calling that function reads the
 * counter of launches. CUPTI calls it for other functions, too: their calls are noted with their times, and the stack
 * of the thread is read (_stack.c). The GIL is not held here; a lock protects the rows of calls and of stacks. */

#include "_stack.h"
#include <time.h>

enum { ENTER = 0, RUNTIME_API = 2, RESOURCE = 3 };
enum { NOTHING, STACKS, CALLS };

/* The first fields of CUpti_CallbackData of cupti_callbacks.h: site at offset 0, correlationId at offset 64. */
typedef struct {
    int site;
    const char *function, *_parameters[3];
    void *_context;
    uint32_t _context_id;
    uint64_t *_correlation_data;
    uint32_t correlation;
} CallbackData;
_Static_assert(offsetof(CallbackData, correlation) == 64, "CUpti_CallbackData.correlationId");

typedef struct {
    int64_t begin, end;
    uint32_t domain, function, thread, number;
} Call;
_Static_assert(sizeof(Call) == 32, "calls are read as NumPy records of 32 bytes");

static __thread uint32_t number; /* of the call by which this thread reads the counter */
static __thread int reading;
static __thread int (*at_exit)(void); /* called by the callback when the call by which this thread reads it ends */
static __thread int answer;           /* what that function returned */
static __thread int64_t began; /* Unix ns: when the thread's other call began; 0: it is in none */
static __thread int domain_of; /* the domain of that call, */
static __thread uint32_t number_of; /* and its number */
static int followed; /* what is noted of calls: a value of Followed in probe.py */
static uint32_t before; /* CUPTI counts from 1 again when it was detached: the last number of all times before */
static int detached;
static const int64_t CLOCKS_DIFFER = 5000; /* ns, at most: between this clock and that of CUPTI's records of calls */
static Rows calls = {.size = sizeof(Call), .most = 1 << 22};

int64_t thence_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void keep(Call call) {
    pthread_mutex_lock(&thence_lock);
    thence_append(&calls, &call);
    pthread_mutex_unlock(&thence_lock);
}

static void on_call(void *user, int domain, uint32_t function, const CallbackData *data) {
    (void)user;
    if (domain == RESOURCE) thence_on_resource(function, data);
    else if (reading) {
        if (data->site == ENTER) number = data->correlation;
        else if (at_exit) {
            int (*last)(void) = at_exit;
            at_exit = NULL;
            answer = last();
        }
    } else if (data->site == ENTER) {
        if (followed == NOTHING) return;
        if (began && domain != RUNTIME_API) return; /* a driver call inside of a runtime call is no row of its own */
        domain_of = domain;
        number_of = data->correlation;
        began = thence_now();
        thence_call_begins();
        if (thence_reading) thence_note_stack(before + number_of - 1, began - (followed == CALLS ? 1 : CLOCKS_DIFFER)); /* before it */
    } else if (began && domain == domain_of && data->correlation == number_of) {
        int64_t ended = thence_now();
        if (followed == CALLS) keep((Call){began, ended, (uint32_t)domain, function, thence_thread(), before + number_of});
        if (thence_reading) thence_call_ended(ended);
        thence_call_is_over(ended);
        began = 0;
    }
}

uint32_t thence_read_counter(int (*call)(int *)) {
    int version;
    number = 0;
    reading = 1;
    call(&version);
    reading = 0;
    return number || detached ? before + number : 0;
}

int thence_calls_are_followed(void) { return followed != NOTHING; }

/* CUPTI recommends to call cuptiFinalize in a callback, at the end of a CUDA call. */
static PyObject *call_at_exit(PyObject *module, PyObject *arguments) {
    Py_ssize_t cheap, function;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "nn", &cheap, &function)) return NULL;
    at_exit = (int (*)(void))function;
    answer = -1;
    Py_BEGIN_ALLOW_THREADS /* threads of CUPTI may wait for the GIL, to hand buffers over */
    thence_read_counter((int (*)(int *))cheap);
    Py_END_ALLOW_THREADS
    at_exit = NULL;
    return Py_BuildValue("iI", answer, number);
}

static PyObject *go_on(PyObject *last, int attached) {
    unsigned long value = PyLong_AsUnsignedLong(last);
    if (PyErr_Occurred()) return NULL;
    before = (uint32_t)value;
    detached = !attached;
    RETURN_NONE;
}

static PyObject *count_from(PyObject *module, PyObject *last) { return (void)module, go_on(last, 1); }

static PyObject *stay_at(PyObject *module, PyObject *last) { return (void)module, go_on(last, 0); }

void thence_forget_calls(void) { calls.count = 0; }

static PyObject *take_calls(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return thence_take(&calls);
}

static PyObject *follow(PyObject *module, PyObject *value) {
    long what = PyLong_AsLong(value);
    (void)module;
    if (what == -1 && PyErr_Occurred()) return NULL;
    if (what < NOTHING || what > CALLS)
        return PyErr_Format(PyExc_ValueError, "follow takes 0 (nothing), 1 (stacks) or 2 (calls), not %ld", what);
    followed = (int)what;
    thence_wake_sampler();
    RETURN_NONE;
}

static PyObject *count_lost_calls(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromSize_t(calls.lost);
}

static PyMethodDef functions[] = {
    {"call_at_exit", call_at_exit, METH_VARARGS,
     "call_at_exit(cheap, function)\n\nCalls a CUDA function, as for the counter, and at its end, in CUPTI's callback, "
     "a function without arguments. Returns the result of that, or -1 if CUPTI did not call back, and the counter."},
    {"count_from", count_from, METH_O,
     "count_from(last)\n\nAdds a number to all numbers of calls from now on: CUPTI counts from 1 when it is attached."},
    {"follow", follow, METH_O,
     "follow(what)\n\nRecords nothing of other calls (0), their stacks (1), or also the calls (2)."},
    {"lost_calls", count_lost_calls, METH_NOARGS,
     "lost_calls()\n\nReturns how many other calls were lost for lack of memory."},
    {"stay_at", stay_at, METH_O, "stay_at(last)\n\nKeeps the counter at a number while CUPTI is detached."},
    {"take_calls", take_calls, METH_NOARGS, "take_calls()\n\nReturns the other calls since the last call, as bytes."},
    {NULL, NULL, 0, NULL}};

int thence_add_calls(PyObject *module) {
    PyObject *address = PyLong_FromVoidPtr((void *)(uintptr_t)on_call);
    int failed = PyModule_AddObjectRef(module, "CALLBACK", address) < 0; /* NULL with an error set fails too */
    Py_XDECREF(address);
    return failed || PyModule_AddFunctions(module, functions);
}
