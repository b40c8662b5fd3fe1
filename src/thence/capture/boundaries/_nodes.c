/* Reads which autograd node runs on the calling thread: its number, and the thread that made it.
 *
 * torch::autograd::get_current_node returns the node as a pointer that owns a reference: a std::shared_ptr of two
 * words, or a c10::intrusive_ptr of one word. The reference is released at once. It is never the last one, because the
 * engine owns the node while it runs. The offsets of the fields are tested first, on nodes whose number and thread
 * Python knows (hooks/torch/running_nodes.py). */

#include "_stack.h"
#include <string.h>

enum { MOST_WORDS = 4, FIRST_FIELD = 2, LAST_FIELD = 8, MAKER = 3 /* words after the number */ };
static const uint32_t FIELDS = (1u << (LAST_FIELD + 1)) - (1u << FIRST_FIELD);

static void *(*current)(uint64_t *pointer); /* get_current_node; the argument is the hidden pointer to its result */
static uint64_t (*own_id)(void);
static int words;                 /* size of its result; 0: not known */
static uint32_t candidates = ~0u; /* bit set of the fields that fit every node tried so far */
static int number_at;             /* index of the field with the number; 0: not known yet */
static int hooked;                /* number of backward passes under way whose nodes have hooks */

/* Address of the reference count. */
static void *count_of(const uint64_t *pointer) { return (char *)(uintptr_t)pointer[words - 1] + 8; }

static void give_back(const uint64_t *pointer) {
    if (words == 1) __atomic_fetch_sub((uint64_t *)count_of(pointer), 1, __ATOMIC_ACQ_REL);
    else __atomic_fetch_sub((uint32_t *)count_of(pointer), 1, __ATOMIC_ACQ_REL);
}

Node thence_node(void) {
    uint64_t pointer[MOST_WORDS] = {0};
    if (!number_at || hooked) return (Node){0};
    current(pointer);
    if (!pointer[0]) return (Node){0};
    const uint64_t *field = (const uint64_t *)(uintptr_t)pointer[0] + number_at;
    Node node = {field[0], (uint32_t)field[MAKER]};
    give_back(pointer);
    return node;
}

uint32_t thence_maker(void) { return own_id ? (uint32_t)own_id() : 0; }

void thence_forget_hooked(void) { hooked = 0; }

/* Functions that Python calls. */

/* Called outside of all nodes. Returns how many words the result of get_current_node has; 0 if it is of no known
 * kind. */
static PyObject *look_for_nodes(PyObject *module, PyObject *arguments) {
    Py_ssize_t of_current, of_id;
    uint64_t pointer[MOST_WORDS];
    (void)module;
    if (!PyArg_ParseTuple(arguments, "nn", &of_current, &of_id)) return NULL;
#ifdef __x86_64__ /* elsewhere the hidden pointer is not passed like a first argument */
    memcpy(&current, &of_current, sizeof current), memcpy(&own_id, &of_id, sizeof own_id);
    memset(pointer, 0xff, sizeof pointer);
    current(pointer);
    words = 0;
    while (words < MOST_WORDS && !pointer[words]) words++;
    if (words > 2) words = 0;
#else
    (void)pointer;
#endif
    if (!words) number_at = 0;
    return PyLong_FromLong(words);
}

/* Takes what Python knows of the node that runs: the address of its object, its number, and the thread that probably
 * made it. Returns whether get_current_node and the fields of the node agree; None if another thread made it. */
static PyObject *try_node(PyObject *module, PyObject *arguments) {
    Py_ssize_t address;
    unsigned long long number;
    unsigned int maker;
    uint64_t pointer[MOST_WORDS] = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "nKI", &address, &number, &maker)) return NULL;
    if (!words || !maker) Py_RETURN_FALSE;
    const uint64_t *known = (const uint64_t *)address + 2; /* after the header of the Python object */
    const uint32_t *count = count_of(known);
    uint32_t before = __atomic_load_n(count, __ATOMIC_ACQUIRE);
    current(pointer);
    int taken = __atomic_load_n(count, __ATOMIC_ACQUIRE) == before + 1;
    if (memcmp(pointer, known, 8 * (size_t)words) || !taken || before < 2) Py_RETURN_FALSE;
    give_back(pointer);
    const uint64_t *field = (const uint64_t *)(uintptr_t)pointer[0];
    uint32_t numbers = 0, both = 0;
    for (int at = FIRST_FIELD; at <= LAST_FIELD; at++)
        if (field[at] == number) numbers |= 1u << at, both |= (uint32_t)(field[at + MAKER] == maker) << at;
    if (numbers && !both) RETURN_NONE; /* another thread made it */
    candidates &= both;
    return PyBool_FromLong(candidates & FIELDS);
}

/* Called after enough nodes agreed. Returns whether nodes are read from now on: exactly one field fits. */
static PyObject *use_nodes(PyObject *module, PyObject *unused) {
    uint32_t left = candidates & FIELDS;
    (void)module, (void)unused;
    if (left && !(left & (left - 1))) number_at = __builtin_ctz(left); /* a single bit */
    return PyBool_FromLong(number_at);
}

static PyObject *nodes_known(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(number_at);
}

static PyObject *maker(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromUnsignedLong(thence_maker());
}

static PyObject *in_node(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(thence_node().maker);
}

static PyObject *hooks_are_set(PyObject *module, PyObject *more) {
    long by = PyLong_AsLong(more);
    (void)module;
    if (PyErr_Occurred()) return NULL;
    hooked += (int)by;
    RETURN_NONE;
}

static PyObject *enter_engine(PyObject *module, PyObject *unused) {
    Here *here = thence_here();
    (void)module, (void)unused;
    PyObject *state = Py_BuildValue("lIIII", here->depth, here->engine.set, here->engine.module, here->engine.line,
                                    here->ran);
    if (state) here->depth = 0, here->engine.set = 0, here->ran = 0;
    return state;
}

static PyObject *leave_engine(PyObject *module, PyObject *state) {
    Here *here = thence_here();
    uint32_t ran = here->ran;
    (void)module;
    if (!PyArg_ParseTuple(state, "lIIII", &here->depth, &here->engine.set, &here->engine.module, &here->engine.line,
                          &here->ran))
        return NULL;
    here->ran |= ran;
    return PyBool_FromLong(ran);
}

static PyMethodDef functions[] = {
    {"look_for_nodes", look_for_nodes, METH_VARARGS, "Sets the addresses of get_current_node and currentThreadId."},
    {"try_node", try_node, METH_VARARGS, "Tests the running node: address of its object, its number, its maker."},
    {"use_nodes", use_nodes, METH_NOARGS,
     "Reads nodes from now on, if all tested nodes agreed; returns whether it does."},
    {"nodes_known", nodes_known, METH_NOARGS, "Returns whether nodes are read."},
    {"maker", maker, METH_NOARGS, "Returns PyTorch's number of the calling thread; 0 if unknown."},
    {"in_node", in_node, METH_NOARGS, "Returns whether the calling thread runs a node."},
    {"hooks_are_set", hooks_are_set, METH_O,
     "Changes the number of backward passes whose nodes have hooks by this much."},
    {"enter_engine", enter_engine, METH_NOARGS, "Enters autograd's engine; returns the state for leave_engine."},
    {"leave_engine", leave_engine, METH_O,
     "Leaves the engine, with the state of enter_engine; whether nodes launched here."},
    {NULL, NULL, 0, NULL}};

int thence_add_nodes(PyObject *module) { return PyModule_AddFunctions(module, functions); }
