/* Reads the Python stack of the calling thread: which functions of the user's, and which module, it is in.
 *
 * A thread that launches is inside of C, so its frames stand still, and need no GIL to be read. Python says at which
 * offsets their fields are (stack.py, which tries them out first), which code objects are the user's, and which objects
 * are modules. What is found is a chain: the innermost module, the line below the outermost frame, and the
 * functions with the position in each, innermost first. Each distinct chain has a number; names and lines are
 * found later, in Python. A lock protects all but what is one thread's own. */

#include "_stack.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_FRAMES = 5000, MOST_OWN = 200, MOST_CHAINS = 1 << 18, HEAD = 2, KEY = HEAD + 2 * MOST_OWN };

typedef struct {
    uintptr_t *key;
    uint32_t *value;
    size_t count, room;
} Map;

/* A thread's chain changed at a launch, or another call: number and time of it. */
typedef struct {
    int64_t time;
    uint32_t number, thread, chain, unused;
} Change;
_Static_assert(sizeof(Change) == 24, "changes are read as NumPy records of 24 bytes");

/* Autograd nodes of these numbers, the end excluded, were made in a chain. */
typedef struct {
    uint64_t begin, end;
    uint32_t thread, chain;
} Made;
_Static_assert(sizeof(Made) == 24, "rows are read as NumPy records of 24 bytes");

static struct {
    Py_ssize_t through, top, previous, instruction, code, locals; /* offsets in bytes; through is -1 for none */
} layout;
static Map codes, modules;
static uint64_t (*next_sequence)(void);
static uint32_t generation = 1;
static __thread Here mine;
static Rows changes = {.size = sizeof(Change), .most = 1 << 22}, made = {.size = sizeof(Made), .most = 1 << 22};
static struct {
    uint64_t hash;
    size_t at; /* in `words`: length and key */
} *chains; /* by number - 1 */
static uint32_t *table, chain_count, chain_room, table_room, lost_callers; /* table: numbers by hash, 0 for none */
static uint32_t *words;
static size_t word_count, word_room;
int thence_reading, thence_nodes;

static size_t slot(const Map *map, uintptr_t key) {
    size_t at = (key >> 4) * 0x9E3779B97F4A7C15u >> 20;
    for (at &= map->room - 1; map->key[at] && map->key[at] != key;) at = (at + 1) & (map->room - 1);
    return at;
}

static uint32_t find(const Map *map, uintptr_t key) { return map->room ? map->value[slot(map, key)] : 0; }

static int put(Map *map, uintptr_t key, uint32_t value) {
    if (2 * map->count >= map->room) {
        Map more = {NULL, NULL, map->count, map->room ? 2 * map->room : 1024};
        more.key = calloc(more.room, sizeof *more.key);
        more.value = calloc(more.room, sizeof *more.value);
        if (!more.key || !more.value) return free(more.key), free(more.value), -1;
        for (size_t at = 0; at < map->room; at++)
            if (map->key[at]) {
                size_t to = slot(&more, map->key[at]);
                more.key[to] = map->key[at], more.value[to] = map->value[at];
            }
        free(map->key), free(map->value);
        *map = more;
    }
    size_t at = slot(map, key);
    map->count += !map->key[at];
    map->key[at] = key, map->value[at] = value;
    return 0;
}

static void empty(Map *map) {
    free(map->key), free(map->value);
    *map = (Map){0};
}

Here *thence_here(void) {
    if (mine.generation != generation) {
        mine = (Here){.generation = generation};
        mine.sequence = next_sequence ? next_sequence() : 0;
    }
    return &mine;
}

static char *word(const char *address) { return *(char *const *)address; }

char *thence_frame(void) {
    const char *state = (const char *)PyGILState_GetThisThreadState();
    if (state && layout.through >= 0) state = word(state + layout.through);
    return state ? word(state + layout.top) : NULL;
}

char *thence_previous(const char *frame) { return word(frame + layout.previous); }

PyObject *thence_self(const char *frame) { return (PyObject *)word(frame + layout.locals); }

uint32_t thence_position(const char *frame) {
    Py_ssize_t offset = word(frame + layout.instruction) - word(frame) - layout.code;
    return offset > 0 ? (uint32_t)offset : 0; /* even: instructions have two bytes */
}

PyObject *thence_code(const char *frame) { return (PyObject *)word(frame); }

