/* Events of a piece of JSON as columns, without the GIL: the compiled counterpart of decoding with msgspec.
 *
 * Which keys are read, and how, is said by `thence.readers.kineto.scanner`. A piece with anything unusual (another
 * type, damaged JSON, an integer beyond 64 bits) is refused as a whole, and read in Python. A column takes memory only
 * from the first event with its key on, and all columns of a piece at most some times its size. */

#define PY_SSIZE_T_CLEAN
#define THENCE_MODULE "thence.readers.kineto._scanner"
#include <Python.h>
#include <stdlib.h>
#include "../_memory.h"
#include "_json.h"

enum { INTEGER, UNSIGNED, TIME, TRIPLE, TEXT, CHECKED_INTEGER, CHECKED_STRING, ANYTHING, ARGUMENTS, KINDS };
enum { MAX_FIELDS = 128, KEY_SLOTS = 512, MAX_COMBINATIONS = 4, MAX_COMBINED = 4, EVENT_BYTES = 256, MOST_PROBES = 64 };
enum { GUESS_BITS = 12, GUESSES = 1 << GUESS_BITS, TEXTS_OF_KIND = 2, CLOSING = UINT8_MAX };
enum { MEMORY_FACTOR = 6, MEMORY_FREE = 1 << 20, FIRST_ENTRIES = 1024 };

/* Bytes in a column of each kind; 0 for kinds without a column. */
static const uint8_t widths[KINDS] = {8, 8, 8, 24, 4};

typedef struct {
    uint8_t key[UINT8_MAX];
    uint8_t length, kind;
    int column; /* -1 for none */
} Field;

typedef struct {
    PyObject_HEAD
    int fields, columns, combinations;
    Field field[MAX_FIELDS];
    uint8_t slots[2][KEY_SLOTS]; /* number of a field + 1 by the hash of its key; of events and of arguments */
    uint8_t kind[MAX_FIELDS];    /* of each column */
    int64_t missing[MAX_FIELDS]; /* value of each column for events without the key */
    int combined[MAX_COMBINATIONS][MAX_COMBINED]; /* columns; -1 for none */
} Scanner;

typedef struct {
    uint8_t *data;
    size_t rows, room;
} Column;

/* Numbers distinct entries in the order of their first appearance. */
typedef struct {
    uint8_t *entries;
    uint64_t *hashes;
    uint32_t *slots; /* number of an entry + 1 */
    size_t width, count, room, mask;
} Table;

typedef struct {
    uint32_t offset, length;
} Extent;

/* What was between two values: a comma, a key, a colon and blanks; before the first value, a bracket instead of the comma.
 * Or what was after the last value, up to the closing bracket. */
typedef struct {
    uint32_t offset;
    uint16_t length; /* 0 for none */
    uint16_t next;   /* the place in its table of the one that came after it the last time */
    uint8_t field;   /* number of the field of this key + 1; 0 for a key that is not read; CLOSING for no key */
} Between;

typedef struct {
    const Scanner *scanner;
    const uint8_t *begin, *end;
    size_t rows, budget;
    Seen seen;
    Column extents, column[MAX_FIELDS], combination[MAX_COMBINATIONS];
    Table texts, combinations[MAX_COMBINATIONS];
    uint64_t context; /* of the texts of the current event, without its arguments */
    uint64_t kind;    /* the same of its first texts alone: phase and category, on which the further keys depend most */
    int texts_of_event;
    uint32_t guesses[GUESSES];   /* number of a text + 1: the last one of the same field that began alike */
    Between opening[2][GUESSES]; /* of events and of arguments: the last one in the same context */
    Between between[2][GUESSES]; /* after a value: the last one after the same key that began alike */
    int no_memory;
} Scan;

/* Larger memory with the same content; NULL, with the old one unchanged, beyond what the piece may take. */
static void *enlarged(Scan *scan, void *memory, size_t before, size_t after) {
    if (after - before > scan->budget) return NULL;
    void *larger = realloc(memory, after);
    if (larger) scan->budget -= after - before;
    else scan->no_memory = 1;
    return larger;
}

