"""From a clone to the first answer: the commands of four users, with the seconds that each took, and CPU seconds.

python benchmarks/first_answers.py [--python python3.12]

Clones this repository beside a fresh virtual environment, installs it as README says, and runs what a PyTorch
trainer, a JAX engineer, an inference engineer, and CI with a notebook type first, on recordings of the repository.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from command_line import documented_parser

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
WANTED_S = 60
TORCH = "src/thence/data/torch_eager_stack_rank0.json.gz"
GRAPHS = "tests/data/torch/graphs"
BAD = "import json, sys; sys.exit(json.load(sys.stdin)['busy_ns'] < 1_000_000)"
NOTEBOOK = f"import thence; trace = thence.open('{TORCH}'); print(len(trace._repr_html_()), trace.self_check())"
USERS = {
    "PyTorch trainer": (f"thence {TORCH}", f"thence idle {TORCH}", f"thence flame {TORCH} -o flame.html"),
    "JAX engineer": ("thence logdir", "thence report logdir --by hlo", "thence programs logdir"),
    "inference engineer": (
        "thence graphs/replay.json.gz",
        "thence label graphs/replay.json.gz --labels labels.json -o labelled.json.gz",
        "thence labelled.json.gz --by label",
    ),
    "CI and notebook": (
        f'thence report {TORCH} --format json | python -c "{BAD}"',
        "thence streams tests/data/jax/streams_moved.xplane.pb --expect 'GEMM>=2'",
        f'python -c "{NOTEBOOK}"',
    ),
}
"""The first command of each is the first answer."""


class Seconds(NamedTuple):
    """What a command took: by the clock, and on CPUs."""

    wall: float
    cpu: float


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--python", default=sys.executable)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="thence-first-") as name:
        folder = Path(name)
        clone = folder / "thence"
        setup = {
            "git clone": took(["git", "clone", "--quiet", str(ROOT), str(clone)], folder),
            "python -m venv": took([chosen.python, "-m", "venv", str(folder / "venv")], folder),
            "pip install .": took([str(folder / "venv" / "bin" / "pip"), "install", "--quiet", "."], clone),
        }
        place(clone)
        show("setup")
        for step, times in setup.items():
            show(step, times)
        before = total(setup.values())
        for user, commands in USERS.items():
            show(f"\n{user}")
            for number, command in enumerate(commands):
                line = f"PATH={folder}/venv/bin:$PATH; {command}"
                times = took(["bash", "-c", line], clone)
                show(command.partition(" -c ")[0], times)
                if not number:
                    whole = total((before, times))
                    verdict = "" if whole.wall < WANTED_S else f" (over the {WANTED_S} s wanted)"
                    show(f"= from the clone to the first answer{verdict}", whole)


def show(text: str, times: Seconds | None = None) -> None:
    """A line of the result, at once."""
    print(text if times is None else f"{times.wall:7.1f} s {times.cpu:7.1f} CPU s  {text}", flush=True)


def total(parts: Iterable[Seconds]) -> Seconds:
    parts = list(parts)
    return Seconds(sum(part.wall for part in parts), sum(part.cpu for part in parts))


def place(clone: Path) -> None:
    """Puts recordings where such users have them: a log directory of JAX, a replay apart from its labels."""
    run = clone / "logdir" / "plugins" / "profile" / "2026_01_02_09_00_00"
    run.mkdir(parents=True)
    subprocess.run(
        ["bash", "-c", f"gunzip -c tests/data/jax/jax_single_nocb.xplane.pb.gz > {run}/host.xplane.pb"],
        cwd=clone, check=True,
    )  # fmt: skip
    (clone / "graphs").mkdir()
    shutil.copy(clone / GRAPHS / "block_replay.json.gz", clone / "graphs" / "replay.json.gz")
    shutil.copy(clone / GRAPHS / "block_labels.json", clone / "labels.json")


def took(command: list[str], folder: Path) -> Seconds:
    """Seconds of a command that must succeed: by the clock, and of all its processes on a CPU."""
    start, before = time.monotonic(), cpu()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    times = Seconds(time.monotonic() - start, cpu() - before)
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    return times


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
