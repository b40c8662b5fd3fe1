"""Python processes that are forked from one which has imported the packages already.

A process of its own costs a test half a second of CPU time, nearly all of it imports: a fork of a process that did
them costs a tenth of it. What is tested of the fork is what happens in a process and at its end: standard streams,
exit codes, signals, limits. For what happens before, as imports, their order, options of Python and the seed of
hashes, start Python.

Only where one waits for descriptors (not on Windows). The process that is forked has run no query: Polars' threads
would be missing in its forks. Importing Polars starts threads of its allocator, too, unless `NO_THREADS` is set; what
is left then is one that waits for spilled files to delete.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOMS = ("analysis", "attribution", "cli", "inside", "model", "readers", "store", "writers")
"""Rooms of thence whose modules are imported before any fork."""
EVERYTHING = ("polars", "polars.testing", "pytest", "rich.console", *(f"thence.{room}" for room in ROOMS))
"""What is imported before any fork: modules, with those of a package below them if they are of thence."""
NO_THREADS = {"_RJEM_MALLOC_CONF": "background_thread:false"}
"""Of the allocator of Polars, jemalloc, in the process that is forked."""
PATIENCE = 150
"""Seconds in which a fork starts, or ends after it was killed: no test waits for ever."""
POLARS = ("polars",)
"""The same for processes that only try tables."""
LAUNCHER = ("thence.capture.launcher", "thence.cli.record")
"""The same for ``thence record``, which has no Polars."""


class Forked:
    """A process that was forked from the server; the part of `subprocess.Popen` that tests need.

    Attributes:
        pid: of the process, which is a child of the server.
        returncode: None before `wait` has returned; negative where a signal ended it.
    """

    def __init__(self, pid: int, ending: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ending = ending

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end.

        Args:
            timeout: seconds. None: until it ends.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        if self.returncode is None:
            if not select.select([self._ending], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            told = self._ending.recv(8)
            self._ending.close()
            assert told, "the process that forks has ended: how this one ended is not known"
            self.returncode = int.from_bytes(told, "little", signed=True)
        return self.returncode

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def start(
    arguments: Sequence[str],
    streams: Sequence[int],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    closed: Sequence[int] = (),
    file_limit: int | None = None,
    imported: tuple[str, ...] = EVERYTHING,
) -> Forked:
    """Starts a process as ``python ARGUMENTS`` would, by a fork.

    Args:
        arguments: of Python: ``-m MODULE``, ``-c CODE`` or a script, and what follows them.
        streams: descriptors that become standard input, output and error.
        env: the environment. None: that of this process.
        cwd: the working directory. None: that of this process.
        closed: standard streams that are closed before anything else.
        file_limit: bytes of a file that can be written at most.
        imported: what the process has imported.
    """
    request = {
        "arguments": [str(argument) for argument in arguments],
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd or Path.cwd()),
        "closed": list(closed),
        "file_limit": file_limit,
    }
    text = json.dumps(request).encode("utf-8", "surrogateescape")
    ours, theirs = socket.socketpair()
    server = _server(imported)
    with theirs:
        socket.send_fds(server, [len(text).to_bytes(8, "little")], [*streams, theirs.fileno()])
        server.sendall(text)
        ours.settimeout(PATIENCE)
        told = ours.recv(8)
    assert told, "the process that is forked has ended"
    pid = int.from_bytes(told, "little")
    return Forked(pid, ours)


def run(
    arguments: Sequence[str],
    *,
    stdin: bytes | None = None,
    stdout: IO[bytes] | int = subprocess.PIPE,
    stderr: IO[bytes] | int = subprocess.PIPE,
    timeout: float = 120,
    **options: Any,
) -> subprocess.CompletedProcess[bytes]:
    """Runs a process as `subprocess.run` does, by a fork; ``options`` are those of `start`."""
    with contextlib.ExitStack() as opened:
        files: list[IO[bytes] | int] = [opened.enter_context(tempfile.TemporaryFile())]
        if stdin is not None:
            _write(files[0], stdin)
        kept: list[IO[bytes] | None] = []
        for given in (stdout, stderr):
            kept.append(opened.enter_context(tempfile.TemporaryFile()) if given == subprocess.PIPE else None)
            files.append(kept[-1] or given)
        process = start(arguments, [file if isinstance(file, int) else file.fileno() for file in files], **options)
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait(PATIENCE)
            raise
        texts = [_content(file) if file is not None else None for file in kept]
        return subprocess.CompletedProcess([*arguments], code, *texts)


def _write(file: Any, content: bytes) -> None:
    file.write(content)
    file.seek(0)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


class Processes:
    """Stands for the module `subprocess` where thence starts Python processes for its own work.

    Args:
        imported: what those processes have imported.
    """

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, imported: tuple[str, ...]) -> None:
        self._imported = imported

    def ready(self) -> None:
        """Starts the process that is forked, before this one has limits of its own."""
        _server(self._imported)

    def Popen(  # noqa: N802 - the name there
        self, command: Sequence[str], *, env: Mapping[str, str], **streams: IO[bytes] | int
    ) -> Forked:
        """A process, whose streams are files."""
        assert command[:2] == [sys.executable, "-P"], command
        with Path(os.devnull).open("r+b") as null:
            given = (streams[name] for name in ("stdin", "stdout", "stderr"))
            descriptors = [(null if isinstance(stream, int) else stream).fileno() for stream in given]
            return start(command[2:], descriptors, env=env, imported=self._imported)

    def run(
        self, command: Sequence[str], *, timeout: float, check: bool, **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """A process that has ended."""
        assert not check
        process = self.Popen(command, **options)
        try:
            return subprocess.CompletedProcess(command, process.wait(timeout))
        finally:
            process.kill()
            process.wait(PATIENCE)


@functools.cache
def _server(imported: tuple[str, ...]) -> socket.socket:
    """The connection to the process that is forked; it ends with this one."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno()), *imported]
    environment = os.environ | NO_THREADS | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # another process still has the connection open
            process.kill()
            process.wait()

    atexit.register(end)
    return ours