static int table_begin(Scan *scan, Table *table, size_t width) {
    size_t room = FIRST_ENTRIES;
    *table = (Table){.width = width, .room = room, .mask = 4 * room - 1};
    table->entries = malloc(room * width);
    table->hashes = malloc(room * sizeof *table->hashes);
    table->slots = calloc(4 * room, sizeof *table->slots);
    if (table->entries && table->hashes && table->slots) return 1;
    scan->no_memory = 1;
    return 0;
}

static void table_end(Table *table) {
    free(table->entries);
    free(table->hashes);
    free(table->slots);
}

static int table_grow(Scan *scan, Table *table) {
    size_t before = table->room, after = 2 * before, slots = 4 * after * sizeof *table->slots;
    void *entries = enlarged(scan, table->entries, before * table->width, after * table->width);
    if (!entries) return 0;
    table->entries = entries;
    void *hashes = enlarged(scan, table->hashes, before * sizeof *table->hashes, after * sizeof *table->hashes);
    if (!hashes) return 0;
    table->hashes = hashes;
    if (slots / 2 > scan->budget) return 0;
    uint32_t *larger = calloc(slots, 1);
    if (!larger) return scan->no_memory = 1, 0;
    scan->budget -= slots / 2;
    free(table->slots);
    table->slots = larger;
    table->room = after;
    table->mask = 4 * after - 1;
    for (size_t entry = 0; entry < table->count; entry++) {
        size_t slot = table->hashes[entry] & table->mask;
        while (larger[slot]) slot = (slot + 1) & table->mask;
        larger[slot] = (uint32_t)entry + 1;
    }
    return 1;
}

static inline uint64_t mixed(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0xD6E8FEB86659FD93u;
    return hash ^ hash >> 32;
}

/* A hash of some bytes. Words with even and with odd numbers are mixed apart, so that the processor does both at once;
 * the last word overlaps the one before it, and is mixed twice, as its highest byte would change no low bit else. */
static inline uint64_t hash_of(const uint8_t *content, size_t size) {
    uint64_t even = size, odd = 0, word = 0;
    size_t at = 0;
    for (; size - at > 2 * WORD; at += 2 * WORD) {
        memcpy(&word, content + at, WORD);
        even = mixed(even, word);
        memcpy(&word, content + at + WORD, WORD);
        odd = mixed(odd, word);
    }
    if (size - at > WORD) {
        memcpy(&word, content + at, WORD);
        even = mixed(even, word);
    }
    if (size >= WORD) memcpy(&word, content + size - WORD, WORD);
    else
        for (word = 0; at < size; at++) word = word << 8 | content[at];
    return mixed(mixed(mixed(even, odd), word), 0);
}

/* The number of an entry; -1 if too many entries have nearly the same hash, as only texts made for that have.
 * `content` are the bytes that distinguish entries: for a text those in the piece. */
static inline int32_t table_number(Scan *scan, Table *table, const void *entry, const uint8_t *content, size_t size,
                                   int is_text) {
    uint64_t hash = hash_of(content, size);
    size_t slot = hash & table->mask;
    for (int probes = 0; probes < MOST_PROBES; probes++, slot = (slot + 1) & table->mask) {
        uint32_t number = table->slots[slot];
        if (!number) {
            if (table->count == table->room) {
                if (!table_grow(scan, table)) return -1;
                slot = hash & table->mask;
                while (table->slots[slot]) slot = (slot + 1) & table->mask;
            }
            memcpy(table->entries + table->count * table->width, entry, table->width);
            table->hashes[table->count] = hash;
            table->slots[slot] = (uint32_t)++table->count;
            return (int32_t)table->count - 1;
        }
        if (table->hashes[--number] != hash) continue;
        const uint8_t *known = table->entries + number * table->width;
        if (is_text) {
            Extent extent;
            memcpy(&extent, known, sizeof extent);
            if (extent.length != size) continue;
            known = scan->begin + extent.offset;
        }
        if (same_bytes(known, content, size)) return (int32_t)number;
    }
    return -1;
}

static inline int ends_value(const uint8_t *at, const uint8_t *end) {
    return at < end && (*at == ',' || *at == '}' || *at == ']' || *at <= ' ');
}

