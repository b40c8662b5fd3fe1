/* Reads the Python stack of the calling thread: in which of the user's functions, and in which module, it is.
 *
 * Python registers the code objects that are the user's, and the objects that are modules. The result is a chain: the
 * place of the innermost module, the place of the line from which the outermost frame was reached, and the user's
 * functions with the position in each, innermost first. Each distinct chain has a number; Python looks up names and
 * lines later. A lock protects everything that is not thread-local. */

#include "_stack.h"
#include <string.h>

enum { MOST_OWN = 200, MOST_CHAINS = 1 << 18, HEAD = 2, KEY = HEAD + 2 * MOST_OWN };

static const uint64_t NOT_KNOWN = UINT64_MAX;

/* Row: at a call, such as a launch, the chain of a thread was another than at its last row. `time` is that of
 * the call or just before it, `before` the end of the thread's previous call, Unix ns; `number` is CUPTI's counter
 * before the call. */
typedef struct {
    int64_t time, before;
    uint64_t node; /* number of the autograd node that ran; `maker` is the thread that made it, 0 for no node */
    uint32_t number, thread, chain, maker;
} Change;
_Static_assert(sizeof(Change) == 40, "changes are read as NumPy records of 40 bytes");

/* Row: the autograd nodes from `begin` to before `end` of thread `maker` were made in a chain. */
typedef struct {
    uint64_t begin, end, inside; /* inside: the node that ran meanwhile, of thread `inside_maker`; 0 for no node */
    uint32_t thread, chain, maker, inside_maker;
} Made;
_Static_assert(sizeof(Made) == 40, "rows are read as NumPy records of 40 bytes");

static uint64_t (*next_sequence)(void);
static uint32_t generation = 1, lost_callers;
static int events_were_off; /* threads may be in calls of modules whose beginning had no event */
static __thread Here mine;
static Rows changes = {.size = sizeof(Change), .most = 1 << 22}, made = {.size = sizeof(Made), .most = 1 << 22};
int thence_reading, thence_nodes;

Here *thence_here(void) {
    if (mine.generation != generation) {
        mine = (Here){.generation = generation};
        mine.sequence = NOT_KNOWN;
        mine.depth = -events_were_off;
    }
    return &mine;
}

uint32_t thence_kind(const char *frame) { return thence_kind_of(thence_code(frame)); }

/* Returns the number of the chain from a frame outwards. If the innermost function of the user's is `code`, it is at
 * `position`. `node` is the node that runs: if there is one, the chain ends at the engine, and Python adds the place
 * where the node was made. Frames called by generated code, or by a node with hooks, get the place that go_below has
 * set for them; for generated code `node` is cleared. */
static uint32_t chain_from(const char *frame, uint32_t code, uint32_t position, Node *node) {
    const Here *here = thence_here();
    uint32_t key[KEY], module = 0, line = 0;
    size_t length = HEAD;
    int left = MOST_FRAMES;
    for (; frame && left--; frame = thence_previous(frame)) {
        uint32_t kind = thence_kind(frame);
        if (kind >= FIRST_OWN) {
            if (length == KEY) continue;
            key[length] = kind;
            key[length + 1] = length == HEAD && kind == code ? position : thence_position(frame);
            length += 2;
        } else if (kind == MODULE && !module) {
            module = thence_module(thence_self(frame));
            if (module && !thence_own_functions && !here->generated.set) break; /* lines are not recorded */
        } else if (kind == GENERATED && here->generated.set) {
            if (!module) module = here->generated.module;
            line = here->generated.line;
            *node = (Node){0};
            break;
        } else if (kind == ENGINE && (here->engine.set || node->maker)) {
            break;
        }
    }
    if (!node->maker && here->engine.set && (!frame || thence_kind(frame) == ENGINE)) {
        if (!module) module = here->engine.module;
        line = here->engine.line;
    }
    key[0] = module, key[1] = line;
    if (length == HEAD && !module && !line) return 0; /* nowhere */
    uint32_t number = thence_chain_number(&thence_chains, key, length, MOST_CHAINS);
    if (number || length <= HEAD + 2) return number;
    lost_callers++;
    return thence_chain_number(&thence_chains, key, HEAD + 2, 2 * MOST_CHAINS);
}

uint32_t thence_chain(char *frame, uint32_t code, uint32_t position) {
    Node node = thence_node();
    pthread_mutex_lock(&thence_lock);
    uint32_t chain = chain_from(frame, code, position, &node);
    pthread_mutex_unlock(&thence_lock);
    return chain;
}

/* Returns the number that the thread's next autograd node will get; `here->sequence` if PyTorch's counter is not
 * known. */
static uint64_t upcoming_node(Here *here) {
    if (!next_sequence) return here->sequence;
    uint64_t upcoming = next_sequence();
    if (here->sequence == NOT_KNOWN) here->sequence = upcoming; /* where earlier nodes were made is not known */
    return upcoming;
}

/* Notes, with the lock held, that the nodes from `here->sequence` to before `upcoming` were made in a chain. */
static void nodes_in(Here *here, uint64_t upcoming, uint32_t chain, Node node) {
    Made row = {here->sequence, upcoming, node.number, thence_thread(), chain, thence_maker(), node.maker};
    thence_append(&made, &row);
    here->sequence = upcoming;
    thence_nodes = 1;
}

