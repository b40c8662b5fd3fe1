/* Pickles of plain values as a tape of 32-bit cells, without the GIL, a Python object, recursion or execution.
 *
 * The compiled counterpart of `thence.readers.plain_pickle`, for dicts whose keys are texts. The pickle is fed in pieces
 * of any size. Anything unusual (another opcode, an integer beyond 60 bits, a dict that is filled twice, more memory than
 * some times the size of the pickle) is refused, and left to Python. What is accepted, Python accepts with equal values.
 *
 * A cell is a kind in its low 3 bits and a number: of a constant, a small integer, or a row in the columns of large
 * integers, texts, lists, tuples or dicts. So an object that the pickle refers to many times is stored once. A list or
 * tuple is a place in the tape: its length, a place that is used while it grows, and its elements. A dict is a place in
 * the tape: the number of its shape, which is the list of its keys, and its values. Place 0 is of empty ones. */

#define PY_SSIZE_T_CLEAN
#define THENCE_MODULE "thence.readers.memory_snapshot._unpickler"
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "../_memory.h"

enum { CONSTANT, SMALL, LARGE, FLOAT, TEXT, LIST, TUPLE, DICT, KIND_BITS = 3, KIND_MASK = 7 };
enum { IS_NONE, IS_FALSE, IS_TRUE };
enum { MOST_TEXTS = 1 << 22, MOST_KEYS = 256, MOST_SHAPES = 4096, SHAPE_SLOTS = 16384, MOST_PROBES = 64, MOST_TEXT = 16 << 20, WORD = 8 };
enum { MEMORY_FACTOR = 3, MEMORY_FREE = 16 << 20, FIRST_ROOM = 1024 };
enum { MORE, DONE, REFUSED, NO_MEMORY };

static const int64_t most_rows = 1 << 29; /* of a column that cells refer to: a cell has 29 bits for the row */

typedef struct {
    uint8_t *data;
    size_t count, room, width;
} Column;

/* The columns of a result, in its order, and those that only the machine needs. */
enum { TAPE, LARGES, TEXT_ENDS, TEXT_BYTES, LISTS, TUPLES, DICTS, KEYS, KEY_ENDS, RESULTS };
enum { STACK = RESULTS, MARKS, MEMO, COLUMNS };
static const uint8_t widths[COLUMNS] = {4, 8, 8, 1, 4, 4, 4, 4, 4, 4, 4, 4};

typedef struct {
    PyObject_HEAD
    Column column[COLUMNS];
    uint32_t *text_slots; /* number of a text + 1, by its hash */
    size_t text_mask;
    uint16_t shape_slots[SHAPE_SLOTS]; /* number of a shape + 1, by the hash of its keys */
    uint32_t last_shape, root;
    size_t fed, taken;
    int state, busy;
} Machine;

static inline uint32_t cell_of(uint32_t kind, uint32_t number) { return number << KIND_BITS | kind; }
static inline uint32_t kind_of(uint32_t cell) { return cell & KIND_MASK; }
static inline uint32_t number_of(uint32_t cell) { return cell >> KIND_BITS; }

static inline uint32_t entry(const Column *column, size_t row) {
    uint32_t value;
    memcpy(&value, column->data + row * sizeof value, sizeof value);
    return value;
}

static inline void set_entry(Column *column, size_t row, uint32_t value) {
    memcpy(column->data + row * sizeof value, &value, sizeof value);
}

static int refuse(Machine *machine) { return machine->state = REFUSED, 0; }

/* Whether so much more memory may be taken. */
static int may_take(Machine *machine, size_t bytes) {
    size_t limit = MEMORY_FREE + MEMORY_FACTOR * machine->fed;
    if (machine->taken > limit || bytes > limit - machine->taken) return refuse(machine);
    machine->taken += bytes;
    return 1;
}

/* Room for more rows of a column; their number is at most that of the bytes of a text or the entries of another column. */
static int column_reserve(Machine *machine, Column *column, size_t more) {
    if (more <= column->room - column->count) return 1;
    size_t room = column->count + more + column->count / 2 + FIRST_ROOM;
    if (!may_take(machine, (room - column->room) * column->width)) return 0;
    void *data = realloc(column->data, room * column->width);
    if (!data) return machine->state = NO_MEMORY, 0;
    column->data = data;
    column->room = room;
    return 1;
}