/* The place in a table of guesses of a text that begins with these words. */
static inline size_t guess_place(uint64_t first, uint64_t second) {
    first *= 0x9E3779B97F4A7C15u;
    return (size_t)(((first ^ first >> 32) + second) * 0xD6E8FEB86659FD93u >> (64 - GUESS_BITS));
}

/* The number of the value that begins here, and the address after it. The last text of the same field with the same
 * first bytes is tried first; of arguments, which are longer, the last one in the same context. It is valid JSON, and no
 * longer value begins with it: a string or an array ends with its last byte, and any other value is delimited. */
static inline const uint8_t *text_value(Scan *scan, int level, int column, const uint8_t *at, int32_t *number) {
    uint64_t first[2] = {0, 0};
    if (scan->end - at >= (ptrdiff_t)sizeof first) memcpy(first, at, sizeof first);
    uint64_t context = (level ? scan->context : 0) + (uint64_t)column;
    uint32_t *guess = &scan->guesses[guess_place(first[0], first[1] + context)];
    Extent extent;
    if (*guess) {
        memcpy(&extent, scan->texts.entries + (*guess - 1) * sizeof extent, sizeof extent);
        const uint8_t *after = at + extent.length;
        if (extent.length < (size_t)(scan->end - at) &&
            is_again(at, scan->end, scan->begin + extent.offset, extent.length) &&
            ends_value(after, scan->end)) {
            *number = (int32_t)*guess - 1;
            return after;
        }
    }
    const uint8_t *after = after_value(at, scan->end, &scan->seen);
    if (!after) return NULL;
    extent = (Extent){(uint32_t)(at - scan->begin), (uint32_t)(after - at)};
    *number = table_number(scan, &scan->texts, &extent, at, extent.length, 1);
    if (*number < 0) return NULL;
    *guess = (uint32_t)*number + 1;
    return after;
}

static int column_reserve(Scan *scan, Column *column, size_t rows, size_t width) {
    if (rows <= column->room) return 1;
    size_t room = rows + rows / 2 + (size_t)(scan->end - scan->begin) / EVENT_BYTES;
    void *data = enlarged(scan, column->data, column->room * width, room * width);
    if (!data) return 0;
    column->data = data;
    column->room = room;
    return 1;
}

/* Gives a column this many rows, the new ones with the value for none. */
static int column_extend(Scan *scan, Column *column, size_t rows, size_t width, int64_t missing) {
    if (!column_reserve(scan, column, rows, width)) return 0;
    int32_t number = (int32_t)missing;
    if (width == sizeof number)
        for (size_t row = column->rows; row < rows; row++) memcpy(column->data + row * width, &number, sizeof number);
    else
        for (size_t at = column->rows * width; at < rows * width; at += sizeof missing)
            memcpy(column->data + at, &missing, sizeof missing);
    if (rows > column->rows) column->rows = rows;
    return 1;
}

/* The current event's place in a column; NULL if it has one, as of a key that it has twice: of the first value nothing
 * would be checked. */
static inline uint8_t *column_place(Scan *scan, int number, size_t width) {
    Column *column = &scan->column[number];
    if (column->rows == scan->rows && column->rows < column->room) column->rows++; /* the value is written next */
    else if (column->rows > scan->rows ||
             !column_extend(scan, column, scan->rows + 1, width, scan->scanner->missing[number]))
        return NULL;
    return column->data + scan->rows * width;
}

static int32_t number_at(const Column *column, size_t row) {
    int32_t number = -1;
    if (row < column->rows) memcpy(&number, column->data + row * sizeof number, sizeof number);
    return number;
}

/* Notes the combinations of the current event's texts, such as its pid and tid. */
static int note_combinations(Scan *scan) {
    for (int i = 0; i < scan->scanner->combinations; i++) {
        int32_t numbers[MAX_COMBINED], given = 0, number;
        for (int j = 0; j < MAX_COMBINED; j++) {
            int column = scan->scanner->combined[i][j];
            numbers[j] = column < 0 ? -1 : number_at(&scan->column[column], scan->rows);
            given |= numbers[j] >= 0;
        }
        if (!given) continue;
        number = table_number(scan, &scan->combinations[i], numbers, (uint8_t *)numbers, sizeof numbers, 0);
        if (number < 0) return 0;
        if (!column_extend(scan, &scan->combination[i], scan->rows + 1, sizeof number, -1)) return 0;
        memcpy(scan->combination[i].data + scan->rows * sizeof number, &number, sizeof number);
    }
    return 1;
}

