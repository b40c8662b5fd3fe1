"""The command line: what it prints, where, how wide, and how it exits."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import re
from typing import TYPE_CHECKING, Any

import click
import pytest

import forking
import thence
from helpers import DATA, FSDP, kernel, launch, output, recording, run_process, run_thence, unzipped, written
from slow_kineto import SlowTrace
from thence.cli import main, report
from thence.cli.inputs import Inputs
from thence.cli.verbs import VERBS, group
from thence.errors import ThenceError
from thence.model.places import BY

if TYPE_CHECKING:
    from pathlib import Path

EAGER = recording("torch_eager_rank0")
ESCAPE = "\x1b"


@functools.cache
def eager_events() -> SlowTrace:
    return SlowTrace(EAGER)


def report_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    return json.loads(output(capsys, "report", *arguments, "--format", "json")[0])


def test_json_of_a_report_keeps_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    found, expected = report_json(capsys, EAGER), eager_events()
    assert found["inputs"] == [str(EAGER)]
    assert found["ranks"] == 1
    assert found["span_ns"] == expected.span_ns
    assert found["busy_ns"] == expected.busy_ns
    assert found["sum_ns"] == expected.sum_ns
    assert found["counts"] == {"kernel": 753, "memcpy": 0, "memset": 75}
    assert found["by"] == "kernel"
    assert found["warnings"] == []
    assert {"label", "module", "op", "source"} <= set(found["attributed_ns"])
    assert found["attributed_ns"]["module"] == 0
    for row in found["rows"]:
        assert {"name", "count", "total_ns", "mean_ns", "share"} <= set(row)
        assert row["mean_ns"] == pytest.approx(row["total_ns"] / row["count"])
        assert row["share"] == pytest.approx(row["total_ns"] / expected.sum_ns)
    assert sum(row["total_ns"] for row in found["rows"]) == expected.sum_ns
    assert sum(row["count"] for row in found["rows"]) == len(expected.activities)


def test_json_holds_every_row_with_full_names_and_the_first_and_a_rest_where_top_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    every = report_json(capsys, EAGER)["rows"]
    assert {row["name"] for row in every} == {a["name"] for a in eager_events().activities}
    first, rest = report_json(capsys, EAGER, "--top", "1")["rows"]
    assert first == every[0]
    assert rest["name"] is None
    assert rest["total_ns"] == sum(row["total_ns"] for row in every[1:])


def test_several_ranks_count_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    found = report_json(capsys, *FSDP[:2], "--by", "rank")
    assert found["ranks"] == 2
    assert {row["name"] for row in found["rows"]} == {"rank 0", "rank 1"}


def test_csv_is_a_table_with_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = output(capsys, "report", EAGER, "--by", "label", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["name"] for row in rows} >= {"forward/mlp", "optimizer"}
    assert sum(int(row["total_ns"]) for row in rows) == eager_events().sum_ns


def test_top_limits_the_rows_and_says_what_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = output(capsys, "report", EAGER, "--by", "label", "--top", "2")
    rows = text.partition("GPU time by label")[2].partition("\n\n")[0]
    assert "forward/attention" in rows
    assert "optimizer" not in rows
    assert "3 more" in rows


OF_HLO = ("program", "hlo", "opcode", "op_name")


@pytest.mark.parametrize("by", ["kernel", "module", "stream", "rank", "step"])
def test_every_kind_of_rows_can_be_asked_for(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = output(capsys, "report", FSDP[0], "--by", by)
    assert "GPU time by" in text


@pytest.mark.parametrize("by", OF_HLO)
def test_rows_by_hlo_of_a_trace_without_hlo_are_refused(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(FSDP[0]), "--by", by])
    assert ended.value.code == 2
    assert f"holds no {by}, because it holds no XLA programs" in capsys.readouterr().err


def test_choices_of_by_are_those_of_the_analysis() -> None:
    (by,) = [option for option in report.command.params if option.name == "by"]
    assert set(by.type.choices) == set(BY)
    assert len(by.type.choices) == len(BY)


@pytest.mark.parametrize("by", ["kernel", "label", "stack", "ops"])
def test_no_line_is_wider_than_80_columns(by: str) -> None:
    lines = run_thence("report", FSDP[0], "--by", by, COLUMNS="80").stdout.decode().splitlines()
    commands = [line for line in lines if line[6:].startswith("thence ")]
    assert len(commands) == 3
    assert commands[0] == f"next  thence collectives {FSDP[0]}", "whole, so that it can be copied"
    assert max(len(line) for line in lines if line not in commands) <= 80


def test_a_pipe_gets_no_escape_codes_and_every_column() -> None:
    done = run_process("report", EAGER)
    assert done.returncode == 0
    assert ESCAPE not in done.stdout.decode()
    assert done.stderr == b""
    assert "columns left out" not in done.stdout.decode()
    jax = DATA / "jax" / "jax_fsdp2.xplane.pb.gz"
    for verb, path, last in (("collectives", FSDP[0], "hidden"), ("programs", jax, "launch")):
        headings = next(
            line
            for line in run_thence(verb, path).stdout.decode().splitlines()
            if line.startswith(("collective ", "program "))
        )
        assert headings.split()[-1] == last


def test_columns_that_a_terminal_has_no_room_for_are_named() -> None:
    whole = run_thence("collectives", *FSDP[:2]).stdout.decode()
    headings = next(line for line in whole.splitlines() if line.startswith("collective "))
    for columns in (40, 60, 80):
        narrow = run_thence("collectives", *FSDP[:2], COLUMNS=str(columns)).stdout.decode()
        assert max(map(len, narrow.splitlines())) <= columns
        below = narrow[narrow.index("\ncollective ") :]
        said = " ".join(below[below.index("columns left out: ") :].split())
        hidden = said.removeprefix("columns left out: ").split("; a wider")[0].split(", ")
        shown = next(line for line in narrow.splitlines() if line.startswith("collective "))
        assert shown.split() + " ".join(hidden).split() == headings.split()


def test_no_color_is_minded_even_on_a_terminal() -> None:
    # FORCE_COLOR makes Rich take the pipe for a terminal.
    assert b"\x1b[36m" in run_process("report", EAGER, FORCE_COLOR="1", COLUMNS="120").stdout
    plain = run_process("report", EAGER, FORCE_COLOR="1", COLUMNS="120", NO_COLOR="1").stdout
    assert not re.search(rb"\x1b\[[0-9;]*3[0-7]m", plain)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
def test_a_dash_reads_standard_input(packed: bool) -> None:
    content = EAGER.read_bytes() if packed else unzipped(EAGER)
    done = run_process("report", "-", "--format", "json", stdin=content)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sum_ns"] == eager_events().sum_ns


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "absent.json"),
        ("report",),
        ("report", "x", "--by", "weather"),
        ("report", "x", "--top", "0"),
        ("nonsense",),
        ("--nonsense",),
        ("sql", "absent.json", "select 1"),
        ("sql",),
    ],
)
def test_what_cannot_be_done_exits_with_2_and_one_sentence(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text, errors = output(capsys, *arguments, code=2)
    assert text == ""
    assert errors.strip()
    assert "Traceback" not in errors


@pytest.mark.parametrize("content", [b"", b"hello", b'{"traceEvents": [', b"\x1f\x8bx", b"\0" * 99])
def test_a_bad_file_gives_one_line_and_no_traceback(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    done = run_thence("report", path)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.decode().startswith(f"thence: {path}: ")
    assert done.stderr.count(b"\n") == 1


def test_a_trace_without_gpu_rows_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "trace.json", [launch(1, 10)])
    assert "no GPU activity" in output(capsys, "report", path, code=2)[1]


def test_whoever_closes_the_pipe_early_gets_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = forking.run(["-m", "thence", "report", str(EAGER), "--format", "json"], stdout=write, timeout=60)
    os.close(write)
    assert b"Traceback" not in done.stderr


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = output(capsys, "--help")
    for name in VERBS:
        assert name in text
        assert f"Usage: thence {name}" in output(capsys, name, "--help")[0]


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert thence.__version__ in output(capsys, "--version")[0]


def test_shell_completion_script_and_choices() -> None:
    script = run_process(_THENCE_COMPLETE="bash_source")
    assert script.returncode == 0
    assert b"complete" in script.stdout
    # A first word that no verb begins with is completed to a file, because it may be a trace.
    offered = [group.shell_complete(click.Context(group), word) for word in ("repo", "tra")]
    kinds = [[(item.type, item.value) for item in items] for items in offered]
    assert kinds == [[("plain", "report")], [("file", "tra")]]
    words = {"COMP_WORDS": "thence report --by st", "COMP_CWORD": "3"}
    done = run_process(_THENCE_COMPLETE="bash_complete", **words)
    assert {line.split(",")[1] for line in done.stdout.decode().split()} == {"stack", "step", "step-kind", "stream"}


def test_the_demo_runs_on_what_ships_with_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text, _ = output(capsys, "demo")
    assert "forward/attention" in text
    assert "torch_gpt.py:" in text
    assert "GPT_0/Block_" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_sql_answers_as_json_csv_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    query = "select kind, count(*) as n from gpu group by kind order by n desc"
    answer = json.loads(output(capsys, "sql", EAGER, query, "--format", "json")[0])
    assert answer == [{"kind": "kernel", "n": 753}, {"kind": "memset", "n": 75}]
    text, _ = output(capsys, "sql", EAGER, query, "--format", "csv")
    assert text == "kind,n\nkernel,753\nmemset,75\n"
    assert "memset" in output(capsys, "sql", EAGER, query)[0]


def test_sql_over_places_agrees_with_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    query = "select sum(duration) as ns from activities where label like '%mlp'"
    (answer,) = json.loads(output(capsys, "sql", EAGER, query, "--format", "json")[0])
    rows = report_json(capsys, EAGER, "--by", "label")["rows"]
    assert answer["ns"] == next(r["total_ns"] for r in rows if r["name"] == "forward/mlp")


@pytest.mark.parametrize("query", ["selec 1", "", "select x from gpu", "select * from nothing", ";"])
def test_bad_sql_exits_with_2(query: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, errors = output(capsys, "sql", EAGER, query, code=2)
    assert "Traceback" not in errors


def odd_trace(folder: Path, name: str) -> Path:
    label = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 2, "ts": 0, "dur": 99}
    return written(folder / "trace.json", [label, launch(1, 5), kernel(1, 10, name=name)])


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '" onmouseover="x', "a & b"])
def test_names_are_escaped_in_html(name: str, tmp_path: Path) -> None:
    trace = thence.open(odd_trace(tmp_path, name))
    for html in (trace._repr_html_(), trace.report("label")._repr_html_()):
        assert name not in html
        assert "<script" not in html
        assert re.search(r'title="[^"<>]*"', html)


def test_input_names_are_escaped_in_html(tmp_path: Path) -> None:
    folder = tmp_path / "<i>"
    folder.mkdir()
    assert "<i>" not in thence.open(odd_trace(folder, "x"))._repr_html_()


@pytest.mark.parametrize(
    ("name", "by"),
    [("[red]hot[/red]", "kernel"), ("[/]", "label"), ("a[bold", "label"), (":smile:", "kernel"), (r"\[x]", "label")],
)
def test_markup_in_names_is_shown_as_it_is(
    name: str, by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = odd_trace(tmp_path, name)
    assert name in output(capsys, "report", path, "--by", by)[0]
    assert name in output(capsys, "sql", path, "select name from gpu")[0]


def test_escape_codes_in_names_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = odd_trace(tmp_path, "evil\x1b]0;title\x07\x1b[2Jname")
    for arguments in (("report", path), ("report", path, "--by", "label"), ("sql", path, "select name from gpu")):
        assert ESCAPE not in output(capsys, *arguments)[0]


def test_an_error_is_printed_by_main_only(tmp_path: Path) -> None:
    with pytest.raises(ThenceError):
        report.command.main([os.fspath(tmp_path / "absent")], standalone_mode=False)


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as code:
        main([*arguments])
    shown = capsys.readouterr()
    return int(str(code.value.code)), shown.out, shown.err


def test_a_trace_alone_is_reported_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(capsys, str(EAGER), "--top", "3") == ended(capsys, "report", str(EAGER), "--top", "3")


def test_a_verbs_name_wins_over_a_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report").write_bytes(EAGER.read_bytes())
    code, _, said = ended(capsys, "report")
    assert code == 2
    assert "Missing argument 'INPUT...'" in said
    code, shown, _ = ended(capsys, "./report")
    assert code == 0
    assert "GPU time by label" in shown


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("repot", "No such command or file 'repot'. Did you mean 'report'?"),
        ("xyzzy", "No such command or file 'xyzzy'.\n"),
        ("nothing.json", "nothing.json: no such file or directory"),
        ("folder/nothing", "folder/nothing: no such file or directory"),
    ],
)
def test_a_word_that_is_neither_is_explained_as_what_it_looks_like(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = ended(capsys, word)
    assert code == 2
    assert said in error


def test_the_next_command_names_several_files_by_a_pattern(tmp_path: Path) -> None:
    paths = [tmp_path / f"my run rank{rank}.json.gz" for rank in range(4)]
    for path in paths:
        path.touch()
    typed = Inputs(tuple(map(str, paths))).typed
    assert typed == f"'{tmp_path}/my run rank'*.json.gz"
    assert Inputs(tuple(map(str, paths[:2]))).typed == f"'{paths[0]}' '{paths[1]}'"
    (tmp_path / "my run rank9.json.gz").touch()
    assert Inputs(tuple(map(str, paths))).typed == f"'{paths[0]}' ...", "the pattern would name others"
