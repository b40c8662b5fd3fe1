"""Programs that pause in functions of random names, on the libcupti of the tests: what idle time is said to be."""

from __future__ import annotations

import json
import random
import string
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import thence
from recorder_programs import program

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 50
PAUSES = {
    "python": """
        def NAME():
            end = time.perf_counter() + 0.006
            x = 0
            while time.perf_counter() < end:
                x = (x * 7 + 3) % 1001
            return x
    """,
    "c": """
        FIRST, SECOND = pow(7, 20000), pow(3, 40000)
        def NAME():
            end = time.perf_counter() + 0.006
            while time.perf_counter() < end:
                FIRST * SECOND  # a C function that holds the GIL for a millisecond
    """,
    "c_without_gil": """
        DATA = os.urandom(2 << 20)
        def NAME():
            end = time.perf_counter() + 0.006
            while time.perf_counter() < end:  # how long a hash takes depends on the processor
                hashlib.sha256(DATA)
    """,
    "lock": """
        LOCK, GO, HELD = threading.Lock(), threading.Semaphore(0), threading.Semaphore(0)
        def hold():
            while GO.acquire():
                with LOCK:
                    HELD.release()
                    time.sleep(0.006)
        threading.Thread(target=hold, daemon=True).start()
        def prepare():
            GO.release()
            HELD.acquire()
        def NAME():
            with LOCK:
                pass
    """,
    "sleep": """
        def NAME():
            time.sleep(0.006)
    """,
    "queue": """
        BATCHES, WANTED = queue.Queue(), threading.Semaphore(0)
        def make():
            while WANTED.acquire():
                time.sleep(0.006)
                BATCHES.put(1)
        threading.Thread(target=make, daemon=True).start()
        def NAME():
            WANTED.release()
            return BATCHES.get()
    """,
    "hook": """
        # As autograd does it: a thread of C++ launches and calls a function of Python, while the main thread waits.
        libc = ctypes.CDLL(None)
        ROUTINE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        def NAME():
            end = time.perf_counter() + 0.006
            while time.perf_counter() < end:
                pass
        def engine(_argument):
            launch()
            begin = time.perf_counter_ns()
            NAME()
            paused.append(time.perf_counter_ns() - begin)
            launch()
        routine = ROUTINE(engine)
        def backward():
            thread = ctypes.c_ulong()
            libc.pthread_create(ctypes.byref(thread), None, routine, None)
            libc.pthread_join(thread, None)
    """,
    "none": """
        def NAME():
            pass
    """,
}
"""Definitions of a function NAME that pauses for some 6 ms, by kind; ``prepare`` is called before it."""
_MODULE = """
import ctypes, hashlib, os, queue, threading, time
paused = []
def prepare():
    pass
def backward():
    begin = time.perf_counter_ns()
    NAME()
    paused.append(time.perf_counter_ns() - begin)
def step():
    for _ in range(5):
        launch()
    prepare()
    launch()
    backward()
    launch()
def main(steps):
    for _ in range(steps):
        step()
"""
_BODY = """
import importlib, json
sys.path.insert(0, {folder!r})
module = importlib.import_module({module!r})
module.launch = lambda: launch("k")
with thence.record(OUT, thence.RecordOptions(own=("!fake_cupti",), {options})):
    module.main({steps})
print(json.dumps(module.paused))
"""


@dataclass(frozen=True)
class Paused:
    """A recording of a program that paused.

    Attributes:
        function: name of the function.
        total_ns: of the pauses, as the program measured them.
        trace: the recording.
    """

    function: str
    total_ns: int
    trace: thence.Trace

    def rows(self) -> list[dict[str, Any]]:
        """Rows of idle time that the host caused, the longest first: cause, name and total_ns."""
        document = self.trace.idle().to_json()
        rows = [
            {"cause": cause["cause"], **row}
            for cause in document["causes"]
            if cause["cause"] not in {"launch", "queued", "event_wait", "unknown"}
            for row in cause["rows"]
        ]
        return sorted(rows, key=lambda row: -row["total_ns"])

    def by_function(self) -> dict[str, dict[str, int]]:
        """Idle time by function (or by the name of a row that is none) and cause."""
        found: dict[str, dict[str, int]] = {}
        for row in self.rows():
            causes = found.setdefault((row["name"] or "").rpartition(" ")[2], {})
            causes[row["cause"]] = causes.get(row["cause"], 0) + row["total_ns"]
        return found


def recorded_pauses(kind: str, folder: Path, options: str = "", steps: int = STEPS) -> Paused:
    """Record a program with one of `PAUSES`."""
    letters = random.SystemRandom()
    module, function = ("".join(letters.choices(string.ascii_lowercase, k=9)) for _ in range(2))
    source = _MODULE + textwrap.dedent(PAUSES[kind])
    (folder / f"{module}.py").write_text(source.replace("NAME", function))
    body = _BODY.format(folder=str(folder), module=module, steps=steps, options=options)
    said = program(body, folder / "out").stdout
    return Paused(function, sum(json.loads(said)), thence.open(folder / "out"))