static inline size_t key_slot(const uint8_t *key, size_t length) {
    size_t hash = length;
    if (length) hash = hash * 31 + key[0] * 7u + key[length / 2] * 17u + key[length - 1] * 131u;
    return hash % KEY_SLOTS;
}

static inline const Field *field_of(const Scanner *scanner, int level, const uint8_t *key, size_t length) {
    for (size_t slot = key_slot(key, length); scanner->slots[level][slot]; slot = (slot + 1) % KEY_SLOTS) {
        const Field *field = &scanner->field[scanner->slots[level][slot] - 1];
        if (field->length == length && same_bytes(field->key, key, length)) return field;
    }
    return NULL;
}

static const uint8_t *triple(const uint8_t *at, const uint8_t *end, uint8_t *place) {
    if (*at != '[') return NULL;
    for (int i = 0; i < 3; i++) {
        int64_t value;
        if (!(at = signed_integer(after_blanks(at + 1, end), end, &value))) return NULL;
        memcpy(place + (size_t)i * sizeof value, &value, sizeof value);
        at = after_blanks(at, end);
        if (at == end || *at != (i < 2 ? ',' : ']')) return NULL;
    }
    return at + 1;
}

static inline void note_context(Scan *scan, int32_t number) {
    scan->context = (scan->context ^ (uint64_t)(number + 1)) * 0xD6E8FEB86659FD93u;
    if (++scan->texts_of_event <= TEXTS_OF_KIND) scan->kind = scan->context;
}

/* The value of a field into its column. */
static inline const uint8_t *field_value(Scan *scan, int level, const Field *field, const uint8_t *at) {
    const uint8_t *end = scan->end;
    int64_t value = 0;
    uint64_t large = 0;
    int32_t number;
    uint8_t *place;
    switch (field->kind) {
    case INTEGER:
        if (!(place = column_place(scan, field->column, sizeof value))) return NULL;
        at = signed_integer(at, end, &value);
        memcpy(place, &value, sizeof value);
        return at;
    case UNSIGNED:
        if (!(place = column_place(scan, field->column, sizeof large))) return NULL;
        at = unsigned_integer(at, end, &large);
        memcpy(place, &large, sizeof large);
        return at;
    case TIME:
        if (!(place = column_place(scan, field->column, sizeof value))) return NULL;
        at = nanoseconds(at, end, &value);
        memcpy(place, &value, sizeof value);
        return at;
    case TRIPLE:
        place = column_place(scan, field->column, 3 * sizeof value);
        return place ? triple(at, end, place) : NULL;
    case TEXT:
        if (!(place = column_place(scan, field->column, sizeof number))) return NULL;
        if (!(at = text_value(scan, level, field->column, at, &number))) return NULL;
        memcpy(place, &number, sizeof number);
        if (!level) note_context(scan, number);
        return at;
    case CHECKED_INTEGER: return signed_integer(at, end, &value);
    case CHECKED_STRING: return *at == '"' ? after_string(at, end, &scan->seen) : NULL;
    default: return after_value(at, end, &scan->seen);
    }
}

/* The field of the next key, or `CLOSING`, and the address of its value, or the one after the closing bracket: from the
 * opening bracket of an object, or from after a value. */
static const uint8_t *read_key(Scan *scan, int level, int opens, const uint8_t *at, uint8_t *field) {
    const uint8_t *end = scan->end;
    if (opens && *at++ != '{') return NULL;
    at = after_blanks(at, end);
    if (at < end && *at == '}') return *field = CLOSING, at + 1;
    if (!opens) {
        if (at == end || *at != ',') return NULL;
        at = after_blanks(at + 1, end);
    }
    if (at == end || *at != '"') return NULL;
    const uint8_t *name = at + 1;
    scan->seen.escaped = 0;
    if (!(at = after_string(at, end, &scan->seen)) || scan->seen.escaped) return NULL;
    const Field *found = field_of(scan->scanner, level, name, (size_t)(at - 1 - name));
    *field = found ? (uint8_t)(found - scan->scanner->field + 1) : 0;
    return after_colon(at, end);
}