uint32_t thence_kind(const char *frame) { return find(&codes, (uintptr_t)word(frame)); }

uint32_t thence_kind_of(PyObject *code) { return find(&codes, (uintptr_t)code); }

uint32_t thence_module(PyObject *module) { return find(&modules, (uintptr_t)module); }

static int grow(void *array, uint32_t *room, size_t size) {
    void **content = array, *more = realloc(*content, (*room ? 2 * (size_t)*room : 1024) * size);
    if (!more) return -1;
    *content = more, *room = *room ? 2 * *room : 1024;
    return 0;
}

static int enter_in_table(uint32_t room) {
    uint32_t *more = calloc(room, sizeof *more);
    if (!more) return -1;
    for (uint32_t number = 1; number <= chain_count; number++) {
        size_t at = chains[number - 1].hash & (room - 1);
        while (more[at]) at = (at + 1) & (room - 1);
        more[at] = number;
    }
    free(table);
    table = more, table_room = room;
    return 0;
}

/* The number of a chain, from 1 on; 0 where there is no memory, or there are too many. */
static uint32_t number_of(const uint32_t *key, size_t length, uint32_t most) {
    uint64_t hash = length;
    for (size_t at = 0; at < length; at++) hash = (hash ^ key[at]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    if (2 * chain_count >= table_room && enter_in_table(table_room ? 2 * table_room : 1024)) return 0;
    size_t at = hash & (table_room - 1);
    for (; table[at]; at = (at + 1) & (table_room - 1)) {
        const uint32_t *known = words + chains[table[at] - 1].at;
        if (chains[table[at] - 1].hash == hash && known[0] == length && !memcmp(known + 1, key, 4 * length))
            return table[at];
    }
    if (chain_count >= most) return 0;
    if (chain_count == chain_room && grow(&chains, &chain_room, sizeof *chains)) return 0;
    if (word_count + length + 1 > word_room) {
        size_t room = 2 * word_room + KEY + 1;
        uint32_t *more = realloc(words, room * sizeof *more);
        if (!more) return 0;
        words = more, word_room = room;
    }
    words[word_count] = (uint32_t)length;
    memcpy(words + word_count + 1, key, 4 * length);
    chains[chain_count].hash = hash, chains[chain_count].at = word_count;
    word_count += length + 1;
    return table[at] = ++chain_count;
}

/* The chain from a frame on; where the first function of the user's is `code`, it is at `position`. */
static uint32_t chain_from(const char *frame, uint32_t code, uint32_t position) {
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
        } else if (kind == GENERATED && here->generated.set) {
            if (!module) module = here->generated.module;
            line = here->generated.line;
            break;
        } else if (kind == ENGINE && here->engine.set) {
            break;
        }
    }
    if (here->engine.set && (!frame || thence_kind(frame) == ENGINE)) {
        if (!module) module = here->engine.module;
        line = here->engine.line;
    }
    key[0] = module, key[1] = line;
    if (length == HEAD && !module && !line) return 0; /* nowhere */
    uint32_t number = number_of(key, length, MOST_CHAINS);
    if (number || length <= HEAD + 2) return number;
    lost_callers++;
    return number_of(key, HEAD + 2, 2 * MOST_CHAINS);
}

uint32_t thence_chain(char *frame, uint32_t code, uint32_t position) {
    pthread_mutex_lock(&thence_lock);
    uint32_t chain = chain_from(frame, code, position);
    pthread_mutex_unlock(&thence_lock);
    return chain;
}

/* With the lock held: autograd nodes that were made since were made in a chain. */
static void nodes_in(Here *here, uint64_t upcoming, uint32_t chain) {
    Made row = {here->sequence, upcoming, thence_thread(), chain};
    thence_append(&made, &row);
    here->sequence = upcoming;
    thence_nodes = 1;
}

/* Nodes that were made since this was last asked were made in the chain from a frame on. */
void thence_made(char *frame, uint32_t code, uint32_t position) {
    Here *here = thence_here();
    uint64_t upcoming = next_sequence ? next_sequence() : 0;
    if (upcoming == here->sequence) return;
    pthread_mutex_lock(&thence_lock);
    nodes_in(here, upcoming, chain_from(frame, code, position));
    pthread_mutex_unlock(&thence_lock);
}

