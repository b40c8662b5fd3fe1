"""What ``thence top`` says of a job, on summaries made by hand."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner, Result
from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families

import thence
from thence.cli import main
from thence.cli.top import command
from thence.watch import metrics as exported
from thence.watch.job import Watch, WatchedJob
from thence.watch.metrics import METRICS, Metrics, server
from thence.watch.otlp import Exporter
from thence.watch.summary_file import Collective, Steps, Window, append

SECOND = 1_000_000_000
MS = 1_000_000
GRAFANA = Path(__file__).parents[2] / "examples" / "grafana.json"


def window(rank: int, number: int, waits_us: int, **more: Any) -> Window:
    """The window of step 100, 200, ... with 10 ms: 6 ms busy, of which 1 ms is an allreduce and its wait."""
    end = number * SECOND
    fields: dict[str, Any] = {
        "schema": 1, "rank": rank, "host": "node", "pid": 100 + rank, "first_step": 100 * number, "steps": 1,
        "begin_unix_ns": end - 10 * MS, "end_unix_ns": end, "duration_ns": 10 * MS, "busy_ns": 6 * MS,
        "exposed_ns": MS, "idle_ns": {"launch": 3 * MS, "python": MS}, "modules": {"attention": 3 * MS, "mlp": 2 * MS},
        "other_ns": 0, "unattributed_ns": MS, "kernels": {"gemm": 5 * MS},
        "collectives": [Collective("allreduce", "dp", 2, MS, [500 + waits_us, 500])],
        "all_steps": Steps(100 * number - 99, 100, end - SECOND, end, SECOND, 9 * MS, 11 * MS, 20 * MS, 100 * number),
        "interval": 100, "cost_share": 0.004, "dropped": 0,
    }  # fmt: skip
    return Window(**fields | more)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two ranks with ten windows each; rank 1 comes last, so that rank 0 waits 0.5 ms in each; one was asked for."""
    for rank, waits in ((0, 500), (1, 0)):
        folder = tmp_path / f"node-rank{rank}-{100 + rank}"
        folder.mkdir()
        append(folder, [window(rank, number, waits) for number in range(1, 11)])
    slow = window(1, 11, 0, first_step=1050, begin_unix_ns=10 * SECOND + 1, end_unix_ns=10 * SECOND + 2)
    slow.asked, slow.busy_ns, slow.dropped = "step 1049 took 90 ms", 0, 3
    append(tmp_path / "node-rank1-101", [slow])
    return tmp_path


def now(directory: Path, since_s: float = 1_000) -> WatchedJob:
    return Watch(directory, round(since_s * SECOND)).now(12 * SECOND)


def test_shares_are_those_of_the_windows_in_turn(job: Path) -> None:
    found = now(job)
    assert found.windows == 20
    assert {(by, name): share for by, name, share, _, _ in found.shares.rows()} == pytest.approx(
        {
            ("busy", ""): 0.6, ("idle", "launch"): 0.3, ("idle", "python"): 0.1, ("module", "attention"): 0.3,
            ("module", "mlp"): 0.2, ("module", "(none)"): 0.1,
        }
    )  # fmt: skip
    # All windows are alike, so nothing is uncertain.
    assert found.shares["low_share"].to_list() == pytest.approx(found.shares["share"].to_list())
    assert now(job, 3).windows == 6
    assert now(job, 3).shares["low_share"].null_count() == 6


def test_ranks_have_their_pace_and_the_late_one_is_named(job: Path) -> None:
    found = now(job)
    assert found.late == (1,)
    rows = {row["rank"]: row for row in found.ranks.iter_rows(named=True)}
    assert rows[0]["steps_per_s"] == 100
    assert rows[0]["wait_share"] == pytest.approx(0.05)  # 0.5 of 10 ms
    assert rows[1]["wait_share"] == 0
    assert rows[1]["dropped"] == 3
    assert (rows[0]["step"], rows[0]["age_ns"]) == (1000, 2 * SECOND)
    assert found.line() == (
        "2 ranks, 100.00 steps/s; GPU busy 60.0 % (60.0 % to 60.0 %), by 20 windows in 9.010 s; the others wait for "
        "rank 1; idle launch 30.0 %, python 10.0 %; module attention 30.0 %, mlp 20.0 %"
    )
    assert found.self_check() is None