/* Notes that the nodes which the thread made since the last call were made in the chain from a frame outwards. */
void thence_made(char *frame, uint32_t code, uint32_t position) {
    Here *here = thence_here();
    uint64_t upcoming = upcoming_node(here);
    if (upcoming == here->sequence) return;
    Node node = thence_node();
    pthread_mutex_lock(&thence_lock);
    uint32_t chain = chain_from(frame, code, position, &node);
    nodes_in(here, upcoming, chain, node);
    pthread_mutex_unlock(&thence_lock);
}

/* Notes the chain of the calling thread before it makes the call after this number, if the chain or the node has
 * changed. */
void thence_note_stack(uint32_t number, int64_t time) {
    char *frame = thence_frame();
    Node node = thence_node();
    pthread_mutex_lock(&thence_lock);
    if (thence_reading) {
        Here *here = thence_here();
        uint32_t chain = chain_from(frame, 0, 0, &node);
        uint64_t upcoming = upcoming_node(here);
        if (upcoming != here->sequence) nodes_in(here, upcoming, chain, node);
        if (time <= here->ended) time = here->ended + 1;
        if (chain != here->chain || node.maker != here->maker || node.number != here->node) {
            Change row = {time, here->ended, node.number, number, thence_thread(), chain, node.maker};
            thence_append(&changes, &row);
            here->chain = chain, here->maker = node.maker, here->node = node.number;
        }
        here->ran |= node.maker != 0;
    }
    pthread_mutex_unlock(&thence_lock);
}

void thence_call_ended(int64_t time) { thence_here()->ended = time; }

void thence_forget_stacks(void) {
    generation++;
    events_were_off = 0;
    thence_reading = thence_nodes = 0;
    next_sequence = NULL;
    thence_forget_chains();
    lost_callers = 0;
    thence_forget_hooked();
    changes.count = made.count = 0; /* their memory is reused */
}

/* Functions that Python calls. */

static PyObject *begin_stacks(PyObject *module, PyObject *address) {
    void *function = PyLong_AsVoidPtr(address);
    (void)module;
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&thence_lock);
    thence_forget_stacks();
    memcpy(&next_sequence, &function, sizeof function);
    thence_reading = 1;
    pthread_mutex_unlock(&thence_lock);
    RETURN_NONE;
}

static PyObject *count_nodes(PyObject *module, PyObject *address) {
    void *function = PyLong_AsVoidPtr(address);
    (void)module;
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&thence_lock);
    memcpy(&next_sequence, &function, sizeof function);
    pthread_mutex_unlock(&thence_lock);
    RETURN_NONE;
}

static PyObject *end_stacks(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    pthread_mutex_lock(&thence_lock);
    thence_reading = 0;
    pthread_mutex_unlock(&thence_lock);
    RETURN_NONE;
}

/* After a time without events: what is known of each thread's stack and nodes is of before that time. */
static PyObject *events_go_on(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    pthread_mutex_lock(&thence_lock);
    generation++;
    events_were_off = 1;
    pthread_mutex_unlock(&thence_lock);
    RETURN_NONE;
}

static PyObject *code_kind(PyObject *module, PyObject *address) {
    void *code = PyLong_AsVoidPtr(address);
    (void)module;
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(thence_kind_of(code));
}

static PyObject *here(PyObject *module, PyObject *unused) {
    char *frame = thence_frame();
    (void)module, (void)unused;
    thence_made(frame, 0, 0);
    Node node = thence_node();
    pthread_mutex_lock(&thence_lock);
    uint32_t chain = chain_from(frame, 0, 0, &node);
    pthread_mutex_unlock(&thence_lock);
    return Py_BuildValue("IKI", chain, (unsigned long long)node.number, node.maker);
}

static PyObject *go_below(PyObject *module, PyObject *arguments) {
    unsigned int generated, on, of_module, line;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "IIII", &generated, &on, &of_module, &line)) return NULL;
    Here *here = thence_here();
    if (generated) here->generated.set = on, here->generated.module = of_module, here->generated.line = line;
    else here->engine.set = on, here->engine.module = of_module, here->engine.line = line;
    RETURN_NONE;
}

static PyObject *take_changes(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return thence_take(&changes);
}

static PyObject *take_made(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return thence_take(&made);
}

static PyObject *lost_stacks(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return Py_BuildValue("nnI", (Py_ssize_t)changes.lost, (Py_ssize_t)made.lost, lost_callers);
}

static PyMethodDef functions[] = {
    {"begin_stacks", begin_stacks, METH_O, "Begins to read stacks; takes the address of autograd's counter, or 0."},
    {"count_nodes", count_nodes, METH_O, "Sets the address of autograd's counter, if it becomes known later."},
    {"end_stacks", end_stacks, METH_NOARGS, "Stops reading stacks; what was read can still be taken."},
    {"events_go_on", events_go_on, METH_NOARGS,
     "Forgets what is known of the state of threads, because there were no events for some time."},
    {"code_kind", code_kind, METH_O, "Returns the kind of a code object by its address; 0 if unknown."},
    {"here", here, METH_NOARGS, "Returns the chain of the calling thread and the node that it runs."},
    {"go_below", go_below, METH_VARARGS,
     "Sets the place below generated code (1) or the engine (0): on, module, line."},
    {"take_changes", take_changes, METH_NOARGS, "Returns the changes of chains since the last call, as bytes."},
    {"take_made", take_made, METH_NOARGS, "Returns the chains of autograd nodes made since the last call, as bytes."},
    {"lost_stacks", lost_stacks, METH_NOARGS,
     "Returns how many changes, nodes and callers were lost for lack of room."},
    {NULL, NULL, 0, NULL}};

int thence_add_stack(PyObject *module) { return PyModule_AddFunctions(module, functions); }
