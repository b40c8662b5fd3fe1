"""Runs tasks in processes of this machine or on a Ray cluster. Both return one outcome for each job, in any order.

If a worker dies, for example because the kernel kills it when memory is short, the jobs that were running are tried
again one at a time. So only the job that kills its worker is given up.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from thence.child_python import safe_path
from thence.errors import MissingRequirement, ThenceError, UsageError
from thence.store.task import Job, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

Task = "Callable[[Job], Outcome]"

_RETRIES = 2
"""How often a job is retried after its worker was lost."""
_LOST = "the process that read it was killed {} times; is there enough memory?"
_JOBS_PER_PROCESS = 50
"""Jobs after which a process is replaced, so that memory that allocators keep does not add up."""
_LOOKS_EVERY_S = 0.5
"""Interval at which the process that waits for jobs checks whether it was interrupted."""
_ONE_THREAD = {"POLARS_MAX_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_AHEAD = 2
"""Jobs submitted for each worker, so that a worker finds its next job when it is done with one."""


class Workers(Protocol):
    """Runs jobs."""

    def run(self, task: Callable[[Job], Outcome], jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yields the outcome of every job, in the order of completion.

        Raises:
            ThenceError: no worker is available.
            OSError: a worker could not write the store.
        """


class LocalWorkers:
    """Processes of this machine.

    Args:
        processes: how many; None for as many as there are usable cores.
    """

    def __init__(self, processes: int | None = None) -> None:
        self.processes = processes or _usable_cores()

    def run(self, task: Callable[[Job], Outcome], jobs: Iterable[Job]) -> Iterator[Outcome]:
        """As `Workers.run`."""
        waiting = deque(jobs)
        while waiting:
            lost: list[Job] = []
            yield from self._in_pool(task, waiting, lost)
            for job in lost:
                yield self._alone(task, job)

    def _in_pool(self, task: Callable[[Job], Outcome], waiting: deque[Job], lost: list[Job]) -> Iterator[Outcome]:
        """Yields outcomes until all jobs are done or a process dies; then adds the jobs that were running to `lost`."""
        running: dict[Future[Outcome], Job] = {}
        with safe_path(), _ended_in_order(), _pool(min(self.processes, len(waiting))) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < _AHEAD * self.processes and not lost:
                        with _without_interrupts():
                            future = pool.submit(task, waiting[0])
                        running[future] = waiting[0]
                        waiting.popleft()
                    # Ctrl-C may interrupt another thread instead, so this wait ends regularly.
                    done, _ = wait(running, _LOOKS_EVERY_S, FIRST_COMPLETED)
                    for future in done:
                        job = running.pop(future)
                        try:
                            yield future.result()
                        except BrokenProcessPool:
                            lost.append(job)
                    if lost and not running:
                        return
            except BrokenProcessPool:  # it broke between two jobs
                lost.extend(running.values())
            except BaseException:
                _end(pool)
                raise
            finally:
                pool.shutdown(cancel_futures=True)

    @staticmethod
    def _alone(task: Callable[[Job], Outcome], job: Job) -> Outcome:
        for _ in range(_RETRIES):
            with safe_path(), _pool(1) as pool:
                try:
                    return pool.submit(task, job).result()
                except BrokenProcessPool:
                    continue
        return Outcome(job.source, reason=f"{job.source}: {_LOST.format(_RETRIES + 1)}", why="lost")


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),  # fork is not safe with the threads of Polars
        _begin,
        max_tasks_per_child=_JOBS_PER_PROCESS,
    )


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Blocks SIGINT in what the block starts (processes, and the thread that starts further ones).

    So Ctrl-C interrupts this process alone.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Lets SIGTERM, like Ctrl-C, end this process by an exception, so that it removes the semaphores of its pool.

    Otherwise Python's resource tracker, a process that outlives this one, prints a warning about them.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # as shells say it


def _end(pool: ProcessPoolExecutor) -> None:
    """Kills the processes of a pool; the folders that they were writing have no final names yet."""
    for process in list((pool._processes or {}).values()):  # noqa: SLF001 - Python 3.14 has kill_workers()
        process.kill()


def _begin() -> None:
    """Initializes a worker, before its first job."""
    _one_thread()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exits when the parent process has ended, even by a signal; otherwise a worker would wait for jobs forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _one_thread() -> None:
    """Makes a worker use one core; must run before Polars and NumPy's OpenBLAS start their threads."""
    os.environ |= _ONE_THREAD


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class RayWorkers:
    """Runs jobs as tasks of a Ray cluster, each on one CPU. Ray retries tasks whose worker or node is lost.

    Args:
        address: of the cluster, as `ray.init` takes it: ``auto``, ``HOST:PORT``; or ``local``
            for a cluster of this machine alone.

    Raises:
        MissingRequirement: Ray is not installed.
        UsageError: there is no cluster at this address.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingRequirement("--ray needs Ray: pip install 'thence[ray]'") from error
        self._ray: Any = ray
        if not ray.is_initialized():
            try:
                # Without a working directory, Ray puts the current one into `sys.path` of all tasks: a file polars.py
                # there, from someone else, would be run.
                with TemporaryDirectory() as empty:
                    ray.init(
                        address=address, log_to_driver=False, logging_level="error", runtime_env={"working_dir": empty}
                    )
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise UsageError(f"--ray {address}: no Ray cluster there ({error})") from error

    def run(self, task: Callable[[Job], Outcome], jobs: Iterable[Job]) -> Iterator[Outcome]:
        """As `Workers.run`."""
        ray = self._ray
        environment = {"env_vars": _ONE_THREAD}
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES, runtime_env=environment)(task)
        waiting = deque(jobs)
        running: dict[Any, Job] = {}
        while waiting or running:
            while waiting and len(running) < _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1))):
                job = waiting.popleft()
                running[remote.remote(job)] = job
            done, _ = ray.wait(list(running), num_returns=1)
            for reference in done:
                yield self._outcome(reference, running.pop(reference))

    def _outcome(self, reference: Any, job: Job) -> Outcome:
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(reference)
        except (errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError) as error:
            what = type(error).__name__
            return Outcome(job.source, reason=f"{job.source}: {_LOST.format(_RETRIES + 1)} ({what})", why="lost")
        except errors.RayTaskError as error:
            if isinstance(error.cause, OSError):
                raise error.cause from error
            raise ThenceError(f"a task of Ray failed: {error}") from error
        return outcome