def test_a_process_that_starts_again_goes_on_in_its_rank(job: Path) -> None:
    watch = Watch(job, 1_000 * SECOND)
    watch.now(12 * SECOND)
    folder = job / "node-rank0-300"
    folder.mkdir()
    append(folder, [window(0, 12, 0, pid=300, first_step=100)])
    found = watch.now(13 * SECOND)
    assert found.windows == 21
    assert found.ranks.select("rank", "pid", "step").rows() == [(0, 100, 1000), (0, 300, 100), (1, 101, 1050)]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


def test_the_command_shows_it_once(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", str(job), "--once", "--since", "1000"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())  # the terminal of the tests has any width
    assert said.startswith("2 ranks, 100.00 steps/s; GPU busy 60.0 % (60.0 % to 60.0 %), by 20 windows in 9.010 s ")
    assert "attention" in said
    with pytest.raises(SystemExit):
        main(["top", str(job), "--once", "--format", "json", "--since", "1000"])
    document = json.loads(capsys.readouterr().out)
    assert (document["windows"], document["late_ranks"], document["damaged_lines"]) == (20, [1], 0)
    with pytest.raises(SystemExit):
        main(["steps", *map(str, sorted(job.glob("*/summaries.jsonl"))), "--format", "json"])
    periods = json.loads(capsys.readouterr().out)["periods"]  # of 10 s: window 10 ended as the second one began
    assert [(p["rank"], p["begin_unix_ns"], p["steps"], p["windows"]) for p in periods] == [
        (0, 0, 900, 9), (0, 10 * SECOND, 100, 1), (1, 0, 900, 9), (1, 10 * SECOND, 200, 1),
    ]  # fmt: skip
    assert (periods[0]["median_ns"], periods[0]["max_ns"], periods[0]["longest"]) == (9 * MS, 20 * MS, 100)
    assert (periods[0]["busy_share"], periods[0]["idle_cause"]) == (pytest.approx(0.6), "launch")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--format", "json"), "needs --once"),
        (("--once", "--prometheus", "0"), "leave out --once"),
        (("--once", "--otlp", "http://127.0.0.1:4318"), "leave out --once"),
        (("--otlp", "127.0.0.1:4318"), "names a host"),
        (("--once",), "there is no recording yet"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    error = run(tmp_path, *arguments).exception
    assert isinstance(error, thence.ThenceError)
    assert expected in str(error)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "recording.json").write_text("{}")
    assert "without --always" in str(run(tmp_path, "--once").exception)
    summaries = tmp_path / "a" / "summaries.jsonl"
    summaries.write_text("nothing")
    with pytest.raises(SystemExit) as ended:
        main(["steps", str(summaries)])
    assert ended.value.code == 2


def families(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by metric and values of labels, as the parser of Prometheus's own client reads them."""
    return {
        sample.name: {
            tuple(other.labels.values()): other.value for other in family.samples if other.name == sample.name
        }
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_the_metrics(job: Path) -> None:
    metrics = Metrics(job)
    metrics.look()
    metrics.look()  # adds nothing
    found = families(metrics.text())
    assert set(found) == set(METRICS)
    assert found["thence_steps_total"] == {("0",): 1000, ("1",): 1100}
    assert found["thence_window_seconds_total"] == pytest.approx({("0",): 0.1, ("1",): 0.1})
    assert found["thence_window_busy_seconds_total"] == pytest.approx({("0",): 0.06, ("1",): 0.06})
    assert found["thence_window_idle_seconds_total"]["0", "launch"] == pytest.approx(0.03)
    assert found["thence_window_module_seconds_total"]["attention",] == pytest.approx(0.06)
    assert found["thence_recorder_dropped_records_total"] == {("0",): 0, ("1",): 3}
    assert found["thence_step_median_seconds"]["0",] == pytest.approx(0.009)
    append(job / "node-rank0-100", [window(0, 20, 0)])
    metrics.look()
    assert families(metrics.text())["thence_steps_total"]["0",] == 1100
    kinds = {family.name: family.type for family in text_string_to_metric_families(metrics.text())}
    assert {name.removesuffix("_total"): metric.kind for name, metric in METRICS.items()} == kinds


def test_other_verbs_say_which_ones_read_summaries(job: Path) -> None:
    for named in (job, job / "node-rank0-100" / "summaries.jsonl"):
        with pytest.raises(thence.InputError, match="thence top DIR --once shows the latest"):
            thence.open(str(named))


def otlp_values(request: ExportMetricsServiceRequest) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by the name that a collector gives Prometheus: with unit and type."""
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    found = {}
    for metric in scope.metrics:
        assert metric.WhichOneof("data") in ("sum", "gauge")
        points = metric.sum.data_points or metric.gauge.data_points
        unit = {"s": "_seconds", "1": "_ratio"}.get(metric.unit, "")
        name = metric.name.replace(".", "_") + unit + ("_total" if metric.sum.data_points else "")
        found[name] = {tuple(a.value.string_value for a in point.attributes): point.as_double for point in points}
        if metric.sum.data_points:
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == 2  # cumulative
            assert {point.start_time_unix_nano for point in points} == {SECOND - 10 * MS}
    return found


def test_a_collector_of_opentelemetry_gets_the_same_metrics(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, self.headers["Content-Type"], self.headers["api-key"], content))
            self.send_response(503 if len(requests) > 1 else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b")
    collector = HTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=collector.serve_forever, daemon=True).start()
    append(job / "node-rank1-101", [window(1, 12, 0, modules={'a\x1b"': MS})])
    metrics = Metrics(job)
    metrics.look()
    exporter = Exporter(metrics, f"http://127.0.0.1:{collector.server_port}/")
    try:
        assert exporter.send(12 * SECOND) is None
        assert "503" in str(exporter.send(13 * SECOND))
    finally:
        collector.shutdown()
        collector.server_close()
    assert "does not answer" in str(exporter.send(14 * SECOND))
    path, kind, key, content = requests[0]
    assert (path, kind, key) == ("/v1/metrics", "application/json", "a b")
    request = json_format.Parse(content, ExportMetricsServiceRequest())
    assert otlp_values(request) == families(metrics.text())
    for url in ("127.0.0.1:4318", "file:///etc/passwd", "http:///v1"):
        with pytest.raises(thence.UsageError, match="names a host"):
            Exporter(metrics, url)


def test_labels_are_bounded_and_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported, "MAX_MODULES", 3)
    names = ['a"}\nb 1', "b\\", *(f"module{number}" for number in range(40))]
    append(tmp_path, [window(0, number, 0, modules={name: MS}) for number, name in enumerate(names, 1)])
    metrics = Metrics(tmp_path)
    metrics.look()
    found = families(metrics.text())["thence_window_module_seconds_total"]
    assert set(found) == {('a"}?b 1',), ("b\\",), ("module0",), ("(others)",), ("(none)",)}
    assert sum(found.values()) == pytest.approx(42 * 2 * 1e-3)


def test_the_port_serves_metrics_and_nothing_else(job: Path) -> None:
    metrics = Metrics(job)
    metrics.look()
    serving = server(metrics, 0)
    try:
        address = f"http://127.0.0.1:{serving.server_port}"
        with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert families(answer.read().decode()).keys() == METRICS.keys()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/etc/passwd", timeout=10)
        assert serving.server_address[0] == "127.0.0.1"
        with pytest.raises(thence.UsageError, match="cannot be used"):
            server(metrics, serving.server_port)
    finally:
        serving.shutdown()
        serving.server_close()


def test_whoever_knows_the_token_may_ask_for_a_window(tmp_path: Path) -> None:
    asked = tmp_path / "record-now"
    for token, given, answer in (
        ("secret", "Bearer secret", 202),
        ("secret", "Bearer secre", 403),
        ("secret", None, 403),
        ("s\u00e9cret", "Bearer s\u00e9cret", 403),  # headers are not UTF-8
        (None, "Bearer ", 403),
        (None, "Bearer None", 403),
    ):
        serving = server(Metrics(tmp_path), 0, token)
        try:
            connection = http.client.HTTPConnection("127.0.0.1", serving.server_port, timeout=10)
            headers = {} if given is None else {"Authorization": given}
            for path, expected in (("/record", answer), ("/metrics", 404)):
                connection.request("POST", path, headers=headers)
                response = connection.getresponse()
                response.read()
                assert response.status == expected, (token, given, path)
            connection.close()
        finally:
            serving.shutdown()
            serving.server_close()
        assert asked.exists() == (answer == 202)
        asked.unlink(missing_ok=True)


def test_the_dashboard_asks_for_metrics_and_labels_that_are_exported() -> None:
    board = json.loads(GRAFANA.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"\bthence_\w+", query)}
    assert asked <= set(METRICS)
    assert asked >= set(METRICS) - {"thence_windows_total", "thence_step_seconds_total"}
    labels = {label for metric in METRICS.values() for label in metric.labels}
    used = {name for query in queries for name in re.findall(r"by \(([\w, ]+)\)", query)}
    legends = [target["legendFormat"] for panel in board["panels"] for target in panel["targets"]]
    assert {label for names in used for label in names.split(", ")} <= labels
    assert {label for legend in legends for label in re.findall(r"\{\{(\w+)\}\}", legend)} <= labels
