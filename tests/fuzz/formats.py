"""The formats that are fuzzed: a small tree made from a recording in tests/data, and how a tree becomes files."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import tempfile
import zipfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fuzz.inside_formats import array, buffer_writer, flashinfer_tree, mosaic_buffer, proton_tree, thence_buffer
from fuzz.store_format import store_tree, store_writer
from thence.model.column_file import encode
from thence.readers.jax.protos.hlo_pb2 import HloProto
from thence.readers.jax.protos.xplane_pb2 import XSpace
from thence.readers.nsight.store import READABLE
from thence.readers.recording.folder import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.mutations import Tree

DATA = Path(__file__).parents[1] / "data"
EVENTS, ROWS, PLANE_EVENTS = 60, 12, 15


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        seed: makes the tree.
        write: writes a tree into a folder; what `thence.open` gets.
        probed: a child process tries to read it first, which takes a while: bytes are rarely damaged.
    """

    name: str
    seed: Callable[[], Tree]
    write: Callable[[Tree, Path], Path]
    probed: bool = False


# ---- JSON


def _kineto() -> Tree:
    document = json.loads(gzip.decompress((DATA / "torch" / "graph_replay_rank0.json.gz").read_bytes()))
    stacks = json.loads(gzip.decompress((DATA / "torch" / "waits" / "pipeline_rank1.json.gz").read_bytes()))
    events = [*document["traceEvents"], *stacks["traceEvents"]]
    kept = document["traceEvents"] = events[:: max(1, len(events) // EVENTS)]
    times = [event["ts"] for event in kept if event.get("cat") == "kernel"]
    metrics = {"sm__cycles_active.sum": 3.5, "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": 50.0}
    for time in times[:ROWS]:
        kept.append(_counters(0, "CUPTI PM Sampling", time, metrics) | {"cat": "hardware_counters"})
        kept.append(_counters("GPU 1 Counters", "SM Active (%)", time, {"": 12.5}))
    return document


def _counters(process: object, name: str, time: float, values: dict[str, float]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": process, "ts": time, "args": values}


def _labels() -> Tree:
    document = json.loads((DATA / "torch" / "graphs" / "block_labels.json").read_text())
    for graph in document["graphs"]:
        graph["nodes"] = {k: v[:ROWS] if isinstance(v, list) else v for k, v in graph["nodes"].items()}
        graph["edges"] = [e for e in graph.get("edges") or [] if set(e) <= set(graph["nodes"]["number"])]
    return document


def _annotations() -> Tree:
    return {
        str((5 << 32) + i): [
            {"name": f"layer {i % 3}", "stream": i % 2, "autograd_phase": "forward", "x": [1, None]},
            "outer",
        ]
        for i in range(ROWS)
    }


def _inspector() -> Tree:
    text = gzip.decompress((DATA / "torch" / "nccl_inspector" / "vm-pid784.log.gz").read_bytes())
    return [json.loads(line) for line in text.splitlines()[:ROWS]]


def _lines_of(file: str) -> Callable[[], Tree]:
    return lambda: [json.loads(line) for line in (DATA / file).read_bytes().splitlines()[:ROWS]]


def _as_lines(name: str) -> Callable[[Tree, Path], Path]:
    def write(tree: Tree, folder: Path) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(_json(line) + b"\n" for line in (tree if isinstance(tree, list) else [tree])))
        return path

    return write


def _flight_recorder() -> Tree:
    document = json.loads((DATA / "torch" / "flight_recorder" / "fr_trace_0.json").read_text())
    document["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    calls = document["entries"] = document["entries"][:ROWS]
    for number, call in enumerate(calls):
        call["profiling_name"] = call["profiling_name"].replace("gloo", "nccl")
        call["time_created_ns"] = 1_790_000_000_000_000_000 + number
        frame = {"name": "step", "filename": "train.py", "line": 12}
        call |= {"state": "started", "frames": [frame]}
    return {"version": document.pop("version"), "pg_config": document.pop("pg_config"), **document}


def _json(tree: Tree) -> bytes:
    return json.dumps(tree, default=repr, skipkeys=True).encode("utf-8", "replace")


def _as_json(name: str) -> Callable[[Tree, Path], Path]:
    def write(tree: Tree, folder: Path) -> Path:
        path = folder / name
        path.write_bytes(_json(tree))
        return path

    return write


def _pickled(tree: Tree, folder: Path) -> Path:
    keys = {int(k) if str(k).isdecimal() else k: v for k, v in tree.items()} if isinstance(tree, dict) else tree
    path = folder / "kernel_annotations_rank0.pkl"
    path.write_bytes(pickle.dumps(keys, protocol=4))
    return path


def _pickled_calls(tree: Tree, folder: Path) -> Path:
    path = folder / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(tree, protocol=2))
    return path


def _snapshot() -> Tree:
    """The last events of a real snapshot, with three frames each, and its first blocks."""
    state = pickle.loads(gzip.decompress((DATA / "torch" / "memory_snapshots" / "oom.pickle.gz").read_bytes()))
    events = state["device_traces"][0][-2 * ROWS :]
    segments = state["segments"][:3]
    for dicts in (events, segments, *(segment["blocks"] for segment in segments)):
        for known in dicts:
            known["frames"] = [dict(frame) for frame in known.get("frames", [])[-3:]]
    for segment in segments:
        segment |= {"blocks": segment["blocks"][:3], "segment_pool_id": list(segment["segment_pool_id"])}
    return state | {"segments": segments, "device_traces": [events]}


def _pickled_snapshot(tree: Tree, folder: Path) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(tree, protocol=4))
    return path


# ---- Protobuf: lists of [field, wire type, value], values being such lists where the schema says so


def _message(data: bytes, of: Any) -> Tree:
    at, result = 0, []
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
        else:
            size, at = _varint(data, at) if wire == 2 else (8 if wire == 1 else 4, at)
            value, at = data[at : at + size], at + size
        inner = of.fields_by_number.get(number)
        if wire == 2 and inner is not None and inner.message_type is not None:
            value = _message(value, inner.message_type)
        result.append([number, wire, value])
    return result


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 128:
            return value, at


def _encoded(tree: Tree) -> bytes:
    if isinstance(tree, bytes | str):
        return tree.encode("utf-8", "replace") if isinstance(tree, str) else tree
    out = bytearray()
    for entry in tree if isinstance(tree, list) else []:
        number, wire, value = (*entry, 0, 0, 0)[:3] if isinstance(entry, list) else (1, 0, entry)
        number = number if isinstance(number, int) and 0 < number < 1 << 29 else 1
        if isinstance(value, bytes | str | list | dict):
            content = _encoded(value)
            if wire in (1, 5):
                out += _number(number << 3 | wire) + content[: 8 if wire == 1 else 4].ljust(
                    8 if wire == 1 else 4, b"\0"
                )
            else:
                out += _number(number << 3 | 2) + _number(len(content)) + content
        elif isinstance(value, float):
            out += _number(number << 3 | 1) + np.float64(value).tobytes()
        else:
            out += _number(number << 3) + _number(int(value or 0) % (1 << 64))
    return bytes(out)


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _xplane() -> Tree:
    space = XSpace()
    space.ParseFromString(gzip.decompress((DATA / "jax" / "remat.xplane.pb.gz").read_bytes()))
    for plane in space.planes:
        for line in plane.lines:
            del line.events[PLANE_EVENTS:]
        used = {e.metadata_id for line in plane.lines for e in line.events}
        for number in [n for n in plane.event_metadata if n not in used][PLANE_EVENTS:]:
            del plane.event_metadata[number]
        del plane.lines[6:]
    while space.ByteSize() > 20_000:  # HLO, which has a format of its own here
        largest = max(space.planes, key=lambda plane: plane.ByteSize())
        space.planes.remove(largest)
    return _message(space.SerializeToString(), XSpace.DESCRIPTOR)


def _hlo() -> Tree:
    proto = HloProto()
    proto.ParseFromString(lzma.decompress((DATA / "jax" / "command_buffer.hlo.pb.xz").read_bytes()))
    module = proto.hlo_module
    while proto.ByteSize() > 20_000 and len(module.computations) > 1:
        del module.computations[0 if module.computations[0].id != module.entry_computation_id else 1]
    return _message(proto.SerializeToString(), HloProto.DESCRIPTOR)


def _written_protobuf(name: str) -> Callable[[Tree, Path], Path]:
    def write(tree: Tree, folder: Path) -> Path:
        path = folder / name
        path.write_bytes(_encoded(tree))
        return path

    return write


# ---- Tables: {table: {column: [cells]}}


def _nsight() -> Tree:
    tree: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.sqlite"
        path.write_bytes(gzip.decompress((DATA / "nsight" / "torch_graph.sqlite.gz").read_bytes()))
        with closing(sqlite3.connect(path)) as database:
            for (table,) in database.execute("select name from sqlite_master where type = 'table'").fetchall():
                if table not in READABLE:
                    continue
                cursor = database.execute(
                    f"select * from {table} limit ?", [8 * ROWS if table == "StringIds" else ROWS]
                )
                rows = cursor.fetchall()
                names = [column[0] for column in cursor.description]
                if rows:
                    tree[table] = {n: [row[i] for row in rows] for i, n in enumerate(names)}
    return tree | _gpu_metrics(min(tree["CUPTI_ACTIVITY_KIND_KERNEL"]["start"]))


def _gpu_metrics(start: int) -> Tree:
    """What `--gpu-metrics-devices` adds to an export: no recording of ours has it."""
    metrics = ("GPC Clock Frequency [MHz]", "Tensor Active [Throughput %]", "DRAM Read Bandwidth [Throughput %]")
    types, samples = len(metrics) * [1 << 32], range(ROWS)
    return {
        "TARGET_INFO_GPU_METRICS": {"typeId": types, "metricId": [*range(len(metrics))], "metricName": list(metrics)},
        "GPU_METRICS": {
            "timestamp": [start + 10_000 * (i // len(metrics)) for i in samples], "typeId": ROWS * [1 << 32],
            "metricId": [i % len(metrics) for i in samples], "value": [(1500, 80, 10)[i % 3] for i in samples],
        },
    }  # fmt: skip


def _columns(table: Tree) -> dict[str, list[Any]]:
    """The columns of a table, of one length, whatever became of them."""
    columns = {
        str(name): list(cells) if isinstance(cells, list) else [cells]
        for name, cells in (table.items() if isinstance(table, dict) else [("value", table)])
    }
    rows = max(map(len, columns.values()), default=0)
    return {name: [*cells, *[None] * (rows - len(cells))] for name, cells in columns.items()}


def _tables(tree: Tree) -> dict[str, dict[str, list[Any]]]:
    return {str(name)[:80]: _columns(table) for name, table in tree.items()} if isinstance(tree, dict) else {}


def _cell(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, float | bytes):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else float(min(value, 1 << 200))
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else repr(value)[:1000]


def _sqlite(tree: Tree, folder: Path) -> Path:
    path = folder / "a.sqlite"
    with closing(sqlite3.connect(path)) as database:
        for table, columns in _tables(tree).items():
            quoted = ", ".join(
                '"' + name.replace('"', "").replace("\0", "") + f'{i}"' * 0 + '"' for i, name in enumerate(columns)
            )
            try:
                database.execute(f'create table "{table}" ({quoted})')
            except (sqlite3.Error, ValueError):
                continue
            marks = ", ".join("?" * len(columns))
            rows = zip(*([_cell(c) for c in cells] for cells in columns.values()), strict=True)
            database.executemany(f'insert into "{table}" values ({marks})', rows)
        database.commit()
    return path


def _frame(columns: dict[str, list[Any]]) -> pl.DataFrame:
    series = []
    for name, cells in columns.items():
        values = [_cell(cell) for cell in cells]
        try:
            series.append(pl.Series(name, values))
        except (pl.exceptions.PolarsError, TypeError, OverflowError, ValueError):
            series.append(pl.Series(name, [None if v is None else str(v) for v in values], pl.String))
    return pl.DataFrame(series)


def _folder_of(ending: str) -> Callable[[Tree, Path], Path]:
    """Writes tables as files; those that are not mutated as they were."""

    def content(columns: dict[str, list[Any]]) -> bytes:
        stream = io.BytesIO()
        if ending == "parquet":
            _frame(columns).write_parquet(stream)
        else:
            _frame(columns).write_ipc_stream(stream)
        return stream.getvalue()

    @functools.cache
    def unchanged() -> dict[str, tuple[str, bytes]]:
        """What each table of the seed is as text, and its file."""
        return {table: (repr(columns), content(columns)) for table, columns in _tables(_nsight()).items()}

    def write(tree: Tree, folder: Path) -> Path:
        place = folder / "export"
        place.mkdir()
        for table, columns in _tables(tree).items():
            if not table.isidentifier():
                continue
            text, written = unchanged().get(table, ("", b""))
            whole = text and repr(columns) == text
            (place / f"{table}.{ending}").write_bytes(written if whole else content(columns))
        return place

    return write


def _csv() -> Tree:
    text = gzip.decompress((DATA / "nsight" / "torch_graph_cuda_gpu_trace.csv.gz").read_bytes()).decode()
    return list(csv.reader(io.StringIO(text)))[: 3 * ROWS]


def _as_csv(tree: Tree, folder: Path) -> Path:
    text = io.StringIO()
    writer = csv.writer(text)
    for row in tree if isinstance(tree, list) else [[tree]]:
        writer.writerow([str(c)[:6000] for c in row] if isinstance(row, list) else [row])
    path = folder / "trace.csv"
    path.write_text(text.getvalue(), "utf-8", errors="replace")
    return path


def _nsys_jax() -> Tree:
    module = "TSL:XlaModule:#hlo_module=jit_Step,program_id=3#"
    ranges = [
        (module, 100, 60, 90, 30, 1, 10, None), ("TSL:Thunk:#hlo_op=fusion.1#", 100, 20, 91, 2, 1, 11, 10),
        ("TSL:Thunk:#name=a,hlo_op=while.1#", 120, 40, 93, 9, 1, 12, 10),
        ("TSL:Thunk:#hlo_op=all-reduce-start.1#", 120, 10, 94, 2, 1, 13, 12), (module, 200, 30, 180, 10, 1, 20, None),
        ("TSL:Thunk:#hlo_op=fusion.1#", 200, 30, 181, 2, 1, 21, 20),
    ]  # fmt: skip
    names = (
        "Name",
        "Projected Start",
        "Projected Duration",
        "Orig Start",
        "Orig Duration",
        "TID",
        "RangeId",
        "ParentId",
    )
    trace = {name: [row[i] for row in ranges] for i, name in enumerate(names)}
    compiles = {"Name": [module.replace("Module", "Compile"), "TSL:XlaPass:#name=dce#"], "Start (ns)": [10, 12],
                "End (ns)": [30, 20], "TID": [1, 1]}  # fmt: skip
    threads = ["main", "XlaLauncher:#global=5,local=1,process=1,slice=0#"]
    return {
        "nvtx_gpu_proj_trace/trace.parquet": trace | {"PID": [7] * len(ranges)},
        "thread-metadata.parquet": {"Name": threads, "PID": [7, 7], "TID": [1, 77]},
        "report_nvtx_pushpop_trace.parquet": compiles,
    }


def _zipped(tree: Tree, folder: Path) -> Path:
    path = folder / "archive.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, columns in _tables(tree).items():
            content = io.BytesIO()
            _frame(columns).write_parquet(content)
            archive.writestr(member.replace("\0", "0"), content.getvalue())
    return path


# ---- Archives of NumPy arrays: {member: JSON or [integers]}


def _recording() -> Tree:
    place = DATA / "recording/two_ranks/host-rank0-631"
    tree: dict[str, Any] = {"recording.json": json.loads((place / "recording.json").read_text())}
    tree["recording.json"]["version"] = 3
    kernels = pl.read_ipc(place / "kernels-000001.arrow").head(ROWS)
    for table, schema in SCHEMAS.items():
        file = place / f"{table}-000001.arrow"
        rows = pl.read_ipc(file).head(8 * ROWS if table == "names" else ROWS) if file.is_file() else kernels
        columns = {
            name: rows[name].cast(pl.String).to_list() if dtype == pl.String
            else rows[name].cast(pl.Int64, wrap_numerical=True, strict=False).fill_null(-1).to_numpy()
            for name, dtype in schema.items() if name in rows.columns
        }  # fmt: skip
        if not file.is_file():
            columns = _made_rows(schema, {name: np.asarray(cells) for name, cells in columns.items()}, kernels)
        tree[f"{table}-000001.npz"] = _members(encode(columns))
    about = tree["recording.json"]
    first = int(kernels["start"].min())  # type: ignore[arg-type]
    about["counters"] = {"interval_ns": 10_000, "left_out": {"warps": "no"}, "windows": []}
    about["stalls"] = {"period_cycles": 65_536, "samples": 99, "unplaced": 7, "trouble": None}
    about["ring"] = {"windows": 1, "asked": 1, "rows": {"kernels": 5}, "parts": {"kernels": [0]}}
    asked = [{"step": 3, "why": "a slow step"}]
    about["sampling"] = {"every": 9, "steps": 99, "interval": 9, "windows": 11, "requests": asked, "cost_share": 0.01}
    about["plain_steps"] = {"since_ns": first, "trouble": None}
    about["clocks"] = [{"device": 0, "times_ns": [first, first + 9], "mhz": [1500, 1400]}]
    about["process_memory"] = [{"device": 0, "times_ns": [first, first + 9], "bytes": [1 << 20, 1 << 21]}]
    return tree


def _made_rows(schema: dict[str, Any], known: dict[str, Any], kernels: pl.DataFrame) -> dict[str, Any]:
    """Rows of a table that the recording lacks: times and devices as kernels have them, else small numbers."""
    starts, number = kernels["start"].cast(pl.Int64).sort().to_numpy(), np.arange(ROWS)
    same = {
        **dict.fromkeys(("number", "place", "line", "frame", "samples"), number + 1), "kind": 1 + number % 5,
        **dict.fromkeys(("parent", "thread", "state"), 0 * number), "duration": 0 * number + 10_000,
        "operation": 1 + number % 2, "memory": 0 * number + 3, "address": number // 2,
        "time": starts, "until": starts + 5_000,
    } | known | dict.fromkeys(("name", "kernel", "file", "reason", "detail", "metadata"), number + 1)  # fmt: skip
    return {
        name: same[name] if name in same else number + 0.5 if dtype == pl.Float64 else number
        for name, dtype in schema.items()
    }


def _members(content: bytes) -> Tree:
    """The members of an archive: JSON as trees, arrays as lists."""
    tree: dict[str, Any] = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith(".json"):
                tree[name] = json.loads(data)
            elif name.endswith(".npy"):
                cells = np.load(io.BytesIO(data))
                tree[name] = [str(cells.dtype), cells.tolist()]
    return tree


def _packed(tree: Tree) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, value in tree.items() if isinstance(tree, dict) else []:
            archive.writestr(str(name).replace("\0", "0")[:200], _member(str(name), value))
    return content.getvalue()


def _member(name: str, value: Tree) -> bytes:
    if name.endswith(".json") or not isinstance(value, list) or len(value) < 2:
        return _json(value)
    content = io.BytesIO()
    np.save(content, array(value[0], value[1]), allow_pickle=False)
    return content.getvalue()


def _recorded(tree: Tree, folder: Path) -> Path:
    place = folder / "host-rank0-1"
    place.mkdir()
    for name, value in tree.items() if isinstance(tree, dict) else []:
        file = place / (str(name).replace("/", "_").replace("\0", "_")[:80] or "_")
        is_part = file.suffix == ".npz"
        content = (
            _packed(value) if is_part else json.dumps(value, default=repr, skipkeys=True).encode("utf-8", "replace")
        )
        file.write_bytes(content)
    return place


# ---- A store


def _stored_inputs(folder: Path) -> list[Path]:
    return [_as_json("trace.json")(_kineto(), folder), _recorded(_recording(), folder)]


FORMATS = (
    Format("kineto", _kineto, _as_json("trace.json")),
    Format("labels", _labels, _as_json("labels.json")),
    Format("annotations", _annotations, _as_json("kernel_annotations_rank0.json")),
    Format("pickle", _annotations, _pickled),
    Format("calls", _flight_recorder, _as_json("fr_trace_0.json")),
    Format("calls-pickle", _flight_recorder, _pickled_calls),
    Format("inspector", _inspector, _as_lines("vm-pid784.log")),
    Format("snapshot", _snapshot, _pickled_snapshot),
    Format("xplane", _xplane, _written_protobuf("a.xplane.pb")),
    Format("hlo", _hlo, _written_protobuf("a.hlo.pb")),
    Format("sqlite", _nsight, _sqlite),
    Format("csv", _csv, _as_csv),
    Format("parquet", _nsight, _folder_of("parquet"), probed=True),
    Format("arrow", _nsight, _folder_of("arrow"), probed=True),
    Format("nsys-jax", _nsys_jax, _zipped, probed=True),
    Format("recording", _recording, _recorded),
    Format("store", lambda: store_tree(_stored_inputs), store_writer(_stored_inputs, _columns, _frame), probed=True),
    Format("inside", thence_buffer, buffer_writer(".npz")),
    Format("mosaic", mosaic_buffer, buffer_writer(".npy")),
    Format("flashinfer", flashinfer_tree, buffer_writer(".npy")),
    Format("proton", proton_tree, buffer_writer(".npy")),
    Format(
        "summaries", _lines_of("watch/node-rank0-100/summaries.jsonl"), _as_lines("run/node-rank0-1/summaries.jsonl")
    ),
    Format("history", _lines_of("history/slower.jsonl"), _as_lines("history.jsonl")),
)