static inline int is_between(const Scan *scan, const Between *between, const uint8_t *at) {
    return between->length && between->length < (size_t)(scan->end - at) &&
           is_again(at, scan->end, scan->begin + between->offset, between->length);
}

/* The last one that began with the same bytes after the same key, which is from now on the first one to be tried. */
static inline Between *alike_between(Scan *scan, int level, const uint8_t *at, Between *before) {
    uint64_t word = 0, key = before->field ? before->field : (uint64_t)MAX_FIELDS + before->length;
    if (scan->end - at >= WORD) memcpy(&word, at, WORD);
    before->next = (uint16_t)guess_place(word, scan->kind + key);
    return &scan->between[level][before->next];
}

/* What is before the next value of an object, or up to its closing bracket, and the address after that. `before` is what
 * was before the last value; NULL at the opening bracket. Events are mostly written alike: first the text is tried that
 * followed the last time, for which no byte needs to be looked at before, then one that began with the same bytes. */
static inline const uint8_t *next_key(Scan *scan, int level, const uint8_t *at, Between *before, Between **found) {
    const uint8_t *first = at;
    Between *between = before ? &scan->between[level][before->next] : NULL;
    if (between && is_between(scan, between, at)) at += between->length;
    else {
        between = before ? alike_between(scan, level, at, before) : &scan->opening[level][guess_place(scan->kind, 0)];
        if (is_between(scan, between, at)) at += between->length;
        else {
            uint8_t field = 0;
            if (!(at = read_key(scan, level, !before, at, &field))) return NULL;
            *between = (Between){.offset = (uint32_t)(first - scan->begin), .field = field};
            if (at - first <= UINT16_MAX) between->length = (uint16_t)(at - first);
        }
    }
    *found = between;
    return between->field == CLOSING || (at = after_blanks(at, scan->end)) < scan->end ? at : NULL;
}

/* The members of an object, from its opening bracket: of an event (level 0), or of its arguments (level 1). */
static inline const uint8_t *members(Scan *scan, const uint8_t *at, int level,
                                     const uint8_t *(*arguments)(Scan *, const uint8_t *)) {
    Between *between = NULL;
    int had_arguments = 0;
    while ((at = next_key(scan, level, at, between, &between)) && between->field != CLOSING) {
        const Field *field = between->field ? &scan->scanner->field[between->field - 1] : NULL;
        if (!field) at = after_value(at, scan->end, &scan->seen);
        else if (field->kind != ARGUMENTS) at = field_value(scan, level, field, at);
        else if (*at != '{' || had_arguments++ || !arguments) return NULL;
        else at = arguments(scan, at);
        if (!at) return NULL;
    }
    return at;
}

static const uint8_t *arguments_of_event(Scan *scan, const uint8_t *at) { return members(scan, at, 1, NULL); }

/* An event, from its opening bracket. */
static const uint8_t *event(Scan *scan, const uint8_t *at) {
    scan->context = scan->kind = 0;
    scan->texts_of_event = 0;
    const uint8_t *after = at < scan->end && *at == '{' ? members(scan, at, 0, arguments_of_event) : NULL;
    if (!after) return NULL;
    Extent extent = {(uint32_t)(at - scan->begin), (uint32_t)(after - at)};
    if (!note_combinations(scan) || !column_reserve(scan, &scan->extents, scan->rows + 1, sizeof extent)) return NULL;
    memcpy(scan->extents.data + scan->rows * sizeof extent, &extent, sizeof extent);
    scan->extents.rows = ++scan->rows;
    return after;
}

