/* Notes when marks open and close: the fast twin of moments.py, which says what the rows mean.
 *
 * Names, lanes and metadata are kept as the objects that they are, and every three of them that were seen lately once:
 * a mark in a loop adds a row of numbers, and nothing for the garbage collector. Everything here runs with the GIL
 * held; the lock is held because all rows are appended so. */

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
    PyObject *name, *lane, *metadata; /* held by the list of texts */
    uint32_t number;
} Texts;

typedef struct {
    PyObject_HEAD
    PyObject *log, *texts; /* a list of tuples, whose numbers begin at 1; NULL for none */
    Texts remembered[REMEMBERED];
    Rows rows;
} Moments;

static const Rows no_rows = {.size = sizeof(Moment), .most = 1 << 22};

static Texts *place_of(Moments *moments, PyObject *name, PyObject *lane, PyObject *metadata) {
    uintptr_t mixed = (uintptr_t)name ^ (uintptr_t)lane * 3 ^ (uintptr_t)metadata * 5;
    return &moments->remembered[(mixed >> 4) % REMEMBERED];
}

/* The number of a name, its lane and its metadata, if they were remembered; else 0. */
static uint32_t number_of(Moments *moments, PyObject *name, PyObject *lane, PyObject *metadata) {
    const Texts *texts = place_of(moments, name, lane, metadata);
    int same = texts->name == name && texts->lane == lane && texts->metadata == metadata;
    return same ? texts->number : 0;
}

/* Keeps a tuple of these three; returns its number, 0 where there is no memory, with an error set. */
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
    if (PyDict_Check(metadata) && !PyDict_Size(metadata)) metadata = Py_None; /* every mark has a dict of its own */
    moment.thread = thence_thread();
    if (thence_note(moments->log, 0, 0, &moment.time, &moment.counter)) return NULL;
    if ((moment.texts = number_of(moments, name, lane, metadata))) return append(moments, moment);
    PyObject *row = PyTuple_Pack(3, name, lane, metadata), *texts = PyList_New(0), *answer = NULL;
    if (row && texts) {
        /* What was allocated may have run Python code, and that have taken all rows and texts: nothing does from here
         * on, so that this row goes with its texts. */
        if (!moments->texts) moments->texts = Py_NewRef(texts);
        moment.texts = remember(moments, row, name, lane, metadata);
        if (moment.texts) answer = append(moments, moment);
    }
    Py_XDECREF(row), Py_XDECREF(texts);
    return answer;
}

static PyObject *opened(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "opened takes number, name, lane, metadata, not %zd arguments", count);
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
    if (!thence_is_log(log)) return PyErr_SetString(PyExc_TypeError, "moments are noted with a Log"), NULL;
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
    {"take", take, METH_NOARGS, "take()\n\nThe rows since this was last asked, as bytes, and their texts."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {{"lost", lost, NULL, "rows for which there was no memory", NULL},
                                   {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, (void *)new_moments},
                              {Py_tp_dealloc, (void *)free_moments},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, attributes},
                              {Py_tp_doc, "Moments of marks, noted with the boundaries of a Log."},
                              {0, NULL}};

static PyType_Spec specification = {.name = "thence.boundaries._probe.Moments",
                                    .basicsize = sizeof(Moments),
                                    .flags = Py_TPFLAGS_DEFAULT,
                                    .slots = slots};

int thence_add_moments(PyObject *module) {
    PyObject *type = PyType_FromSpec(&specification);
    int failed = PyModule_AddObjectRef(module, "Moments", type) < 0; /* NULL with an error set fails too */
    Py_XDECREF(type);
    return failed;
}
