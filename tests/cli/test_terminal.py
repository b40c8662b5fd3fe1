"""No escape sequence of a trace reaches a terminal, whatever the verb."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
from pathlib import Path
from typing import Any

import pytest

import forking
import thence
from helpers import event, kernel, launch, output, written
from source_trees import nodes

BAD = "\x1b[7;7;7mpwn\x1b]0;pwn\x07\x9b7;7m\u202e"
PLANTED = ("\x1b[7;7;7m", "\x1b]0;", "\x07", "\x9b", "\u202e")
PACKAGE = Path(thence.__file__).parent
RUN = """
import json, sys
from thence import opening
from thence.cli import main
really, traces = opening.open_trace, {}
def opened_once(*inputs, **options):
    key = repr((inputs, {name: value for name, value in options.items() if name != "progress"}))
    if key not in traces: traces[key] = really(*inputs, **options)
    return traces[key]
opening.open_trace = opened_once
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit:
        pass
"""
COLLECTIVE = {
    "Collective name": f"all{BAD}", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float", "Group size": 2,
    "Process Group Name": f"0{BAD}", "Process Group Description": f"group{BAD}", "Process Group Ranks": "[0, 1]",
}  # fmt: skip


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A trace whose every text holds escape sequences, its name included."""
    events: list[dict[str, Any]] = [
        event("user_annotation", f"ProfilerStep#1{BAD}", 0, 1000),
        event("user_annotation", f"label{BAD}", 1, 900),
        event("python_function", f"nn.Module: Block{BAD}_0", 2, 800),
        event("python_function", f"model{BAD}.py(3): forward{BAD}", 3, 700),
        event("cpu_op", f"aten::op{BAD}", 4, 600),
        *(e for i in range(1, 5) for e in (launch(i, 10 * i), kernel(i, 10 * i + 5, name=f"kernel{BAD}"))),
        launch(9, 100),
        kernel(9, 110, name=f"ncclDevKernel_AllReduce{BAD}", args=COLLECTIVE),
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": f"thread{BAD}"}},
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": f"python{BAD}"}},
        {"ph": "X", "cat": "kernel", "name": f"broken{BAD}", "ts": BAD, "dur": BAD, "pid": BAD, "tid": BAD},
    ]  # fmt: skip
    metadata = {
        "deviceProperties": [{"id": 0, "name": f"GPU{BAD}", "totalGlobalMem": 1, "computeMajor": 9}],
        "distributedInfo": {"rank": 0, "backend": f"nccl{BAD}", "pg_config": [{"pg_name": BAD, "ranks": [0]}]},
        "WARNING": [f"lost records{BAD}"],
        "traceName": BAD,
    }
    return written(tmp_path / f"trace{BAD}.json".replace("/", "_"), events, **metadata)


def shown(verbs: list[list[str]], folder: Path) -> str:
    """What a terminal gets of these command lines, both streams."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "250"}
    environment.pop("NO_COLOR", None)
    process = forking.start(["-c", RUN, json.dumps(verbs)], [theirs] * 3, cwd=folder, env=environment)
    os.close(theirs)
    content = b""
    try:
        while part := os.read(ours, 1 << 16):
            content += part
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(ours)
        process.wait(60)
    return content.decode("utf-8", "replace")


def test_no_verb_lets_an_escape_sequence_through(hostile: Path, tmp_path: Path) -> None:
    name = str(hostile)
    missing = str(tmp_path / f"missing{BAD}.json")
    verbs = [
        *(["report", name, "--by", by] for by in ("kernel", "module", "stack", "collective")),
        ["report", name, "--details", "--by", "op"], ["report", name, "--format", "json"],
        ["report", name, "--by", "source", "--format", "csv"],
        ["report", name, missing], ["report", name, "--only", BAD], ["report", name, "--by", BAD],
        ["streams", name, "--group", f"group{BAD}=kernel", "--expect", f"group{BAD}>=9"],
        ["collectives", name], ["programs", name], ["compile", name], ["check", name],
        ["flame", name, "--by", "label", "-o", "-"], ["flame", name, "-o", f"flame{BAD}.html"],
        ["convert", name, "-o", "-", "--to", "json"], ["convert", name, "-o", f"out{BAD}.pftrace"],
        ["convert", name, "-o", f"out{BAD}.nothing"], ["sql", name, "select name from gpu"],
        ["sql", name, f"select '{BAD}' as x from gpu"], ["sql", name, f"select {BAD} from gpu"],
        ["sql", name, "select name from gpu", "--format", "json"], ["label", name, "-o", "labelled.json"],
        ["label", name, "--eager", name, "-o", f"labelled{BAD}.json"], ["inside", name, "-o", "x.json"],
        ["inside", missing, "-o", "x.json"], ["idle", name], ["idle", name, "--by", "kernel"], ["steps", name],
        ["whatif", name], ["whatif", name, "--free", f"kernel:{BAD}"],
        ["diff", name, name, "--anyway", "--format", "markdown"],
        ["diff", name, name, "--fail-on", f"kernel:{BAD}>5%"], ["label", name, "--labels", missing],
        ["label", name, "--labels", name], ["report", name, "--run", BAD],
        ["report", name, "--own", BAD, "--hlo", missing], ["record", "-o", f"out{BAD}.x", "--", f"missing{BAD}"],
        [f"verb{BAD}"], ["report", name, f"--option{BAD}"],
    ]  # fmt: skip
    text = shown(verbs, tmp_path)
    assert text.count("pwn") > 3 * len(verbs), "the names are shown"
    assert "\x1b[" in text, "it was taken for a terminal"
    for planted in PLANTED:
        at = text.find(planted)
        assert at < 0, text[max(0, at - 200) : at + 50]


ALLOWED = {
    "__main__.py": {"sys.stderr.write"},  # two numbers, where there is no memory to import the command line
    "cli/messages.py": {"sys.stderr.write", "sys.stdout.write"},
    "doctor/probe.py": {"sys.stdout.write"},  # answers of a child to its parent
    "capture/launcher/first_use.py": {"sys.stderr.write"},  # in a program that is recorded, of itself
    "capture/launcher/startup/sitecustomize.py": {"sys.stderr.write"},
    "cli/safe_console.py": {"Console"},
    "integrations/training.py": {"sys.stderr.write"},  # in a program that trains; what it says is made harmless there
}
PRINTING = {
    "print", "sys.stdout.write", "sys.stderr.write", "sys.stdout.writelines", "sys.stderr.writelines", "click.echo",
    "click.secho", "Console", "rich.print", "console.print",
}  # fmt: skip
CALL = re.compile(r"\b(print|write|writelines|echo|secho|Console)\s*\(")
"""Without any of these, a module is not parsed."""


def test_one_place_prints() -> None:
    """`say` and `put` of cli/messages.py, and tables on a `SafeConsole`: what they print is made harmless."""
    found = {}
    for path in filter(lambda path: CALL.search(path.read_text()), PACKAGE.rglob("*.py")):
        calls = [n.func for n in nodes(path) if isinstance(n, ast.Call)]
        names = {ast.unparse(f) for f in calls} & PRINTING
        where = path.relative_to(PACKAGE).as_posix()
        if more := names - ALLOWED.get(where, set()):
            found[where] = more
    assert not found


def test_a_name_with_line_feeds_is_no_message_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("report", "ranks", "ingest"):
        more = ["-o", "a.store"] if verb == "ingest" else []
        told = output(capsys, verb, "a\nthence: all is sound\n.json", *more, code=2)[1]
        assert told.count("\n") == 1, told
        assert told.startswith("thence: a\ufffdthence: all is sound\ufffd.json: ")