/* All events of an array; 0 if the piece is to be read in Python. */
static int events(Scan *scan) {
    const uint8_t *end = scan->end, *at = after_blanks(scan->begin, end);
    if (at == end || *at != '[') return 0;
    at = after_blanks(at + 1, end);
    if (at == end || *at != ']')
        for (;;) {
            if (!(at = event(scan, at))) return 0;
            at = after_blanks(at, end);
            if (at == end || (*at != ',' && *at != ']')) return 0;
            if (*at == ']') break;
            at = after_blanks(at + 1, end);
        }
    return after_blanks(at + 1, end) == end;
}

static int scan_begin(Scan *scan, const Scanner *scanner, const uint8_t *begin, size_t size) {
    scan->scanner = scanner;
    scan->begin = begin;
    scan->end = begin + size;
    scan->budget = MEMORY_FACTOR * size + MEMORY_FREE;
    int begun = table_begin(scan, &scan->texts, sizeof(Extent));
    for (int i = 0; i < scanner->combinations; i++)
        begun &= table_begin(scan, &scan->combinations[i], MAX_COMBINED * sizeof(int32_t));
    return begun;
}

static int scan_columns(Scan *scan) {
    if (!events(scan)) return 0;
    for (int i = 0; i < scan->scanner->columns; i++)
        if (scan->column[i].rows && !column_extend(scan, &scan->column[i], scan->rows, widths[scan->scanner->kind[i]],
                                                   scan->scanner->missing[i]))
            return 0;
    for (int i = 0; i < scan->scanner->combinations; i++)
        if (scan->combination[i].rows &&
            !column_extend(scan, &scan->combination[i], scan->rows, sizeof(int32_t), -1))
            return 0;
    return 1;
}

static void scan_end(Scan *scan) {
    table_end(&scan->texts);
    free(scan->extents.data);
    for (int i = 0; i < MAX_COMBINATIONS; i++) table_end(&scan->combinations[i]), free(scan->combination[i].data);
    for (int i = 0; i < MAX_FIELDS; i++) free(scan->column[i].data);
}

/* The memory of a column; None if there is none. */
static PyObject *taken_over(uint8_t **data, size_t size) {
    return *data && size ? memory_of(data, size, 0) : Py_NewRef(Py_None);
}

/* A list of objects of which each reference is taken over; NULL if one of them is NULL. */
static int append(PyObject *list, PyObject *item) {
    int failed = !item || PyList_Append(list, item);
    Py_XDECREF(item);
    return failed;
}

static PyObject *result_of(Scan *scan) {
    PyObject *columns = PyList_New(0), *combinations = PyList_New(0), *result = NULL;
    int failed = !columns || !combinations;
    for (int i = 0; !failed && i < scan->scanner->columns; i++)
        failed = append(columns, taken_over(&scan->column[i].data, scan->rows * widths[scan->scanner->kind[i]]));
    for (int i = 0; !failed && i < scan->scanner->combinations; i++) {
        Table *table = &scan->combinations[i];
        failed = append(combinations, taken_over(&scan->combination[i].data, scan->rows * sizeof(int32_t))) ||
                 append(combinations, taken_over(&table->entries, table->count * table->width));
    }
    if (!failed) {
        PyObject *extents = taken_over(&scan->extents.data, scan->rows * sizeof(Extent));
        PyObject *texts = taken_over(&scan->texts.entries, scan->texts.count * sizeof(Extent));
        if (extents && texts)
            result = Py_BuildValue("nOOOOO", (Py_ssize_t)scan->rows, scan->seen.non_ascii ? Py_True : Py_False,
                                   extents, texts, columns, combinations);
        Py_XDECREF(extents);
        Py_XDECREF(texts);
    }
    Py_XDECREF(columns);
    Py_XDECREF(combinations);
    return result;
}

static PyObject *scanner_scan(PyObject *self, PyObject *piece) {
    Py_buffer view;
    if (PyObject_GetBuffer(piece, &view, PyBUF_SIMPLE)) return NULL;
    Scan *scan = calloc(1, sizeof *scan);
    PyObject *result = NULL;
    int found = 0;
    if (scan && (size_t)view.len < INT32_MAX) {
        Py_BEGIN_ALLOW_THREADS
        found = scan_begin(scan, (const Scanner *)self, view.buf, (size_t)view.len) && scan_columns(scan);
        Py_END_ALLOW_THREADS
    }
    if (!scan || scan->no_memory) PyErr_NoMemory();
    else result = found ? result_of(scan) : Py_NewRef(Py_None);
    if (scan) scan_end(scan);
    free(scan);
    PyBuffer_Release(&view);
    return result;
}

