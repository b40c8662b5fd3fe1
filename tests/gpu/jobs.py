"""Whole jobs on several GPUs, none of them annotated: recorded, and what thence says of them held against the truth.

    python tests/gpu/jobs.py record OUT [PROGRAM...] [--ranks N] [--seconds 240]    on GPUs; needs torch, or jax
    python tests/gpu/jobs.py check OUT [PROGRAM...]                                 anywhere, with thence
    python tests/gpu/jobs.py try OUT [PROGRAM...]                                   the programs, small, on a CPU

record: every program of job_programs.py and job_jax.py under ``thence record -- torchrun``, or as JAX starts it;
and, without thence, those without a fault once more: for the time of a step, and under torch.profiler. All start at
once, as imports take most of the time, and then take turns on the GPUs (job_turns.py). Programs that N GPUs or the
packages that are there do not suffice for are named with the reason. Turns are in the order given, and none begins
when the time is up; what runs without thence comes directly after what it is compared with.
check: coverage of module, line and collective; collectives beside torch.profiler's; clocks; waits, stragglers and
bubbles beside what was planted; cost per rank; time and memory of verbs. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from job_turns import Turns
from support import documented_parser

HERE = Path(__file__).parent
TORCH, JAX = "job_programs.py", "job_jax.py"
REFERENCE = "reference"
SHORTEST = 5
"""Seconds that must be left for a program's turn."""
TURN = {"cuda": 45, "cpu": 300}
"""Seconds that the turn of one program may take; the references take as much each."""
READY = {"cuda": 60, "cpu": 600}
"""Seconds after which turns are taken though some programs are not ready."""


@dataclass(frozen=True)
class Entry:
    """One program, and what it takes.

    Attributes:
        script: the file that has it.
        packages: what it imports.
        fewest: ranks that it takes at least.
        even: whether their number must be even.
        compared: whether it also runs without thence.
    """

    script: str = TORCH
    packages: tuple[str, ...] = ("torch",)
    fewest: int = 2
    even: bool = False
    compared: bool = False

    def refused(self, ranks: int) -> str | None:
        """Why it cannot run."""
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                return f"needs {package}, which is not installed"
        if ranks < self.fewest:
            return f"needs {self.fewest} GPUs, {ranks} are there"
        if self.even and ranks % 2:
            return f"needs an even number of GPUs, {ranks} are there"
        return None


HUGGING_FACE = ("torch", "transformers")
ENTRIES = {
    "fsdp2": Entry(packages=HUGGING_FACE, compared=True),
    "late_sleep_backward": Entry(),
    "late_spin_backward": Entry(),
    "late_batch": Entry(),
    "tensor_parallel": Entry(compared=True),
    "pipeline_gpipe": Entry(compared=True),
    "mixture_of_experts": Entry(compared=True),
    "hsdp": Entry(packages=HUGGING_FACE, even=True, compared=True),
    REFERENCE: Entry(),
    "late_200_ddp": Entry(),
    "late_200_fsdp2": Entry(),
    "jax_many": Entry(JAX, ("jax",)),
    "jax_one": Entry(JAX, ("jax",)),
    "ddp": Entry(compared=True),
    "late_loader": Entry(),
    "late_sleep_forward": Entry(),
    "pipeline_1f1b": Entry(compared=True),
}
"""What `record` runs where none are named, what matters most first."""


@dataclass(frozen=True)
class Job:
    """How programs are run.

    Attributes:
        out: where everything goes.
        device: cuda or cpu.
        until: when the time is up, on the clock of `time.monotonic`.
    """

    out: Path
    ranks: int
    device: str
    until: float

    def torchrun(self, *arguments: str) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={self.ranks}", str(HERE / TORCH), *arguments),
            *("--out", str(self.out), "--device", self.device),
        ]

    def jax(self, name: str, out_name: str) -> list[str]:
        processes = self.ranks if name == "jax_many" else 1
        return [
            *(sys.executable, str(HERE / JAX), str(processes), "--devices", str(self.ranks)),
            *("--name", out_name, "--out", str(self.out), "--device", self.device),
        ]

    def command(self, name: str, compared: list[str]) -> list[str]:
        """What runs a program under thence, or all that are compared without it."""
        if name == REFERENCE:
            return self.torchrun("--reference", *compared)
        program = self.jax(name, name) if ENTRIES[name].script == JAX else self.torchrun(name)
        return [sys.executable, __file__, "launch", str(self.out / name), "--", *program]

    def left(self) -> float:
        """Seconds until the time is up."""
        return self.until - time.monotonic()


