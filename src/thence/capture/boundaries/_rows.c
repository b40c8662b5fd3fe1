/* Growing buffers of rows that Python takes, the lock that protects them, and the id of the calling thread. */

#include "_stack.h"
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static __thread uint32_t thread_id, thread_of;
uint32_t thence_forks = 1;
pthread_mutex_t thence_lock = PTHREAD_MUTEX_INITIALIZER;

uint32_t thence_thread(void) {
    if (thread_of != thence_forks) { /* first call of this thread, or the process was forked since */
        thread_id = (uint32_t)syscall(SYS_gettid);
        thread_of = thence_forks;
    }
    return thread_id;
}

void thence_append(Rows *rows, const void *row) {
    if (rows->count == rows->room && rows->room < rows->most) {
        size_t room = rows->room ? 2 * rows->room : 256;
        char *more = realloc(rows->content, room * rows->size);
        if (more) rows->content = more, rows->room = room;
    }
    if (rows->count < rows->room) memcpy(rows->content + rows->size * rows->count++, row, rows->size);
    else rows->lost++;
}

PyObject *thence_take(Rows *rows) {
    pthread_mutex_lock(&thence_lock);
    char *taken = rows->content;
    size_t count = rows->count;
    rows->content = NULL;
    rows->count = rows->room = 0;
    pthread_mutex_unlock(&thence_lock);
    PyObject *content = PyBytes_FromStringAndSize(taken, (Py_ssize_t)(count * rows->size));
    free(taken);
    return content;
}

void thence_forget_threads(void) {
    thence_forks++;
    thence_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
