/* The tables that _stack.c uses: a number for each chain, and by address the kind of a code object and the place of
 * a module.
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
static struct {
    uint64_t hash;
    size_t at; /* in `words`: length and key */
} *chains; /* by number - 1 */
static uint32_t *table, chain_count, chain_room, table_room; /* table: numbers by hash, 0 for none */
static uint32_t *words;
static size_t word_count, word_room;

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

/* Returns the number of a chain, from 1 on, and adds the chain if it is new; 0 if there is no memory for it, or there
 * are `most` chains already. */
uint32_t thence_chain_number(const uint32_t *key, size_t length, uint32_t most) {
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
        size_t room = 2 * word_room + length + 1024;
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

void thence_forget_chains(void) {
    empty(&codes), empty(&modules);
    thence_own_functions = 0;
    free(table), free(chains), free(words);
    table = words = NULL, chains = NULL;
    chain_count = chain_room = table_room = 0;
    word_count = word_room = 0;
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

static PyMethodDef functions[] = {
    {"add_code", add_code, METH_VARARGS, "Registers a code object: its address and its kind."},
    {"add_module", add_module, METH_VARARGS,
     "Registers a module: its address and the number of its place; 0 removes it."},
    {"chains_from", chains_from, METH_O, "Returns the chains from a number on, as bytes: length and words of each."},
    {NULL, NULL, 0, NULL}};

int thence_add_chains(PyObject *module) { return PyModule_AddFunctions(module, functions); }
