"""Programs that end at a random moment, in any way, and what their recordings say of what was lost."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import forking
from recorder_programs import PREAMBLE, RECORDER, fake_libraries

FLUSH_SECONDS = 0.4
BODY = f"""
import struct
progress = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
recording = thence.record(OUT, thence.RecordOptions(flush_seconds={FLUSH_SECONDS}))
recording.start()
name = fake.text("k")
print("ready", flush=True)
ends, ending = time.monotonic() + float(sys.argv[3]), sys.argv[4]
while True:
    if time.monotonic() > ends:
        os.write(progress, struct.pack("=qq", -1, time.time_ns()))
        exec(ending)
    with thence.mark("step"):
        for _ in range(20):
            number, now = fake.launch(), time.time_ns()
            fake.emit(fake.record("CONCURRENT_KERNEL", start=now, end=now + 5, name=name, correlationId=number,
                                  queued=now))
            os.write(progress, struct.pack("=qq", number, now))
    time.sleep(0.001)
"""


ENDINGS = {
    "SIGKILL": None,
    "SIGTERM": None,
    "os._exit": "os._exit(0)",
    "exec": "os.execv('/bin/true', ['true'])",
    "os._exit of another thread": "threading.Thread(target=os._exit, args=(0,)).start(); ending = 'pass'",
    "sys.exit": "sys.exit()",
}
"""What a program executes to end itself, by the name of its ending; None: it is sent this signal."""


@dataclass(frozen=True)
class Killed:
    """What a sudden end cost.

    Attributes:
        ran_seconds: from the beginning of the recording to the end.
        launched, recorded: kernels.
        gap: whether a kernel is missing that was launched before one that is there.
        lost_seconds: from the first lost launch to the kill; 0 where nothing was lost.
        stated_seconds, stated: the most that the recording says may be lost; 0 where it says nothing.
        told: whether anything says that the recording is incomplete.
        labelled: share of the recorded kernels that have the mark they were launched in.
    """

    ran_seconds: float
    launched: int
    recorded: int
    gap: bool
    lost_seconds: float
    stated_seconds: float
    stated: int
    told: bool
    labelled: float


def killed(scratch: Path, seconds: float, ending: str = "SIGKILL") -> Killed:
    """Record a program that launches all the time, and end it after a time."""
    import re

    import thence
    from thence.capture.launcher.content import content

    out, progress = scratch / "out", scratch / "progress"
    code = ENDINGS[ending]
    after = ("inf", "") if code is None else (str(seconds), code)
    read, write = os.pipe()
    arguments = ["-c", PREAMBLE + BODY, str(out), str(progress), *after]
    with Path(os.devnull).open("rb") as nothing:
        process = forking.start(
            arguments, [nothing.fileno(), write, 2], env={**os.environ, **fake_libraries()}, imported=RECORDER
        )
    os.close(write)
    with os.fdopen(read, "rb") as told_by:
        assert told_by.readline() == b"ready\n"
    began = time.time_ns()
    ended = None
    if code is None:
        time.sleep(seconds)
        ended = time.time_ns()
        os.kill(process.pid, signal.Signals[ending])
    process.wait(60)
    launched = np.frombuffer(progress.read_bytes()[: progress.stat().st_size // 16 * 16], np.int64)
    numbers, times = launched[::2], launched[1::2]
    if ended is None:
        ended = int(times[numbers == -1][0])
    # Without thence, the program would have ended now; while the recording is completed, other threads go on.
    numbers, times = numbers[times < ended], times[times < ended]
    recorded, labelled = np.empty(0, np.int64), 1.0
    stated_seconds, stated, told = 0.0, 0, False
    contents = content(out)
    if contents.unwritten:
        told, stated_seconds, stated = True, 0.1, len(numbers)
    elif contents.processes:
        try:
            trace = thence.open(str(out))
        except thence.DamagedInput as error:  # nothing was written yet
            text = str(error)
            stated_seconds, stated = (ended - began) / 1e9, len(numbers)
        else:
            recorded = trace.tables.gpu["correlation"].to_numpy()
            labelled = (trace.tables.places["label"].cast(str) == "step").mean() or 0.0
            text = "\n".join(trace.meta.warnings)
        told = "the recording was cut" in text
        match = re.search(r"normally at most ([\d.]+) s of it, about ([\d,]+) activities", text)
        if match:
            stated_seconds, stated = float(match[1]), int(match[2].replace(",", ""))
    missing = ~np.isin(numbers, recorded)
    first = int(np.argmax(missing)) if missing.any() else len(numbers)
    return Killed(
        (ended - began) / 1e9,
        len(numbers),
        len(recorded),
        bool((~missing[first:]).any()),
        (ended - int(times[first])) / 1e9 if missing.any() else 0.0,
        stated_seconds,
        stated,
        told,
        float(labelled),
    )
