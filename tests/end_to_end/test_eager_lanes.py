"""What `thence.mark` says beside a name, of work launched eagerly: its lane and its metadata.

Recordings come from a libcupti that calls the recorder as the real one does (`recorder_programs`); graphs are
made by hand.
"""

from __future__ import annotations

import dataclasses
import json
import random
import textwrap
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from graph_data import Made, Ran, layers, replay, tables_of
from perfetto_reading import decoded
from recorder_programs import program
from thence.model.column_file import decode, encode
from thence.model.tables import HOST, Tables
from thence.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path

LAUNCH = """
correlations = iter(range(1, 1000))

def launch(name):
    now, correlation = time.time_ns(), next(correlations)
    fake.emit(
        fake.record("RUNTIME", start=now, end=now + 1, cbid=2, correlationId=correlation,
                    threadId=threading.get_native_id()),
        fake.record("CONCURRENT_KERNEL", start=now, end=now + 5, name=fake.text(name), deviceId=0,
                    streamId=7, correlationId=correlation),
    )
"""
DEVICE = "GPU 0"


def recorded(body: str, out: Path) -> thence.Trace:
    """The recording that a program makes, in a process of its own."""
    program(LAUNCH + textwrap.dedent(body), out)
    trace = thence.open(out)
    trace.self_check()
    return trace


def said(trace: thence.Trace, column: str) -> dict[str, Any]:
    """A column of the places by name of the kernel."""
    return dict(trace.activities.select(pl.col("name", column).cast(pl.String)).rows())


def metadata(trace: thence.Trace) -> dict[str, Any]:
    """Metadata of each kernel, read."""
    return {k: None if v is None else json.loads(v) for k, v in said(trace, "metadata").items()}


NESTED = """
    with thence.record(OUT, thence.RecordOptions(launches=True)):
        with thence.mark("outer", lane="comm", layer=3, dtype="bf16"):
            launch("in_outer")
            with thence.mark("inner", lane="side", layer=4):
                launch("in_inner")
                with thence.mark("silent"):
                    launch("in_silent")
            with thence.mark("told", head=[1, 2]):
                launch("in_told")
            launch("again_outer")
        with thence.mark("plain"):
            launch("in_plain")
        launch("outside")
"""


def test_the_innermost_mark_that_names_a_lane_wins(tmp_path: Path) -> None:
    trace = recorded(NESTED, tmp_path)
    assert said(trace, "lane") == {
        "in_outer": "comm",
        "in_inner": "side",
        "in_silent": "side",
        "in_told": "comm",
        "again_outer": "comm",
        "in_plain": None,
        "outside": None,
    }
    outer = {"layer": 3, "dtype": "bf16"}
    assert metadata(trace) == {
        "in_outer": outer,
        "in_inner": {"layer": 4, "dtype": "bf16"},
        "in_silent": {"layer": 4, "dtype": "bf16"},
        "in_told": {**outer, "head": [1, 2]},
        "again_outer": outer,
        "in_plain": None,
        "outside": None,
    }
    marks = trace.tables.host.filter(pl.col("lane").is_not_null())
    assert marks.select(pl.col("name", "lane").cast(pl.String)).rows() == [("outer", "comm"), ("inner", "side")]


def test_perfetto_shows_the_lanes_beside_the_stream(tmp_path: Path) -> None:
    trace = recorded(NESTED, tmp_path / "recording")
    trace.convert(tmp_path / "out.pftrace", lanes=("lane",))
    shown = decoded((tmp_path / "out.pftrace").read_bytes())
    assert [s.name for s in shown.on(f"{DEVICE} > lanes > comm")] == ["in_outer", "in_told", "again_outer"]
    assert [s.name for s in shown.on(f"{DEVICE} > lanes > side")] == ["in_inner", "in_silent"]
    titles = {shown.path(uuid) for uuid in shown.tracks}
    assert {t for t in titles if t.startswith(f"{DEVICE} > lanes > ")} == {
        f"{DEVICE} > lanes > comm",
        f"{DEVICE} > lanes > side",
    }
    stream = {s.name: s.arguments for s in shown.on(f"{DEVICE} > stream 7")}
    assert len(stream) == 7
    fields = {name: stream["in_inner"].get(name) for name in ("layer", "dtype")}
    assert fields == {"layer": 4, "dtype": "bf16"}
    types = {s.name: s.types for s in shown.on(f"{DEVICE} > stream 7")}
    assert types["in_inner"]["layer"] == "int_value"
    assert not {"layer", "dtype", "annotations"} & stream["in_plain"].keys()


