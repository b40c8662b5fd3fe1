/* The tables that _stack.c and _samples.c use: a number for each chain, and by address the kind of a code object and
 * the place of a module.
 *
 * The maps of code objects and modules change only with the GIL and the lock held, so a reader needs one of the two.
 * Chains are read and added with the lock held. */

#include "_stack.h"
#include <stdlib.h>
#include <string.h>

typedef struct {
    uintptr_t *key;
    uint32_t *value;
    size_t count, room;
} Map;

static Map codes, modules;
int thence_own_functions;
ChainTable thence_chains;

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

uint32_t thence_kind_of(PyObject *code) { return find(&codes, (uintptr_t)code); }

uint32_t thence_module(PyObject *module) { return find(&modules, (uintptr_t)module); }

static int grow(ChainTable *in) {
    uint32_t room = in->room ? 2 * in->room : 1024;
    void *more = realloc(in->chains, room * sizeof *in->chains);
    if (!more) return -1;
    in->chains = more, in->room = room;
    return 0;
}

static int enter_in_table(ChainTable *in, uint32_t room) {
    uint32_t *more = calloc(room, sizeof *more);
    if (!more) return -1;
    for (uint32_t number = 1; number <= in->count; number++) {
        size_t at = in->chains[number - 1].hash & (room - 1);
        while (more[at]) at = (at + 1) & (room - 1);
        more[at] = number;
    }
    free(in->table);
    in->table = more, in->table_room = room;
    return 0;
}

/* Returns the number of a chain, from 1 on, and adds the chain if it is new; 0 if there is no memory for it, or there
 * are `most` chains already. */
uint32_t thence_chain_number(ChainTable *in, const uint32_t *key, size_t length, uint32_t most) {
    uint64_t hash = length;
    for (size_t at = 0; at < length; at++) hash = (hash ^ key[at]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    if (2 * in->count >= in->table_room && enter_in_table(in, in->table_room ? 2 * in->table_room : 1024)) return 0;
    size_t at = hash & (in->table_room - 1);
    for (; in->table[at]; at = (at + 1) & (in->table_room - 1)) {
        const uint32_t *known = in->words + in->chains[in->table[at] - 1].at;
        if (in->chains[in->table[at] - 1].hash == hash && known[0] == length && !memcmp(known + 1, key, 4 * length))
            return in->table[at];
    }
    if (in->count >= most) return 0;
    if (in->count == in->room && grow(in)) return 0;
    if (in->word_count + length + 1 > in->word_room) {
        size_t room = 2 * in->word_room + length + 1024;
        uint32_t *more = realloc(in->words, room * sizeof *more);
        if (!more) return 0;
        in->words = more, in->word_room = room;
    }
    in->words[in->word_count] = (uint32_t)length;
    memcpy(in->words + in->word_count + 1, key, 4 * length);
    in->chains[in->count].hash = hash, in->chains[in->count].at = in->word_count;
    in->word_count += length + 1;
    return in->table[at] = ++in->count;
}

void thence_empty_chains(ChainTable *table) {
    free(table->table), free(table->chains), free(table->words);
    *table = (ChainTable){0};
}

void thence_forget_chains(void) {
    empty(&codes), empty(&modules);
    thence_own_functions = 0;
    thence_empty_chains(&thence_chains);
}

static PyObject *add(Map *map, PyObject *arguments) {
    Py_ssize_t address;
    unsigned int number;
    if (!PyArg_ParseTuple(arguments, "nI", &address, &number)) return NULL;
    if (!address) return PyErr_SetString(PyExc_ValueError, "the address of an object is not 0"), NULL;
    pthread_mutex_lock(&thence_lock);
    int failed = put(map, (uintptr_t)address, number);
    thence_own_functions |= !failed && map == &codes && number >= FIRST_OWN;
    pthread_mutex_unlock(&thence_lock);
    if (failed) return PyErr_NoMemory();
    RETURN_NONE;
}

static PyObject *add_code(PyObject *module, PyObject *arguments) { (void)module; return add(&codes, arguments); }

static PyObject *add_module(PyObject *module, PyObject *arguments) { (void)module; return add(&modules, arguments); }

PyObject *thence_chains_from(const ChainTable *in, PyObject *first) {
    unsigned long number = PyLong_AsUnsignedLong(first);
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&thence_lock);
    size_t begin = number && number <= in->count ? in->chains[number - 1].at : in->word_count;
    size_t size = 4 * (in->word_count - begin);
    uint32_t *content = malloc(size + 1);
    if (content) memcpy(content, in->words ? in->words + begin : in->words, in->words ? size : 0);
    pthread_mutex_unlock(&thence_lock);
    PyObject *result = content ? PyBytes_FromStringAndSize((char *)content, (Py_ssize_t)size) : PyErr_NoMemory();
    free(content);
    return result;
}

static PyObject *chains_from(PyObject *module, PyObject *first) {
    (void)module;
    return thence_chains_from(&thence_chains, first);
}

static PyMethodDef functions[] = {
    {"add_code", add_code, METH_VARARGS, "Registers a code object: its address and its kind."},
    {"add_module", add_module, METH_VARARGS,
     "Registers a module: its address and the number of its place; 0 removes it."},
    {"chains_from", chains_from, METH_O, "Returns the chains from a number on, as bytes: length and words of each."},
    {NULL, NULL, 0, NULL}};

int thence_add_chains(PyObject *module) { return PyModule_AddFunctions(module, functions); }