/* The calling thread makes the call of this number. */
void thence_note_stack(uint32_t number, int64_t time) {
    char *frame = thence_frame();
    pthread_mutex_lock(&thence_lock);
    if (thence_reading) {
        Here *here = thence_here();
        uint32_t chain = chain_from(frame, 0, 0);
        uint64_t upcoming = next_sequence ? next_sequence() : 0;
        if (upcoming != here->sequence) nodes_in(here, upcoming, chain);
        if (chain != here->chain) {
            Change row = {time, number, thence_thread(), chain, 0};
            thence_append(&changes, &row);
            here->chain = chain;
        }
    }
    pthread_mutex_unlock(&thence_lock);
}

void thence_forget_stacks(void) {
    generation++;
    thence_reading = thence_nodes = 0;
    next_sequence = NULL;
    empty(&codes), empty(&modules);
    free(table), free(chains), free(words);
    table = words = NULL, chains = NULL;
    chain_count = chain_room = table_room = lost_callers = 0;
    word_count = word_room = 0;
    changes.count = made.count = 0; /* their memory serves again */
}

/* What Python calls. */

static PyObject *use_layout(PyObject *module, PyObject *arguments) {
    (void)module;
    if (!PyArg_ParseTuple(arguments, "nnnnnn", &layout.through, &layout.top, &layout.previous, &layout.instruction,
                          &layout.code, &layout.locals))
        return NULL;
    Py_RETURN_NONE;
}

/* A word that may lie nowhere: the kernel looks, so that a wrong offset is an answer and no fault. */
static int peek(const int *ends, const char *address, char **value) {
    return write(ends[1], address, sizeof *value) == sizeof *value && read(ends[0], value, sizeof *value) == sizeof *value;
}

static PyObject *try_frames(PyObject *module, PyObject *unused) {
    int ends[2];
    char *state = (char *)PyGILState_GetThisThreadState(), *frame = NULL, *code, *at, *first;
    (void)module, (void)unused;
    PyObject *found = PyList_New(0);
    if (!found || pipe(ends)) return Py_XDECREF(found), PyErr_SetFromErrno(PyExc_OSError);
    int good = layout.through < 0 || peek(ends, state + layout.through, &state);
    good = good && peek(ends, state + layout.top, &frame);
    for (int left = MOST_FRAMES; good && frame && left--;) {
        good = peek(ends, frame, &code) && peek(ends, frame + layout.instruction, &at)
            && peek(ends, frame + layout.locals, &first);
        PyObject *row = good ? Py_BuildValue("nnn", (Py_ssize_t)code, (Py_ssize_t)(at - code) - layout.code,
                                             (Py_ssize_t)first) : NULL;
        good = good && row && !PyList_Append(found, row) && peek(ends, frame + layout.previous, &frame);
        Py_XDECREF(row);
    }
    close(ends[0]), close(ends[1]);
    if (good) return found;
    Py_DECREF(found);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *begin_stacks(PyObject *module, PyObject *address) {
    void *function = PyLong_AsVoidPtr(address);
    (void)module;
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&thence_lock);
    thence_forget_stacks();
    memcpy(&next_sequence, &function, sizeof function);
    thence_reading = 1;
    pthread_mutex_unlock(&thence_lock);
    Py_RETURN_NONE;
}

static PyObject *count_nodes(PyObject *module, PyObject *address) {
    void *function = PyLong_AsVoidPtr(address);
    (void)module;
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&thence_lock);
    memcpy(&next_sequence, &function, sizeof function);
    pthread_mutex_unlock(&thence_lock);
    Py_RETURN_NONE;
}

static PyObject *end_stacks(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    pthread_mutex_lock(&thence_lock);
    thence_reading = 0;
    pthread_mutex_unlock(&thence_lock);
    Py_RETURN_NONE;
}

