"""Whether two installations say the same of every recording: each verb, each option that changes numbers.

Meant for restructurings: what one installation of thence printed and wrote before is compared with
what another does now.

    python benchmarks/compare_outputs.py BEFORE AFTER [--data DIR]... [--renamed FILE] [--cache DIR]
                                         [--only REGEX]

BEFORE and AFTER are ``thence`` executables of virtual environments, or commands that end in ``-m
thence``, such as ``"env PYTHONPATH=src .venv/bin/python -m thence"``. The Python that runs this script
needs Polars and, where timelines differ, perfetto; it does not import thence.

Recordings are those of tests/data and of each --data DIR: Kineto JSON (files of several ranks one
alone and all together; graph replays also with the labels and eager runs whose names say that they
belong to them), xplane, thence's own recordings, Nsight exports, nsys-jax archives, in-kernel
buffers; HLO dumps in folders named ``hlo_NAME`` go with the recordings whose names end in NAME,
``hlo_dump`` with those that begin with "jax". Everything is copied first and .tar archives are
unpacked; commands run in folders of their own, so nothing is written beside a recording. A recording
that BEFORE cannot read is asked for one report only, whose error is compared.

Exit codes, standard output, standard error and written files are compared: JSON and CSV by value,
rows of a list by the first columns that tell them apart, with another order allowed where some
column of numbers is in the same order (ties); floats to a relative 1e-12; text by line, where a run
of blanks counts as one; timelines as slices, counters and counts of packets; Parquet by column.
Differences are listed by verb and path with how often each pair of values was seen. The exit code is
1 if there are any.

--renamed is a TOML or JSON file of differences that are wanted:

    gone = ["key"]               # keys and columns that AFTER no longer has
    new = ["key"]                # keys and columns that only AFTER has
    [keys]                       # keys and columns by their old names
    mean_ns = "average_ns"
    [values]                     # whole strings, by what they were
    line = "source"
    [texts]                      # parts of strings and lines, by what they were
    "bus bandwidth" = "bus rate"
    [arguments]                  # words of commands for AFTER
    "--warm-up" = "--skip"

Each installation is imported once a process and forked for each command. Commands see one thread
for Polars, a fixed hash seed and 120 columns. --cache keeps what BEFORE gave for later runs; it
knows when recordings change, but must be deleted when BEFORE itself does. --only takes the commands
that its regular expression finds, such as "^(streams|label)" or "fsdp".
"""

from __future__ import annotations