class Running:
    """A program that was started, and waits for its turn."""

    def __init__(self, name: str, job: Job, command: list[str]) -> None:
        self.name = name
        self.job = job
        self.turns = Turns(job.out / "turns", name)
        # Its output goes to a file: workers that outlive a time limit would keep a pipe open.
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self.process = subprocess.Popen(
            command,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **self.turns.environment()},
        )

    def waits(self) -> bool:
        """Whether it will be ready for its turn and is not yet."""
        return self.process.poll() is None and not self.turns.ready()

    def turn(self, seconds: float) -> float:
        """Give it its turn; how long that took."""
        begin = time.monotonic()
        self.turns.give()
        while self.process.poll() is None and not self.turns.done():
            if time.monotonic() - begin > seconds:
                break
            time.sleep(0.02)
        return time.monotonic() - begin

    def end(self, took: float | None) -> None:
        """Wait for its end, or stop it where its turn did not end; print what came of it."""
        # One that had its turn and is not done hangs; one that had none goes by itself.
        hangs = took is not None and not self.turns.done()
        code = ended(self.process, 0 if hangs else 15)
        self._output.seek(0)
        told = self._output.read()
        self._output.close()
        size = sum(file.stat().st_size for file in (self.job.out / self.name).rglob("*") if file.is_file())
        turn = f"a turn of {took:.1f} s" if took is not None else "no turn: the time is up"
        print(f"{self.name}: {code}, {turn}, {size / 1e6:.2f} MB recorded", flush=True)
        (self.job.out / f"{self.name}.log").write_text(told[-20_000:])
        if code != "exit code 0" and took is not None:
            print(told[-3000:], flush=True)


def ended(process: subprocess.Popen[bytes], timeout: float) -> str:
    """How a process ended, which with all that it started is stopped when its time is up."""
    try:
        return f"exit code {process.wait(timeout)}"
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            try:
                process.wait(4)
                break
            except subprocess.TimeoutExpired:
                continue
        return f"stopped after {timeout:.0f} s"


def record(out: Path, names: list[str], ranks: int, device: str, seconds: float) -> None:
    """Run the programs, in their order."""
    out.mkdir(parents=True, exist_ok=True)
    job = Job(out.absolute(), ranks, device, time.monotonic() + seconds)
    (out / "job.json").write_text(json.dumps({"ranks": ranks, "device": device}))
    present = []
    for name in names:
        if reason := ENTRIES[name].refused(ranks):
            print(f"{name}: skipped: {reason}", flush=True)
        else:
            present.append(name)
    compared = [name for name in present if ENTRIES[name].compared]
    running = []
    for name in with_reference(present):
        running.append(Running(name, job, job.command(name, compared)))
        if ENTRIES[name].script == JAX:
            plain = f"{name}.{REFERENCE}"
            running.append(Running(plain, job, job.jax(name, plain)))
    limit = min(READY[device], seconds / 2)
    while any(one.waits() for one in running) and seconds - job.left() < limit:
        time.sleep(0.05)
    print(f"ready after {seconds - job.left():.1f} s", flush=True)
    took: dict[str, float] = {}
    for one in running:
        if job.left() > SHORTEST:
            share = len(compared) if one.name == REFERENCE else 1
            took[one.name] = one.turn(min(TURN[device] * share, job.left()))
        else:
            one.turns.refuse()
    for one in running:
        one.end(took.get(one.name))
    print(f"all: {seconds - job.left():.1f} s", flush=True)


def with_reference(names: list[str]) -> list[str]:
    """The programs, and their run without thence: where it is named, else after the last that is compared with it."""
    compared = [at for at, name in enumerate(names) if ENTRIES[name].compared]
    if not compared:
        return [name for name in names if name != REFERENCE]
    if REFERENCE in names:
        return names
    return [*names[: compared[-1] + 1], REFERENCE, *names[compared[-1] + 1 :]]


def launch(directory: Path, command: list[str]) -> int:
    """What ``thence record -o DIRECTORY -- COMMAND`` does, where the packages of the command line are missing."""
    from thence.capture.launcher.launch import run
    from thence.capture.recorder.options import RecordOptions

    directory.mkdir(parents=True)
    return run(command, directory, RecordOptions()).code


def gpus() -> int:
    """How many GPUs are there."""
    try:
        told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(line.startswith("GPU ") for line in told.stdout.splitlines())


def main() -> int:
    """One of the three."""
    if sys.argv[1:2] == ["launch"]:
        return launch(Path(sys.argv[2]), sys.argv[4:])
    parser = documented_parser(__doc__)
    parser.add_argument("what", choices=("record", "check", "try"))
    parser.add_argument("out", type=Path)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(ENTRIES))
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--seconds", type=float, default=240)
    given = parser.parse_intermixed_args()
    names = given.programs or list(ENTRIES)
    if unknown := set(names) - set(ENTRIES):
        sys.exit(f"there is no program {', '.join(sorted(unknown))}; there are {', '.join(ENTRIES)}")
    if given.what == "check":
        from job_checks import check

        return check(given.out, [name for name in names if name != REFERENCE])
    if given.what == "try":
        record(given.out, names, given.ranks or 2, "cpu", max(given.seconds, 1800))
        return 0
    ranks = given.ranks or gpus()
    if ranks < 2:
        sys.exit(f"{ranks} GPUs are there; a job of several ranks needs 2")
    record(given.out, names, ranks, "cuda", given.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
