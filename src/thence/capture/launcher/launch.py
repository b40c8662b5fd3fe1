"""``thence record -- COMMAND``: runs a command so that it and every Python process that it starts are recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thence.capture.launcher.first_use import SETTINGS, why_unseen
from thence.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thence.capture.recorder.options import RecordOptions

_SIGNALLED = 128  # shells' exit code of a process that a signal ended, less the signal's number
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: its exit code as in a shell: 128 plus the number of the signal if a signal ended it.
        seconds: how long it ran.
        unseen: why Python does not record itself if it is started in this way; None if it does.
    """

    code: int
    seconds: float
    unseen: str | None = None


def claimed_directory(wanted: str | None) -> Path:
    """Creates the directory for a recording, and returns its absolute path.

    Args:
        wanted: the path that the user named, which may be an empty directory; None takes ``thence-recording``,
            or the first free name with a number.

    Raises:
        UsageError: the directory cannot be created or written to, or is not empty.
    """
    names = (Path(wanted),) if wanted else map(Path, _default_names())
    for path in names:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if wanted and (not path.is_dir() or any(path.iterdir())):
                raise UsageError(
                    f"{path}: exists and is not an empty directory; name another directory for the recording"
                ) from None
            if not wanted:
                continue
        except OSError as error:
            raise UsageError(f"{path}: a recording cannot be written there: {error.strerror}") from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise UsageError(f"{path}: a recording cannot be written there: this user may not write to it")
        return path.absolute()
    raise AssertionError("names never end")


def _default_names() -> Iterator[str]:
    yield "thence-recording"
    yield from (f"thence-recording-{number}" for number in itertools.count(2))


def run(command: Sequence[str], directory: Path, options: RecordOptions) -> Outcome:
    """Run a command to its end, recorded.

    The signals of `_PASSED_ON` are passed on to the command; the terminal sends Ctrl-C to it by itself.
    """
    began = time.monotonic()
    try:
        environment = _environment(os.environ, directory, options)
        child = subprocess.Popen(command, env=environment)  # noqa: S603 - what the user asked for
    except FileNotFoundError:
        raise UsageError(f"{command[0]}: there is no such command") from None
    except OSError as error:
        raise UsageError(f"{command[0]}: cannot be run: {error.strerror}") from error
    with _passed_on(child):
        code = child.wait()
    seconds = time.monotonic() - began
    return Outcome(code if code >= 0 else _SIGNALLED - code, seconds, why_unseen(command, environment))


def _environment(given: Mapping[str, str], directory: Path, options: RecordOptions) -> dict[str, str]:
    """The environment that makes every Python process of the command import thence's sitecustomize.

    If this package is not installed, its folder is appended to PYTHONPATH, so that it can be imported there.
    """
    startup = Path(__file__).with_name("startup")
    package = Path(__file__).parents[3]
    path = [str(startup), *filter(None, [given.get("PYTHONPATH")])]
    if "site-packages" not in package.parts and "dist-packages" not in package.parts:
        path.append(str(package))
    settings = {"directory": str(directory), "options": dataclasses.asdict(options)}
    return {**given, "PYTHONPATH": os.pathsep.join(path), SETTINGS: json.dumps(settings)}


@contextlib.contextmanager
def _passed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, lambda n, _frame: child.send_signal(n)) for n in _PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda _n, _frame: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