static inline int column_add(Machine *machine, int name, const void *value) {
    Column *column = &machine->column[name];
    if (column->count == column->room && !column_reserve(machine, column, 1)) return 0;
    memcpy(column->data + column->count++ * column->width, value, column->width);
    return 1;
}

static inline int add(Machine *machine, int name, uint32_t value) { return column_add(machine, name, &value); }

/* Adds a row of a column that cells refer to; its number is the count before. */
static inline int add_numbered(Machine *machine, int name, const void *value) {
    return (int64_t)machine->column[name].count < most_rows ? column_add(machine, name, value) : refuse(machine);
}

static inline int push(Machine *machine, uint32_t kind, uint32_t number) {
    return add(machine, STACK, cell_of(kind, number));
}

static inline size_t stack_floor(const Machine *machine) {
    const Column *marks = &machine->column[MARKS];
    return marks->count ? entry(marks, marks->count - 1) : 0;
}

/* Whether there are so many values above the last mark. */
static inline int has_top(Machine *machine, size_t values) {
    return machine->column[STACK].count >= stack_floor(machine) + values ? 1 : refuse(machine);
}

static inline uint32_t stack_at(const Machine *machine, size_t from_top) {
    const Column *stack = &machine->column[STACK];
    return entry(stack, stack->count - 1 - from_top);
}

static int push_integer(Machine *machine, int64_t value) {
    if (value >= -(1 << 28) && value < 1 << 28) return push(machine, SMALL, (uint32_t)value);
    if (value >= (int64_t)1 << 60 || value < -((int64_t)1 << 60)) return refuse(machine);
    uint32_t row = (uint32_t)machine->column[LARGES].count;
    return add_numbered(machine, LARGES, &value) && push(machine, LARGE, row);
}

static int push_float(Machine *machine, const uint8_t *at) {
    uint64_t bits = 0;
    for (int i = 0; i < WORD; i++) bits = bits << 8 | at[i];
    uint32_t row = (uint32_t)machine->column[LARGES].count;
    return add_numbered(machine, LARGES, &bits) && push(machine, FLOAT, row);
}

static uint64_t unsigned_at(const uint8_t *at, size_t size) {
    uint64_t value = 0;
    for (size_t i = size; i-- > 0;) value = value << 8 | at[i];
    return value;
}

static int64_t signed_at(const uint8_t *at, size_t size) {
    uint64_t value = unsigned_at(at, size);
    if (size && size < WORD && at[size - 1] & 0x80) value |= ~(uint64_t)0 << 8 * size;
    int64_t result;
    memcpy(&result, &value, sizeof result);
    return result;
}

static uint64_t hash_of(const uint8_t *content, size_t size) {
    uint64_t hash = size, word;
    for (size_t at = 0; at < size; at += WORD) {
        word = 0;
        memcpy(&word, content + at, size - at < WORD ? size - at : WORD);
        hash = (hash ^ word) * 0xD6E8FEB86659FD93u;
        hash ^= hash >> 32;
    }
    return hash;
}

static inline uint64_t text_end(const Machine *machine, size_t row) {
    uint64_t end = 0;
    if (row) memcpy(&end, machine->column[TEXT_ENDS].data + (row - 1) * sizeof end, sizeof end);
    return end;
}

static int texts_grow(Machine *machine) {
    size_t slots = machine->text_slots ? 2 * (machine->text_mask + 1) : FIRST_ROOM;
    if (!may_take(machine, slots / (machine->text_slots ? 2 : 1) * sizeof(uint32_t))) return 0;
    uint32_t *larger = calloc(slots, sizeof *larger);
    if (!larger) return machine->state = NO_MEMORY, 0;
    free(machine->text_slots);
    machine->text_slots = larger;
    machine->text_mask = slots - 1;
    for (size_t row = 0; row < machine->column[TEXT_ENDS].count; row++) {
        uint64_t begin = text_end(machine, row), end = text_end(machine, row + 1);
        size_t slot = hash_of(machine->column[TEXT_BYTES].data + begin, end - begin) & machine->text_mask;
        while (larger[slot]) slot = (slot + 1) & machine->text_mask;
        larger[slot] = (uint32_t)row + 1;
    }
    return 1;
}

