"""What PyTorch itself writes: annotated traces, and ranges among operators. Needs torch 2.12 or newer."""

from __future__ import annotations

import gzip
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import TORCH, recording

torch = pytest.importorskip("torch", reason="torch is not installed")

if TYPE_CHECKING:
    from pathlib import Path

REPLAY = recording("torch-2.12_graph_replay_rank0")
LANES = {"attention": 62, "mlp": 61}


def annotations() -> dict[int, list[dict[str, Any]]]:
    nodes = json.loads((TORCH / "graphs" / "graph_truth_rank0.json").read_text())["nodes"]
    return {
        2 << 32 | node["id"] & 0xFFFFFFFF: [
            {"name": node["label"], "layer": i // 16}
            | ({"stream": LANES[node["label"]]} if node["label"] in LANES else {})
        ]
        for i, node in enumerate(nodes)
    }


def counts(path: Path) -> tuple[dict[str, int], dict[str | None, int]]:
    places = thence.open(path).tables.places
    label, lane = (dict(places[name].cast(str).value_counts().rows()) for name in ("label", "lane"))
    return label, lane


RIGHT = (
    {"attention": 120, "mlp": 75, "qkv_proj": 15, "out_proj": 15, "side_norm": 15},
    {"62": 120, "61": 75, None: 45},
)


def test_a_trace_annotated_by_pytorchs_tool(tmp_path: Path) -> None:
    """The tool of 2.12 to 2.14, and beside it the pickle that it reads."""
    tool = pytest.importorskip("torch.cuda._annotate_cuda_graph_trace")
    trace = tool.load_trace(REPLAY)
    assert tool.annotate_trace(trace, annotations()) == 240
    (tmp_path / "out").mkdir()
    tool.save_trace(trace, tmp_path / "out" / "annotated.json.gz")
    assert counts(tmp_path / "out" / "annotated.json.gz") == RIGHT
    (tmp_path / "raw.json.gz").write_bytes(REPLAY.read_bytes())
    with (tmp_path / "kernel_annotations_rank0_fwd_bwd.pkl").open("wb") as file:
        pickle.dump(annotations(), file)
    assert counts(tmp_path / "raw.json.gz") == RIGHT


class Activity:
    """An event of the recording as torch's profiler hands it to its exporter."""

    def __init__(self, event: dict[str, Any], base_ns: int) -> None:
        self.event, self.base_ns = event, base_ns
        self.args = {k: v for k, v in event.get("args", {}).items() if k != "External id"}

    def __getattr__(self, name: str) -> Any:
        values = {
            "device_id": self.event["pid"],
            "resource_id": self.event["tid"],
            "timestamp": self.base_ns + round(self.event["ts"] * 1000),
            "duration": round(self.event.get("dur", 0) * 1000),
            "type": self.event["cat"],
            "name": self.event["name"],
            "metadata_json": json.dumps(self.args)[1:-1],
            "linked_activity": None,
        }
        return lambda: values.get(name, 0)


@pytest.mark.parametrize("lanes", ["none", "all"])
def test_a_trace_annotated_by_pytorchs_exporter(lanes: str, tmp_path: Path) -> None:
    """The exporter of 2.15 and newer."""
    exporter = pytest.importorskip("torch.profiler._chrome_trace_export")
    if not hasattr(exporter, "_annotation_args"):
        pytest.skip(f"torch {torch.__version__} annotates no traces as it writes them")
    document = json.loads(gzip.decompress(REPLAY.read_bytes()))
    base = document["baseTimeNanoseconds"]
    events = [e for e in document["traceEvents"] if e.get("ph") == "X" and e.get("cat") != "Trace"]
    results = type("Results", (), {"trace_activities": lambda _: [Activity(e, base) for e in events]})()
    path = tmp_path / "trace.json"
    exporter.export_chrome_trace(results, str(path), annotations=annotations(), graph_lanes=lanes)
    assert counts(path) == RIGHT
    assert set(thence.open(path).tables.gpu["stream"]) == {7, 143, 144, 145}


def test_ranges_of_record_function_fast_are_labels_and_operators_stay(tmp_path: Path) -> None:
    fast = torch._C._profiler._RecordFunctionFast
    x = torch.randn(4, 8, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with fast("attention"):
            y = torch.nn.functional.softmax(x @ x.T, -1)
        with fast("mlp", [x]):
            y = torch.nn.functional.gelu(y)
        with torch.profiler.record_function("loss"):
            y.sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    host = thence.open(tmp_path / "trace.json").tables.host
    named = {category: set(host["name"].cast(str).filter(host["category"] == category)) for category in ("range", "op")}
    assert named["range"] == {"attention", "mlp", "loss"}
    assert {"aten::softmax", "aten::gelu", "GeluBackward0"} <= named["op"]