import collections
import functools
import gzip
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from command_line import documented_parser
from output_differences import Renamed, Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DATA = Path(__file__).parent.parent / "tests/data"
LIMIT_S = 120  # of one command
ENVIRONMENT = {
    "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0",
    "POLARS_MAX_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
DRIVER = """
import contextlib, gc, importlib, json, os, pkgutil, runpy, signal, sys
import numpy, polars, thence
answers = os.fdopen(os.dup(1), "w")
for module in pkgutil.walk_packages(thence.__path__, "thence.", onerror=lambda name: None):
    if not module.name.endswith("__main__"):
        with contextlib.suppress(Exception):
            importlib.import_module(module.name)
gc.collect()
gc.freeze()
for line in sys.stdin:
    job = json.loads(line)
    process = os.fork()
    if not process:
        answers.close()
        os.chdir(job["folder"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        signal.alarm(job["limit"])
        sys.argv = ["thence", *job["arguments"]]
        runpy.run_module("thence", run_name="__main__", alter_sys=True)
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(code, file=answers, flush=True)
"""


@dataclass(frozen=True)
class Recording:
    """What is given to the verbs together; paths are relative to the folder of copies."""

    paths: tuple[str, ...]
    source: str  # top folder, which has a digest
    options: tuple[tuple[str, ...], ...] = ()  # for `label`: labels or eager runs that belong to it
    hlo: tuple[str, ...] = ()
    buffers: bool = False
    brief: bool = False  # reports alone: it is read like another, or is a part of another


@dataclass(frozen=True)
class Job:
    arguments: tuple[str, ...]
    digest: str = ""  # of the recordings it reads

    def __str__(self) -> str:
        return " ".join(a.removeprefix("in/") for a in self.arguments)


# ---- recordings


def copied(folder: Path, root: Path) -> str:
    """Copies a folder of recordings under ``root``, unpacks archives, and returns its digest."""
    target = root / folder.resolve().name
    if target.exists():
        raise SystemExit(f"two folders of recordings are named {target.name}")
    shutil.copytree(folder, target)
    digest = hashlib.sha256()
    for path in sorted(path for path in target.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(target)}\0".encode() + path.read_bytes())
        if ".tar" in path.suffixes:
            with tarfile.open(path) as archive:
                archive.extractall(path.parent / path.name.split(".")[0], filter="data")
            path.unlink()
    return digest.hexdigest()


def recordings(top: Path) -> Iterator[Recording]:
    """All recordings below a folder of copies."""
    root, source = top.parent, top.name

    def found(*paths: Path, **more: Any) -> Recording:
        return Recording(tuple(f"in/{path.relative_to(root)}" for path in paths), source, **more)

    parts = sorted(path.parent for path in top.rglob("recording.json"))
    for folder, ranks in itertools.groupby(parts, lambda part: part.parent):
        yield found(folder)
        first, *others = ranks
        if others:
            yield found(first, brief=True)
    everything = (path for path in sorted(top.rglob("*")) if path.is_file())
    files = [path for path in everything if not any(part in path.parents for part in parts)]
    yield from (found(*group, **more) for group, more in kineto_groups(files, root))
    for path in files:
        if re.search(r"\.(xplane\.pb|sqlite|csv)(\.gz)?$", path.name):
            yield found(path, hlo=tuple(hlo_folders(path, top)), brief=".csv" in path.suffixes)
    archives = [path for path in files if path.suffix == ".zip"]
    if archives:
        yield found(*archives)
        yield found(archives[0], brief=True)
    buffers = [path for path in files if path.suffix in {".npz", ".npy"}]
    yield from (found(path, buffers=True) for path in buffers)
    for folder, group in itertools.groupby(buffers, lambda path: path.parent):
        trace = folder / "trace.json.gz"
        if trace.exists():
            options = ("--merge", f"in/{trace.relative_to(root)}")
            yield found(*group, buffers=True, options=(options,))


def kineto_groups(files: Sequence[Path], root: Path) -> Iterator[tuple[list[Path], dict[str, Any]]]:
    """Traces of torch.profiler: all ranks of each job, one of them, and what belongs to replays."""
    traces = [path for path in files if holds_events(path)]
    jobs = collections.defaultdict(list)
    for path in traces:
        jobs[path.parent, re.sub(r"rank\d+", "", path.name)].append(path)
    for ranks in jobs.values():
        belonging = belonging_to(ranks, traces) if "replay" in ranks[0].name else []
        options = []
        for word, paths in belonging:
            names = (f"in/{path.relative_to(root)}" for path in paths)
            options.append(tuple(itertools.chain.from_iterable((word, name) for name in names)))
        yield ranks, {"options": tuple(options)}
        if len(ranks) > 1:
            yield ranks[:1], {"brief": True}


def belonging_to(replays: list[Path], traces: list[Path]) -> Iterator[tuple[str, list[Path]]]:
    """Labels and eager runs of the ranks of a replay, with the option that takes them."""
    labels = [path.with_name(labels_name(path.name)) for path in replays]
    if all(path.exists() for path in labels):
        yield "--labels", labels
    ends = tuple(path.name.replace("replay", "eager") for path in replays)
    near = [path for path in traces if replays[0].parent in path.parents]
    eager = [path for path in near if path.name.endswith(ends)]
    for group in [eager] if len(replays) > 1 else [[path] for path in eager]:
        if group:
            yield "--eager", group


def labels_name(replay: str) -> str:
    return replay.replace("replay", "labels").removesuffix(".gz")


def holds_events(path: Path) -> bool:
    if not path.name.endswith((".json", ".json.gz")):
        return False
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return b'"traceEvents"' in file.read(1 << 22)


def hlo_folders(recording: Path, top: Path) -> Iterator[str]:
    stem = recording.name.split(".")[0]
    for folder in sorted(path for path in top.rglob("hlo_*") if path.is_dir()):
        ending = folder.name.rsplit("_", 1)[1]
        near = folder.parent == recording.parent
        if stem.endswith(f"_{ending}") or (ending == "dump" and near and stem.startswith("jax")):
            yield f"in/{folder.relative_to(top.parent)}"


# ---- commands


def jobs_of(recording: Recording, words: dict[str, list[str]]) -> Iterator[tuple[str, ...]]:
    """All commands for a recording; ``words`` are the choices of some options, by verb and option."""
    inputs = recording.paths
    if recording.buffers:
        yield from inside_jobs(recording)
        return
    for by in words["report --by"]:
        yield ("report", *inputs, "--by", by, "--format", "json")
    if recording.brief:
        return
    yield from traced_jobs(inputs, words, ())
    for folder in recording.hlo:
        for by in ("source", "hlo", "opcode", "op_name"):
            yield ("report", *inputs, "--hlo", folder, "--by", by, "--format", "json")
        yield from traced_jobs(inputs, words, ("--hlo", folder))
    yield from other_jobs(inputs, words)
    for options in ((), *recording.options):
        yield ("label", *inputs, *options, "--format", "json")
        yield ("label", *inputs, *options, "-o", "out.json")


def other_jobs(inputs: tuple[str, ...], words: dict[str, list[str]]) -> Iterator[tuple[str, ...]]:
    """The verbs that take no HLO dumps, and other ways to print reports."""
    yield ("report", *inputs, "-o", "out.csv", "--by", "op")
    yield ("report", *inputs, "--top", "5")
    yield ("sql", *inputs, "select count(*) as n, sum(duration) as ns from host", "--format", "csv")
    for expect in ("ln==1", "GEMM>=2", "communication!=GEMM"):
        group = ("--group", "ln=reduce_sum") if "ln" in expect else ()
        yield ("streams", *inputs, *group, "--expect", expect, "--format", "json")
    for form in ("table", "json", "csv"):
        yield ("streams", *inputs, "--format", form)
    for verb in ("check", "explain", "idle", "memory", "ranks", "steps"):
        yield (verb, *inputs, "--format", "json")
    yield ("whatif", *inputs)
    yield ("diff", *inputs[:1], *inputs[-1:], "--anyway", "--format", "json")
    yield ("report", *inputs, "-o", "out.html")
    for detail in words["compile --autotuning"]:
        yield ("compile", *inputs, "--autotuning", detail, "--format", "json")
    for more in (("--split", "phase"), ("--idle", "exclude"), ("--rank", "1")):
        yield ("flame", *inputs, *more, "-o", "out.folded")
    yield ("flame", *inputs, "-o", "out.speedscope.json")
    for ending in ("json", "parquet", "pftrace"):
        yield ("convert", *inputs, "-o", f"out.{ending}")
    yield ("convert", *inputs, "--clocks", "recorded", "-o", "out.json")
    lanes = (word for lane in words["convert --lanes"] for word in ("--lanes", lane))
    yield ("convert", *inputs, *lanes, "-o", "out.pftrace")


def traced_jobs(
    inputs: tuple[str, ...], words: dict[str, list[str]], hlo: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """The verbs beside report whose answers may change with HLO dumps."""
    for verb in ("programs", "collectives"):
        for choice in words[f"{verb} --warm-up"]:
            yield (verb, *inputs, *hlo, "--warm-up", choice, "--format", "json")
        yield (verb, *inputs, *hlo)
    for by in ("kernel", "module", "op", "hlo", "phase"):
        yield ("roofline", *inputs, *hlo, "--by", by, "--format", "json")
    yield ("roofline", *inputs, *hlo, "--only", "gemm|nvjet|fusion")
    for by in words["flame --by"]:
        yield ("flame", *inputs, *hlo, "--by", by, "-o", "out.folded")
    sums = "select hlo, label, count(*) as n, sum(duration) as ns from activities"
    query = f"{sums} group by hlo, label order by hlo, label"
    yield ("sql", *inputs, *hlo, query, "--format", "json")


def inside_jobs(recording: Recording) -> Iterator[tuple[str, ...]]:
    """Those for in-kernel buffers, whose layouts may lack the clock."""
    for options in recording.options:
        for ending in ("json", "pftrace"):
            yield ("inside", *recording.paths, *options, "-o", f"out.{ending}")
        yield ("inside", recording.paths[0], *options, "--launch", "1", "-o", "out.json")
    for clock in ((), ("--clock-ghz", "1.755")):
        for form in ("table", "json", "csv"):
            yield ("inside", *recording.paths, *clock, "--format", form)
        for ending in ("json", "pftrace", "parquet"):
            yield ("inside", *recording.paths, *clock, "-o", f"out.{ending}")


class Side:
    """An installation with processes that run its commands, and the folder of what they gave."""

    def __init__(self, command: str, root: Path, folder: Path, processes: int) -> None:
        self.command, self.root, self.folder = command, root, folder
        words = shlex.split(command)
        if words[-2:] == ["-m", "thence"]:
            python = words[:-2]
        else:  # the interpreter of a virtual environment lies beside its scripts
            found = shutil.which(words[-1])
            if found is None:
                raise SystemExit(f"{command}: there is no such command")
            python = [*words[:-1], str(Path(found).parent / "python")]
        self.drivers: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        self.processes = [
            subprocess.Popen(
                [*python, "-P", "-c", DRIVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | ENVIRONMENT,
            )
            for _ in range(processes)
        ]
        for process in self.processes:
            self.drivers.put(process)

    def results(self, jobs: Sequence[Job], renamed: Renamed | None = None) -> list[Path]:
        """The folder of each job's stdout, stderr, exit code and output, after all have run."""
        run = functools.partial(self._result, renamed=renamed)
        with ThreadPoolExecutor(len(self.processes)) as pool:
            return list(pool.map(run, jobs))

    def _result(self, job: Job, renamed: Renamed | None) -> Path:
        words = [renamed.arguments.get(w, w) for w in job.arguments] if renamed else job.arguments
        key = hashlib.sha256(json.dumps([self.command, job.digest, list(words)]).encode())
        folder = self.folder / key.hexdigest()[:24]
        code = folder / "code"
        if code.exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
        folder.mkdir(parents=True)
        (folder / "in").symlink_to(self.root)
        process = self.drivers.get()
        assert process.stdin is not None
        assert process.stdout is not None
        request = {"folder": str(folder), "arguments": list(words), "limit": LIMIT_S}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.command}: cannot be run")
        self.drivers.put(process)
        (folder / "in").unlink()
        for name in ("stdout", "stderr"):  # where a path was made absolute
            text = (folder / name).read_text(errors="replace")
            text = text.replace(str(folder), ".").replace(str(self.root), "in")
            (folder / name).write_text(text)
        code.write_text(answer.strip())
        return folder

    def close(self) -> None:
        for process in self.processes:
            process.communicate()


# ---- all together


def planned(side: Side, digests: dict[str, str]) -> list[Job]:
    """Every command, from what BEFORE has verbs and choices for, and can read."""
    top = Job(("--help",))
    overview = (side.results([top])[0] / "stdout").read_text()
    verbs = re.findall(r"^  ([a-z]+)  ", overview.split("Commands:")[1], re.MULTILINE)
    helps = [Job((verb, "--help")) for verb in verbs]
    words = {}
    for verb, folder in zip(verbs, side.results(helps), strict=True):
        text = re.sub(r"\|\s+", "|", (folder / "stdout").read_text())
        for option, choices in re.findall(r"(--[a-z-]+) \[([^\]]+\|[^\]]+)\]", text):
            words[f"{verb} {option}"] = choices.split("|")
        for option, choices in re.findall(
            r"(--[a-z-]+) NAME [^[]*? NAME is one of ([\w, -]+)\.", " ".join(text.split())
        ):
            words[f"{verb} {option}"] = re.sub("- ", "-", choices).split(", ")  # where a line ends
    found = [one for name in digests for one in recordings(side.root / name)]
    first = [
        Job(("inside" if one.buffers else "report", *one.paths, "--format", "json"), digests[one.source])
        for one in found
    ]
    jobs = {top: None} | dict.fromkeys(helps) | {Job(("demo",)): None} | dict.fromkeys(first)
    for one, tried, folder in zip(found, first, side.results(first), strict=True):
        readable = (folder / "code").read_text() == "0"
        print(f"{'' if readable else 'cannot be read: '}{tried}")
        if readable or one.buffers:
            jobs |= dict.fromkeys(Job(a, tried.digest) for a in jobs_of(one, words))
    return list(jobs)


def renamed_of(path: Path | None) -> Renamed:
    if path is None:
        return Renamed()
    text = path.read_text()
    return Renamed(**(json.loads(text) if path.suffix == ".json" else tomllib.loads(text)))


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--data", type=Path, action="append", default=[])
    parser.add_argument("--renamed", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--only", default="", help="regex of the commands to run")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    renamed = renamed_of(options.renamed)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name).resolve()
        root = work / "copies"
        root.mkdir()
        digests = {folder.resolve().name: copied(folder, root) for folder in (DATA, *options.data)}
        begin = time.perf_counter()
        cache = options.cache.resolve() if options.cache else work / "before"
        before = Side(options.before, root, cache, options.processes)
        jobs = [job for job in planned(before, digests) if re.search(options.only, str(job))]
        old = before.results(jobs)
        before.close()
        between = time.perf_counter()
        after = Side(options.after, root, work / "after", options.processes)
        new = after.results(jobs, renamed)
        after.close()
        end = time.perf_counter()
        print(f"{len(jobs):,} commands: {between - begin:.0f} s before, {end - between:.0f} s after")
        codes = collections.Counter((folder / "code").read_text() for folder in old)
        print("exit codes before:", ", ".join(f"{n:,} x {code}" for code, n in codes.items()))
        report = Report()
        for job, one, other in zip(jobs, old, new, strict=True):
            report.compare(job.arguments, one, other, renamed)
    count = report.show()
    print(f"\n{count:,} differences" if count else "no differences")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
