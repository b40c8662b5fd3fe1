/* Memory of a column that NumPy reads without a copy; it is freed with the last array of it.
 *
 * Before it includes this, a module defines THENCE_MODULE, its whole name. */

#ifndef THENCE_MEMORY_H
#define THENCE_MEMORY_H

#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    PyObject_HEAD
    uint8_t *data;
    size_t size;
    int read_only;
} Memory;

static PyTypeObject *memory_type;

static int memory_get(PyObject *self, Py_buffer *view, int flags) {
    Memory *memory = (Memory *)self;
    return PyBuffer_FillInfo(view, self, memory->data, (Py_ssize_t)memory->size, memory->read_only, flags);
}

static void memory_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    free(((Memory *)self)->data);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Takes the memory of a column over: its owner has none then. */
static PyObject *memory_of(uint8_t **data, size_t size, int read_only) {
    Memory *memory = (Memory *)((allocfunc)PyType_GetSlot(memory_type, Py_tp_alloc))(memory_type, 0);
    if (memory) memory->data = *data, memory->size = size, memory->read_only = read_only, *data = NULL;
    return (PyObject *)memory;
}

static PyType_Slot memory_slots[] = {
    {Py_bf_getbuffer, (void *)memory_get}, {Py_tp_dealloc, (void *)memory_free}, {0, NULL}};

static PyType_Spec memory_specification = {
    .name = THENCE_MODULE ".Memory",
    .basicsize = sizeof(Memory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = memory_slots};

/* Adds a type to a module under this name, and makes the type of memory; -1 with an error set if that fails. */
static int add_types(PyObject *module, const char *name, PyType_Spec *specification) {
    PyObject *type = PyType_FromSpec(specification);
    int failed = PyModule_AddObjectRef(module, name, type) < 0; /* NULL with an error set fails too */
    Py_XDECREF(type);
    memory_type = failed ? NULL : (PyTypeObject *)PyType_FromSpec(&memory_specification); /* kept */
    return memory_type ? 0 : -1;
}

#endif