static int add_field(Scanner *scanner, PyObject *description) {
    int level, kind;
    const char *key;
    Py_ssize_t length;
    long long missing;
    if (!PyArg_ParseTuple(description, "iy#iL", &level, &key, &length, &kind, &missing)) return 0;
    if (scanner->fields == MAX_FIELDS || level < 0 || level > 1 || kind < 0 || kind >= KINDS || length > UINT8_MAX)
        return PyErr_SetString(PyExc_ValueError, "a field that the scanner cannot read"), 0;
    Field *field = &scanner->field[scanner->fields++];
    memcpy(field->key, key, (size_t)length);
    field->length = (uint8_t)length;
    field->kind = (uint8_t)kind;
    field->column = widths[kind] ? scanner->columns++ : -1;
    if (field->column >= 0) {
        scanner->kind[field->column] = field->kind;
        scanner->missing[field->column] = missing;
    }
    size_t slot = key_slot(field->key, field->length);
    while (scanner->slots[level][slot]) slot = (slot + 1) % KEY_SLOTS;
    scanner->slots[level][slot] = (uint8_t)scanner->fields;
    return 1;
}

static int add_combination(Scanner *scanner, PyObject *columns) {
    Py_ssize_t count = PyTuple_Check(columns) ? PyTuple_Size(columns) : 0;
    int valid = scanner->combinations < MAX_COMBINATIONS && count > 0 && count <= MAX_COMBINED;
    for (Py_ssize_t i = 0; valid && i < MAX_COMBINED; i++) {
        long column = i < count ? PyLong_AsLong(PyTuple_GetItem(columns, i)) : -1;
        if (i < count)
            valid = column >= 0 && column < scanner->columns && scanner->kind[column] == TEXT && !PyErr_Occurred();
        scanner->combined[scanner->combinations][i] = (int)column;
    }
    if (!valid && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "only columns of texts can be combined");
    scanner->combinations += valid;
    return valid;
}

static PyObject *scanner_new(PyTypeObject *type, PyObject *arguments, PyObject *unused) {
    PyObject *fields, *combinations;
    (void)unused;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyTuple_Type, &fields, &PyTuple_Type, &combinations)) return NULL;
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    int made = self != NULL;
    for (Py_ssize_t i = 0; made && i < PyTuple_Size(fields); i++)
        made = add_field((Scanner *)self, PyTuple_GetItem(fields, i));
    for (Py_ssize_t i = 0; made && i < PyTuple_Size(combinations); i++)
        made = add_combination((Scanner *)self, PyTuple_GetItem(combinations, i));
    if (made) return self;
    Py_XDECREF(self);
    return NULL;
}

static void scanner_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef scanner_methods[] = {
    {"scan", scanner_scan, METH_O, "scan(piece)\n\nReturns the columns of a JSON array of events; None if it is unusual."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot scanner_slots[] = {
    {Py_tp_new, (void *)scanner_new},
    {Py_tp_dealloc, (void *)scanner_free},
    {Py_tp_methods, scanner_methods},
    {Py_tp_doc, "Scanner(fields, combinations): reads these keys of events and of their arguments."},
    {0, NULL}};

static PyType_Spec scanner_specification = {
    .name = THENCE_MODULE ".Scanner",
    .basicsize = sizeof(Scanner),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = scanner_slots};

/* The parents of ranges in order of track and start, outer ones first: of each the last one before it on its track that
 * does not end before it. Those between the two end earlier than it, so no later range is looked for in them again. */
static void find_parents(const int64_t *track, const int64_t *end, int64_t *parent, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) {
        int64_t above = row && track[row - 1] == track[row] ? row - 1 : -1;
        while (above >= 0 && end[above] < end[row]) above = parent[above];
        parent[row] = above;
    }
}

static PyObject *scanner_parents(PyObject *self, PyObject *arguments) {
    Py_buffer track, end, parent;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "y*y*w*", &track, &end, &parent)) return NULL;
    int valid = track.len == parent.len && end.len == parent.len && parent.len % (Py_ssize_t)sizeof(int64_t) == 0 &&
                !(((uintptr_t)track.buf | (uintptr_t)end.buf | (uintptr_t)parent.buf) % sizeof(int64_t));
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        find_parents(track.buf, end.buf, parent.buf, parent.len / (Py_ssize_t)sizeof(int64_t));
        Py_END_ALLOW_THREADS
    } else PyErr_SetString(PyExc_ValueError, "columns of int64 of one length are expected");
    PyBuffer_Release(&track);
    PyBuffer_Release(&end);
    PyBuffer_Release(&parent);
    return valid ? Py_NewRef(Py_None) : NULL;
}