def _serve(connection: socket.socket) -> None:
    """Forks for each request, and tells how each fork ended; returns in each fork, as that process."""
    ended, wakes = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # What starts the tests may block it, and children inherit that: no end would ever be noticed.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    signal.set_wakeup_fd(wakes)
    endings: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            os.read(ended, 1 << 16)
            for pid, code in _ended():
                with endings.pop(pid) as ending, contextlib.suppress(OSError):
                    ending.send(code.to_bytes(8, "little", signed=True))
        if connection not in ready:
            continue
        size, descriptors, _, _ = socket.recv_fds(connection, 8, 4)
        if not size:
            sys.exit(0)
        request = _received(connection, int.from_bytes(size, "little"))
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for ending in [*endings.values(), connection]:
                ending.close()
            _take(descriptors[:3])
            for descriptor in (descriptors[3], ended, wakes):
                os.close(descriptor)
            _become(request)
            return
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        endings[pid] = socket.socket(fileno=descriptors[3])
        endings[pid].send(pid.to_bytes(8, "little"))


def _take(descriptors: Sequence[int]) -> None:
    """Makes them standard input, output and error; none of them is one before."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _received(connection: socket.socket, size: int) -> dict[str, Any]:
    text = b""
    while len(text) < size:
        text += connection.recv(size - len(text))
    request: dict[str, Any] = json.loads(text.decode("utf-8", "surrogateescape"))
    return request


def _ended() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def _become(request: dict[str, Any]) -> None:
    """Makes a fork the process that was asked for, before it runs anything."""
    # Python leaves the main thread the number that it has in the parent.
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["file_limit"] is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"],) * 2)
    for descriptor in request["closed"]:
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, name)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = request["arguments"]


def _stream(number: int, name: str) -> Any:
    """A standard stream as Python makes it; None where the descriptor is closed."""
    try:
        os.fstat(number)
    except OSError:
        return None
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    errors = "backslashreplace" if name == "stderr" else errors or "strict"
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    raw = io.FileIO(number, "r" if name == "stdin" else "w", closefd=False)
    raw.name = f"<{name}>"  # type: ignore[misc]
    binary: Any = raw if unbuffered and name != "stdin" else (
        io.BufferedReader(raw) if name == "stdin" else io.BufferedWriter(raw)
    )  # fmt: skip
    by_line = raw.isatty() or name == "stderr"
    return io.TextIOWrapper(
        binary, encoding or "utf-8", errors, line_buffering=by_line, write_through=unbuffered and name != "stdin"
    )


def _run() -> None:
    """Runs what ``sys.argv`` says, as Python does with its arguments."""
    first, *rest = sys.argv
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")


def _import(names: Sequence[str]) -> None:
    """Imports modules, and those below packages of thence but for what needs optional libraries."""
    for name in names:
        module = importlib.import_module(name)
        if name.startswith("thence."):
            from thence.errors import MissingRequirement

            for below in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
                with contextlib.suppress(ImportError, MissingRequirement):
                    importlib.import_module(below.name)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _import(sys.argv[2:])
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    gc.unfreeze()
    _run()
