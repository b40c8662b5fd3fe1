"""Decodes the pieces of a file to columns, in this process or, for large files, in several processes.

The first decoding process is started with ``python -m`` on this module: unlike multiprocessing's
spawn this does not import the caller's main module again, and unlike fork it is safe beside the
threads of Polars. It has no threads itself, and forks the others. Pieces and columns travel as
msgpack over pipes; of a plain file only the offset of a piece travels, and the process reads it
itself.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import subprocess
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np

from thence.errors import ThenceError
from thence.readers.kineto.envelope import PIECE_BYTES, Piece
from thence.readers.kineto.events import decode

if sys.platform == "linux":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from thence.readers.kineto.events import Columns

__all__ = ["decoded"]

_BYTES_BEFORE_PROCESSES = 48 << 20
"""JSON that is decoded here before other processes are started: below, starting costs more than it gains."""
_MOST_PROCESSES = 16
"""One process joins what all others decode: more would wait for it."""
_PIPE_BYTES = 1 << 20
"""Asked of the system for each pipe of columns: with its 64 KiB, threads take turns for every 64 KiB that arrive."""
# glibc gives freed memory back to the system at once and fetches it again for the next piece, which
# doubles the system time; these make it keep what one piece needs. Other systems ignore them. NumPy
# would start a thread for each core, for algebra that is not done here.
_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "OPENBLAS_NUM_THREADS": "1",
}


def decoded(
    pieces: Iterable[Piece], path: str, expected_bytes: int, cores: int | None = None
) -> Iterator[Columns]:
    """The columns of each piece, in order.

    Args:
        pieces: as `Envelope.pieces` gives them.
        path: the file that pieces without bytes are to be read from.
        expected_bytes: how much JSON there will be, 0 where unknown; decides only how soon other
            processes are started.
        cores: how many processes may decode; None: as many as there are usable cores.
    """
    processes = min(cores or _usable_cores(), _MOST_PROCESSES)
    if expected_bytes:
        processes = min(processes, -(-expected_bytes // PIECE_BYTES))
    pieces = iter(pieces)
    if processes < 2:
        yield from (_decoded_here(piece, path) for piece in pieces)
        return
    done = 0 if expected_bytes < _BYTES_BEFORE_PROCESSES else _BYTES_BEFORE_PROCESSES
    while done < _BYTES_BEFORE_PROCESSES:
        if (piece := next(pieces, None)) is None:
            return
        yield _decoded_here(piece, path)
        done += piece.size
    yield from _in_processes(pieces, path, processes)


def _decoded_here(piece: Piece, path: str) -> Columns:
    if piece.events is not None:
        return decode(b"[" + piece.events + b"]", annotated=piece.annotated)
    array = bytearray(piece.size + 2)
    with Path(path).open("rb") as file:
        file.seek(piece.offset)
        file.readinto(memoryview(array)[1:-1])
    array[0], array[-1] = b"[]"
    return decode(array, annotated=piece.annotated)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_processes(pieces: Iterator[Piece], path: str, processes: int) -> Iterator[Columns]:
    """The columns of each piece, in order, decoded by several worker processes."""
    workers = _Workers(path, processes)
    running: deque[Future[Columns]] = deque()
    try:
        for piece in pieces:
            running.append(workers.submit(piece))
            # Twice as many pieces as processes: the next is at hand when a process is done.
            if len(running) == 2 * processes:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BaseException:
        workers.stop()
        raise
    workers.end()


class _Workers:
    """Decoding processes, each asked over one pipe and answering on another.

    One process is started, which forks these once it has imported what they need, and waits for them.
    """

    def __init__(self, path: str, processes: int) -> None:
        self._path = path
        pipes = [(os.pipe(), os.pipe()) for _ in range(processes)]
        theirs = [end for asked, answered in pipes for end in (asked[0], answered[1])]
        try:
            self._first = subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
                [sys.executable, "-m", __name__, *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Out of reach of Ctrl-C, which a terminal sends to all of its group, from the first moment on.
                process_group=0,
                pass_fds=theirs,
                env=os.environ
                | _ENVIRONMENT
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            for end in theirs:
                os.close(end)
            ours = [(os.fdopen(a[1], "wb"), os.fdopen(b[0], "rb")) for a, b in pipes]
        self._free: queue.SimpleQueue[tuple[IO[bytes], IO[bytes]]] = queue.SimpleQueue()
        for questions, answers in ours:
            _widen(answers)
            self._free.put((questions, answers))
        self._pipes = [pipe for pair in ours for pipe in pair]
        self._threads = ThreadPoolExecutor(processes)
        import numpy.ma  # noqa: F401 - Polars needs it in the end; while processes start it takes no time

    def submit(self, piece: Piece) -> Future[Columns]:
        """The columns of a piece, which the next free process decodes; `ThenceError` if it is gone."""
        return self._threads.submit(self._decode, piece)

    def _decode(self, piece: Piece) -> Columns:
        questions, answers = self._free.get()
        try:
            _send(questions, (self._path, piece))
            return {name: _unpacked(value) for name, value in _received(answers).items()}
        except (OSError, EOFError) as error:
            raise ThenceError(
                "a process that decodes the trace was killed; is there enough memory?"
            ) from error
        finally:
            self._free.put((questions, answers))

    def end(self) -> None:
        """Lets the processes end by themselves, once all pieces are decoded; does not wait for that."""
        for pipe in self._pipes:
            pipe.close()
        self._threads.submit(self._first.wait)
        self._threads.shutdown(wait=False)

    def stop(self) -> None:
        """Ends the processes, whatever they are doing."""
        if self._first.poll() is None:  # else its number may be another's by now
            os.killpg(self._first.pid, signal.SIGKILL)
        self._first.wait()
        self._threads.shutdown(cancel_futures=True)
        for pipe in self._pipes:
            with suppress(OSError):  # what was to be sent last reaches nobody
                pipe.close()


def _widen(answers: IO[bytes]) -> None:
    """Makes a pipe hold more; one user's pipes may not be of any size together."""
    if sys.platform == "linux":
        with suppress(OSError):
            fcntl.fcntl(answers, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _send(stream: IO[bytes], message: object) -> None:
    packed = msgspec.msgpack.encode(message)
    stream.write(len(packed).to_bytes(8, "little"))
    stream.write(packed)
    stream.flush()


def _received(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return msgspec.msgpack.decode(stream.read(int.from_bytes(head, "little")))


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        return np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"])
    return value


def _serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """The life of a decoding process."""
    while True:
        try:
            path, piece = msgspec.convert(_received(questions), tuple[str, Piece])
        except EOFError:
            return
        columns = _decoded_here(piece, path)
        _send(answers, {name: _packed(value) for name, value in columns.items()})


def _serve_forked(pipes: list[tuple[int, int]]) -> None:
    """A process for each pair of pipes, to be asked on the first and to answer on the second; until all end."""
    # The process that asked is told of Ctrl-C, and ends these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # what is decoded here holds no cycles
    for own in pipes:
        if os.fork() == 0:
            for end in set(chain.from_iterable(pipes)).difference(own):
                os.close(end)  # else nobody would see that another process is gone
            with suppress(BrokenPipeError):  # whoever asked is gone
                _serve(os.fdopen(own[0], "rb"), os.fdopen(own[1], "wb"))
            os._exit(0)
    for end in chain.from_iterable(pipes):
        os.close(end)
    for _ in pipes:
        os.wait()


if __name__ == "__main__":
    ends = [int(number) for number in sys.argv[1:]]
    _serve_forked(list(zip(ends[::2], ends[1::2], strict=True)))