def test_chrome_json_says_the_lane_and_the_facts(tmp_path: Path) -> None:
    trace = recorded(NESTED, tmp_path / "recording")
    trace.convert(tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    shown = {e["name"]: e["args"] for e in events if e.get("cat") == "kernel"}
    assert shown["in_inner"]["lane"] == "side"
    assert shown["in_inner"]["annotations"] == {"layer": 4, "dtype": "bf16"}
    assert {"lane", "annotations"}.isdisjoint(shown["in_plain"])
    again = thence.open(tmp_path / "out.json")
    assert again.recorded.graph_places.is_empty()  # nothing of it ran in a graph


def test_backward_work_is_on_the_lane_of_its_forward_op(tmp_path: Path) -> None:
    trace = recorded(
        """
        with thence.record(OUT, thence.RecordOptions(launches=True)) as recording:
            log = recording._log
            log.opened(41, "attention", "attention lane", {"layer": 1})
            launch("forward")
            log.closed(41)
            with thence.mark("training", lane="step lane"):
                log.backward_opened(41, "MulBackward0")
                launch("backward")
                with thence.mark("checkpoint", lane="recomputed"):
                    launch("inside_backward")
                with thence.mark("silent"):
                    launch("silent_backward")
                log.backward_closed()
                log.backward_opened(None, "AccumulateGrad")
                launch("accumulate")
                log.backward_closed()
        """,
        tmp_path,
    )
    assert said(trace, "lane") == {
        "forward": "attention lane",
        "backward": "attention lane",
        "inside_backward": "recomputed",
        "silent_backward": "attention lane",
        "accumulate": "step lane",
    }
    facts = metadata(trace)
    assert facts["forward"] == facts["backward"] == {"layer": 1}
    assert facts["accumulate"] is None


def test_a_lane_belongs_to_the_thread_that_opened_it(tmp_path: Path) -> None:
    trace = recorded(
        """
        with thence.record(OUT, thence.RecordOptions(launches=True)):
            with thence.mark("here", lane="mine"):
                thread = threading.Thread(target=launch, args=("elsewhere",))
                thread.start(); thread.join()
                launch("same_thread")
        """,
        tmp_path,
    )
    assert said(trace, "lane") == {"elsewhere": None, "same_thread": "mine"}


def test_what_describes_a_collective_is_said_once(tmp_path: Path) -> None:
    trace = recorded(
        """
        facts = {"Collective name": "allreduce", "In msg nelems": 10, "dtype": "Float", "Process Group Name": "5",
                 "bucket": "gradients"}
        with thence.record(OUT, thence.RecordOptions(launches=True)):
            with thence.mark("model", dtype="bf16"):
                with thence.mark("nccl:allreduce", "tp (process group 5)", **facts):
                    launch("nccl_kernel")
        """,
        tmp_path / "recording",
    )
    assert metadata(trace) == {"nccl_kernel": {"dtype": "bf16", "bucket": "gradients"}}
    [row] = trace.tables.collectives.to_dicts()
    assert (row["collective"], row["in_elements"], row["element_type"]) == ("allreduce", 10, "Float")
    # The lane that the mark named, as for the same collective in a graph, not one more for its group.
    assert trace.timeline(("lane",)).lanes["lane"].to_list() == ["tp (process group 5)"]


def test_metadata_that_are_no_object_do_no_harm(tmp_path: Path) -> None:
    recorded(
        """
        with thence.record(OUT, thence.RecordOptions(launches=True)):
            for i in range(8):
                with thence.mark("a", lane=f"lane {i}", n=i):
                    launch(f"k{i}")
            with thence.mark("a", loss=float("nan")):
                launch("nan")
        """,
        tmp_path,
    )
    instead: dict[str, str] = dict(
        zip(
            [f'{{"n": {i}}}' for i in range(7)],
            ["[1]", "{", "", "3", '{"a": "\\ud800"}', "[" * 100_000, '{"x": 1e999}'],
            strict=True,
        )
    )
    replaced = 0
    for path in tmp_path.glob("*/names-*.npz"):
        names = decode(path.read_bytes())
        replaced += sum(name in instead for name in names["name"])
        names["name"] = [instead.get(name, name) for name in names["name"]]
        path.write_bytes(encode(names))
    assert replaced == 7
    trace = thence.open(tmp_path)
    trace.self_check()
    expected = {f"k{i}": None for i in range(6)}
    assert metadata(trace) == {**expected, "k6": {"x": None}, "k7": {"n": 7}, "nan": {"loss": None}}
    assert said(trace, "lane")["k3"] == "lane 3"
    trace.convert(tmp_path / "out.json")
    trace.convert(tmp_path / "out.pftrace", lanes=("lane",))


# Beside CUDA graphs


def within_mark(tables: Tables, **columns: Any) -> Tables:
    """The tables with one range of the user's around everything that was launched."""
    end = int((tables.host["start"] + tables.host["duration"]).max())  # type: ignore[operator,arg-type]
    first = tables.host["start"][0] - 1
    around = HOST.frame(
        {"rank": [0], "process": [tables.host["process"][0]], "thread": [1], "category": ["range"],
         "name": ["around"], "start": [first], "duration": [end - first + 1],
         **{name: [value] for name, value in columns.items()}}
    )  # fmt: skip
    inside = tables.host.with_columns(parent=pl.lit(0, pl.Int32))
    return dataclasses.replace(tables, host=pl.concat([around, inside]))


@pytest.fixture
def labelled_replay(tmp_path: Path) -> tuple[Trace, list[str]]:
    """A replay inside a mark with a lane, its side work captured with another; and each row's label."""
    made = layers(1)
    document = made.document()
    for label in document["labels"]:
        if label["path"][-1] == "side":
            label |= {"lane": "side work", "metadata": {"layer": 1, "bias": True}}
    (tmp_path / "labels.json").write_text(json.dumps(document))
    tables, nodes = tables_of(made, [replay(made, 2, random.Random(0))], ids=True)
    tables = within_mark(tables, lane="decoding", metadata='{"layer":0,"token":9}')
    trace = Trace(tables).label(tmp_path / "labels.json")
    trace.self_check()
    return trace, [str(made.labels[n]) for n in nodes]


def test_a_captured_lane_is_inside_that_of_the_replay(labelled_replay: tuple[Trace, list[str]], tmp_path: Path) -> None:
    trace, labels = labelled_replay
    side = [label.endswith("side") for label in labels]
    assert any(side)
    assert not all(side)
    assert trace.tables.places["lane"].to_list() == ["side work" if s else "decoding" for s in side]
    texts = trace.tables.places["metadata"].cast(pl.String)
    inner, outer = {"layer": 1, "bias": True, "token": 9}, {"layer": 0, "token": 9}
    assert [json.loads(text) for text in texts] == [inner if s else outer for s in side]
    totals = dict(trace.graph_lanes().lanes.select("lane", "count").rows())
    assert totals == {"side work": sum(side), "decoding": len(side) - sum(side)}
    trace.convert(tmp_path / "out.pftrace", lanes=("lane",))
    shown = decoded((tmp_path / "out.pftrace").read_bytes())
    assert len(shown.on(f"{DEVICE} > lanes > side work")) == sum(side)
    assert len(shown.on(f"{DEVICE} > lanes > decoding")) == len(side) - sum(side)


def test_lanes_of_graphed_work_come_back_from_chrome_json(
    labelled_replay: tuple[Trace, list[str]], tmp_path: Path
) -> None:
    trace, _ = labelled_replay
    (tmp_path / "out").mkdir()  # where no labels lie beside
    trace.convert(tmp_path / "out" / "out.json")
    again = thence.open(tmp_path / "out" / "out.json")
    again.self_check()
    assert again.tables.places["lane"].to_list() == trace.tables.places["lane"].to_list()
    assert [json.loads(t) for t in again.tables.places["metadata"]] == [
        json.loads(t) for t in trace.tables.places["metadata"]
    ]


def test_lanes_of_an_eager_run_go_over_to_replays() -> None:
    made = Made()
    made.node("gemm", None)
    made.node("softmax", None, 0)
    run, _ = tables_of(made, [[Ran(0, 0, 500, 7)], [Ran(1, 10_000, 500, 7)]])
    run = dataclasses.replace(run, host=run.host.with_columns(name=pl.lit("cudaLaunchKernel").cast(pl.Categorical())))
    eager = Trace(within_mark(run, lane="mine"))
    assert eager.tables.places["lane"].to_list() == ["mine", "mine"]
    replays, _ = tables_of(made, [[Ran(0, 0, 500, 7), Ran(1, 600, 500, 7)]])
    assert Trace(replays).label(eager=eager).tables.places["lane"].to_list() == ["mine", "mine"]


def test_metadata_that_json_cannot_say_cost_no_other_mark_and_no_kernel(tmp_path: Path) -> None:
    recorded(
        """
        circle = []
        circle.append(circle)
        class Unsaid:
            def __str__(self): raise OSError("it does not say")
        with thence.record(OUT, thence.RecordOptions(launches=True, flush_seconds=0.1)) as recording:
            for name, facts in (("a", {"n": 1}), ("b", {"n": 2, "all": circle}), ("c", {"n": {(1,): 2}})):
                with thence.mark(name, **facts):
                    launch(name)
            while recording.counts.get("marks", 0) < 7: time.sleep(0.01)  # three open and close, a step
            with thence.mark("d", n=Unsaid()):
                launch("d")
        """,
        tmp_path,
    )
    trace = thence.open(tmp_path)
    assert said(trace, "label") == {name: name for name in "abcd"}
    told = metadata(trace)
    assert told["a"] == {"n": 1}
    assert told["b"] == {"n": 2, "all": "[[...]]"}
    assert told["c"] == {"n": "{(1,): 2}"}
    assert trace.meta.warnings == ()
    assert set(told["d"] or {}) <= {"n"}  # the value cannot be told
