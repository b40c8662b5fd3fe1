/* Notes when marks and steps begin and end: the compiled counterpart of moments.py, which documents the rows.
 *
 * Names, lanes and metadata are kept as Python objects. A triple of them that was seen recently is not kept again: a
 * mark in a loop adds a row of numbers, and no object for the garbage collector. Everything here runs with the GIL
 * held; the lock is taken because thence_append requires it. */

#include "_stack.h"
#include <string.h>

enum { OPENED, CLOSED }; /* of thence.model.formats */
enum { REMEMBERED = 64 };

typedef struct {
    int64_t time, serial, forward;
    uint32_t counter, thread, texts, what;
} Moment;
_Static_assert(sizeof(Moment) == 40, "moments are read as NumPy records of 40 bytes");

typedef struct {
    PyObject *name, *lane, *metadata; /* borrowed: the list of texts owns them */
    uint32_t number;
} Texts;

typedef struct {
    PyObject_HEAD
    PyObject *log, *texts; /* texts: a list of tuples, numbered from 1 on; NULL for none */
    Texts remembered[REMEMBERED];
    Rows rows;
} Moments;

static const Rows no_rows = {.size = sizeof(Moment), .most = 1 << 22};

static Texts *place_of(Moments *moments, PyObject *name, PyObject *lane, PyObject *metadata) {
    uintptr_t mixed = (uintptr_t)name ^ (uintptr_t)lane * 3 ^ (uintptr_t)metadata * 5;
    return &moments->remembered[(mixed >> 4) % REMEMBERED];
}

/* Returns the number of a name, lane and metadata if they are remembered, else 0. */
static uint32_t number_of(Moments *moments, PyObject *name, PyObject *lane, PyObject *metadata) {
    const Texts *texts = place_of(moments, name, lane, metadata);
    int same = texts->name == name && texts->lane == lane && texts->metadata == metadata;
    return same ? texts->number : 0;
}

/* Keeps `row`, the tuple of name, lane and metadata. Returns its number; 0, with an exception set, if there is no
 * memory. */
static uint32_t remember(Moments *moments, PyObject *row, PyObject *name, PyObject *lane, PyObject *metadata) {
    if (PyList_Append(moments->texts, row)) return 0;
    uint32_t number = (uint32_t)PyList_Size(moments->texts);
    *place_of(moments, name, lane, metadata) = (Texts){name, lane, metadata, number};
    return number;
}

static PyObject *append(Moments *moments, Moment moment) {
    pthread_mutex_lock(&thence_lock);
    thence_append(&moments->rows, &moment);
    pthread_mutex_unlock(&thence_lock);
    RETURN_NONE;
}

static PyObject *begin(Moments *moments, Moment moment, PyObject *name, PyObject *lane, PyObject *metadata) {
    if (PyDict_Check(metadata) && !PyDict_Size(metadata)) metadata = Py_None; /* marks have distinct empty dicts */
    moment.thread = thence_thread();
    if (thence_note(moments->log, 0, 0, &moment.time, &moment.counter)) return NULL;
    if ((moment.texts = number_of(moments, name, lane, metadata))) return append(moments, moment);
    PyObject *row = PyTuple_Pack(3, name, lane, metadata), *texts = PyList_New(0), *answer = NULL;
    if (row && texts) {
        /* The allocations above may have run Python code (garbage collection, another thread) that took all rows and
         * texts. From here on no Python code runs, so this row and its texts are taken together. */
        if (!moments->texts) moments->texts = Py_NewRef(texts);
        moment.texts = remember(moments, row, name, lane, metadata);
        if (moment.texts) answer = append(moments, moment);
    }
    Py_XDECREF(row), Py_XDECREF(texts);
    return answer;
}

static PyObject *opened(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "opened takes number, name, lane and metadata, not %zd arguments", count);
    Moment moment = {.serial = PyLong_AsLongLong(arguments[0]), .forward = -1, .what = OPENED};
    if (moment.serial == -1 && PyErr_Occurred()) return NULL;
    return begin((Moments *)self, moment, arguments[1], arguments[2], arguments[3]);
}

static PyObject *closed(PyObject *self, PyObject *number) {
    Moment moment = {.serial = PyLong_AsLongLong(number), .forward = -1, .what = CLOSED};
    if (moment.serial == -1 && PyErr_Occurred()) return NULL;
    if (thence_note(((Moments *)self)->log, 0, 0, &moment.time, &moment.counter)) return NULL;
    return append((Moments *)self, moment);
}

static PyObject *began(PyObject *self, PyObject *arguments) {
    unsigned int what;
    long long serial, forward;
    PyObject *name;
    if (!PyArg_ParseTuple(arguments, "ILLO", &what, &serial, &forward, &name)) return NULL;
    Moment moment = {.serial = serial, .forward = forward, .what = what};
    return begin((Moments *)self, moment, name, Py_None, Py_None);
}

static PyObject *take(PyObject *self, PyObject *unused) {
    Moments *moments = (Moments *)self;
    PyObject *texts = moments->texts ? moments->texts : PyList_New(0), *content;
    (void)unused;
    if (!texts) return NULL;
    moments->texts = NULL;
    memset(moments->remembered, 0, sizeof moments->remembered);
    content = thence_take(&moments->rows);
    return content ? Py_BuildValue("NN", content, texts) : (Py_DECREF(texts), NULL);
}

static PyObject *lost(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(((Moments *)self)->rows.lost);
}

static PyObject *new_moments(PyTypeObject *type, PyObject *arguments, PyObject *unused) {
    PyObject *log;
    (void)unused;
    if (!PyArg_ParseTuple(arguments, "O", &log)) return NULL;
    if (!thence_is_log(log)) return PyErr_SetString(PyExc_TypeError, "moments need a Log"), NULL;
    Moments *moments = (Moments *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!moments) return NULL;
    moments->log = Py_NewRef(log);
    memcpy(&moments->rows, &no_rows, sizeof no_rows);
    return (PyObject *)moments;
}

static void free_moments(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(thence_take(&((Moments *)self)->rows));
    Py_XDECREF(((Moments *)self)->texts);
    Py_DECREF(((Moments *)self)->log);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"opened", (PyCFunction)(void (*)(void))opened, METH_FASTCALL, "opened(number, name, lane, metadata)"},
    {"closed", closed, METH_O, "closed(number)"},
    {"began", began, METH_VARARGS, "began(what, serial, forward, name)"},
    {"take", take, METH_NOARGS, "take()\n\nReturns the rows since the last call, as bytes, and their texts."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {{"lost", lost, NULL, "number of rows lost for lack of memory", NULL},
                                   {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, (void *)new_moments},
                              {Py_tp_dealloc, (void *)free_moments},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, attributes},
                              {Py_tp_doc, "Events of marks, recorded with the boundaries of a Log."},
                              {0, NULL}};

static PyType_Spec specification = {.name = "thence.capture.boundaries._probe.Moments",
                                    .basicsize = sizeof(Moments),
                                    .flags = Py_TPFLAGS_DEFAULT,
                                    .slots = slots};

int thence_add_moments(PyObject *module) {
    PyObject *type = PyType_FromSpec(&specification);
    int failed = PyModule_AddObjectRef(module, "Moments", type) < 0; /* NULL with an error set fails too */
    Py_XDECREF(type);
    return failed;
}
