/* Reads frames of Python functions, by the offsets of their fields.
 *
 * A thread that launches is inside of C code, so its frames do not change, and can be read without the GIL. stacks.py
 * sets the offsets of the fields, and tests them before they are used. */

#include "_stack.h"
#include <sys/syscall.h>
#include <unistd.h>

Layout thence_layout;

char *thence_frame(void) {
    const char *state = (const char *)PyGILState_GetThisThreadState();
    if (state && thence_layout.through >= 0) state = thence_word(state + thence_layout.through);
    return state ? thence_word(state + thence_layout.top) : NULL;
}

static PyObject *use_layout(PyObject *module, PyObject *arguments) {
    (void)module;
    Layout *to = &thence_layout;
    if (!PyArg_ParseTuple(arguments, "nnnnnn", &to->through, &to->top, &to->previous, &to->instruction, &to->code,
                          &to->locals))
        return NULL;
    RETURN_NONE;
}

/* Reads a word at an address that may be invalid. The word goes through a pipe, so that the operating system checks the
 * address: a wrong offset makes the call fail, without a segmentation fault. */
static int peek(const int *ends, const char *address, char **value) {
    return syscall(SYS_write, ends[1], address, sizeof *value) == sizeof *value
        && read(ends[0], value, sizeof *value) == sizeof *value;
}

static PyObject *try_frames(PyObject *module, PyObject *unused) {
    int ends[2];
    char *state = (char *)PyGILState_GetThisThreadState(), *frame = NULL, *code, *at, *first;
    (void)module, (void)unused;
    PyObject *found = PyList_New(0);
    if (!found || pipe(ends)) return Py_XDECREF(found), PyErr_SetFromErrno(PyExc_OSError);
    int good = thence_layout.through < 0 || peek(ends, state + thence_layout.through, &state);
    good = good && peek(ends, state + thence_layout.top, &frame);
    for (int left = MOST_FRAMES; good && frame && left--;) {
        good = peek(ends, frame, &code) && peek(ends, frame + thence_layout.instruction, &at)
            && peek(ends, frame + thence_layout.locals, &first);
        if (good) code = thence_untagged(code), first = thence_untagged(first);
        PyObject *row = good ? Py_BuildValue("nnn", (Py_ssize_t)code, (Py_ssize_t)(at - code) - thence_layout.code,
                                             (Py_ssize_t)first) : NULL;
        good = good && row && !PyList_Append(found, row) && peek(ends, frame + thence_layout.previous, &frame);
        Py_XDECREF(row);
    }
    close(ends[0]), close(ends[1]);
    if (good) return found;
    Py_DECREF(found);
    if (PyErr_Occurred()) return NULL;
    RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"use_layout", use_layout, METH_VARARGS, "Sets the offsets of the fields that are read (stacks.py)."},
    {"try_frames", try_frames, METH_NOARGS,
     "Returns code, position and first local of each frame; None for a missing one."},
    {NULL, NULL, 0, NULL}};

int thence_add_frames(PyObject *module) { return PyModule_AddFunctions(module, functions); }