/* Equal texts get one number, so that keys are equal if their numbers are. Texts of which too many have nearly the same
 * hash were made for that, and are refused. */
static int push_text(Machine *machine, const uint8_t *content, size_t size) {
    Column *ends = &machine->column[TEXT_ENDS], *bytes = &machine->column[TEXT_BYTES];
    if ((!machine->text_slots || ends->count >= (machine->text_mask + 1) / 4) && !texts_grow(machine)) return 0;
    size_t slot = hash_of(content, size) & machine->text_mask;
    for (int probes = 0; machine->text_slots[slot]; probes++, slot = (slot + 1) & machine->text_mask) {
        uint32_t row = machine->text_slots[slot] - 1;
        uint64_t begin = text_end(machine, row);
        if (text_end(machine, row + 1) - begin == size && (!size || !memcmp(bytes->data + begin, content, size)))
            return push(machine, TEXT, row);
        if (probes == MOST_PROBES) return refuse(machine);
    }
    if (ends->count == MOST_TEXTS) return refuse(machine);
    if (!column_reserve(machine, bytes, size)) return 0;
    if (size) memcpy(bytes->data + bytes->count, content, size);
    uint32_t row = (uint32_t)ends->count;
    uint64_t end = bytes->count + size;
    if (!add_numbered(machine, TEXT_ENDS, &end)) return 0;
    bytes->count = end;
    machine->text_slots[slot] = row + 1;
    return push(machine, TEXT, row);
}

static int push_container(Machine *machine, int name, uint32_t kind) {
    uint32_t row = (uint32_t)machine->column[name].count, empty = 0;
    return add_numbered(machine, name, &empty) && push(machine, kind, row);
}

/* The place at which something is added to the tape; 0 if the tape is full. */
static uint32_t tape_place(Machine *machine, size_t more) {
    size_t count = machine->column[TAPE].count;
    if (count + more > UINT32_MAX) return (uint32_t)refuse(machine);
    return column_reserve(machine, &machine->column[TAPE], more) ? (uint32_t)count : 0;
}

/* Moves the last values of the stack to the tape, after two entries. */
static uint32_t tape_take(Machine *machine, size_t values, uint32_t first, uint32_t second, int entries) {
    Column *tape = &machine->column[TAPE], *stack = &machine->column[STACK];
    uint32_t place = tape_place(machine, values + (size_t)entries);
    if (!place) return 0;
    set_entry(tape, tape->count++, first);
    if (entries == 2) set_entry(tape, tape->count++, second);
    stack->count -= values;
    memcpy(tape->data + tape->count * tape->width, stack->data + stack->count * stack->width, values * tape->width);
    tape->count += values;
    return place;
}

/* Adds the last values of the stack to the list below them. The parts of a list are linked in a circle, of which the
 * list has the last one. */
static int list_extend(Machine *machine, size_t values) {
    Column *lists = &machine->column[LISTS], *tape = &machine->column[TAPE];
    if (!has_top(machine, values + 1)) return 0;
    uint32_t list = stack_at(machine, values);
    if (kind_of(list) != LIST) return refuse(machine);
    if (!values) return 1;
    uint32_t place = tape_take(machine, values, (uint32_t)values, 0, 2), last = entry(lists, number_of(list));
    if (!place) return 0;
    set_entry(tape, place + 1, last ? entry(tape, last + 1) : place);
    if (last) set_entry(tape, last + 1, place);
    set_entry(lists, number_of(list), place);
    return 1;
}

static int make_tuple(Machine *machine, size_t values) {
    if (!has_top(machine, values)) return 0;
    uint32_t place = values ? tape_take(machine, values, (uint32_t)values, 0, 2) : 0;
    if (values && !place) return 0;
    uint32_t row = (uint32_t)machine->column[TUPLES].count;
    return add_numbered(machine, TUPLES, &place) && push(machine, TUPLE, row);
}

static inline size_t shape_begin(const Machine *machine, uint32_t shape) {
    return shape ? entry(&machine->column[KEY_ENDS], shape - 1) : 0;
}

