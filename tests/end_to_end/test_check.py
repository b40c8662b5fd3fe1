"""``thence check`` and what other verbs say of a trace that is not sound."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from faults import KinetoFile, drop_every_second_graph, drop_every_tenth_kernel
from helpers import DATA, FSDP, output, recording
from thence.analysis.soundness.findings import MISSING_WORK, RULES

if TYPE_CHECKING:
    from pathlib import Path

EAGER = recording("torch_eager_rank0")
REPLAY = recording("graphs/block_replay")
FINDING = {"code", "rank", "device", "count", "span_ns", "span_share", "text"}


def checked(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0
) -> dict[str, Any]:
    return json.loads(output(capsys, "check", *arguments, "--format", "json", code=code)[0])


@pytest.fixture
def without_graphs(tmp_path: Path) -> Path:
    """Kernels of every second launch of a CUDA graph dropped."""
    trace = KinetoFile.of(REPLAY)
    drop_every_second_graph(trace)
    return trace.written(tmp_path / "lost.json")


def busy_share(trace: KinetoFile) -> float:
    """By hand: the union of all device work, as part of the span."""
    work = trace.of_category("kernel", "gpu_memcpy", "gpu_memset")
    busy, until = 0.0, work[0]["ts"]
    for event in work:
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(until, event["ts"]))
        until = max(until, end)
    return busy / trace.span_us


def test_a_sound_trace_exits_with_0_and_says_what_was_not_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = checked(capsys, EAGER)
    assert found["sound"] is True
    assert found["findings"] == []
    assert {entry["code"] for entry in found["not_checked"]} == {"windows_apart"}
    text = output(capsys, "check", EAGER)[0]
    assert text.startswith(f"sound: {len(RULES)} rules checked, nothing found")
    assert "windows_apart: the trace has device work of only one rank" in text


def test_what_cannot_be_checked_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "nsight" / "torch_graph_cuda_gpu_trace.csv.gz"
    found = checked(capsys, path)
    assert found["sound"] is True
    assert {"launch_without_work", "work_without_launch"} <= {
        entry["code"] for entry in found["not_checked"]
    }


def test_lost_graphs_are_found_and_idle_is_a_bound(
    capsys: pytest.CaptureFixture[str], without_graphs: Path
) -> None:
    whole, lost = KinetoFile.of(REPLAY), KinetoFile(json.loads(without_graphs.read_text()))
    assert busy_share(whole) > 0.9
    assert busy_share(lost) < 0.6
    found = checked(capsys, without_graphs, code=1)
    assert found["sound"] is False
    (finding,) = found["findings"]
    assert set(finding) == FINDING
    assert (finding["code"], finding["rank"], finding["device"], finding["count"]) == (
        "launch_without_work", 0, 0, 2,
    )  # fmt: skip
    report = output(capsys, "report", without_graphs)[0]
    assert "idle at most" in report
    assert "attributed GPU time of the work that was recorded" in report
    assert "this trace is not sound: rank 0: 2 of 5 launches of CUDA graphs" in report.replace(
        "\n", " "
    )
    assert "at most" not in output(capsys, "report", REPLAY)[0]
    document = json.loads(output(capsys, "report", without_graphs, "--format", "json")[0])
    assert document["soundness"] == found["findings"]
    assert document["idle_is"] == "at most"


@pytest.mark.parametrize(
    ("verb", "options"),
    [("streams", ()), ("report", ("--by", "stream"))],
    ids=["streams", "report"],
)
def test_json_holds_the_findings(
    capsys: pytest.CaptureFixture[str], without_graphs: Path, verb: str, options: tuple[str, ...]
) -> None:
    document = json.loads(output(capsys, verb, without_graphs, *options, "--format", "json")[0])
    assert [finding["code"] for finding in document["soundness"]] == ["launch_without_work"]
    sound = json.loads(output(capsys, verb, REPLAY, *options, "--format", "json")[0])
    assert sound["soundness"] == []


def test_collectives_say_it_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = KinetoFile.of(FSDP[0])
    drop_every_tenth_kernel(trace)
    path = trace.written(tmp_path / "rank0.json")
    document = json.loads(output(capsys, "collectives", path, "--format", "json")[0])
    assert document["warnings"][0].startswith("this trace is not sound: ")
    assert [finding["code"] for finding in document["soundness"]] == ["launch_without_work"]
    errors = output(capsys, "collectives", path, "--format", "csv")[1]
    assert errors.startswith("this trace is not sound: ")


def test_sql_flame_and_the_page_say_it(
    capsys: pytest.CaptureFixture[str], without_graphs: Path, tmp_path: Path
) -> None:
    sentence = "this trace is not sound: rank 0: 2 of 5 launches of CUDA graphs"
    assert sentence in output(capsys, "sql", without_graphs, "select count(*) from gpu")[1]
    assert sentence in output(capsys, "flame", without_graphs, "-o", "-")[1]
    page = tmp_path / "report.html"
    output(capsys, "report", without_graphs, "-o", page)
    text = page.read_text()
    assert sentence in text
    assert "Idle at most" in text
    assert text.index(sentence) < text.index('<section id="timeline"')


def test_findings_as_csv(capsys: pytest.CaptureFixture[str], without_graphs: Path) -> None:
    rows = list(
        csv.DictReader(
            io.StringIO(output(capsys, "check", without_graphs, "--format", "csv", code=1)[0])
        )
    )
    assert rows[0]["verdict"] == "unsound"
    assert rows[0]["count"] == "2"


def test_top_limits_the_findings_and_says_what_is_hidden(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = KinetoFile.of(EAGER)
    trace.drop(trace.of_category("kernel", "gpu_memcpy", "gpu_memset"))
    path = trace.written(tmp_path / "trace.json")
    text = output(capsys, "check", path, "--top", "1", code=1)[0]
    assert "no_device_work" not in text
    assert "... 1 more; --top 2 shows all" in text


def test_what_cannot_be_read_exits_with_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("no trace")
    output(capsys, "check", path, code=2)
    output(capsys, "check", tmp_path / "nothing.json", code=2)


def test_a_trace_without_device_work_is_unsound_not_unreadable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = KinetoFile.of(EAGER)
    trace.drop(trace.of_category("kernel", "gpu_memcpy", "gpu_memset"))
    found = checked(capsys, trace.written(tmp_path / "trace.json"), code=1)
    assert "no_device_work" in {finding["code"] for finding in found["findings"]}


def test_every_rule_has_a_meaning() -> None:
    assert set(RULES) >= MISSING_WORK
    assert all(text and not text.endswith(".") for text in RULES.values())
