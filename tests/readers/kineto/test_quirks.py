"""What Kineto and its relatives write besides the documented: one small hand-written file each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from helpers import LABEL, OP, PAIR, event, kernel, launch, opened, opened_text
from thence.errors import DamagedInput, MissingData

if TYPE_CHECKING:
    from pathlib import Path

    import thence


def as_numbers(events: list[dict[str, Any]]) -> str:
    """JSON text in which times given as text are bare numbers, as Kineto prints them."""
    text = json.dumps(events)
    for found in {v for e in events for k in ("ts", "dur") if isinstance(v := e.get(k), str)}:
        text = text.replace(f'"{found}"', found)
    return text


def fields(event_: dict[str, Any]) -> list[str]:
    return [as_numbers([{key: value}])[2:-2] for key, value in event_.items()]


def old_pretty(events: list[dict[str, Any]]) -> str:
    """C++ exporter before April 2026: several fields on a line, the arguments as a block."""
    texts = []
    for item in events:
        head = fields({k: v for k, v in item.items() if k not in ("ts", "dur", "args")})
        times = fields({k: item[k] for k in ("ts", "dur")})
        arguments = ", ".join(fields(item.get("args", {})))
        block = f',\n    "args": {{\n      {arguments}\n    }}' if "args" in item else ""
        texts.append(f"  {{\n    {', '.join(head)},\n    {', '.join(times)}{block}\n  }}")
    return ",\n".join(texts)


def new_pretty(events: list[dict[str, Any]]) -> str:
    """C++ exporter since April 2026: one field on each line, a comma on its own before the arguments."""
    texts = []
    for item in events:
        head = ",\n    ".join(fields({k: v for k, v in item.items() if k != "args"}))
        arguments = ", ".join(fields(item.get("args", {})))
        block = f'\n    ,\n    "args": {{\n            {arguments}\n    }}' if "args" in item else ""
        texts.append(f"  {{\n    {head}{block}\n  }}")
    return ",\n".join(texts)


def one_per_line(events: list[dict[str, Any]]) -> str:
    """Python exporter: compact events, one per line."""
    return ",\n".join("{" + ",".join(fields(e)).replace('": ', '":') + "}" for e in events)


LAYOUTS = {
    "old": lambda e: f'{{\n  "schemaVersion": 1,\n  "traceEvents": [\n{old_pretty(e)}\n  ],\n  "traceName": "x"\n}}',
    "new": lambda e: f'{{\n  "schemaVersion": 1,\n  "traceEvents": [\n{new_pretty(e)}\n  ],\n  "traceName": "x"\n}}',
    "python": lambda e: f'{{"schemaVersion":1,"traceEvents":[\n{one_per_line(e)}\n]}}',
    "minified": lambda e: '{"traceEvents":[' + one_per_line(e).replace("\n", "") + "]}",
    "spaced": lambda e: '{"traceEvents": ' + as_numbers(e) + "}",
    "bare array": as_numbers,
    "bare array with line breaks": lambda e: "[\n" + one_per_line(e) + "\n]\n",
    "byte order mark": lambda e: '\ufeff{"traceEvents": ' + as_numbers(e) + "}",
    "carriage returns": lambda e: '{"traceEvents": [\r\n' + one_per_line(e).replace("\n", "\r\n") + "\r\n]}",
    "indented": lambda e: json.dumps({"traceEvents": json.loads(as_numbers(e))}, indent=4),
}  # fmt: skip


def check_pair(trace: thence.Trace) -> None:
    gpu = trace.activities.with_columns(pl.col(pl.Categorical).cast(pl.String))
    columns = gpu.select("start", "duration", "stream", "name", "label", "op")
    assert columns.rows() == [
        (40_250, 5_125, 7, "gemm", "train", "aten::mm"),
        (60_000, 5_000, 7, "gemm", "train", None),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_the_same(layout: str, tmp_path: Path) -> None:
    trace = opened_text(tmp_path, LAYOUTS[layout](PAIR))
    assert trace.meta.warnings == ()
    check_pair(trace)


@pytest.mark.parametrize("layout", ["old", "new", "python", "minified"])
def test_a_single_event_is_read_in_every_layout(layout: str, tmp_path: Path) -> None:
    trace = opened_text(tmp_path, LAYOUTS[layout]([kernel(1, 5)]))
    assert trace.tables.gpu["start"].to_list() == [5000]


def test_metadata_after_the_events_counts(tmp_path: Path) -> None:
    text = '{"traceEvents": %s, "distributedInfo": {"rank": 3, "world_size": 8}, "traceName": "x"}'
    trace = opened_text(tmp_path, text % as_numbers(PAIR))
    assert trace.tables.gpu["rank"].to_list() == [3, 3]
    assert trace.meta.facts[0]["world_size"] == 8
    assert trace.meta.warnings == ()


def test_metadata_after_the_events_of_a_pretty_file_counts(tmp_path: Path) -> None:
    text = LAYOUTS["old"](PAIR).replace('"traceName": "x"', '"distributedInfo": {"rank": 5}')
    assert opened_text(tmp_path, text).tables.gpu["rank"].to_list() == [5, 5]


def test_host_pids_and_tids_may_be_text(tmp_path: Path) -> None:
    events = [e if e["pid"] == 0 else {**e, "pid": "1", "tid": "2"} for e in PAIR]
    trace = opened(tmp_path, events)
    check_pair(trace)
    assert trace.tables.host.select("process", "thread").unique().rows() == [(1, 2)]


def test_text_lanes_of_the_profiler_itself_do_no_harm(tmp_path: Path) -> None:
    spans = event("Trace", "PyTorch Profiler (0)", 0, 100, pid="Spans", tid="PyTorch Profiler")
    end = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 99}
    check_pair(opened(tmp_path, [*PAIR, spans, end]))


def tagged(tag: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**e, "pid": f"[{tag}] {e['pid']}"} for e in events]


def test_tags_of_a_merged_file_are_ranks(tmp_path: Path) -> None:
    # The two ranks share pids, device numbers, streams and correlation ids.
    second = [{**e, "name": "other"} if e["cat"] == "user_annotation" else e for e in PAIR]
    trace = opened(tmp_path, [*tagged("TP00", PAIR), *tagged("TP01", second)])
    assert trace.tables.gpu["rank"].to_list() == [0, 0, 1, 1]
    labels = trace.activities["label"].cast(pl.String).to_list()
    assert labels == ["train", "train", "other", "other"]
    assert trace.report().busy_ns == 2 * (5125 + 5000)
    assert any("TP00" in w and "TP01" in w for w in trace.meta.warnings)


def test_processes_of_a_merged_file_without_tags_are_ranks(tmp_path: Path) -> None:
    # Correlation ids collide; devices differ, as does one kernel of each that only it launched.
    def rank(pid: int, device: int, correlation: int) -> list[dict[str, Any]]:
        host = [
            event("user_annotation", f"rank {pid}", 0, 100, pid=pid),
            launch(1, 10, pid=pid),
            launch(correlation, 12, pid=pid),
        ]
        args = {"device": device}
        return [*host, kernel(1, 20, pid=device, args=args), kernel(correlation, 30, pid=device, args=args)]

    trace = opened(tmp_path, [*rank(100, 0, 2), *rank(200, 1, 3)])
    rows = trace.activities.select("rank", "device", "start", pl.col("label").cast(pl.String))
    assert rows.rows() == [
        (0, 0, 20_000, "rank 100"),
        (0, 0, 30_000, "rank 100"),
        (1, 1, 20_000, "rank 200"),
        (1, 1, 30_000, "rank 200"),
    ]
    assert any("2 processes" in w for w in trace.meta.warnings)


@pytest.mark.parametrize("duration", [-3, "-0.001", None, "nan", ""])
def test_unusable_durations_count_as_zero_with_a_warning(duration: Any, tmp_path: Path) -> None:
    events = [kernel(1, 10, duration), kernel(2, 20)]
    if duration is None:
        del events[0]["dur"]
    trace = opened(tmp_path, events)
    assert trace.tables.gpu["duration"].to_list() == [0, 5000]
    assert any("1 device activity" in w for w in trace.meta.warnings)


def test_an_event_without_a_start_is_left_out_with_a_warning(tmp_path: Path) -> None:
    lost = kernel(1, 10)
    del lost["ts"]
    trace = opened(tmp_path, [lost, kernel(2, 20)])
    assert trace.tables.gpu["start"].to_list() == [20_000]
    assert any("1 event without a start time" in w for w in trace.meta.warnings)


def test_infinity_as_text_is_no_obstacle(tmp_path: Path) -> None:
    trace = opened(tmp_path, [kernel(1, 10, args={"blocks per SM": "inf", "warps per SM": "inf"})])
    assert trace.tables.gpu["duration"].to_list() == [5000]
    assert trace.meta.warnings == ()


@pytest.mark.parametrize("value", ["inf", "-inf", "Infinity", "-Infinity", "NaN", "nan"])
def test_bare_infinity_and_nan_cost_no_event(value: str, tmp_path: Path) -> None:
    events = [kernel(1, 10, args={"blocks per SM": "HERE", "registers per thread": 32}), kernel(2, 20)]
    trace = opened_text(tmp_path, json.dumps({"traceEvents": events}).replace('"HERE"', value))
    assert trace.tables.gpu["start"].to_list() == [10_000, 20_000]
    assert trace.tables.gpu["registers"].to_list() == [32, None]


@pytest.mark.parametrize("layout", ["old", "python"])
def test_unescaped_quotes_cost_no_event(layout: str, tmp_path: Path) -> None:
    # As torch before July 2026 wrote names and call stacks, here after mending by hand:
    # name: void k<"a">()   Call stack: f.py(3): g("x", 1)
    op = event("cpu_op", "aten::mm", 10, 20, args={"Call stack": "STACK", "External id": 5})
    events = [LABEL, op, launch(1, "12.001"), kernel(1, "40.250", "5.125", name="NAME"), kernel(2, 60)]
    text = LAYOUTS[layout](events)
    text = text.replace("NAME", 'void k<"a">()').replace("STACK", 'f.py(3): g("x", 1)')
    trace = opened_text(tmp_path, text)
    assert trace.tables.gpu["name"].cast(pl.String).to_list() == ['void k<"a">()', "gemm"]
    assert trace.activities["op"].cast(pl.String).to_list() == ["aten::mm", None]
    assert trace.tables.host.filter(pl.col("category") == "op")["external"].to_list() == [5]
    assert not any("could not be read" in w for w in trace.meta.warnings)


def test_an_unreadable_event_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    text = LAYOUTS["python"](PAIR).replace('"name":"aten::mm"', '"name":aten::mm')
    trace = opened_text(tmp_path, text)
    assert trace.tables.gpu.height == 2
    assert trace.tables.host.height == 3
    assert any("1 of 6 events could not be read" in w for w in trace.meta.warnings)


def test_half_of_the_events_unreadable_is_no_reason_to_give_up(tmp_path: Path) -> None:
    text = LAYOUTS["python"]([OP, kernel(1, 10)]).replace('"aten::mm"', "aten::mm")
    trace = opened_text(tmp_path, text)
    assert trace.tables.gpu.height == 1
    assert any("1 of 2 events could not be read" in w for w in trace.meta.warnings)


def test_no_readable_event_at_all_is_an_error(tmp_path: Path) -> None:
    text = LAYOUTS["python"]([OP, OP]).replace('"aten::mm"', "aten::mm")
    with pytest.raises(DamagedInput, match="no event that could be read"):
        opened_text(tmp_path, text)


def test_control_characters_and_broken_utf8_in_names_cost_no_event(tmp_path: Path) -> None:
    text = LAYOUTS["python"](PAIR).encode().replace(b'"gemm"', b'"ge\x01m\xff"', 1)
    trace = opened_text(tmp_path, text)
    assert trace.tables.gpu["start"].to_list() == [40_250, 60_000]
    assert trace.tables.gpu["name"].cast(pl.String).to_list() == ["ge m\ufffd", "gemm"]


def test_of_duplicate_keys_the_last_counts_as_in_any_json_reader(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [kernel(1, 10)]}).replace('"stream": 7', '"stream": 7, "stream": 9')
    assert opened_text(tmp_path, text).tables.gpu["stream"].to_list() == [9]


@pytest.mark.parametrize("node", [1, (1 << 32) - 1, 2 << 32 | 5, (1 << 64) - 1])
def test_node_ids_of_32_and_64_bits_are_exact(node: int, tmp_path: Path) -> None:
    trace = opened(tmp_path, [kernel(1, 10, args={"graph id": 2, "graph node id": node})])
    assert trace.tables.gpu.select("graph", "node").rows() == [(2, node)]


def test_node_zero_means_launched_eagerly(tmp_path: Path) -> None:
    trace = opened(tmp_path, [kernel(1, 10, args={"graph id": 0, "graph node id": 0})])
    assert trace.tables.gpu.select("graph", "node").rows() == [(None, None)]


def test_numbers_too_large_for_a_column_cost_no_event(tmp_path: Path) -> None:
    args = {"correlation": 1 << 70, "bytes": 1 << 64, "registers per thread": 1 << 40}
    trace = opened(tmp_path, [kernel(1, 10, args=args), kernel(2, 20)])
    assert trace.tables.gpu["start"].to_list() == [10_000, 20_000]
    assert trace.tables.gpu.select("bytes", "registers").row(0) == (None, None)


def test_without_gpu_rows_the_error_says_how_to_record_them(tmp_path: Path) -> None:
    trace = opened(tmp_path, [LABEL, OP])
    assert trace.tables.gpu.height == 0
    assert trace.tables.host.height == 2
    with pytest.raises(MissingData, match=r"no GPU activity.*ProfilerActivity\.CUDA"):
        trace.report()


def test_category_names_and_whole_microseconds_of_old_torch(tmp_path: Path) -> None:
    # torch 1.13 and older: other category names, times in whole microseconds since 1970.
    at = 1_668_000_000_000_000
    events = [
        event("Operator", "aten::mm", at, 20, args={"External id": 5}),
        event("Runtime", "cudaLaunchKernel", at + 2, 3, args={"correlation": 1}),
        {**kernel(1, at + 7), "cat": "Kernel"},
        {**kernel(0, at + 17, 2), "cat": "Memcpy", "name": "Memcpy DtoH"},
        {**kernel(0, at + 27, 2), "cat": "Memset", "name": "Memset (Device)"},
    ]
    trace = opened(tmp_path, events)
    assert trace.tables.gpu["kind"].to_list() == ["kernel", "memcpy", "memset"]
    assert trace.tables.gpu["start"][0] == (at + 7) * 1000
    assert trace.activities["op"].cast(pl.String)[0] == "aten::mm"
    assert trace.meta.epoch_ns == 0  # the clock is Unix time


def test_nanoseconds_are_exact_at_todays_unix_time(tmp_path: Path) -> None:
    # As a double, 1.7e15 us steps by a quarter of a microsecond.
    text = LAYOUTS["old"]([kernel(1, "1722970000123456.789", "0.001"), kernel(2, "1722970000123456.791")])
    trace = opened_text(tmp_path, text)
    assert trace.tables.gpu["start"].to_list() == [1722970000123456789, 1722970000123456791]
    assert trace.tables.gpu["duration"].to_list() == [1, 5000]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1.5", 1500), ("2e3", 2_000_000), ("3.1234", 3123), ("7", 7000), ("0.0005", 0), ("0.0015", 2)],
)
def test_other_writers_numbers_are_rounded_half_to_even(text: str, expected: int, tmp_path: Path) -> None:
    trace = opened_text(tmp_path, as_numbers([kernel(1, text)]))
    assert trace.tables.gpu["start"].to_list() == [expected]


def test_rocm_launches_are_api_calls(tmp_path: Path) -> None:
    for category in ("cuda_runtime", "hip_runtime"):
        events = [LABEL, OP, kernel(1, 40)]
        events.append(event(category, "hipLaunchKernel", 12, 2, args={"correlation": 1}))
        events.append(event(category, "hipGraphLaunch", 60, 2, args={"correlation": 2}))
        events.append(kernel(2, 70))
        rows = opened(tmp_path, events).activities
        assert rows["op"].cast(pl.String).to_list() == ["aten::mm", None]
        assert rows["op_rule"].to_list() == ["launch_ranges", "graph"]


def test_a_peer_to_peer_copy_belongs_to_the_device_it_comes_from(tmp_path: Path) -> None:
    args = {"fromDevice": 2, "inDevice": 2, "toDevice": 3, "stream": 9, "correlation": 1, "bytes": 64}
    copy = event("gpu_memcpy", "Memcpy PtoP", 10, 5, args=args) | {"pid": 2, "tid": 9}
    trace = opened(tmp_path, [copy])
    assert trace.tables.gpu.select("device", "stream", "kind", "bytes").rows() == [(2, 9, "memcpy", 64)]


def test_an_activity_on_a_moved_lane_keeps_its_own_stream(tmp_path: Path) -> None:
    # annotate_trace of torch 2.12 to 2.14 moves kernels of a graph to lanes of their labels.
    moved = kernel(1, 10, tid=1_000_001, args={"stream": 1_000_001, "original_stream": 20})
    assert opened(tmp_path, [moved]).tables.gpu["stream"].to_list() == [20]


def test_where_the_arguments_are_silent_the_lane_is_device_and_stream(tmp_path: Path) -> None:
    silent = {**kernel(1, 10), "pid": 3, "tid": 21, "args": {"correlation": 1}}
    assert opened(tmp_path, [silent]).tables.gpu.select("device", "stream").rows() == [(3, 21)]


def test_begin_and_end_events_are_counted_in_a_warning(tmp_path: Path) -> None:
    pair = [{"ph": ph, "name": "x", "cat": "cpu_op", "pid": 1, "tid": 2, "ts": 5} for ph in "BE"]
    trace = opened(tmp_path, [*PAIR, *pair])
    check_pair(trace)
    assert any("2 begin/end events" in w for w in trace.meta.warnings)