static int is_shape(const Machine *machine, uint32_t shape, size_t first, size_t keys) {
    const Column *known = &machine->column[KEYS], *stack = &machine->column[STACK];
    size_t begin = shape_begin(machine, shape), end = entry(&machine->column[KEY_ENDS], shape);
    if (end - begin != keys) return 0;
    for (size_t i = 0; i < keys; i++)
        if (entry(known, begin + i) != entry(stack, first + 2 * i)) return 0;
    return 1;
}

/* The number of the shape of the keys on the stack from this place on, every second one; 0 if it is refused. */
static uint32_t shape_of(Machine *machine, size_t first, size_t keys) {
    const Column *stack = &machine->column[STACK];
    if (is_shape(machine, machine->last_shape, first, keys)) return machine->last_shape;
    uint64_t hash = keys;
    for (size_t i = 0; i < keys; i++) {
        uint32_t key = entry(stack, first + 2 * i);
        if (kind_of(key) != TEXT) return (uint32_t)refuse(machine);
        hash = (hash ^ key) * 0xD6E8FEB86659FD93u;
        hash ^= hash >> 32;
    }
    size_t slot = hash % SHAPE_SLOTS;
    for (; machine->shape_slots[slot]; slot = (slot + 1) % SHAPE_SLOTS)
        if (is_shape(machine, machine->shape_slots[slot] - 1u, first, keys))
            return machine->last_shape = machine->shape_slots[slot] - 1u;
    if (keys > MOST_KEYS || machine->column[KEY_ENDS].count == MOST_SHAPES) return (uint32_t)refuse(machine);
    for (size_t i = 0; i < keys; i++)
        for (size_t j = 0; j < i; j++)
            if (entry(stack, first + 2 * i) == entry(stack, first + 2 * j)) return (uint32_t)refuse(machine);
    for (size_t i = 0; i < keys; i++)
        if (!add(machine, KEYS, entry(stack, first + 2 * i))) return 0;
    if (!add(machine, KEY_ENDS, (uint32_t)machine->column[KEYS].count)) return 0;
    machine->last_shape = (uint32_t)machine->column[KEY_ENDS].count - 1;
    machine->shape_slots[slot] = (uint16_t)(machine->last_shape + 1);
    return machine->last_shape;
}

/* Fills the dict below the last values of the stack with them: keys and values in turn. */
static int dict_fill(Machine *machine, size_t values) {
    Column *stack = &machine->column[STACK], *dicts = &machine->column[DICTS];
    if (values % 2 || !has_top(machine, values + 1)) return refuse(machine);
    uint32_t dict = stack_at(machine, values);
    if (kind_of(dict) != DICT || entry(dicts, number_of(dict))) return refuse(machine);
    if (!values) return 1;
    size_t first = stack->count - values, pairs = values / 2;
    uint32_t shape = shape_of(machine, first, pairs);
    if (!shape) return 0;
    for (size_t i = 0; i < pairs; i++) set_entry(stack, first + i, entry(stack, first + 2 * i + 1));
    stack->count = first + pairs;
    uint32_t place = tape_take(machine, pairs, shape, 0, 1);
    if (!place) return 0;
    set_entry(dicts, number_of(dict), place);
    return 1;
}

static int mark(Machine *machine) {
    size_t count = machine->column[STACK].count;
    return count < UINT32_MAX ? add(machine, MARKS, (uint32_t)count) : refuse(machine);
}

/* How many values are above the last mark, which is removed. */
static int since_mark(Machine *machine, size_t *values) {
    Column *marks = &machine->column[MARKS];
    if (!marks->count) return refuse(machine);
    *values = machine->column[STACK].count - stack_floor(machine);
    marks->count--;
    return 1;
}

static int memoize(Machine *machine) {
    return has_top(machine, 1) && add(machine, MEMO, stack_at(machine, 0));
}

static int put(Machine *machine, uint64_t place) {
    return place == machine->column[MEMO].count ? memoize(machine) : refuse(machine);
}

static int get(Machine *machine, uint64_t place) {
    if (place >= machine->column[MEMO].count) return refuse(machine);
    return add(machine, STACK, entry(&machine->column[MEMO], place));
}

