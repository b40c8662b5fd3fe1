/* Notes boundaries with CUPTI's counter of launches (_calls.c): the compiled counterpart of log.py, which documents
 * the rows. Everything here runs with the GIL held, which protects the rows. */

#include "_stack.h"
#include <stdlib.h>
#include <string.h>

enum { CHUNK_ROWS = 4096 };

typedef struct {
    int64_t time;
    uint32_t counter, thread, place, flags;
} Row;
_Static_assert(sizeof(Row) == 24, "rows are read as NumPy records of 24 bytes");

typedef struct Chunk {
    struct Chunk *next;
    size_t rows;
    Row row[CHUNK_ROWS];
} Chunk;

typedef struct {
    PyObject_HEAD
    int (*call)(int *);
    Chunk *first, *last;
    size_t rows, lost;
    PyObject *observer; /* called with the place of each boundary; NULL for none */
} Log;

static void forked(void) { /* another thread of the parent may have held the lock */
    thence_forget_threads();
    thence_forget_calls();
    thence_forget_stacks();
    thence_forget_samples();
    thence_forget_stalls();
}

static Row *new_row(Log *log) {
    if (!log->last || log->last->rows == CHUNK_ROWS) {
        Chunk *chunk = malloc(sizeof *chunk);
        if (!chunk) return NULL;
        chunk->next = NULL;
        chunk->rows = 0;
        if (log->last) log->last->next = chunk;
        else log->first = chunk;
        log->last = chunk;
    }
    log->rows++;
    return &log->last->row[log->last->rows++];
}

static PyTypeObject *log_type;

int thence_is_log(PyObject *object) { return log_type && PyObject_TypeCheck(object, log_type); }

/* Notes that the calling thread is in a place from now on. Returns -1, with an exception set, if the observer raises
 * one. */
int thence_note(PyObject *self, uint32_t place, uint32_t flags, int64_t *time, uint32_t *counter) {
    Log *log = (Log *)self;
    *counter = thence_read_counter(log->call);
    *time = thence_now();
    Row *row = new_row(log);
    if (row) *row = (Row){*time, *counter, thence_thread(), place, flags};
    else log->lost++;
    if (thence_reading) thence_note_stack(*counter, *time), thence_call_ended(*time);
    PyObject *answer = log->observer ? PyObject_CallFunction(log->observer, "I", place) : NULL;
    if (log->observer && !answer) return -1;
    Py_XDECREF(answer);
    return 0;
}

static PyObject *log_note(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count < 1 || count > 2)
        return PyErr_Format(PyExc_TypeError, "note takes a place and flags, not %zd arguments", count);
    unsigned long place = PyLong_AsUnsignedLong(arguments[0]);
    if (place == (unsigned long)-1 && PyErr_Occurred()) return NULL;
    unsigned long flags = count == 2 ? PyLong_AsUnsignedLong(arguments[1]) : 0;
    if (flags == (unsigned long)-1 && PyErr_Occurred()) return NULL;
    int64_t time;
    uint32_t counter;
    if (thence_note(self, (uint32_t)place, (uint32_t)flags, &time, &counter)) return NULL;
    return PyLong_FromUnsignedLong(counter);
}

static int set_observer(PyObject *self, PyObject *value, void *unused) {
    Log *log = (Log *)self;
    PyObject *before = log->observer;
    (void)unused;
    log->observer = value && value != Py_None ? Py_NewRef(value) : NULL;
    Py_XDECREF(before);
    return 0;
}

static PyObject *log_take(PyObject *self, PyObject *unused) {
    Log *log = (Log *)self;
    Chunk *chunk = log->first;
    size_t rows = log->rows;
    (void)unused;
    log->first = log->last = NULL;
    log->rows = 0;
    PyObject *content = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(rows * sizeof(Row)));
    char *to = content ? PyBytes_AsString(content) : NULL;
    for (Chunk *next; chunk; chunk = next) {
        if (to) {
            memcpy(to, chunk->row, chunk->rows * sizeof(Row));
            to += chunk->rows * sizeof(Row);
        }
        next = chunk->next;
        free(chunk);
    }
    if (!content) log->lost += rows;
    return content;
}

static PyObject *log_lost(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(((Log *)self)->lost);
}

static PyObject *log_new(PyTypeObject *type, PyObject *arguments, PyObject *unused) {
    Py_ssize_t address;
    (void)unused;
    if (!PyArg_ParseTuple(arguments, "n", &address)) return NULL;
    if (!address) return PyErr_SetString(PyExc_ValueError, "the address of a function is not 0"), NULL;
    Log *log = (Log *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (log) log->call = (int (*)(int *))address;
    return (PyObject *)log;
}

static void log_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(log_take(self, NULL));
    set_observer(self, NULL, NULL);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef log_methods[] = {
    {"note", (PyCFunction)(void (*)(void))log_note, METH_FASTCALL,
     "note(place, flags=0)\n\nRecords that this thread enters a place; returns the counter."},
    {"take", log_take, METH_NOARGS, "take()\n\nReturns the rows since the last call, as bytes."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef log_attributes[] = {
    {"lost", log_lost, NULL, "number of rows lost for lack of memory", NULL}, 
    {"observer", NULL, set_observer, "function that is called with the place of each boundary; None removes it", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot log_slots[] = {
    {Py_tp_new, (void *)log_new},         {Py_tp_dealloc, (void *)log_free}, {Py_tp_methods, log_methods},
    {Py_tp_getset, log_attributes},       {Py_tp_doc, "Boundaries of this process, recorded with a CUDA function."},
    {0, NULL}};

static PyType_Spec log_specification = {
    .name = "thence.capture.boundaries._probe.Log",
    .basicsize = sizeof(Log),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = log_slots};

static int fill(PyObject *module) {
    PyObject *type = PyType_FromSpec(&log_specification);
    int failed = PyModule_AddObjectRef(module, "Log", type) < 0; /* NULL with an error set fails too */
    log_type = (PyTypeObject *)type; /* kept: there is one module in a process */
    failed = failed || thence_add_calls(module) || thence_add_frames(module) || thence_add_chains(module);
    failed = failed || thence_add_stack(module) || thence_add_events(module) || thence_add_nodes(module);
    failed = failed || thence_add_moments(module) || thence_add_samples(module) || thence_add_signals(module);
    failed = failed || thence_add_counters(module) || thence_add_stalls(module);
    return failed || pthread_atfork(NULL, NULL, forked) ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "thence.capture.boundaries._probe",
    .m_doc = "CUPTI's counter of launches, and boundaries recorded with it.",
    .m_slots = module_slots};

PyMODINIT_FUNC PyInit__probe(void) { return PyModuleDef_Init(&module); }
