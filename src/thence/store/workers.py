"""Where tasks run: processes of this machine, or a Ray cluster. Both give every job one outcome, in any order.

A worker that dies, by the kernel's hand where memory is short, takes no other job with it: what was under way is
tried again, alone, so that only the job that kills its worker is given up.
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
from typing import TYPE_CHECKING, Any, Protocol

from thence.errors import MissingRequirement, ThenceError, UsageError
from thence.store.task import Job, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["LocalWorkers", "RayWorkers", "Workers"]

Task = "Callable[[Job], Outcome]"

_RETRIES = 2
"""How often a job is tried again whose worker was lost."""
_LOST = "the process that read it was killed {} times; is there enough memory?"
_JOBS_PER_PROCESS = 50
"""After which a process gives way to a new one: what allocators keep does not add up."""
_LOOKS_EVERY_S = 0.5
"""How often the process that waits for jobs looks whether it was interrupted."""
_ONE_THREAD = {"POLARS_MAX_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_AHEAD = 2
"""Jobs handed out for each worker: the next is at hand when one is done."""


class Workers(Protocol):
    """What runs jobs."""

    def run(self, task: Callable[[Job], Outcome], jobs: Iterable[Job]) -> Iterator[Outcome]:
        """The outcome of every job, in the order in which they are done.

        Raises:
            ThenceError: no worker can be had.
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

    def _in_pool(
        self, task: Callable[[Job], Outcome], waiting: deque[Job], lost: list[Job]
    ) -> Iterator[Outcome]:
        """Outcomes until all jobs are done, or a process dies: then ``lost`` are the jobs that were under way."""
        running: dict[Future[Outcome], Job] = {}
        with _pool(min(self.processes, len(waiting))) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < _AHEAD * self.processes and not lost:
                        with _without_interrupts():
                            future = pool.submit(task, waiting[0])
                        running[future] = waiting[0]
                        waiting.popleft()
                    # Another thread may be the one that Ctrl-C interrupts: this one looks now and then.
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
            with _pool(1) as pool:
                try:
                    return pool.submit(task, job).result()
                except BrokenProcessPool:
                    continue
        return Outcome(job.source, reason=f"{job.source}: {_LOST.format(_RETRIES + 1)}", why="lost")


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),  # fork is not safe beside the threads of Polars
        _begin,
        max_tasks_per_child=_JOBS_PER_PROCESS,
    )


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Starts processes, and the thread that starts further ones, so that Ctrl-C reaches this process alone."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(pool: ProcessPoolExecutor) -> None:
    """Ends the processes of a pool at once: what they were writing has no name yet."""
    for process in list((pool._processes or {}).values()):  # noqa: SLF001 - Python 3.14 has kill_workers()
        process.kill()


def _begin() -> None:
    """What a worker does before its first job."""
    _one_thread()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends a worker when the process that started it has ended, by whatever signal: it would wait for jobs for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _one_thread() -> None:
    """Makes a worker use one core; before Polars and NumPy's OpenBLAS start their threads."""
    os.environ |= _ONE_THREAD


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class RayWorkers:
    """Tasks of a Ray cluster, each on one CPU. Ray tries those again whose worker or node is lost.

    Args:
        address: of the cluster, as `ray.init` takes it: ``auto``, ``HOST:PORT``; or ``local``
            for one of this machine alone.

    Raises:
        MissingRequirement: Ray is not installed, or there is no cluster.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingRequirement("--ray needs Ray: pip install 'thence[ray]'") from error
        self._ray: Any = ray
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, logging_level="error")
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
            while waiting and len(running) < _AHEAD * max(
                1, int(ray.cluster_resources().get("CPU", 1))
            ):
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
            return Outcome(
                job.source,
                reason=f"{job.source}: {_LOST.format(_RETRIES + 1)} ({what})",
                why="lost",
            )
        except errors.RayTaskError as error:
            if isinstance(error.cause, OSError):
                raise error.cause from error
            raise ThenceError(f"a task of Ray failed: {error}") from error
        return outcome