static int stop(Machine *machine) {
    if (machine->column[MARKS].count || machine->column[STACK].count != 1) return refuse(machine);
    machine->root = stack_at(machine, 0);
    machine->state = DONE;
    return 1;
}

/* Bytes after an opcode: an argument, or the length of a text. */
static const uint8_t arguments[256] = {
    [0x80] = 1, [0x95] = 8, ['K'] = 1, ['M'] = 2, ['J'] = 4, [0x8a] = 1, ['G'] = 8, [0x8c] = 1, ['X'] = 4,
    [0x8d] = 8, ['q'] = 1,  ['r'] = 4, ['h'] = 1, ['j'] = 4};

/* Does what an opcode says, other than those with a length. */
static int step(Machine *machine, uint8_t code, const uint8_t *at) {
    size_t values = 0;
    switch (code) {
    case 0x80: return at[0] >= 2 && at[0] <= 5 ? 1 : refuse(machine); /* PROTO */
    case 0x95: return 1;                                                /* FRAME */
    case '(': return mark(machine);
    case 'N': return push(machine, CONSTANT, IS_NONE);
    case 0x88: return push(machine, CONSTANT, IS_TRUE);
    case 0x89: return push(machine, CONSTANT, IS_FALSE);
    case 'K':
    case 'M': return push_integer(machine, (int64_t)unsigned_at(at, arguments[code])); /* BININT1, BININT2 */
    case 'J': return push_integer(machine, signed_at(at, 4));                          /* BININT */
    case 'G': return push_float(machine, at);
    case ']': return push_container(machine, LISTS, LIST);
    case '}': return push_container(machine, DICTS, DICT);
    case ')': return make_tuple(machine, 0);
    case 0x85:
    case 0x86:
    case 0x87: return make_tuple(machine, code - 0x85u + 1); /* TUPLE1 to TUPLE3 */
    case 't': return since_mark(machine, &values) && make_tuple(machine, values);
    case 'a': return list_extend(machine, 1);
    case 'e': return since_mark(machine, &values) && list_extend(machine, values);
    case 's': return dict_fill(machine, 2);
    case 'u': return since_mark(machine, &values) && dict_fill(machine, values);
    case 0x94: return memoize(machine);
    case 'q':
    case 'r': return put(machine, unsigned_at(at, arguments[code]));
    case 'h':
    case 'j': return get(machine, unsigned_at(at, arguments[code]));
    case '.': return stop(machine);
    default: return refuse(machine);
    }
}

/* Reads whole opcodes; returns how many bytes they have. */
static size_t feed(Machine *machine, const uint8_t *begin, size_t size) {
    size_t at = 0;
    while (machine->state == MORE && at < size) {
        uint8_t code = begin[at];
        size_t next = at + 1 + arguments[code];
        if (next > size) break;
        const uint8_t *argument = begin + at + 1;
        machine->fed += next - at;
        if (code == 0x8c || code == 'X' || code == 0x8d || code == 0x8a) {
            uint64_t length = unsigned_at(argument, arguments[code]);
            if (length > MOST_TEXT || (code == 0x8a && length > WORD)) {
                refuse(machine);
                break;
            }
            if (length > size - next) {
                machine->fed -= next - at;
                break;
            }
            machine->fed += length;
            if (code == 0x8a) push_integer(machine, signed_at(begin + next, length));
            else push_text(machine, begin + next, length);
            next += length;
        } else
            step(machine, code, argument);
        at = next;
    }
    return at;
}

/* Makes each list one part. */
static int join_lists(Machine *machine) {
    Column *tape = &machine->column[TAPE], *lists = &machine->column[LISTS];
    for (size_t list = 0; list < lists->count; list++) {
        uint32_t last = entry(lists, list), part = last;
        if (entry(tape, last + 1) == last || !last) continue;
        size_t values = 0;
        do values += entry(tape, part), part = entry(tape, part + 1);
        while (part != last);
        uint32_t place = tape_place(machine, values + 2);
        if (!place) return 0;
        set_entry(tape, tape->count, (uint32_t)values);
        set_entry(tape, tape->count + 1, place);
        tape->count += 2;
        do {
            part = entry(tape, part + 1);
            size_t length = entry(tape, part);
            memcpy(tape->data + tape->count * tape->width, tape->data + (part + 2) * tape->width, length * tape->width);
            tape->count += length;
        } while (part != last);
        set_entry(lists, list, place);
    }
    return 1;
}

