"""The proof of the product on GPUs, part by part, with the results last.

    python tests/gpu/run.py                                 lists the parts, what each proves, and its seconds
    python tests/gpu/run.py all --out DIR                   runs every part, and checks it
    python tests/gpu/run.py idle compiled --out DIR --only record     on a GPU, without Polars
    python tests/gpu/run.py idle compiled --out DIR --only check      elsewhere, on the files of DIR

``make gpu PARTS="..."`` does the same. Each part runs in processes of its own with its output in DIR/PART/*.log. None
begins when --minutes are over, and none runs for longer than --limit seconds; a part for which GPUs or packages are
missing is named with the reason. Packages that a machine lacks may lie in a folder of PYTHONPATH. The exit code is 1 if
a part failed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from parts import PARTS, READER, ROOT, Part
from support import documented_parser


@dataclass(frozen=True)
class Result:
    """What came of a part: ``passed``, ``failed`` or ``not run``, the seconds, and why."""

    part: str
    state: str
    seconds: float
    why: str = ""


def gpus() -> int:
    """How many GPUs the driver lists."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def obstacle(part: Part, steps: tuple[str, ...], devices: int) -> str:
    """Why the part cannot run here; empty if it can."""
    needed = part.packages if "record" in steps else READER
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if "record" in steps and devices < part.gpus:
        return f"needs {part.gpus} GPUs, {devices} are there"
    return ""


def run_step(part: Part, step: str, folder: Path, limit: float) -> str:
    """Runs one step of a part, its output in a file of its own; why it failed, or empty."""
    arguments = part.record if step == "record" else part.check
    assert arguments is not None
    command = [sys.executable, str(part.path), *(word.format(out=folder) for word in arguments)]
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = folder / f"{step}.log"
    with log.open("w") as output:
        try:
            code = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                timeout=limit,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"{step} ran for more than {limit:.0f} s"
    if code == 0:
        return ""
    lines = log.read_text(errors="replace").splitlines()
    telling = [line for line in lines if line.startswith("WRONG")] or lines[-1:]
    return f"{step} exit code {code}: {'; '.join(telling[:3])[:300]}"


def run_part(part: Part, steps: tuple[str, ...], out: Path, limit: float) -> Result:
    """Records a part, checks it, or both."""
    begin = time.monotonic()
    folder = (out / part.name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    why = ""
    for step in steps:
        if step == "record" or part.check is not None:
            why = why or run_step(part, step, folder, limit)
    return Result(part.name, "failed" if why else "passed", time.monotonic() - begin, why)


def main() -> int:
    """Lists the parts, or runs them."""
    parser = documented_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="names, or all; without any the parts are listed")
    parser.add_argument("--out", type=Path, help="folder for what is recorded, a folder for each part")
    parser.add_argument("--only", choices=("record", "check"), help="one of the two steps")
    parser.add_argument("--minutes", type=float, default=60, help="after which no part begins")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a step may take")
    given = parser.parse_args()
    if not given.parts:
        for part in PARTS:
            print(f"{part.name:18} {part.seconds:4} s, {part.gpus} GPU{'s' * (part.gpus > 1)}  {part.proves}")
        return 0
    named = {part.name: part for part in PARTS}
    chosen = list(named) if given.parts == ["all"] else given.parts
    if unknown := [name for name in chosen if name not in named]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(named)}")
    if given.out is None:
        parser.error("--out names the folder for what is recorded")
    steps = (given.only,) if given.only else ("record", "check")
    begin, devices, results = time.monotonic(), gpus(), []
    for name in chosen:
        part = named[name]
        why = obstacle(part, steps, devices)
        if not why and time.monotonic() - begin > 60 * given.minutes:
            why = f"{given.minutes:g} minutes are over"
        if given.only == "check" and part.check is None:
            why = "its recording compares by itself"
        print(f"=== {name}", flush=True)
        results.append(Result(name, "not run", 0, why) if why else run_part(part, steps, given.out, given.limit))
    print()
    for result in results:
        print(f"{result.part:18} {result.state:8} {result.seconds:5.0f} s  {result.why}".rstrip())
    return any(result.state == "failed" for result in results)


if __name__ == "__main__":
    sys.exit(main())
