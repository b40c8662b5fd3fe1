"""Fuzzes the readers and verbs of thence.

    python tests/fuzz/run.py FORMAT --cases 200                 one format, as the tests do it
    python tests/fuzz/run.py --minutes 60 [--processes 8] [--seed N]     all formats, each the same CPU time
    python tests/fuzz/run.py FORMAT --cases 1 --seed N --first I     one case again
    python tests/fuzz/run.py FORMAT --cases 9999 --corpus DIR   guided by the lines of code that mutants reach
    python tests/fuzz/run.py --add LOG...                       one table of what several runs with --minutes printed

Every case is told by format, seed and number, and with a corpus by the dice of its generations. It fails where thence
ends in anything but a result or one sentence, takes longer than `MAX_SECONDS` of CPU time, or more memory than
`MAX_BYTES` beside what it had before. Inputs that fail are kept in --keep, beside the smallest that fails alike.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gzip
import io
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import polars as pl

import forking
import thence
from fuzz.batches import Plan, Totals, run_all
from fuzz.corpus import Corpus, kind_of, of_bytes, smallest
from fuzz.formats import FORMATS, Format
from fuzz.mutations import damaged, mutated
from fuzz.verbs import VERBS, drawn
from stores import InProcess
from thence.cli import main as command_line
from thence.readers import parquet_probe
from thence.readers.jax.hlo_dump import hlo_dump_modules
from thence.readers.registry import read
from thence.store import workers
from untried_tables import PassingChild

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_SECONDS = 20
CASES, LONG_CASES = 200, 1000
"""Of a batch; with --minutes, where the start of a process is to cost little."""
CHECKED = 0.25
"""Part of the cases with a verb that are read once more, by `thence.open` and `self_check`: that costs as much."""
WAIT = 15
"""So many times that long may a case take by the clock."""
INSIDE = ("inside", "--clock-ghz", "1.7", "INPUT", "-o")
ALONE: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(
        ("inside", "mosaic", "flashinfer", "proton"),
        tuple((*INSIDE, f"FOLDER/out.{ending}") for ending in ("json", "pftrace", "parquet")),
    ),
    "summaries": (
        ("top", "FOLDER/..", "--once", "--since", "1000000000"),
        ("top", "FOLDER/..", "--once", "--since", "1000000000", "--format", "json"),
    ),
    "history": (
        ("history", "--keep", "INPUT"),
        ("history", "--keep", "INPUT", "--format", "json"),
        ("history", "--keep", "INPUT", "--new", "GOOD"),
    ),
}
"""Formats that one verb alone reads, and how it is called; FOLDER is that of the input."""
MAX_BYTES = 1 << 30


class Failure(Exception):
    """What thence did wrong; the message says it in full."""


class TooLong(BaseException):
    """A case took too long; no Exception, which thence would tell as an error of its own."""


def made(of: Format, tree: Any, dice: random.Random, folder: Path) -> tuple[Path, Any]:
    """A mutated input of a format, and its tree; None for one whose bytes are damaged."""
    bytes_change = of_bytes(dice, probed=of.probed)
    tree = tree if bytes_change else mutated(tree, dice)
    path = of.write(tree, folder)
    if bytes_change:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        file = dice.choice(files)
        content = damaged(file.read_bytes(), dice)
        file.write_bytes(gzip.compress(content, 1) if path.is_file() and dice.random() < 0.2 else content)
    return path, None if bytes_change else tree


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def stop(_signal: int, _frame: object) -> None:
        raise TooLong

    # CPU time, and a time after which nothing can be but waiting, on a machine of many other programs too.
    timers = ((signal.SIGPROF, signal.ITIMER_PROF, 1), (signal.SIGALRM, signal.ITIMER_REAL, WAIT))
    before = {number: signal.signal(number, stop) for number, _, _ in timers}
    for _, timer, times in timers:
        signal.setitimer(timer, times * MAX_SECONDS)
    # Handlers wait for the interpreter; these two end a process that hangs in native code.
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + 3 * MAX_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
    faulthandler.dump_traceback_later((WAIT + 1) * MAX_SECONDS, exit=True)
    try:
        yield
    except TooLong:
        raise Failure(f"took longer than {MAX_SECONDS} s\n{traceback.format_exc()}") from None
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for number, timer, _ in timers:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def try_one(of: Format, path: Path, dice: random.Random, *, through_verbs: bool) -> None:
    """Reads an input, and puts it through a verb and the checks of a trace, which takes ten times as long.

    Raises:
        Failure: something but a result or a sentence came of it.
    """
    if of.name in ALONE:
        places = {"FOLDER": str(path.parent), "GOOD": str(TRACES["labels"]), "INPUT": str(path)}
        _verb([_filled(word, places) for word in dice.choice(ALONE[of.name])])
        return
    beside = ["--hlo", str(path)] if of.name == "hlo" else []
    if of.name in TRACES:
        inputs = [str(path.parent)]
        shutil.copy(TRACES[of.name], path.parent / "trace.json.gz")
        if of.name == "hlo":
            inputs = [str(path.parent / "trace.json.gz")]
    else:
        inputs = [str(path)]
    if not through_verbs and of.name == "store":  # readers know nothing of stores
        _api(inputs, [])
        return
    if not through_verbs:
        _read(inputs, [str(path)] if beside else [])
        return
    verb = drawn(dice) if of.name != "hlo" else list(dice.choice(VERBS[:2]))
    places = {"OUT": str(path.parent), "GOOD": str(TRACES["labels"]), "INPUT": inputs[0]}
    arguments = [_filled(word, places) for word in verb]
    written = "-o" in verb or verb[0] == "label"
    form = [] if written else dice.choice((["--format", "json"], ["--format", "csv"], []))
    _verb([*arguments, *(inputs if verb[0] != "sql" else []), *beside, *form])
    if (store := path.parent / "a.store/manifest.json").exists() and verb[0] == "ingest":
        _verb([*dice.choice((("ranks",), ("report",), ("steps",))), str(store.parent)])
    if dice.random() < CHECKED:
        _api(inputs, [str(path)] if beside else [])


def _filled(word: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        word = word.replace(name, place)
    return word


TRACES = {
    name: Path(__file__).parents[1] / "data/torch" / file
    for name, file in (
        ("hlo", "graph_replay_rank0.json.gz"), ("labels", "graph_replay_rank0.json.gz"),
        ("annotations", "graph_replay_rank0.json.gz"), ("pickle", "graph_replay_rank0.json.gz"),
        ("calls", "graphs/comm_replay_rank0.json.gz"), ("calls-pickle", "graphs/comm_replay_rank0.json.gz"),
        ("inspector", "nccl_inspector/replay_rank0.json.gz"),
    )
}  # fmt: skip


def _verb(arguments: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line(arguments)
        except SystemExit as ended:
            code = ended.code
        except TooLong:
            raise
        except BaseException:  # noqa: BLE001
            raise Failure(f"{arguments}\n{traceback.format_exc()}") from None
    told = err.getvalue()
    if code not in (0, 1, 2) or "should not happen" in told or "not enough memory" in told:
        raise Failure(f"{arguments}: exit code {code}\n{told}\n{_kept(told)}")
    # Refusals of diff, and notes that begin with the input, or with the process of a recording.
    told_beside = ("not comparable (", "/", "host-rank0-1: ")
    sentences = [x for x in told.strip().splitlines() if not x.startswith(told_beside)]
    with_notes = "--expect" in arguments  # that cannot be judged: notes of the trace stand beside
    if code == 2 and len(sentences) > 3 and "Usage" not in told and not with_notes:
        raise Failure(f"{arguments}: several lines\n{told}")
    if "\x1b" in told:
        raise Failure(f"{arguments}: an escape sequence in {told!r}")


def _kept(told: str) -> str:
    """The traceback in the file that a message names."""
    where = told.partition("with the traceback in ")[2].strip()
    if not where:
        return ""
    text = Path(where).read_text()
    Path(where).unlink()
    return text


def _read(inputs: list[str], hlo: list[str]) -> None:
    with limited():
        try:
            read(inputs)
            for path in hlo:
                hlo_dump_modules(path)
        except thence.ThenceError:
            return
        except TooLong:
            raise
        except BaseException:  # noqa: BLE001
            raise Failure(f"reading\n{traceback.format_exc()}") from None


def _api(inputs: list[str], hlo: list[str]) -> None:
    with limited():
        try:
            trace = thence.open(*inputs, hlo=hlo)
            trace.self_check()
        except thence.ThenceError:
            return
        except TooLong:
            raise
        except BaseException:  # noqa: BLE001
            raise Failure(f"thence.open and self_check\n{traceback.format_exc()}") from None
        try:
            summary = trace.report()
        except thence.ThenceError:
            return
        negative = [n for n in (summary.span_ns, summary.busy_ns, summary.sum_ns) if n < 0]
        if negative or (summary.rows["total_ns"] < 0).any():
            raise Failure(f"impossible totals: {summary.span_ns}, {summary.busy_ns}, {summary.sum_ns}")


def run(of: Format, cases: range, options: argparse.Namespace) -> int:
    """Runs cases of one format; the number of those that failed."""
    tree = of.seed()
    corpus = None
    if options.corpus is not None:
        corpus = Corpus.of(options.corpus, of.name, probed=of.probed)
        if not corpus.watch():
            corpus = None
            print("a corpus needs Python 3.12 or newer: all mutants are made from the seed", flush=True)
    begun = failed = 0
    began = time.monotonic()
    pl.DataFrame({"a": [1]}).lazy().sort("a").collect()  # starts Polars' threads, whose stacks count
    # What tries a table is forked from a process of which the limits are not those of this one.
    _PROBES.ready()
    parquet_probe.subprocess = _PROBES  # type: ignore[assignment]
    # Stores are written within this process, whose memory is limited.
    workers.LocalWorkers = lambda _processes: InProcess()  # type: ignore[assignment,misc,return-value]
    for number in cases:
        if options.stop_after is not None and time.monotonic() - began > options.stop_after:
            break
        begun += 1
        failed += not _passes(of, tree, number, options, corpus)
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    what = f"{of.name}: {begun} cases from {cases[0]}, seed {options.seed}, {failed} failed"
    print(f"{what}, {seconds:.1f} s, peak {peak:,.0f} MB", flush=True)
    return failed


def _limit_memory() -> None:
    """Limits this process to what it has, and `MAX_BYTES`.

    For each case anew: allocators keep address space that an earlier case was given and did not use.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        most = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


