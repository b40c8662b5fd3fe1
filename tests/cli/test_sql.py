"""A query sees the tables of the trace and nothing else, and stays within limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import polars as pl
import pytest

from helpers import kernel, written
from thence.analysis.query import answer
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


def test_a_process_that_answers_can_open_nothing(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Were the names of Polars' functions others than those that are refused, the system would refuse.
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    program = (
        "import sys, polars as pl, thence.analysis.query as q, thence.cli.bounded_query as b;"
        "q._check = lambda query: None;"
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
    with pytest.raises(
        UsageError, match=r"more than 1 GB of memory; --memory-limit|more rows than fit"
    ):
        bounded_answer(GPU, everything, 60, 10**9)
    with pytest.raises(UsageError, match=r"longer than 0\.01 s; --time-limit"):
        bounded_answer(GPU, "select x from gpu", 0.01, 10**9)
    found = bounded_answer(GPU, "select sum(x) as total from gpu", 60, 10**9)
    assert found.rows() == [(sum(range(2000)),)]


def test_the_verb_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "trace.json", [kernel(i, 10 * i, 5) for i in range(1, 8)])
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "sql",
                str(path),
                "select count(*) as n, sum(duration) as ns from gpu",
                "--format",
                "json",
            ]
        )
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == [{"n": 7, "ns": 35_000}]


@pytest.mark.parametrize("limit", ["nan", "inf", "1e300"])
def test_limits_of_any_size_are_limits(
    limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(written(tmp_path / "t.json", [kernel(1, 20)]))
    for option in ("--memory-limit", "--time-limit"):
        with pytest.raises(SystemExit) as ended:
            main(["sql", source, "select count(*) as n from gpu", option, limit, "--format", "csv"])
        assert ended.value.code == 0
        assert capsys.readouterr().out == "n\n1\n"


def test_values_that_no_line_of_text_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
