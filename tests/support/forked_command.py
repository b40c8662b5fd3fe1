"""``thence`` as a command of shell scripts: each call is a fork of a process that has imported everything.

The command itself is a small script, which hands its streams, arguments, environment and folder to this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

import forking

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_COMMAND = f"""#!{sys.executable} -ISE
import json, os, socket, sys
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
with socket.socket(socket.AF_UNIX) as calls:
    calls.connect(ADDRESS)
    socket.send_fds(calls, [len(request).to_bytes(8, "little")], [0, 1, 2])
    calls.sendall(request)
    told = calls.recv(8)
sys.exit(int.from_bytes(told, "little", signed=True) if told else "no process came of it")
"""
_one_by_one = threading.Lock()


@contextlib.contextmanager
def forked_command(path: Path) -> Iterator[None]:
    """Writes the command to ``path``; it works until the end of the context."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/calls"
        listener.bind(address)
        listener.listen()
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        path.write_text(_COMMAND.replace("ADDRESS", repr(address)))
        path.chmod(0o755)
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the context has ended
        while True:
            threading.Thread(target=_answer, args=(listener.accept()[0],), daemon=True).start()


def _answer(call: socket.socket) -> None:
    """Runs what a call asks for, and tells it the exit code."""
    with call:
        size, streams, _, _ = socket.recv_fds(call, 8, 3)
        with call.makefile("rb") as file:
            arguments, environment, folder = json.loads(file.read(int.from_bytes(size, "little")))
        with _one_by_one:
            process = forking.start(["-m", "thence", *arguments], streams, env=environment, cwd=folder)
        for stream in streams:
            os.close(stream)
        call.send(process.wait().to_bytes(8, "little", signed=True))