_probe_started = parquet_probe._started
_PROBES = forking.Processes(forking.POLARS)


def _passes(of: Format, tree: Any, number: int, options: argparse.Namespace, corpus: Corpus | None) -> bool:
    """Whether a case ends as it should; what fails is told and kept."""
    text = f"{of.name} {options.seed} {number}"
    dice = random.Random(text)
    chain: tuple[str, ...] = (text,)
    if corpus is not None:
        parent = corpus.parent(random.Random(f"parent of {text}"))
        tree, chain = corpus.grown(tree, parent), (*parent, text)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        path, changed = made(of, tree, dice, folder)
        # What Polars has written itself cannot end Polars: nothing needs to try it first.
        whole = of.probed and random.Random(f"{of.name} {options.seed} {number}").random() >= 0.05
        parquet_probe._started = PassingChild if whole else _probe_started
        _limit_memory()
        print(f"at {number}", file=sys.stderr, flush=True)  # where an abort happened
        state, verbs = dice.getstate(), number % options.every == 0
        try:
            try_one(of, path, dice, through_verbs=verbs)
        except Failure as failure:
            print(f"{of.name} seed {options.seed} case {number} failed: {failure}", flush=True)
            if options.keep is not None:
                place = options.keep / f"{of.name}-{options.seed}-{number}"
                shutil.copytree(folder, place, dirs_exist_ok=True)
                told = f"{' > '.join(chain)}\n{failure}"
                (place / "failure.txt").write_text(told, errors="replace")
                if changed is not None:
                    _keep_smallest(of, changed, str(failure), (state, verbs), place / "smallest")
            return False
        if corpus is not None:
            corpus.ended(chain, tree=changed is not None)
    return True


