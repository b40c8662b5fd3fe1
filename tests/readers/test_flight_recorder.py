"""PyTorch's flight recorder: read as torch wrote it, and refused in one sentence otherwise."""

from __future__ import annotations

import json
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import TORCH
from thence.readers.flight_recorder import is_record, sniff
from thence.readers.registry import read

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from thence.model.flight_records import FlightRecord

RECORDS = TORCH / "flight_recorder"
RANKS = range(4)


def raw(rank: int) -> dict[str, Any]:
    """What the pickle holds: data of these tests."""
    return dict(pickle.loads((RECORDS / f"fr_trace_{rank}").read_bytes()))


def record(path: Path) -> FlightRecord:
    (found,) = read([str(path)]).flight_records
    return found


def written(folder: Path, content: object, name: str = "nccl_trace_rank_0") -> Path:
    path = folder / name
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


@pytest.mark.parametrize("rank", RANKS)
def test_every_call_is_read_as_torch_wrote_it(rank: int) -> None:
    found, calls = record(RECORDS / f"fr_trace_{rank}"), raw(rank)["entries"]
    assert found.rank == rank
    assert len(calls) == (42 if rank == 3 else 45)  # rank 3 is not in the group "experts"
    rows = found.calls
    assert rows["created"].to_list() == [call["time_created_ns"] for call in calls]
    assert rows["sequence"].to_list() == [call["collective_seq_id"] for call in calls]
    groups = rows.select("group_name", "group_description").rows()
    assert groups == [call["process_group"] for call in calls]
    assert rows["element_type"].to_list() == [call["input_dtypes"][0] for call in calls]
    names = [f"gloo:{name}" for name in rows["collective"]]
    assert names == [call["profiling_name"] for call in calls]


def test_sizes_are_those_of_the_tensors() -> None:
    rows = record(RECORDS / "fr_trace_0").calls[:4]
    # make.py: 1,024 floats; then 64 of bfloat16, reduced, gathered from two ranks, and a double number reduced.
    assert rows["in_elements"].to_list() == [1024, 64, 64, 128]
    assert rows["out_elements"].to_list() == [1024, 64, 128, 128]
    assert rows["bytes"].to_list() == [4096, 128, 128, 256]


def test_json_and_pickle_say_the_same() -> None:
    one, other = record(RECORDS / "fr_trace_0.json"), record(RECORDS / "fr_trace_0")
    assert one.calls.equals(other.calls)
    assert (one.rank, other.rank) == (0, 0)


@pytest.mark.parametrize(
    ("name", "rank"),
    [("nccl_trace_rank_12", 12), ("comm_lib_trace_rank_0", 0), ("fr_trace_3", 3), ("dump7.pkl", 7), ("x", None)],
)  # fmt: skip
def test_the_rank_is_the_number_at_the_end_of_the_name(tmp_path: Path, name: str, rank: int | None) -> None:
    path = written(tmp_path, raw(0), name)
    assert record(path).rank == rank
    assert is_record(str(path)) == ("_trace_" in name)


def test_members_are_those_of_the_file(tmp_path: Path) -> None:
    content = raw(0)
    content["pg_config"] = {"3": {"name": "3", "desc": "mesh_tp", "ranks": "[0, 1]"}}
    tables = read([str(written(tmp_path, content))])
    calls = tables.flight_records[0].calls
    known = calls.filter(calls["group_ranks"].is_not_null())
    assert known.select("group_name", "group_ranks", "group_size").unique().rows() == [("3", "[0, 1]", 2)]
    assert tables.meta.process_groups == ({"name": "3", "description": "mesh_tp", "size": 2, "ranks": [0, 1]},)


def test_the_recorders_default_of_2000_calls_with_deep_stacks_is_read(tmp_path: Path) -> None:
    """Every call refers to the frames of its stack, which take thousands of characters written out."""
    frame = {"name": "f" * 40, "filename": "/home/user/project/" + "d/" * 40 + "train.py", "line": 12}
    frames = [frame] * 60
    content = raw(0)
    call = content["entries"][0]
    content["entries"] = [call | {"record_id": n, "frames": frames} for n in range(500, 2500)]
    path = written(tmp_path, content)
    assert path.stat().st_size < 1_000_000
    assert record(path).overwritten == 500
    assert record(path).calls.height == 2000


class Bad:
    def __reduce__(self) -> Any:
        return os.system, ("touch /nonexistent/executed",)


def deep(content: dict[str, Any]) -> dict[str, Any]:
    nested: list[Any] = []
    for _ in range(200):
        nested = [nested]
    return content | {"entries": nested}


def repeated(content: dict[str, Any]) -> dict[str, Any]:
    sizes = [[1] * 1000] * 1000
    return content | {"entries": [content["entries"][0] | {"input_sizes": sizes}] * 1000}


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content | {"entries": [Bad()]},
        lambda content: content | {"entries": "x"},
        lambda content: content | {"entries": [1]},
        lambda content: content | {"entries": [{}]},
        lambda content: content | {"entries": [content["entries"][0] | {"record_id": -1}]},
        lambda content: content | {"entries": [content["entries"][0] | {"record_id": 1 << 70}]},
        lambda content: content | {"entries": [content["entries"][0] | {"input_sizes": [["x"]]}]},
        lambda content: content | {"entries": content["entries"][::-1]},
        lambda content: content | {"pg_config": [1]},
        lambda content: content | {"version": 2},
        lambda content: content | {"entries": [content["entries"][0]] * 200_001},
        deep,
        repeated,
    ],
)
def test_what_torch_does_not_write_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(thence.DamagedInput, match="nccl_trace_rank_0"):
        read([str(written(tmp_path, change(raw(0))))])


def test_json_of_empty_lists_is_refused(tmp_path: Path) -> None:
    head = (RECORDS / "fr_trace_0.json").read_bytes()[:1000]
    (tmp_path / "fr_trace_0.json").write_bytes(head + b'{"input_sizes":[' + b"[]," * 2_000_000)
    with pytest.raises(thence.DamagedInput, match="lists and objects"):
        read([str(tmp_path / "fr_trace_0.json")])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_cut_file_is_refused(tmp_path: Path, share: float) -> None:
    for name in ("fr_trace_0", "fr_trace_0.json"):
        content = (RECORDS / name).read_bytes()
        (tmp_path / name).write_bytes(content[: int(len(content) * share)])
        with pytest.raises(thence.DamagedInput, match="fr_trace_0"):
            read([str(tmp_path / name)])


def test_huge_sizes_become_unknown(tmp_path: Path) -> None:
    content = raw(0)
    content["entries"][0] |= {"input_sizes": [[1 << 62] * 1000], "output_sizes": [[1 << 62] * 1000]}
    assert record(written(tmp_path, content)).calls["in_elements"][0] <= 1 << 50


def test_other_pickles_and_traces_are_not_taken_for_one(tmp_path: Path) -> None:
    assert not sniff(pickle.dumps({5 << 32: [{"name": "x"}]}, protocol=2))
    assert not sniff(json.dumps({"version": 1, "traceEvents": []}).encode())
    assert not is_record(str(TORCH / "groups" / "gloo_rank0.json.gz"))
    (tmp_path / "fr_trace_0.json").write_text("{}")
    assert not is_record(str(tmp_path / "fr_trace_0.json"))
