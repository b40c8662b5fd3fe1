"""Runs what README, docs and --help tell to type, and compares what they show.

python docs/check_commands.py [PAGE...]     every page and all examples of --help, or these pages
python docs/check_commands.py --update      writes what commands print now into the pages

In Markdown:

    ```console          lines that begin with $ are run, what follows must be what they print; [...] is any lines
    ```sh, indented     lines that call thence are run and must succeed; what is behind two spaces and a # is a remark
    ```pycon            run as doctest does, where ... is anything
    ```python           run, one after the other, in the namespace of their page
    <!-- not run: WHY -->   before a block: it is left out, and listed with the reason

Commands whose output is shown run in a folder with nothing but what a clone holds; others find stand-ins for names
such as trace.json.gz, too (docs/stand_ins.py). They run in this process wherever they use nothing of a shell.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import glob
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stand_ins import ROOT, clone, stage

from thence.cli import main as thence_main
from thence.cli.manual import verbs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGES = ("README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
HELP = "--help"
"""Stands for the examples of every verb's help, as one page."""
WIDTH = "110"
_LEFT_OUT = (
    (r"(?:thence record|torchrun|python |nsys |xprof)", "needs a GPU"),
    (r"thence roofline --measure-peaks", "needs a GPU"),
    (r"thence mcp\b", "serves until its input ends"),
    (r"thence top\b|.*summaries\.jsonl", "needs a program that is being recorded"),
    (r"(?:pip|pipx|uvx|uv|git|make|cd|eval|sbatch|srun|man|export)\b", "sets something up"),
    (r".*\| *(?:jq|inferno-flamegraph)\b", "needs a program that is no part of thence"),
    (r".*\$GITHUB_", "needs GitHub Actions"),
    (r".*(?:s3://|--ray (?!local))", "needs a bucket or a cluster"),
)
"""Commands that are not run, and why."""
_CODES = {
    "thence memory memory.json.gz --at oom": 2,  # no allocation failed there
    "thence report server.json.gz --by step-kind": 2,  # no server's trace is in tests/data
    "thence streams trace.json --group 'rope=rotary|_rope_' --expect 'rope==1'": 2,  # no such kernels
    "thence collectives rank*.zip --format json": 2,  # of a single GPU
    "thence streams traces/ --expect 'communication!=GEMM'": 2,  # of that job's kernels only collectives were kept
    "thence steps traces/": 2,  # and no steps
    "thence roofline traces/ --by kernel --steps typical --format json": 2,
    "thence label run/ --graph graph.html": 2,  # the recording of that name has no graphs
    "thence label traces/ -o labelled.pftrace": 2,  # and no graphs
    "thence inside gemm.npz --merge trace.json.gz -o all.pftrace": 2,  # the trace is of another program
    "thence diff --baseline main_runs/ new* --fail-on 'step>5%' --fail-on 'label:forward/attention>10%'": 1,
    "thence diff --baseline main_runs/ new* --fail-on 'step>5%' --fail-on 'new:kernel>0'": 1,
    "thence diff --baseline main_runs/ new* --fail-on 'step>5%' --fail-on 'label:attention>10%'": 2,  # no such label
    "thence idle job.store --rank 37": 2,  # the job has four
    "thence doctor --need recording --need jax && thence record -- python train.py": 1,
}
"""Exit codes other than 0 of commands without shown output, where the stand-ins make them so."""
_SHELL = re.compile(r"[|;&<>$]")
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n)?"
    r"^```(?P<kind>\w+)[^\n]*\n(?P<body>.*?)^```$|(?P<indented>(?:^    [^\n]*\n)+)",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Report:
    """What became of the commands of a page.

    Attributes:
        ran: how many were run.
        compared: of how many the output was compared.
        left_out: commands that were not run, with the reason.
        wrong: sentences about those that did not do what the page says.
        text: the page with the outputs of now.
    """

    ran: int = 0
    compared: int = 0
    left_out: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    text: str = ""