def _keep_smallest(of: Format, tree: Any, failure: str, how: tuple[Any, bool], place: Path) -> None:
    """Writes the smallest input that fails like this one, with the same state of the dice and the same verb."""
    state, verbs = how

    def fails_alike(candidate: Any) -> bool:
        dice = random.Random()
        dice.setstate(state)
        with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
            try:
                path = of.write(candidate, Path(name))
            except Exception:  # noqa: BLE001 - what cannot be written in this format is no input
                return False
            try:
                try_one(of, path, dice, through_verbs=verbs)
            except Failure as other:
                return kind_of(str(other)) == kind_of(failure)
        return False

    least = smallest(tree, fails_alike)
    place.mkdir(parents=True, exist_ok=True)
    of.write(least, place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=", ".join(f.name for f in FORMATS))
    parser.add_argument("--cases", type=int, help=f"of a batch: {CASES}, with --minutes {LONG_CASES}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="run the formats again and again, with other seeds")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one of N cases goes through verbs")
    parser.add_argument("--keep", type=Path, help="folder for inputs that fail")
    parser.add_argument("--corpus", type=Path, help="folder for mutants that reach new lines")
    parser.add_argument("--processes", type=int, default=1, help="with --minutes: so many at a time")
    parser.add_argument("--stop-after", type=float, help="begin no case after so many seconds")
    parser.add_argument("--add", type=Path, nargs="+", metavar="LOG", help="logs to add up")
    options = parser.parse_args()
    if options.add is not None:
        print(Totals.of_logs(path.read_text(errors="replace") for path in options.add).table())
        return 0
    if options.cases is None:
        options.cases = CASES if options.minutes is None else LONG_CASES
    chosen = [f for f in FORMATS if not options.formats or f.name in options.formats]
    if options.minutes is None and len(chosen) == 1:
        of, cases = chosen[0], range(options.first, options.first + options.cases)
        return min(1, run(of, cases, options))
    plan = Plan(options.cases, options.every, options.seed, options.keep, options.corpus)
    seconds = None if options.minutes is None else 60 * options.minutes
    totals = Totals()
    names = [of.name for of in chosen]
    for batch in run_all(names, plan, processes=options.processes, seconds=seconds):
        print(batch.text + batch.counted, end="", flush=True)
        totals.add(batch)
    print(totals.table(), end="", flush=True)
    return min(1, sum(totals.failed.values()))


if __name__ == "__main__":
    sys.exit(main())
