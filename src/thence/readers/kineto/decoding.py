"""Decodes the pieces of a file to columns: with the compiled scanner in threads, else, if large, in several processes.

The scanner works without the GIL, so threads of this process decode at once. Where it was not built, or refuses the
first piece of a file, Python decodes: in this process, or for large files in others. Pieces and columns are then sent
over pipes as msgpack; for a plain file only the offset of a piece is sent, and the decoding process reads the piece
itself. Run as a program, this module is the first decoding process, which forks the others
(`thence.readers.kineto.processes`).
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from thence.errors import ThenceError
from thence.readers.kineto.envelope import Piece
from thence.readers.kineto.events import decode
from thence.readers.kineto.processes import BYTES_BEFORE_PROCESSES, PIECE_BYTES, Processes, fitting
from thence.readers.kineto.scanner import is_scanned

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from io import BufferedReader, BufferedWriter

    from thence.model.arrays import Array
    from thence.readers.kineto.events import Columns

_MAX_AHEAD = 32
"""Maximum pieces of a plain file that are submitted before the caller takes the first; their columns take some 45 MB,
at a time when the joined columns of the file are still small. Of a smaller file it is a quarter of its pieces."""

_MAX_THREADS = 4
"""Maximum number of threads: one makes columns of what the others scan, and three scan faster than that."""
_BYTES_OF_A_THREAD = 24 << 20
"""Bytes of a file for each thread: glibc keeps for each some 30 MB of what the columns of its pieces took."""


class _Workers(Protocol):
    """Decodes pieces beside the caller."""

    def submit(self, piece: Piece) -> Future[Columns]:
        """A future of the columns of a piece; `ThenceError` if they were lost."""

    def end(self) -> None:
        """Called after the last piece; does not wait."""

    def stop(self) -> None:
        """Gives up what was submitted, and waits until nothing is being decoded."""


def decoded(
    pieces: Iterable[Piece],
    path: str,
    expected_bytes: int,
    cores: int | None = None,
    processes: Processes | None = None,
) -> Generator[Columns]:
    """The columns of each piece, in order; for a large file, decoding has already started when this returns.

    Args:
        pieces: as `Envelope.pieces` yields them.
        path: the file from which pieces without bytes are read.
        expected_bytes: estimated size of the JSON, 0 if unknown; determines how many threads or processes decode,
            and when processes are started.
        cores: maximum number of decoding threads or processes; None: the number of usable cores.
        processes: decoding processes that are already started; they end after the last piece.
    """
    pieces = iter(pieces)
    count = fitting(expected_bytes, cores)
    if processes is None and count < 2:
        return (_decoded_here(piece, path) for piece in pieces)
    if processes is None and expected_bytes < BYTES_BEFORE_PROCESSES:
        return _first_here(pieces, path, expected_bytes, count)
    return _beside(pieces, path, expected_bytes, count, processes)


def _first_here(pieces: Iterator[Piece], path: str, expected_bytes: int, count: int) -> Generator[Columns]:
    """The columns of each piece; decodes `BYTES_BEFORE_PROCESSES` here, and only the rest in threads or processes."""
    done = 0
    while done < BYTES_BEFORE_PROCESSES:
        if (piece := next(pieces, None)) is None:
            return
        yield _decoded_here(piece, path)
        done += piece.size
    yield from _beside(pieces, path, expected_bytes, count, None)


def _beside(
    pieces: Iterator[Piece], path: str, expected_bytes: int, count: int, processes: Processes | None
) -> Generator[Columns]:
    """The columns of each piece, decoded in threads if the scanner reads the first one, else in processes."""
    ahead = min(_MAX_AHEAD, expected_bytes // (4 * PIECE_BYTES))
    if processes is None and (first := next(pieces, None)) is not None:
        pieces = chain((first,), pieces)
        if is_scanned(_json(first, path)):
            threads = min(count, _MAX_THREADS, max(2, expected_bytes // _BYTES_OF_A_THREAD))
            return _decoded_ahead(pieces, _Threads(path, threads), 2 * threads, ahead)
    processes = processes or Processes.start(count)
    return _decoded_ahead(pieces, _InProcesses(path, processes), 2 * len(processes.pipes), ahead)


def _decoded_here(piece: Piece, path: str) -> Columns:
    return decode(_json(piece, path), annotated=piece.annotated)


def _json(piece: Piece, path: str, room: Array | None = None) -> bytes | memoryview:
    """The events of a piece as a JSON array.

    Args:
        piece: as `Envelope.pieces` yields it.
        path: the file from which a piece without bytes is read.
        room: memory (bytes) for what is read, if it is large enough.
    """
    if piece.events is not None:
        return b"[" + piece.events + b"]"
    if room is None or len(room) < piece.size + 2:
        room = np.empty(piece.size + 2, np.uint8)  # a bytearray would be filled with zeros first
    array = room[: piece.size + 2]
    with Path(path).open("rb") as file:
        file.seek(piece.offset)
        read = file.readinto(array[1:-1].data)
    array[1 + read :] = 0  # of a file that has become shorter
    array[0], array[-1] = b"[]"
    return array.data


def _decoded_ahead(pieces: Iterator[Piece], workers: _Workers, enough: int, ahead: int) -> Generator[Columns]:
    """The columns of each piece, in order; decoding has started when this returns.

    Args:
        pieces: as `Envelope.pieces` yields them.
        workers: decode the pieces.
        enough: how many pieces to keep submitted: twice as many as can be decoded at once, so that the next ones wait.
        ahead: how many to submit before the first one is asked for, of a plain file.
    """
    running: deque[Future[Columns]] = deque()
    try:
        for piece in pieces:
            running.append(workers.submit(piece))
            if len(running) >= (enough if piece.events is not None else max(enough, ahead)):
                break
    except BaseException:
        workers.stop()
        raise
    return _results(running, pieces, workers, enough)


def _results(
    running: deque[Future[Columns]], pieces: Iterator[Piece], workers: _Workers, enough: int
) -> Generator[Columns]:
    """The columns of the pieces that are being decoded and of all following pieces; keeps ``enough`` submitted."""
    try:
        while running:
            columns = running.popleft().result()
            running.extend(map(workers.submit, islice(pieces, max(enough - len(running), 0))))
            yield columns
    except BaseException:
        workers.stop()
        raise
    workers.end()


class _Threads:
    """`_Workers` in threads of this process."""

    def __init__(self, path: str, count: int) -> None:
        self._path = path
        self._threads = ThreadPoolExecutor(count)
        self._of_thread = threading.local()

    def submit(self, piece: Piece) -> Future[Columns]:
        """As `_Workers.submit`."""
        return self._threads.submit(self._decode, piece)

    def _decode(self, piece: Piece) -> Columns:
        """The columns of a piece, of which none is a part of its text: each thread reads all pieces to one place.

        The system fills new memory with zeros first, which takes as long as to read a piece.
        """
        room = getattr(self._of_thread, "room", None)
        if room is None:
            room = self._of_thread.room = np.empty(PIECE_BYTES + 2, np.uint8)
        return decode(_json(piece, self._path, room), annotated=piece.annotated)

    def end(self) -> None:
        """As `_Workers.end`."""
        self._threads.shutdown(wait=False)

    def stop(self) -> None:
        """As `_Workers.stop`."""
        self._threads.shutdown(cancel_futures=True)


class _InProcesses:
    """`_Workers` in decoding processes, with a thread for each process that waits for its answers."""

    def __init__(self, path: str, processes: Processes) -> None:
        self._path = path
        self._processes = processes
        self._free: queue.SimpleQueue[tuple[BufferedWriter, BufferedReader]] = queue.SimpleQueue()
        for pair in processes.pipes:
            self._free.put(pair)
        self._threads = ThreadPoolExecutor(len(processes.pipes))
        import numpy.ma  # noqa: F401 - Polars needs it later; importing it while processes start is free

    def submit(self, piece: Piece) -> Future[Columns]:
        """A future of the columns of a piece, decoded by the next free process; `ThenceError` if that was killed."""
        return self._threads.submit(self._decode, piece)

    def _decode(self, piece: Piece) -> Columns:
        questions, answers = self._free.get()
        try:
            _send(questions, (self._path, piece))
            return _received_columns(answers)
        except (OSError, EOFError) as error:
            raise ThenceError("a process that decodes the trace was killed; is there enough memory?") from error
        finally:
            self._free.put((questions, answers))

    def end(self) -> None:
        """Lets the processes exit by themselves, once all pieces are decoded; does not wait for their exit."""
        self._processes.dismiss()
        self._threads.submit(self._processes.first.wait)
        self._threads.shutdown(wait=False)

    def stop(self) -> None:
        """Kills the processes."""
        self._processes.kill()
        self._threads.shutdown(cancel_futures=True)
        self._processes.dismiss()


def _send(stream: IO[bytes], message: object) -> None:
    packed = msgspec.msgpack.encode(message)
    stream.write(len(packed).to_bytes(8, "little"))
    stream.write(packed)
    stream.flush()


def _received(stream: IO[bytes]) -> Any:
    """The message that `_send` sent; raises `EOFError` if the other process has exited."""
    head = stream.read(8)
    size = int.from_bytes(head, "little")
    packed = stream.read(size)
    if len(head) < 8 or len(packed) < size:
        raise EOFError
    return msgspec.msgpack.decode(packed)


def _send_columns(stream: IO[bytes], columns: Columns) -> None:
    """Sends a message with all other values and the arrays' dtypes and shapes, then the arrays' bytes uncopied."""
    arrays = {name: value for name, value in columns.items() if isinstance(value, np.ndarray)}
    others = {name: value for name, value in columns.items() if name not in arrays}
    _send(stream, (others, [(name, a.dtype.str, a.shape) for name, a in arrays.items()]))
    for array in arrays.values():
        if array.size:
            stream.write(np.ascontiguousarray(array).data.cast("B"))
    stream.flush()


def _received_columns(stream: BufferedReader) -> Columns:
    """The columns that `_send_columns` sent; raises `EOFError` if the other process has exited."""
    columns, arrays = _received(stream)
    for name, dtype, shape in arrays:
        array = columns[name] = np.empty(shape, dtype)
        if array.size and stream.readinto(array.data.cast("B")) < array.nbytes:
            raise EOFError
    return dict(columns)


def _serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """The main loop of a decoding process, which ends when the request pipe is closed."""
    while True:
        try:
            path, piece = msgspec.convert(_received(questions), tuple[str, Piece])
        except EOFError:
            return
        _send_columns(answers, _decoded_here(piece, path))


def _serve_forked(pipes: list[tuple[int, int]]) -> None:
    """Forks a decoding process for each pair of pipes (requests, answers), and waits until all have exited."""
    # On Ctrl-C the calling process ends these processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # the decoded objects form no reference cycles
    for own in pipes:
        if os.fork() == 0:
            for end in set(chain.from_iterable(pipes)).difference(own):
                os.close(end)  # otherwise the caller would not see EOF when another process exits
            with suppress(BrokenPipeError):  # the calling process has exited
                _serve(os.fdopen(own[0], "rb"), os.fdopen(own[1], "wb"))
            os._exit(0)
    for end in chain.from_iterable(pipes):
        os.close(end)
    for _ in pipes:
        os.wait()


if __name__ == "__main__":
    ends = [int(number) for number in sys.argv[1:]]
    _serve_forked(list(zip(ends[::2], ends[1::2], strict=True)))
