/* Declarations that the files of the compiled probe share: buffers of rows, and the stack of a thread. */

#ifndef THENCE_STACK_H
#define THENCE_STACK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* Py_RETURN_NONE as in Python 3.11. The macro of newer headers takes no reference to None, which is immortal from 3.12
 * on: a library that is built with them and loaded by Python 3.11 would free None. */
#define RETURN_NONE return Py_NewRef(Py_None)

#define SHARED __attribute__((visibility("hidden")))

/* A buffer of rows of one size, `most` of them at most. thence_append is called with the lock held; thence_take takes
 * the lock itself. */
typedef struct {
    char *content;
    size_t count, room;
    const size_t size, most;
    size_t lost;
} Rows;

/* Kinds of code objects; each number from FIRST_OWN on is one function of the user's. */
enum { UNKNOWN, WATCHED, MODULE, ENGINE, GENERATED, FIRST_OWN };

/* The state of the calling thread. `frame` is only compared with frames on the stack, and never dereferenced. */
typedef struct {
    uint32_t generation, chain; /* the reading of stacks that this state is of; the chain noted last */
    long depth;                 /* how many calls of modules the thread is in; -1: not counted since the events were off */
    char *frame;                /* frame of the user's function in which a line began last, */
    uint32_t code, position;    /* and the number of that function and its position */
    uint64_t sequence;          /* autograd nodes below this number are noted */
    int64_t ended;              /* when the thread's last call ended, Unix ns */
    uint64_t node;              /* number of the autograd node that ran when the chain was noted last, */
    uint32_t maker, ran;        /* the thread that made it, 0: no node; whether a node launched in this engine call */
    struct {
        uint32_t set, module, line;
    } engine, generated; /* places to which frames called by autograd's engine, and by generated code, belong */
} Here;

/* An autograd node: its number, and the thread that made it; maker 0: no node. Each thread numbers its own nodes. */
typedef struct {
    uint64_t number;
    uint32_t maker;
} Node;

/* Offsets in bytes (Layout in stacks.py); `through` is -1 if there is no such field. */
typedef struct {
    Py_ssize_t through, top, previous, instruction, code, locals;
} Layout;

enum { MOST_FRAMES = 5000 }; /* read at most; Python's recursion limit is 1000 unless it is raised */

/* Numbers for chains (_chains.c): words, of which each key is kept once. Used with the lock held. */
typedef struct {
    struct {
        uint64_t hash;
        size_t at; /* in `words`: length and key */
    } *chains; /* by number - 1 */
    uint32_t *table, *words; /* table: numbers by hash, 0 for none */
    uint32_t count, room, table_room;
    size_t word_count, word_room;
} ChainTable;

/* Of _rows.c */
SHARED extern pthread_mutex_t thence_lock;
SHARED extern uint32_t thence_forks; /* of this process and its parents, from 1 on */
SHARED uint32_t thence_thread(void);
SHARED void thence_append(Rows *rows, const void *row);
SHARED PyObject *thence_take(Rows *rows);
SHARED void thence_forget_threads(void);

/* Of _probe.c */
SHARED int thence_is_log(PyObject *object);
SHARED int thence_note(PyObject *log, uint32_t place, uint32_t flags, int64_t *time, uint32_t *counter);

/* Of _moments.c */
SHARED int thence_add_moments(PyObject *module);

/* Of _calls.c */
SHARED int64_t thence_now(void); /* Unix ns */
SHARED uint32_t thence_read_counter(int (*call)(int *));
SHARED int thence_calls_are_followed(void);
SHARED void thence_forget_calls(void);
SHARED int thence_add_calls(PyObject *module);

/* Of _frames.c */
SHARED extern Layout thence_layout;
SHARED char *thence_frame(void); /* the innermost frame of the calling thread; NULL for none */
SHARED int thence_add_frames(PyObject *module);

static inline char *thence_word(const char *address) { return *(char *const *)address; }

static inline char *thence_previous(const char *frame) { return thence_word(frame + thence_layout.previous); }

/* From Python 3.14 on, code and locals are _PyStackRefs: pointers to objects with tags in the lowest two bits
 * (Py_TAG_BITS in Include/internal/pycore_stackref.h), which are 0 in pointers to objects. */
static inline char *thence_untagged(char *reference) { return (char *)((uintptr_t)reference & ~(uintptr_t)3); }

static inline PyObject *thence_code(const char *frame) { return (PyObject *)thence_untagged(thence_word(frame)); }

static inline PyObject *thence_self(const char *frame) {
    return (PyObject *)thence_untagged(thence_word(frame + thence_layout.locals));
}

/* Offset of the instruction that runs, in bytes: even. */
static inline uint32_t thence_position(const char *frame) {
    Py_ssize_t offset = thence_word(frame + thence_layout.instruction) - (char *)thence_code(frame) - thence_layout.code;
    return offset > 0 ? (uint32_t)offset : 0;
}

/* Of _stack.c */
SHARED extern int thence_reading; /* whether stacks are read */
SHARED extern int thence_nodes;   /* whether any autograd node was made */
SHARED Here *thence_here(void);
SHARED uint32_t thence_kind(const char *frame);
SHARED uint32_t thence_chain(char *frame, uint32_t code, uint32_t position);
SHARED void thence_made(char *frame, uint32_t code, uint32_t position);
SHARED void thence_note_stack(uint32_t number, int64_t time);
SHARED void thence_call_ended(int64_t time);
SHARED void thence_forget_stacks(void);
SHARED int thence_add_stack(PyObject *module);

/* Of _nodes.c */
SHARED Node thence_node(void); /* the node that the calling thread runs */
SHARED uint32_t thence_maker(void);
SHARED void thence_forget_hooked(void);
SHARED int thence_add_nodes(PyObject *module);

/* Of _chains.c */
SHARED uint32_t thence_kind_of(PyObject *code);
SHARED uint32_t thence_module(PyObject *module);
SHARED extern ChainTable thence_chains; /* of launches */
SHARED uint32_t thence_chain_number(ChainTable *in, const uint32_t *key, size_t length, uint32_t most);
SHARED PyObject *thence_chains_from(const ChainTable *in, PyObject *first);
SHARED void thence_empty_chains(ChainTable *table);
SHARED extern int thence_own_functions; /* whether any function is the user's */
SHARED void thence_forget_chains(void);
SHARED int thence_add_chains(PyObject *module);

/* Of _samples.c */
SHARED void thence_call_begins(void);
SHARED void thence_call_is_over(int64_t time);
SHARED void thence_wake_sampler(void);
SHARED void thence_forget_samples(void);
SHARED int thence_add_samples(PyObject *module);

/* Of _signals.c */
SHARED int thence_add_signals(PyObject *module);
SHARED int thence_add_counters(PyObject *module);

/* Of _stalls.c */
SHARED void thence_on_resource(uint32_t what, const void *data);
SHARED void thence_forget_stalls(void);
SHARED int thence_add_stalls(PyObject *module);

/* Of _events.c */
SHARED int thence_add_events(PyObject *module);

#endif