/* Renumbers numbers, of which the least is -1, in the order of their first appearance; of each of those the number. */
static int32_t find_order(const int32_t *number, int32_t *code, size_t rows, int32_t *code_of, int32_t *order) {
    int32_t count = 0;
    for (size_t row = 0; row < rows; row++) {
        int32_t *known = &code_of[number[row]]; /* code + 1; 0 for none */
        if (!*known) order[count] = number[row], *known = ++count;
        code[row] = *known - 1;
    }
    return count;
}

static PyObject *scanner_in_order(PyObject *self, PyObject *arguments) {
    Py_buffer number, code;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "y*w*", &number, &code)) return NULL;
    const int32_t *numbers = number.buf;
    size_t rows = (size_t)number.len / sizeof *numbers;
    int32_t least = 0, most = -1;
    int valid = code.len == number.len && number.len % (Py_ssize_t)sizeof *numbers == 0 &&
                !(((uintptr_t)number.buf | (uintptr_t)code.buf) % sizeof *numbers);
    for (size_t row = 0; valid && row < rows; row++) {
        least = numbers[row] < least ? numbers[row] : least;
        most = numbers[row] > most ? numbers[row] : most;
    }
    if (valid && least >= -1) {
        size_t values = (size_t)most + 2, room = values < rows ? values : rows;
        int32_t *code_of = calloc(values, sizeof *code_of), count = 0;
        uint8_t *order = malloc((room + 1) * sizeof *code_of);
        if (code_of && order) {
            Py_BEGIN_ALLOW_THREADS
            count = find_order(numbers, code.buf, rows, code_of + 1, (int32_t *)order);
            Py_END_ALLOW_THREADS
            result = memory_of(&order, (size_t)count * sizeof *code_of, 0);
        } else PyErr_NoMemory();
        free(code_of);
        free(order);
    } else PyErr_SetString(PyExc_ValueError, "two columns of int32 of one length are expected, from -1 on");
    PyBuffer_Release(&number);
    PyBuffer_Release(&code);
    return result;
}

static PyMethodDef module_methods[] = {
    {"parents", scanner_parents, METH_VARARGS,
     "parents(track, end, parent)\n\nWrites the innermost range around each range, -1 for none."},
    {"in_order", scanner_in_order, METH_VARARGS,
     "in_order(numbers, codes)\n\nWrites the codes of numbers in the order of their first appearance; returns these."},
    {NULL, NULL, 0, NULL}};

static int fill(PyObject *module) {
    static const char *const names[KINDS] = {"INTEGER", "UNSIGNED",        "TIME",           "TRIPLE",   "TEXT",
                                             "CHECKED_INTEGER", "CHECKED_STRING", "ANYTHING", "ARGUMENTS"};
    for (int kind = 0; kind < KINDS; kind++)
        if (PyModule_AddIntConstant(module, names[kind], kind)) return -1;
    return add_types(module, "Scanner", &scanner_specification);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = THENCE_MODULE,
    .m_doc = "Scans pieces of Kineto files, and nests host ranges.",
    .m_methods = module_methods,
    .m_slots = module_slots};

PyMODINIT_FUNC PyInit__scanner(void) { return PyModuleDef_Init(&module); }