static PyObject *add(Map *map, PyObject *arguments) {
    Py_ssize_t address;
    unsigned int number;
    if (!PyArg_ParseTuple(arguments, "nI", &address, &number)) return NULL;
    if (!address) return PyErr_SetString(PyExc_ValueError, "no object lies at 0"), NULL;
    pthread_mutex_lock(&thence_lock);
    int failed = put(map, (uintptr_t)address, number);
    pthread_mutex_unlock(&thence_lock);
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *add_code(PyObject *module, PyObject *arguments) { (void)module; return add(&codes, arguments); }

static PyObject *add_module(PyObject *module, PyObject *arguments) { (void)module; return add(&modules, arguments); }

static PyObject *code_kind(PyObject *module, PyObject *address) {
    void *code = PyLong_AsVoidPtr(address);
    (void)module;
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(thence_kind_of(code));
}

static PyObject *here(PyObject *module, PyObject *unused) {
    char *frame = thence_frame();
    (void)module, (void)unused;
    thence_made(frame, 0, 0);
    return PyLong_FromUnsignedLong(thence_chain(frame, 0, 0));
}

static PyObject *go_below(PyObject *module, PyObject *arguments) {
    unsigned int generated, on, of_module, line;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "IIII", &generated, &on, &of_module, &line)) return NULL;
    Here *here = thence_here();
    if (generated) here->generated.set = on, here->generated.module = of_module, here->generated.line = line;
    else here->engine.set = on, here->engine.module = of_module, here->engine.line = line;
    Py_RETURN_NONE;
}

static PyObject *enter_engine(PyObject *module, PyObject *unused) {
    Here *here = thence_here();
    (void)module, (void)unused;
    PyObject *state = Py_BuildValue("lIII", here->depth, here->engine.set, here->engine.module, here->engine.line);
    if (state) here->depth = 0, here->engine.set = 0;
    return state;
}

static PyObject *leave_engine(PyObject *module, PyObject *state) {
    Here *here = thence_here();
    (void)module;
    if (!PyArg_ParseTuple(state, "lIII", &here->depth, &here->engine.set, &here->engine.module, &here->engine.line))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *take_changes(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return thence_take(&changes);
}

static PyObject *take_made(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return thence_take(&made);
}

static PyObject *chains_from(PyObject *module, PyObject *first) {
    unsigned long number = PyLong_AsUnsignedLong(first);
    (void)module;
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&thence_lock);
    size_t begin = number && number <= chain_count ? chains[number - 1].at : word_count, size = 4 * (word_count - begin);
    uint32_t *content = malloc(size + 1);
    if (content) memcpy(content, words ? words + begin : words, words ? size : 0);
    pthread_mutex_unlock(&thence_lock);
    PyObject *result = content ? PyBytes_FromStringAndSize((char *)content, (Py_ssize_t)size) : PyErr_NoMemory();
    free(content);
    return result;
}

static PyObject *lost_stacks(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return Py_BuildValue("nnI", (Py_ssize_t)changes.lost, (Py_ssize_t)made.lost, lost_callers);
}

static PyMethodDef functions[] = {
    {"use_layout", use_layout, METH_VARARGS, "Offsets of the fields that are read (stack.py)."},
    {"try_frames", try_frames, METH_NOARGS, "Code, position and first local of each frame; None where none is."},
    {"begin_stacks", begin_stacks, METH_O, "Read stacks; the address of autograd's counter, or 0."},
    {"count_nodes", count_nodes, METH_O, "The address of autograd's counter, where it is known later."},
    {"end_stacks", end_stacks, METH_NOARGS, "Read them no longer; what was read can be taken."},
    {"add_code", add_code, METH_VARARGS, "Address of a code object, and what it is."},
    {"code_kind", code_kind, METH_O, "What a code object is, by its address; 0 where it is not known."},
    {"add_module", add_module, METH_VARARGS, "Address of a module, and the number of its place; 0: it is gone."},
    {"here", here, METH_NOARGS, "The chain that the calling thread is in."},
    {"go_below", go_below, METH_VARARGS, "Places below generated code (1) or the engine (0): on, module, line."},
    {"enter_engine", enter_engine, METH_NOARGS, "Autograd's engine is called; the state to leave it with."},
    {"leave_engine", leave_engine, METH_O, "It is over: the state that entering gave."},
    {"take_changes", take_changes, METH_NOARGS, "Changes of chains since this was last asked, as bytes."},
    {"take_made", take_made, METH_NOARGS, "In which chains autograd nodes were made since, as bytes."},
    {"chains_from", chains_from, METH_O, "The chains from a number on, as bytes: length and words of each."},
    {"lost_stacks", lost_stacks, METH_NOARGS, "Changes, nodes and callers for which there was no room."},
    {NULL, NULL, 0, NULL}};

int thence_add_stack(PyObject *module) { return PyModule_AddFunctions(module, functions); }
