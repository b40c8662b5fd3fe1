"""``thence check`` and what other verbs say of a trace that is not sound."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from capture_data import Recorder, layers
from faults import KinetoFile, drop_every_second_graph, drop_every_tenth_kernel
from helpers import DATA, FSDP, kernel, launch, output, recording, shared, written
from thence.analysis.soundness.findings import MISSING_WORK, RULES

if TYPE_CHECKING:
    from pathlib import Path

EAGER = recording("torch_eager_rank0")
REPLAY = recording("graphs/block_replay")
FINDING = {"code", "rank", "device", "count", "span_ns", "span_share", "text"}


def checked(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict[str, Any]:
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


def test_a_sound_trace_exits_with_0_and_says_what_was_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    found = checked(capsys, EAGER)
    assert found["sound"] is True
    assert found["findings"] == []
    assert {entry["code"] for entry in found["not_checked"]} == {"windows_apart"}
    text = output(capsys, "check", EAGER)[0]
    assert text.startswith("sound: nothing was found that makes its figures wrong\n")
    assert "windows_apart: the trace has device work of only one rank" in text


def test_what_cannot_be_checked_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "nsight" / "torch_graph_cuda_gpu_trace.csv.gz"
    found = checked(capsys, path)
    assert found["sound"] is True
    assert {"launch_without_work", "work_without_launch"} <= {entry["code"] for entry in found["not_checked"]}
    assert set(found["not_checked"][0]) == {"code", "text"}


def test_the_verdict_says_what_cannot_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    """The CSV of a graph trace has no calls, no overhead and one process, of which nothing is left to know."""
    path = DATA / "nsight" / "torch_graph_cuda_gpu_trace.csv.gz"
    text = " ".join(output(capsys, "check", path)[0].split())
    assert text.startswith(
        "nothing wrong was found, but this trace cannot show whether device work is missing, which launch each kernel"
        " is from, whether the clocks of host and device agree and how much idle time the profiler caused "
    )
    screen = output(capsys, "report", path)[0]
    assert "but the trace cannot show whether device work is missing" in screen
    assert "rules found nothing wrong" not in screen


def test_a_trace_of_a_capture_is_named_as_such(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As inference servers record: launches between the begin and the end of a capture, and no launch of a graph."""
    recorder = Recorder(amd=False)
    recorder.capture(layers(2))
    path = written(tmp_path / "capture.json", recorder.events)
    launches = sum(e["name"] == "cudaLaunchKernel" for e in recorder.events)
    (finding,) = checked(capsys, path, code=1)["findings"]
    assert (finding["code"], finding["count"]) == ("no_device_work", launches)
    assert f"the trace of a capture, whose {launches} launches were captured" in finding["text"]
    for verb in ("report", "idle", "streams", "ranks", "whatif"):
        message = output(capsys, verb, path, code=2)[1]
        assert f"the trace of a capture: its {launches} launches were captured" in message
        assert "thence label REPLAY --eager CAPTURE" in message
    recorder.replay(layers(2))
    replayed = written(tmp_path / "replayed.json", recorder.events)
    assert checked(capsys, replayed)["sound"] is True


def test_launches_outside_of_captures_make_no_trace_of_a_capture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recorder = Recorder(amd=False)
    recorder.capture(layers(2))
    path = written(tmp_path / "lost.json", [*recorder.events, launch(999, 5000)])
    message = output(capsys, "report", path, code=2)[1]
    assert "of a capture" not in message
    assert "ProfilerActivity.CUDA" in message


def test_no_message_denies_launches_that_are_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """The xplane file without command buffers has 1,000 launches, each of which is named by its kernel."""
    tables = shared(DATA / "jax" / "jax_single_nocb.xplane.pb.gz").recorded
    calls = tables.host.filter(pl.col("correlation") > 0, pl.col("category") == "driver")
    assert calls.height == 1000
    path = DATA / "jax" / "jax_single_nocb.xplane.pb.gz"
    assert "no launches are recorded" not in output(capsys, "check", path)[0]


def test_launches_whose_ids_fit_nothing_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    events = [x for i in range(1, 6) for x in (launch(i, 10 * i), kernel(1000 + i, 10 * i + 4))]
    text = output(capsys, "check", written(tmp_path / "trace.json", events))[0]
    assert "none of the 5 recorded launches has the id of any device work" in text
    assert "no launches are recorded" not in text


def test_lost_graphs_are_found_and_idle_is_a_bound(capsys: pytest.CaptureFixture[str], without_graphs: Path) -> None:
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
    assert "this trace is not sound: rank 0: 2 of 5 launches of CUDA graphs" in report.replace("\n", " ")
    assert "at most" not in output(capsys, "report", REPLAY)[0]
    document = json.loads(output(capsys, "report", without_graphs, "--format", "json")[0])
    assert document["soundness"] == found["findings"]
    assert document["idle_is"] == "at most"


@pytest.mark.parametrize(
    ("verb", "options"), [("streams", ()), ("report", ("--by", "stream"))], ids=["streams", "report"]
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
    assert re.search(r'>Idle(</\w+>)+<p class="value">at most ', text)
    assert text.index(sentence) < text.index('<section id="timeline"')


def test_findings_as_csv(capsys: pytest.CaptureFixture[str], without_graphs: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(output(capsys, "check", without_graphs, "--format", "csv", code=1)[0])))
    assert rows[0]["verdict"] == "unsound"
    assert rows[0]["count"] == "2"


def test_top_limits_the_findings_and_says_what_is_hidden(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = KinetoFile.of(EAGER)
    trace.drop(trace.of_category("kernel", "gpu_memcpy", "gpu_memset"))
    path = trace.written(tmp_path / "trace.json")
    text = output(capsys, "check", path, "--top", "1", code=1)[0]
    assert "no_device_work" not in text
    assert "... 1 more; --top 2 shows all" in text


def test_what_cannot_be_read_exits_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
