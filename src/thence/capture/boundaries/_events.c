/* Callbacks of sys.monitoring for code that runs often: calls of modules, and functions of the user's.
 *
 * They note in which chain autograd nodes are made, also by operations that launch nothing. They call Python for
 * modules that have no place yet and for calls of outermost modules; events of other watched code are passed on to
 * Python. They run with the GIL held, and the frame of the code is the innermost frame of the thread. */

#include "_stack.h"

/* The callbacks in Python, in the order of the tuple that set_callbacks takes. */
enum { BEGINS, RESUMES, ENDS, THROWS, MODULE_BEGINS, MODULE_OVER, NODES, CALLBACKS };
static PyObject *callbacks[CALLBACKS], *observer;
static int idle; /* whether events of the user's functions are off, because no node was made; the first one ends this */

static PyObject *pass_on(int which, PyObject *const *arguments, Py_ssize_t count) {
    if (count < 2 || !callbacks[which]) RETURN_NONE;
    return PyObject_CallFunctionObjArgs(callbacks[which], arguments[0], arguments[1], count > 2 ? arguments[2] : NULL,
                                        NULL);
}

/* Drops the result of a callback. An Exception is cleared, so that it does not reach the program; anything else that
 * was raised, such as KeyboardInterrupt, is passed on: returns -1. */
static int said(PyObject *answer) {
    Py_XDECREF(answer);
    if (answer) return 0;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return 0;
}

/* Calls the observer with the chain of a frame, in which the calling thread is from now on. */
static PyObject *tell(char *frame, uint32_t code, uint32_t position) {
    if (observer && said(PyObject_CallFunction(observer, "I", thence_chain(frame, code, position)))) return NULL;
    RETURN_NONE;
}

/* Notes that the nodes made since the last call were made in the chain of a frame. While idle, the first node makes
 * Python switch the events of the user's functions on. */
static int made(char *frame, uint32_t code, uint32_t position) {
    thence_made(frame, code, position);
    if (!idle || !thence_nodes || !callbacks[NODES]) return 0;
    idle = 0;
    return said(PyObject_CallFunctionObjArgs(callbacks[NODES], NULL));
}

/* How many calls of modules there are from a frame outwards, without those around a call of autograd's engine. */
static long modules_from(char *frame) {
    long count = 0;
    for (int left = MOST_FRAMES; frame && left-- && thence_kind(frame) != ENGINE; frame = thence_previous(frame))
        count += thence_kind(frame) == MODULE;
    return count;
}

static PyObject *module_begins(char *frame) {
    Here *here = thence_here();
    char *around = thence_previous(frame);
    if (made(around, 0, 0)) return NULL;
    PyObject *module = thence_self(frame);
    here->depth = (here->depth < 0 ? modules_from(around) : here->depth) + 1;
    if (callbacks[MODULE_BEGINS] && (here->depth == 1 || !thence_module(module))) {
        uint32_t in = 0;
        for (char *at = around; at && here->depth > 1 && !in; at = thence_previous(at))
            if (thence_kind(at) == MODULE) in = thence_module(thence_self(at));
        if (said(PyObject_CallFunction(callbacks[MODULE_BEGINS], "OiI", module, here->depth == 1, in))) return NULL;
    }
    return tell(frame, 0, 0);
}

static PyObject *module_ends(char *frame) {
    Here *here = thence_here();
    if (made(frame, 0, 0)) return NULL;
    if (here->depth < 0) here->depth = modules_from(frame);
    if (here->depth > 0 && --here->depth == 0 && callbacks[MODULE_OVER]) {
        if (said(PyObject_CallFunctionObjArgs(callbacks[MODULE_OVER], NULL))) return NULL;
    }
    return tell(thence_previous(frame), 0, 0);
}

/* Returns the frame of an event, NULL while stacks are not read; sets the kind of its code. */
static char *frame_of(PyObject *const *arguments, Py_ssize_t count, uint32_t *kind) {
    char *frame = thence_reading && count ? thence_frame() : NULL;
    *kind = count ? thence_kind_of(arguments[0]) : UNKNOWN;
    return frame && thence_code(frame) == arguments[0] ? frame : NULL;
}

/* A function of the user's begins or continues, at the present position of its frame. */
static PyObject *goes_on(char *frame, uint32_t kind) {
    Here *here = thence_here();
    if (made(thence_previous(frame), 0, 0)) return NULL;
    here->frame = frame, here->code = kind, here->position = thence_position(frame);
    return tell(frame, 0, 0);
}

