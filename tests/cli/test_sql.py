"""A query sees the tables of the trace and nothing else, and stays within limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import polars as pl
import pytest

from helpers import kernel, written
from thence.analysis.sql import answer
from thence.cli import main
from thence.cli.bounded_query import bounded_answer
from thence.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "what-nobody-shall-read"
GPU = {"gpu": pl.DataFrame({"x": range(2000), "name": ["k"] * 2000})}
FILES = (
    "select * from read_csv('{}')",
    "select * from READ_CSV ('{}')",
    "select * from read_csv /* why */ ('{}')",
    "select * from read_csv -- why\n ('{}')",
    "select * from \"read_csv\"('{}')",
    "with t as (select * from read_csv('{}')) select * from t",
    "select x from gpu where name in (select secret from read_csv('{}'))",
    "select * from gpu, read_csv('{}')",
    "select x from gpu union all select secret from read_csv('{}')",
    "explain select * from read_csv('{}')",
)
NO_QUERIES = ("drop table gpu", "truncate table gpu", "delete from gpu", "create table y as select 1",
              "insert into gpu values (1)", "copy gpu to 'x.csv'", "", "/* select */ drop table gpu")  # fmt: skip


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    path = tmp_path / "planted.csv"
    path.write_text(f"secret\n{SECRET}\n")
    return path


@pytest.mark.parametrize("query", FILES)
def test_a_query_reads_no_file(planted: Path, query: str) -> None:
    with pytest.raises(UsageError, match="no files") as refused:
        answer(GPU, query.format(planted))
    assert SECRET not in str(refused.value)


def test_what_asks_polars_itself_would_read_the_file(planted: Path) -> None:
    with pl.SQLContext({}) as context:
        found = context.execute(FILES[0].format(planted), eager=True)
    assert found.rows() == [(SECRET,)]


@pytest.mark.parametrize("query", NO_QUERIES)
def test_only_queries_are_answered(query: str) -> None:
    with pytest.raises(UsageError):
        answer(GPU, query)


@pytest.mark.parametrize("query", ["select nothing from gpu", "select", "select repeat(x, 9) from gpu",
                                   "select * from 'gpu.csv'", "select x::foo from gpu"])  # fmt: skip
def test_an_error_is_one_line(query: str) -> None:
    with pytest.raises(UsageError) as refused:
        answer(GPU, query)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_process_that_answers_can_open_nothing(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Were the names of Polars' functions others than those that are refused, the system would refuse.
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    program = (
        "import sys, polars as pl, thence.analysis.sql as q, thence.cli.bounded_query as b;"
        "q.check_query = lambda query: None;"
        "from pathlib import Path;"
        "sys.exit(b._answer(Path(sys.argv[1]), 1 << 33))"
    )
    import subprocess
    import sys

    folder = planted.parent / "exchange"
    folder.mkdir()
    (folder / "query").write_text(FILES[0].format(planted))
    done = subprocess.run([sys.executable, "-c", program, folder], check=False, timeout=60)
    assert done.returncode == 3
    assert SECRET.encode() not in (folder / "result").read_bytes()


def test_a_query_stays_within_its_limits() -> None:
    everything = "select a.x from gpu a cross join gpu b cross join gpu c"
    with pytest.raises(UsageError, match=r"more than 1 GB of memory; --memory-limit|more rows than fit"):
        bounded_answer(GPU, everything, 60, 10**9)
    with pytest.raises(UsageError, match=r"longer than 0\.001 s; --time-limit"):
        bounded_answer(GPU, "select x from gpu", 0.001, 10**9)
    found = bounded_answer(GPU, "select sum(x) as total from gpu", 60, 10**9)
    assert found.rows() == [(sum(range(2000)),)]


def test_the_verb_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "trace.json", [kernel(i, 10 * i, 5) for i in range(1, 8)])
    with pytest.raises(SystemExit) as ended:
        main(["sql", str(path), "select count(*) as n, sum(duration) as ns from gpu", "--format", "json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == [{"n": 7, "ns": 35_000}]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["sql", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def many(tmp_path: Path) -> str:
    args = {"grid": [8, 1, 2], "block": [128, 1, 1]}
    kernels = [kernel(i, 10 * i, 5, args=args) for i in range(1, 250)]
    return str(written(tmp_path / "trace.json", kernels))


def test_tables_are_listed_without_an_input(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--tables")
    for name in ("gpu", "host", "activities", "waits"):
        assert f"{name}: " in text
    assert any(line.split()[:3] == ["duration", "integer", "ns"] for line in text.splitlines())


def test_lists_are_shown_as_lists_and_rows_have_a_limit(many: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, many, "select grid, duration from gpu")
    assert text.count("[8,1,2]") == 100
    assert "... 149 more; --top 249 shows all" in text
    assert shown(capsys, many, "select grid from gpu", "--top", "249").count("[8,1,2]") == 249


def test_what_is_wider_than_the_terminal_is_shown_one_below_the_other(
    many: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, many, "select * from gpu")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("row ") for line in lines) == 10
    assert sum(line.split() == ["grid", "[8,1,2]"] for line in lines) == 10
    assert "... 239 more rows" in text


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select nam from gpu", "there is no column nam, did you mean name; thence sql --tables"),
        ("select name from gpus", "there is no table gpus; the tables are gpu, host, places"),
    ],
)
def test_a_name_that_there_is_not_says_which_there_are(query: str, said: str) -> None:
    frames = {name: pl.DataFrame({"name": ["k"]}) for name in ("gpu", "host")}
    with pytest.raises(UsageError, match=said):
        answer(frames, query)


@pytest.mark.parametrize("limit", ["nan", "inf", "1e300"])
def test_limits_of_any_size_are_limits(limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(written(tmp_path / "t.json", [kernel(1, 20)]))
    for option in ("--memory-limit", "--time-limit"):
        with pytest.raises(SystemExit) as ended:
            main(["sql", source, "select count(*) as n from gpu", option, limit, "--format", "csv"])
        assert ended.value.code == 0
        assert capsys.readouterr().out == "n\n1\n"


def test_values_that_no_line_of_text_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several values in one cell are JSON, bytes base64, and durations ISO 8601."""
    source = str(written(tmp_path / "t.json", [kernel(1, 20, name="k", args={"grid": [2, 3, 4]})]))
    query = "select grid, cast(name as bytea) as name, interval '3 days' as i from gpu"
    for form in ("csv", "table"):
        with pytest.raises(SystemExit) as ended:
            main(["sql", source, query, "--format", form])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert "[2,3,4]" in text
        assert "aw==" in text
        assert "P3D" in text
