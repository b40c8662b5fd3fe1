/* Lets a thread of Python finish something before a signal ends the process, although the main thread may be in C for
 * long: the handler only notes the signal, and the thread asks for it. Python's own handlers run on the main thread only,
 * between two instructions of Python.
 *
 * Python does not know of the handler: `signal.getsignal` answers as before, and a handler that the program sets
 * replaces this one. The handler only calls functions that are safe in signal handlers. */

#include "_stack.h"
#include <errno.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

static struct sigaction before; /* what the signal did */
static siginfo_t told;         /* of the signal */
static timer_t deadline;
static struct timespec patience;
static volatile sig_atomic_t signal_number, came; /* signal_number: 0 while no signal is watched */
static volatile pid_t owner;

/* Does what the signal would have done. */
static void pass_on(int number) {
    if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, &told, NULL);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(number);
    else {
        sigaction(number, &before, NULL);
        kill(getpid(), number);
    }
}

static void on_signal(int number, siginfo_t *info, void *context) {
    int error = errno;
    (void)context;
    if (!came) told = *info;
    if (getpid() == owner && !came) {
        struct itimerspec once = {{0, 0}, patience};
        came = 1;
        timer_settime(deadline, 0, &once, NULL);
    } else pass_on(number); /* of a forked child, or the deadline, or a second signal */
    errno = error;
}

static PyObject *watch_signal(PyObject *module, PyObject *arguments) {
    int number;
    double seconds;
    struct sigaction now, ours = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
    struct sigevent again = {.sigev_notify = SIGEV_SIGNAL};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "id", &number, &seconds)) return NULL;
    if (sigaction(number, NULL, &now)) return PyErr_SetFromErrno(PyExc_OSError);
    int inherited = now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_signal; /* by fork */
    again.sigev_signo = number;
    if (signal_number == number && owner == getpid()) { /* watched: unless the program has set another handler since */
        if (inherited || came || now.sa_handler != SIG_DFL) return PyBool_FromLong(0);
        sigaction(number, &ours, NULL);
        return PyBool_FromLong(1);
    }
    if ((signal_number && owner == getpid()) || (!inherited && now.sa_handler == SIG_IGN)
        || timer_create(CLOCK_MONOTONIC, &again, &deadline))
        return PyBool_FromLong(0);
    if (!inherited) before = now;
    patience = (struct timespec){(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    came = 0;
    owner = getpid();
    signal_number = number;
    sigaction(number, &ours, NULL);
    return PyBool_FromLong(1);
}

static PyObject *signal_came(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(came && owner == getpid());
}

static PyObject *end_by_signal(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    Py_BEGIN_ALLOW_THREADS
    pass_on(signal_number);
    Py_END_ALLOW_THREADS
    RETURN_NONE;
}

static PyObject *unwatch_signal(PyObject *module, PyObject *unused) {
    struct sigaction now;
    (void)module, (void)unused;
    if (signal_number && owner == getpid() && !came) { /* after the signal, whoever asked for it ends the process */
        if (!sigaction(signal_number, NULL, &now) && now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_signal)
            sigaction(signal_number, &before, NULL);
        timer_delete(deadline);
        signal_number = 0;
    }
    RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"end_by_signal", end_by_signal, METH_NOARGS, "Does what the signal that came would have done without the watch."},
    {"signal_came", signal_came, METH_NOARGS, "Whether the signal came to this process since `watch_signal`."},
    {"unwatch_signal", unwatch_signal, METH_NOARGS, "Ends the watch, unless the signal came."},
    {"watch_signal", watch_signal, METH_VARARGS,
     "watch_signal(number, seconds)\n\nHas `signal_came` say that a signal came, which ends the process after so "
     "many seconds at the latest, or if it comes again. To be called again after "
     "the program replaced its own handler by the default action. Returns False if that is not possible."},
    {NULL, NULL, 0, NULL}};

int thence_add_signals(PyObject *module) { return PyModule_AddFunctions(module, functions); }