def check(page: str) -> Report:
    """Runs a page's commands in a folder of their own.

    Args:
        page: path below the repository's root, or `HELP`.
    """
    report = Report()
    with tempfile.TemporaryDirectory() as name, _environment(), contextlib.chdir(name):
        stage(Path("names"))
        clone(Path("clone"))
        if page == HELP:
            with contextlib.chdir("names"):
                for verb in verbs():
                    for command in verb.examples:
                        _run_plain(command, report)
        else:
            text = (ROOT / page).read_text(encoding="utf-8")
            namespace: dict[str, Any] = {}
            report.text = _BLOCK.sub(lambda m: _checked(m, report, namespace), text)
    return report


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    paths = {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": WIDTH, "NO_COLOR": "1"}
    os.environ.update(paths, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _checked(block: re.Match[str], report: Report, namespace: dict[str, Any]) -> str:
    """Runs a block; returns it with the outputs of now."""
    whole, kind, body = block[0], block["kind"], block["body"] or block["indented"]
    if block["why"]:
        report.left_out += [f"{line.strip()}  ({block['why']})" for line in body.splitlines()[:1]]
        return whole
    with contextlib.chdir("clone" if kind in ("console", "pycon") else "names"):
        if kind == "console":
            return whole.replace(body, "".join(_transcript(body, report)))
        if kind in ("sh", None):
            for line in body.splitlines():
                _run_plain(line.strip(), report)
        elif kind == "python":
            _run_python(body, report, namespace)
        elif kind == "pycon":
            _run_doctest(body, report, namespace)
    return whole


def _run_plain(line: str, report: Report) -> None:
    command = re.split(r" {2,}#|  +(?=[a-z].* .* )", line)[0].strip()
    if not re.match(r"(\w+ .*\| *)?thence\s", command) and not _reason(command):
        return
    if why := _reason(command):
        report.left_out.append(f"{command}  ({why})")
        return
    with _output_put_aside(command):
        printed, code = _run(command)
    report.ran += 1
    if code != _CODES.get(command, 0):
        report.wrong.append(f"{command}\nended with {code}:\n{printed}")


@contextlib.contextmanager
def _output_put_aside(command: str) -> Iterator[None]:
    """Where what a command writes is there already, of an example before or as a stand-in, that stays."""
    output = re.search(r" -o (\S+)", command)
    path = Path(output[1] if output else "")
    if output is None or not path.exists():
        yield
        return
    with tempfile.TemporaryDirectory() as aside:
        kept = shutil.move(path, aside)
        yield
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.move(kept, path)


def _reason(command: str) -> str | None:
    return next((why for pattern, why in _LEFT_OUT if re.match(pattern, command)), None)


def _transcript(body: str, report: Report) -> Iterator[str]:
    """Runs the commands of a transcript; yields it with the outputs of now."""
    code = 0
    for part in re.split(r"^(?=\$ )", body, flags=re.MULTILINE):
        if not part.startswith("$ "):
            yield part
            continue
        lines = part.split("\n")
        count = next(i for i, line in enumerate(lines) if not line.endswith("\\")) + 1
        command = "\n".join(lines[:count]).removeprefix("$ ").replace("\\\n", "")
        shown = "\n".join(lines[count:]).rstrip("\n")
        if why := _reason(command):
            report.left_out.append(f"{command}  ({why})")
            yield part
            continue
        if command == "echo $?":
            printed = f"{code}"
        else:
            printed, code = _run(command)
            report.ran += 1
        printed = "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n")
        report.compared += 1
        if _agree(shown, printed):
            yield part
            continue
        report.wrong.append(f"{command}\nprints\n{printed}\nand the page shows\n{shown}")
        yield "\n".join([*lines[:count], *([printed] if printed else []), ""])


def _agree(shown: str, printed: str) -> bool:
    pattern = re.escape("\n".join(line.rstrip() for line in shown.splitlines()))
    any_lines = pattern.replace(re.escape("[...]"), r"(?s:.*)")
    return re.fullmatch(any_lines, printed) is not None


def _run(command: str) -> tuple[str, int]:
    """What a command prints, on both streams in order, and its exit code."""
    if _SHELL.search(re.sub(r"'[^']*'|\"[^\"$]*\"", "", command)) or not command.startswith("thence"):
        run = subprocess.run(  # noqa: S602 - our own documentation
            f'thence() {{ "{sys.executable}" -m thence "$@"; }}\n{command}',
            shell=True, executable="/bin/bash", text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return run.stdout, run.returncode
    arguments = [name for word in _words(command) for name in word]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            thence_main(arguments)
        except SystemExit as ended:
            return printed.getvalue(), int(ended.code or 0)
    return printed.getvalue(), 0


def _words(command: str) -> Iterator[list[str]]:
    """Arguments of a command; globs without quotes as a shell expands them."""
    for raw in shlex.split(command, posix=False)[1:]:
        (word,) = shlex.split(raw) or [""]
        found = [] if raw[0] in "'\"" or raw.startswith("-") else sorted(glob.glob(word))  # noqa: PTH207
        yield found if re.search(r"[*?\[]", word) and found else [word]


def _run_python(body: str, report: Report, namespace: dict[str, Any]) -> None:
    report.ran += 1
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(body, "<documentation>", "exec"), namespace)  # noqa: S102 - our own documentation
    except Exception:  # noqa: BLE001 - whatever it is, it is reported
        report.wrong.append(f"{body}\n{traceback.format_exc()}")


def _run_doctest(body: str, report: Report, namespace: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(body, namespace, "documentation", None, 0)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    said = io.StringIO()
    results = doctest.DocTestRunner(verbose=False, optionflags=flags).run(test, out=said.write, clear_globs=False)
    namespace.update(test.globs)
    report.ran += results.attempted
    report.compared += results.attempted
    if results.failed:
        report.wrong.append(said.getvalue())


def main(arguments: Sequence[str]) -> int:
    """Checks pages and prints what was found; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Runs the commands of the documentation.")
    parser.add_argument("pages", nargs="*", default=[*PAGES, HELP])
    parser.add_argument("--update", action="store_true", help="write outputs of now into the pages")
    options = parser.parse_args(arguments)
    total = Report()
    for page in options.pages:
        report = check(page)
        if options.update and page != HELP:
            (ROOT / page).write_text(report.text, encoding="utf-8")
        sys.stdout.write(f"{page}: {report.ran} run, {report.compared} compared, {len(report.wrong)} wrong\n")
        sys.stdout.writelines(f"  not run: {line}\n" for line in report.left_out)
        sys.stdout.writelines(f"  WRONG: {text}\n" for text in report.wrong)
        total = replace(total, ran=total.ran + report.ran, compared=total.compared + report.compared)
        total.left_out += report.left_out
        total.wrong += report.wrong
    sys.stdout.write(
        f"{total.ran} commands run, {total.compared} compared with what is shown, {len(total.left_out)} not run, "
        f"{len(total.wrong)} wrong\n"
    )
    return 1 if total.wrong and not options.update else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