static PyObject *on_start(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    uint32_t kind;
    char *frame = frame_of(arguments, count, &kind);
    (void)module;
    if (frame && kind == MODULE) return module_begins(frame);
    if (kind < FIRST_OWN) {
        PyObject *answer = pass_on(BEGINS, arguments, count);
        if (!answer || thence_kind_of(arguments[0]) < FIRST_OWN) return answer;
        /* Python has just registered it as the user's. Its answer, which may be DISABLE, is dropped: the event would
         * stay disabled in later recordings, too. */
        Py_DECREF(answer);
        frame = frame_of(arguments, count, &kind);
    }
    if (frame && !idle) return goes_on(frame, kind);
    RETURN_NONE;
}

static PyObject *on_resume(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    uint32_t kind;
    char *frame = frame_of(arguments, count, &kind);
    (void)module;
    if (kind < FIRST_OWN) {
        PyObject *answer = pass_on(RESUMES, arguments, count);
        if (!answer || thence_kind_of(arguments[0]) < FIRST_OWN) return answer;
        Py_DECREF(answer); /* Python has just registered it as the user's: do not disable it */
    } else if (frame) {
        return goes_on(frame, kind);
    }
    RETURN_NONE;
}

static PyObject *on_throw(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    uint32_t kind;
    char *frame = frame_of(arguments, count, &kind);
    (void)module;
    if (kind == WATCHED || kind == ENGINE) return pass_on(THROWS, arguments, count);
    if (frame && kind >= FIRST_OWN) return goes_on(frame, kind);
    RETURN_NONE;
}

static PyObject *on_leave(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    uint32_t kind;
    char *frame = frame_of(arguments, count, &kind);
    (void)module;
    if (kind == WATCHED || kind == ENGINE) return pass_on(ENDS, arguments, count);
    if (frame && kind == MODULE) return module_ends(frame);
    if (!frame || kind < FIRST_OWN) RETURN_NONE;
    if (made(frame, 0, 0)) return NULL;
    Here *here = thence_here();
    char *caller = thence_previous(frame);
    for (int left = 100; caller && left-- && thence_kind(caller) < FIRST_OWN;) caller = thence_previous(caller);
    here->frame = caller;
    if (caller) here->code = thence_kind(caller), here->position = thence_position(caller);
    return tell(thence_previous(frame), 0, 0);
}

static PyObject *on_line(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    uint32_t kind;
    char *frame = frame_of(arguments, count, &kind);
    (void)module;
    if (!frame || count < 2 || kind < FIRST_OWN) RETURN_NONE;
    Here *here = thence_here();
    int same = here->frame == frame && here->code == kind;
    if (same ? made(frame, kind, here->position) : made(thence_previous(frame), 0, 0)) return NULL;
    here->frame = frame, here->code = kind;
    here->position = (uint32_t)PyLong_AsUnsignedLong(arguments[1]) << 1 | 1; /* odd: twice the line, and 1 */
    return tell(frame, kind, here->position);
}

static PyObject *set_callbacks(PyObject *module, PyObject *given) {
    (void)module;
    if (!PyTuple_Check(given) || (PyTuple_Size(given) != CALLBACKS && PyTuple_Size(given) != 0))
        return PyErr_SetString(PyExc_TypeError, "give a tuple of all callbacks, or an empty one"), NULL;
    for (int at = 0; at < CALLBACKS; at++) {
        PyObject *before = callbacks[at];
        callbacks[at] = at < PyTuple_Size(given) ? Py_NewRef(PyTuple_GetItem(given, at)) : NULL;
        Py_XDECREF(before);
    }
    RETURN_NONE;
}

static PyObject *observe_stacks(PyObject *module, PyObject *value) {
    PyObject *before = observer;
    (void)module;
    observer = value != Py_None ? Py_NewRef(value) : NULL;
    Py_XDECREF(before);
    RETURN_NONE;
}

/* If no node was made so far, and there is no observer, only the first node is looked for from now on. Returns whether
 * that is so. */
static PyObject *go_idle(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    idle = !thence_nodes && !observer;
    return PyBool_FromLong(idle);
}

#define FAST(name) (PyCFunction)(void (*)(void))name, METH_FASTCALL
static PyMethodDef functions[] = {
    {"on_start", FAST(on_start), "PY_START"},
    {"on_resume", FAST(on_resume), "PY_RESUME"},
    {"on_throw", FAST(on_throw), "PY_THROW"},
    {"on_leave", FAST(on_leave), "PY_RETURN, PY_YIELD, PY_UNWIND"},
    {"on_line", FAST(on_line), "LINE"},
    {"set_callbacks", set_callbacks, METH_O,
     "Sets the Python callbacks, in the order of CALLBACKS; an empty tuple removes them."},
    {"observe_stacks", observe_stacks, METH_O,
     "Sets the function that is called with the chain at each event; None removes it."},
    {"go_idle", go_idle, METH_NOARGS, "Returns whether events of the user's functions are not needed from now on."},
    {NULL, NULL, 0, NULL}};

int thence_add_events(PyObject *module) { return PyModule_AddFunctions(module, functions); }
