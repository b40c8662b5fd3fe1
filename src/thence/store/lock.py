"""A lock, so that only one ingest at a time writes a store."""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from thence.errors import UsageError
from thence.model.json_fields import Count, NotAsWritten, decoded
from thence.store.layout import LOCK

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MOST_BYTES = 500


class _Holder(msgspec.Struct):
    process: Count
    host: str


@contextmanager
def locked(store: Path) -> Iterator[str | None]:
    """Holds the lock of a store; the system releases it however the process ends.

    The lock file is emptied but never deleted: if it were, two processes could lock two inodes of the same name.

    Args:
        store: a folder.

    Yields:
        A sentence where the store's file system has no locks, else None.

    Raises:
        UsageError: another process holds it, or the folder cannot be written to.
    """
    if sys.platform == "win32":
        yield f"{store}: there is no lock on Windows; make sure that no other ingest writes it at the same time"
        return
    path = store / LOCK
    try:
        # Opened for reading too, so that the error can name the holder.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UsageError(f"{store}: cannot be written to: {error.strerror}") from error
    try:
        unguarded = None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{store}: is being written by another thence ingest ({_holder(handle)}); wait until it has ended, "
                "or name another store"
            ) from None
        except OSError as error:
            unguarded = (
                f"{store}: its file system has no locks ({error.strerror}); make sure that no other ingest writes it "
                "at the same time"
            )
        holder = json.dumps({"process": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(handle, 0)
        os.pwrite(handle, holder.encode(), 0)
        try:
            yield unguarded
        finally:
            os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _holder(handle: int) -> str:
    """The process and host that a lock file names; of the host only letters, digits and ``.-_`` are kept."""
    try:
        told = decoded(os.pread(handle, _MOST_BYTES, 0), _Holder)
    except (NotAsWritten, OSError):
        return "process unknown"
    host = "".join(sign for sign in told.host if sign.isalnum() or sign in ".-_")
    return f"process {told.process} on {host}"
