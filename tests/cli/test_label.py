"""``thence label``, and the Kineto file that it writes."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest
from polars.testing import assert_frame_equal

import thence
from graph_data import truth_document
from helpers import DATA, TORCH, recording, run_thence, unzipped

if TYPE_CHECKING:
    from pathlib import Path

WITH_IDS, WITHOUT_IDS = recording("torch-2.12_graph_replay_rank0"), recording("graph_replay_rank0")
EAGER = TORCH / "graphs" / "torch-2.11_graph_eager_rank0.json.gz"
ADDED = {"label", "phase", "label_rule", "label_confidence"}


def pid_of(trace: Path) -> int:
    events = json.loads(unzipped(trace))["traceEvents"]
    (pid,) = {e["pid"] for e in events if e.get("cat") == "cuda_runtime"}
    return int(pid)


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    truth = TORCH / "graphs" / "graph_truth_rank0.json"
    document = truth_document(truth, WITH_IDS, pid_of(WITHOUT_IDS))
    document["labels"][0]["metadata"] = {"Collective name": "allreduce", "Seq": 5, "bucket": "a"}
    (tmp_path / "saved").mkdir()
    path = tmp_path / "saved" / "labels.json"
    path.write_text(json.dumps(document))
    return path


def laid_out(trace: Path, folder: Path, how: str) -> Path:
    """The recording as other exporters lay it out."""
    document = json.loads(unzipped(trace), parse_float=str)
    path = folder / f"{how}.json"
    if how == "as recorded":
        path.write_bytes(unzipped(trace))
    elif how == "compact":
        document = json.loads(unzipped(trace))
        path.write_text(json.dumps(document, separators=(",", ":")))
    elif how == "events alone":
        path.write_text(json.dumps(json.loads(unzipped(trace))["traceEvents"]))
    return path


@pytest.mark.parametrize(
    ("how", "ending"), [("as recorded", ".json"), ("compact", ".json.gz"), ("events alone", ".json")]
)
def test_every_event_stays_as_it_was_but_for_the_labels(tmp_path: Path, labels: Path, how: str, ending: str) -> None:
    source, target = laid_out(WITHOUT_IDS, tmp_path, how), tmp_path / f"out{ending}"
    done = run_thence("label", source, "--labels", labels, "-o", target)
    assert done.returncode == 0, done.stderr
    content = gzip.decompress(target.read_bytes()) if ending.endswith("gz") else target.read_bytes()
    # Numbers as text: not a digit may change.
    before = json.loads(source.read_bytes(), parse_float=str)
    after = json.loads(content, parse_float=str)
    old = before if isinstance(before, list) else before["traceEvents"]
    if isinstance(before, dict):
        assert {k: v for k, v in after.items() if k != "traceEvents"} == {
            k: v for k, v in before.items() if k != "traceEvents"
        }
    labelled = 0
    assert len(after["traceEvents"]) == len(old)
    for was, now in zip(old, after["traceEvents"], strict=True):
        if "label_rule" in now.get("args", {}):
            labelled += 1
            arguments = now["args"]
            if arguments["label"] == "qkv_proj":  # the first label
                assert arguments.pop("annotations") == {"bucket": "a"}
                assert (arguments.pop("Collective name"), arguments.pop("Seq")) == ("allreduce", 5)
            assert arguments.keys() - was["args"].keys() == ADDED
            now["args"] = {k: v for k, v in arguments.items() if k in was["args"]}
        assert now == was
    assert labelled == 240


def test_the_file_reads_back_with_its_labels(tmp_path: Path, labels: Path) -> None:
    target = tmp_path / "out" / "labelled.json"
    target.parent.mkdir()
    done = run_thence("label", WITHOUT_IDS, "--labels", labels, "-o", target)
    assert done.returncode == 0, done.stderr
    expected = thence.open(WITHOUT_IDS).label(labels)
    again = thence.open(target)
    again.self_check()
    assert_frame_equal(again.tables.places, expected.tables.places, categorical_as_str=True)
    assert_frame_equal(again.tables.gpu, expected.tables.gpu, categorical_as_str=True)
    assert again.tables.collectives["sequence"].to_list() == [5] * 15
    # What was labelled can be labelled again.
    once_more = tmp_path / "out" / "again.json"
    assert run_thence("label", target, "--labels", labels, "-o", once_more).returncode == 0
    assert json.loads(once_more.read_bytes()) == json.loads(target.read_bytes())


def test_writing_from_the_tables_reads_back_too(tmp_path: Path, labels: Path) -> None:
    trace = thence.open(WITHOUT_IDS).label(labels)
    (tmp_path / "out").mkdir()
    trace.convert(tmp_path / "out" / "t.json")
    again = thence.open(tmp_path / "out" / "t.json")
    assert_frame_equal(again.tables.places, trace.tables.places, categorical_as_str=True)


def test_the_summary_says_streams_before_and_lanes_after(labels: Path) -> None:
    done = run_thence("label", WITHOUT_IDS, "--labels", labels, "--format", "json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["graphed"] == summary["labelled"] == 240
    assert summary["coverage"] == 1
    assert summary["rules"] == {"graph_alignment": 240}
    assert summary["confidence_min"] == 1
    streams = {row["stream"]: row["count"] for row in summary["streams"]}
    assert streams == {"7": 225, "143": 5, "144": 5, "145": 5}
    lanes = {row["lane"]: row["count"] for row in summary["lanes"]}
    assert lanes == {"attention": 120, "mlp": 75, "out_proj": 15, "side_norm": 15, "qkv_proj": 15}
    kernels = [e for e in json.loads(unzipped(WITHOUT_IDS))["traceEvents"] if e.get("cat") == "kernel"]
    assert summary["graphed_ns"] == round(sum(e["dur"] for e in kernels) * 1000)
    shown = run_thence("label", WITHOUT_IDS, "--labels", labels).stdout.decode()
    assert "240 of 240 activities in CUDA graphs have a label: 100.0 % of their time" in shown
    assert "240 by alignment to the captured CUDA graph" in shown


def test_eager_traces_and_perfetto(tmp_path: Path) -> None:
    target = tmp_path / "out.pftrace"
    done = run_thence("label", WITHOUT_IDS, "--eager", EAGER, "-o", target, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rules"] == {"eager_alignment": 240}
    content = target.read_bytes()
    assert b"side_norm" in content
    assert b"aten::native_layer_norm" in content


def test_edges_are_shown_on_request(labels: Path) -> None:
    truth = json.loads((TORCH / "graphs" / "graph_truth_rank0.json").read_text())
    edges = sorted((a & 0xFFFFFFFF, b & 0xFFFFFFFF) for a, b in truth["edges"])
    of_node = {node["id"] & 0xFFFFFFFF: node["label"] for node in truth["nodes"]}
    base = ["label", WITHOUT_IDS, "--labels", labels]
    shown = json.loads(run_thence(*base, "--edges", "--format", "json").stdout)["edges"]
    assert [(edge["node"], edge["next_node"]) for edge in shown] == edges
    for edge in shown:
        assert (edge["label"], edge["next_label"]) == (of_node[edge["node"]], of_node[edge["next_node"]])
    assert "edges" not in json.loads(run_thence(*base, "--format", "json").stdout)
    lines = run_thence(*base, "--edges").stdout.decode()
    assert "graph 1: 0 " in lines
    refused = run_thence("label", WITHOUT_IDS, "--eager", EAGER, "--edges")
    assert refused.returncode == 2
    assert b"the labels have no edges of CUDA graphs" in refused.stderr


def test_the_page_of_a_graph_is_written_and_summed_up(tmp_path: Path, labels: Path) -> None:
    page = tmp_path / "graph.html"
    base = ["label", WITHOUT_IDS, "--labels", labels, "--graph", page]
    done = run_thence(*base, "--format", "json")
    assert done.returncode == 0, done.stderr
    graph = json.loads(done.stdout)["graph"]
    assert (graph["graph"], graph["replays"], len(graph["nodes"]), len(graph["edges"])) == (1, 5, 48, 52)
    assert graph["path_ns"] < graph["replay_ns"]
    text = page.read_text()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert run_thence(*base).returncode == 2  # it is there already
    shown = run_thence(*base, "--force", "--graph-id", "1").stdout.decode()
    assert "critical path: " in shown
    assert f"wrote {page}" in shown


def test_a_page_of_a_graph_that_cannot_be_written_is_refused_first(tmp_path: Path, labels: Path) -> None:
    base = ["label", WITHOUT_IDS, "--labels", labels]
    (tmp_path / "mine.html").write_text("mine")
    target = tmp_path / "out.html"
    for arguments, message in (
        (["--graph", tmp_path / "mine.html"], b"--force replaces it"),
        (["--graph", tmp_path / "x" / "g.html"], b"there is no folder"),
        (["--graph", tmp_path / "g.json"], b"must end in .html"),
        (["--graph-id", "1"], b"--graph OUT.html, which is missing"),
        (["--graph", target, "--graph-id", "77"], b"no graph with known edges has the id 77"),
    ):
        done = run_thence(*base, *arguments)
        assert done.returncode == 2
        assert message in done.stderr
    assert (tmp_path / "mine.html").read_text() == "mine"
    assert not target.exists()
    unknown = run_thence("label", WITH_IDS, "--graph", target)
    assert unknown.returncode == 2
    assert b"the edges of its CUDA graphs are unknown" in unknown.stderr


def test_an_eager_run_without_labels_gives_operators(tmp_path: Path) -> None:
    document = json.loads(unzipped(EAGER))
    events = [e for e in document["traceEvents"] if "user_annotation" not in e.get("cat", "")]
    (tmp_path / "eager.json").write_text(json.dumps({**document, "traceEvents": events}))
    base = ["label", WITHOUT_IDS, "--eager", tmp_path / "eager.json"]
    shown = json.loads(run_thence(*base, "--format", "json").stdout)
    assert (shown["labelled"], shown["places"]["op"]) == (0, 240)
    assert shown["rules"] == {"eager_alignment": 240}
    target = tmp_path / "out.json"
    said = " ".join(run_thence(*base, "-o", target).stdout.decode().split())
    assert "240 have an operator" in said
    assert f"next thence report {target} --by op" in said
    again = thence.open(target).tables.places
    rules = {kind: again[f"{kind}_rule"].unique().to_list() for kind in ("op", "label", "module", "source")}
    assert rules.pop("op") == ["eager_alignment"]
    assert set(map(tuple, rules.values())) == {("graph_no_place",)}


def test_labels_beside_the_trace_need_no_option(tmp_path: Path, labels: Path) -> None:
    (tmp_path / "trace.json.gz").write_bytes(WITHOUT_IDS.read_bytes())
    refused = run_thence("label", tmp_path / "trace.json.gz")
    assert refused.returncode == 2
    assert b"there are no matching labels next to it" in refused.stderr
    assert b"op_name" not in refused.stderr
    assert b"thence report --by op_name shows" in run_thence("label", DATA / "jax" / "recording").stderr
    (tmp_path / "labels.json").write_bytes(labels.read_bytes())
    done = run_thence("label", tmp_path / "trace.json.gz", "--format", "json")
    assert json.loads(done.stdout)["labelled"] == 240


def wrong(labels: Path, target: Path) -> dict[str, tuple[list[Any], bytes]]:
    other = json.loads(labels.read_text())
    other["process"]["pid"] = 1
    foreign = labels.with_name("foreign_labels.json")
    foreign.write_text(json.dumps(other))
    cut = labels.with_name("cut.json")
    cut.write_bytes(labels.read_bytes()[:300])
    there = target.with_name("there.json")
    there.write_text("mine")
    base = ["label", WITHOUT_IDS, "-o", target]
    return {
        "foreign": ([*base, "--labels", foreign], b"process 1 captured these graphs"),
        "cut": ([*base, "--labels", cut], b"is cut or not valid JSON"),
        "missing": ([*base, "--labels", target], b"no such file or directory"),
        "both": ([*base, "--labels", labels, "--eager", EAGER], b"give either --labels or --eager"),
        "ending": ([*base[:3], target.with_suffix(".txt"), "--labels", labels], b"must end in"),
        "there": ([*base[:3], there, "--labels", labels], b"--force replaces it"),
        "no folder": ([*base[:3], target / "x" / "y.json", "--labels", labels], b"there is no folder"),
        "no graphs": (["label", EAGER, "--labels", labels], b"nothing in it ran in a CUDA graph"),
        "other run": (
            ["label", WITHOUT_IDS, "--eager", recording("torch_eager_rank0"), "-o", target],
            b"has no kernel like activity 0",
        ),
    }


@pytest.mark.parametrize(
    "case", ["foreign", "cut", "missing", "both", "ending", "there", "no folder", "no graphs", "other run"]
)
def test_what_cannot_be_done_says_why_and_writes_nothing(tmp_path: Path, labels: Path, case: str) -> None:
    target = tmp_path / "out.json"
    arguments, message = wrong(labels, target)[case]
    done = run_thence(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert b"Traceback" not in done.stderr
    assert not target.exists()
    assert (tmp_path / "there.json").read_text() == "mine"


def test_force_replaces_the_output(tmp_path: Path, labels: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")
    assert run_thence("label", WITHOUT_IDS, "--labels", labels, "-o", target, "--force").returncode == 0
    assert json.loads(target.read_bytes())["traceEvents"]


def test_events_that_had_to_be_repaired_are_written_from_the_tables(tmp_path: Path, labels: Path) -> None:
    text = unzipped(WITHOUT_IDS)
    place = text.index(b'"name": "cudaStreamIsCapturing"')
    damaged = text[:place] + b'"name": "quo"te", "x": "cudaStreamIsCapturing"' + text[place + 31 :]
    source, target = tmp_path / "t.json", tmp_path / "out" / "o.json"
    target.parent.mkdir()
    source.write_bytes(damaged)
    done = run_thence("label", source, "--labels", labels, "-o", target)
    assert done.returncode == 0, done.stderr
    assert b"were not found again; the output holds what could be read" in done.stderr
    again = thence.open(target)
    assert again.tables.places["label"].null_count() == 0
    expected = thence.open(source)
    assert_frame_equal(again.tables.gpu, expected.tables.gpu, categorical_as_str=True)
    assert_frame_equal(again.tables.host, expected.tables.host, categorical_as_str=True)


def test_labels_beside_that_do_not_fit_are_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "trace_rank0.json.gz").write_bytes(recording("torch-2.12_graph_replay_rank0").read_bytes())
    (tmp_path / "kernel_annotations_rank0_a.pkl").write_bytes(b"no annotations")
    done = run_thence("label", str(tmp_path / "trace_rank0.json.gz"))
    assert done.returncode == 2
    message = done.stderr.decode()
    assert "or an eager run with --eager; " in message
    assert "kernel_annotations_rank0_a.pkl: is not JSON" in message
    assert "\ufffd" not in message


def test_two_files_say_which_of_them_labelled_what(tmp_path: Path) -> None:
    nodes = json.loads((TORCH / "graphs" / "graph_truth_rank0.json").read_text())["nodes"]
    for part, name in ((nodes[:30], "a"), (nodes[30:], "b")):
        content = {str(2 << 32 | node["id"] & 0xFFFFFFFF): [{"name": node["label"]}] for node in part}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    files = ("--labels", str(tmp_path / "a.json"), "--labels", str(tmp_path / "b.json"))
    done = run_thence("label", str(recording("torch-2.12_graph_replay_rank0")), *files)
    assert done.returncode == 0
    said = " ".join(done.stdout.decode().split())
    assert "labels of CUDA graphs from a.json (150 activities), b.json (90 activities): 240 of 240" in said