static PyObject *given_away(Column *column) {
    PyObject *memory = memory_of(&column->data, column->count * column->width, 1);
    if (memory) *column = (Column){.width = column->width};
    return memory;
}

static PyObject *machine_feed(PyObject *self, PyObject *piece) {
    Machine *machine = (Machine *)self;
    Py_buffer view;
    if (machine->busy) return PyErr_SetString(PyExc_RuntimeError, "is fed by another thread"), NULL;
    if (PyObject_GetBuffer(piece, &view, PyBUF_SIMPLE)) return NULL;
    size_t consumed;
    machine->busy = 1;
    Py_BEGIN_ALLOW_THREADS
    consumed = feed(machine, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    machine->busy = 0;
    PyBuffer_Release(&view);
    if (machine->state == NO_MEMORY) return PyErr_NoMemory();
    return Py_BuildValue("ni", (Py_ssize_t)consumed, machine->state);
}

static PyObject *machine_take(PyObject *self, PyObject *unused) {
    Machine *machine = (Machine *)self;
    (void)unused;
    if (machine->busy || machine->state != DONE)
        return PyErr_SetString(PyExc_RuntimeError, "the pickle has not ended"), NULL;
    if (!join_lists(machine)) {
        if (machine->state == NO_MEMORY) return PyErr_NoMemory();
        return Py_NewRef(Py_None);
    }
    machine->state = REFUSED; /* its columns are given away */
    PyObject *result = PyTuple_New(RESULTS + 1);
    for (int i = 0; result && i <= RESULTS; i++) {
        PyObject *item = i < RESULTS ? given_away(&machine->column[i]) : PyLong_FromUnsignedLong(machine->root);
        if (!item || PyTuple_SetItem(result, i, item)) Py_CLEAR(result);
    }
    return result;
}

static PyObject *machine_new(PyTypeObject *type, PyObject *arguments_, PyObject *unused) {
    (void)unused;
    if (PyTuple_Size(arguments_)) return PyErr_SetString(PyExc_TypeError, "takes no arguments"), NULL;
    Machine *machine = (Machine *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!machine) return NULL;
    for (int i = 0; i < COLUMNS; i++) machine->column[i].width = widths[i];
    /* Place 0 of the tape and shape 0 are of empty containers. */
    if (add(machine, TAPE, 0) && add(machine, TAPE, 0) && add(machine, KEY_ENDS, 0) &&
        column_reserve(machine, &machine->column[TEXT_BYTES], 1))
        return (PyObject *)machine;
    Py_DECREF((PyObject *)machine);
    return PyErr_NoMemory();
}

static void machine_free(PyObject *self) {
    Machine *machine = (Machine *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (int i = 0; i < COLUMNS; i++) free(machine->column[i].data);
    free(machine->text_slots);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef machine_methods[] = {
    {"feed", machine_feed, METH_O,
     "feed(piece)\n\nReads the whole opcodes of a piece; returns how many bytes they have, and the state."},
    {"take", machine_take, METH_NOARGS,
     "take()\n\nReturns the columns and the cell of the value, of a pickle that has ended; None if it is refused."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot machine_slots[] = {
    {Py_tp_new, (void *)machine_new},
    {Py_tp_dealloc, (void *)machine_free},
    {Py_tp_methods, machine_methods},
    {Py_tp_doc, "Machine(): reads one pickle of plain values."},
    {0, NULL}};

static PyType_Spec machine_specification = {
    .name = THENCE_MODULE ".Machine",
    .basicsize = sizeof(Machine),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = machine_slots};

static int fill(PyObject *module) {
    static const char *const states[] = {"MORE", "DONE", "REFUSED"};
    for (int state = MORE; state <= REFUSED; state++)
        if (PyModule_AddIntConstant(module, states[state], state)) return -1;
    return add_types(module, "Machine", &machine_specification);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = THENCE_MODULE,
    .m_doc = "Pickles of plain values as columns.",
    .m_slots = module_slots};

PyMODINIT_FUNC PyInit__unpickler(void) { return PyModuleDef_Init(&module); }
