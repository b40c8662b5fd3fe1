"""Collective kernels described by the calls that PyTorch's flight recorder kept: true facts, or none.

The recorders are gloo's, of torch 2.13 on a CPU, with the name of the library replaced (``gloo:`` by ``nccl:``): NCCL
needs a GPU. The kernels are those of a recorded replay, put in the order of the calls that make.py makes.
"""

from __future__ import annotations

import json
import pickle
import random
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import TORCH, unzipped

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

RECORDS = TORCH / "flight_recorder"
GROUPS = {
    "0": ("default_pg", [0, 1, 2, 3]),
    "1": ("mesh_dp", [0, 2]),
    "2": ("mesh_dp", [1, 3]),
    "3": ("mesh_tp", [0, 1]),
    "4": ("mesh_tp", [2, 3]),
    "5": ("experts", [0, 1, 2]),
}
"""As make.py makes them."""
TRUTH = [
    (kind, 64 * (layer + 1) * times * 2)
    for layer in range(4)
    for kind, times in (("AllReduce", 1), ("AllGather", 1), ("AllReduce", 2))
]
"""Kernel and message size of each call of the four layers: bfloat16 has 2 bytes; gloo reduces and scatters by an
all-reduce of the whole input, twice as large."""
AFTER = 1_795_600_000 * 10**9
"""A Unix time (ns) after all recorders were written."""

Kernels = list[dict[str, Any]]


def kernel(kind: str) -> dict[str, Any]:
    """A recorded kernel of NCCL."""
    document = json.loads(unzipped(TORCH / "graphs" / "comm_replay_rank0.json.gz"))
    events = document["traceEvents"]
    return next(e for e in events if e.get("cat") == "kernel" and f"Kernel_{kind}" in e["name"])


def layers() -> Kernels:
    """The kernels of a replay, each with its true message size."""
    kernels = {kind: kernel(kind) for kind in ("AllReduce", "AllGather")}
    return [deepcopy(kernels[kind]) | {"true": size} for kind, size in TRUTH]


def trace(folder: Path, kernels: Kernels, rank: int = 0, *, replays: int = 3) -> Path:
    """A trace in which a graph with these kernels is replayed."""
    document = json.loads(unzipped(TORCH / "graphs" / "comm_replay_rank0.json.gz"))
    events = [e for e in document["traceEvents"] if e.get("cat") != "kernel"]
    launches = sorted((e for e in events if "GraphLaunch" in str(e.get("name"))), key=lambda e: e["ts"])
    for number, launch in enumerate(launches[:replays]):
        for place, row in enumerate(kernels):
            args = row["args"] | {"correlation": launch["args"]["correlation"]}
            made = {key: value for key, value in row.items() if key != "true"}
            start = launches[0]["ts"] + 5000 * number + 30.0 * place
            events.append(made | {"args": args, "ts": start, "dur": 20})
    document["traceEvents"] = events
    document["baseTimeNanoseconds"] = AFTER
    document["distributedInfo"] = {
        "backend": "nccl", "rank": rank, "world_size": 4,
        "pg_config": [
            {"pg_name": name, "pg_desc": text, "pg_size": len(ranks), "ranks": ranks}
            for name, (text, ranks) in GROUPS.items()
            if rank in ranks
        ],
    }  # fmt: skip
    path = folder / f"replay_rank{rank}.json"
    path.write_text(json.dumps(document))
    return path


def record(folder: Path, rank: int = 0, named: int | None = None) -> Path:
    """The recorder of a rank as NCCL's, under the name of a rank."""
    content = (RECORDS / f"fr_trace_{rank}").read_bytes()
    path = folder / f"nccl_trace_rank_{rank if named is None else named}"
    path.write_bytes(content.replace(b"gloo:", b"nccl:"))
    return path


def changed(path: Path, change: Any) -> None:
    """Writes a recorder again after a change of its calls."""
    document = pickle.loads(path.read_bytes())
    document["entries"] = change(document["entries"])
    path.write_bytes(pickle.dumps(document, protocol=2))


def facts(path: Path) -> pl.DataFrame:
    """What is known of the collectives; ``start`` counts from the first kernel."""
    found = thence.open(path)
    found.self_check()
    start = found.tables.gpu["start"] - found.tables.gpu["start"].min()
    return found.tables.collectives.with_columns(start=start.gather(found.tables.collectives["gpu"]))


@pytest.mark.parametrize(("rank", "group"), [(0, "3"), (3, "4")])
def test_a_replay_gets_size_and_group_of_its_calls(tmp_path: Path, rank: int, group: str) -> None:
    record(tmp_path, rank)
    rows = facts(trace(tmp_path, layers(), rank)).sort("start")
    assert rows["bytes"].to_list() == 3 * [size for _, size in TRUTH]
    text, members = GROUPS[group]
    kinds = rows.select("group_name", "group_description", "group_ranks", "group_size", "element_type")
    assert kinds.unique().rows() == [(group, text, str(members), 2, "BFloat16")]
    assert rows["collective"].to_list() == 3 * 4 * ["all_reduce", "all_gather", "all_reduce"]


def test_without_a_recorder_nothing_is_known(tmp_path: Path) -> None:
    assert facts(trace(tmp_path, layers())).is_empty()


# Damage: no false number

FLOAT = {"input_dtypes": ["Float"], "output_dtypes": ["Float"]}


def foreign(rows: Kernels, name: str) -> dict[str, Any]:
    return deepcopy(rows[0]) | {"name": name, "true": None}


def damaged(rows: Kernels, how: str, at: int) -> Kernels:
    """A replay after damage; kernels that no call launched have no true size."""
    chance = random.Random(at)
    rest = rows[:at] + rows[at + 1 :]
    to = chance.randrange(len(rest))
    other = deepcopy(rows[at]) | {"true": None}
    return {
        "lost": rest,
        "two lost": rest[:to] + rest[to + 1 :],
        "layer lost": rows[:3] + rows[6:],
        "cut": rows[: max(at, 1)],
        "cut at the beginning": rows[at:],
        "twice": [*rows[:at], other, *rows[at:]],
        "foreign": [*rows[:at], foreign(rows, "gemm"), *rows[at:]],
        "foreign of NCCL": [*rows[:at], foreign(rows, "ncclDevKernel_Generic()"), *rows[at:]],
        "exchanged": [*rows[:to], *rows[to : to + 2][::-1], *rows[to + 2 :]],
        "moved": [*rest[:to], rows[at], *rest[to:]],
        "renamed": [*rows[:at], foreign(rows, "ncclDevKernel_SendRecv()"), *rows[at + 1 :]],
        "another type": [*rows[:at], foreign(rows, "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"), *rows[at + 1 :]],
        "lost and foreign": [*rest[:to], foreign(rows, "ncclDevKernel_Generic()"), *rest[to:]],
    }[how]


DAMAGES = (
    "lost", "two lost", "layer lost", "cut", "cut at the beginning", "twice", "foreign", "foreign of NCCL",
    "exchanged", "moved", "renamed", "another type", "lost and foreign",
)  # fmt: skip
KEPT = {"lost": 8, "twice": 10, "foreign": 12, "foreign of NCCL": 9, "renamed": 11, "another type": 11}
"""How many of 12 sizes at least stay known after one difference; two may leave nothing."""


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_replay_gets_no_false_size(tmp_path: Path, how: str) -> None:
    record(tmp_path)
    at = (0, 1, 5, 11)[DAMAGES.index(how) % 4]
    kernels = damaged(layers(), how, at)
    rows = facts(trace(tmp_path, kernels, replays=1))
    true = [row["true"] for row in kernels]
    for start, size in rows.select("start", "bytes").rows():
        assert size in (None, true[start // 30_000]), (how, at, start)
    assert rows["bytes"].count() >= KEPT.get(how, 0), (how, at)


@pytest.mark.parametrize(
    ("how", "change"),
    [
        ("overwritten", lambda calls: calls[15:]),
        ("left out", lambda calls: calls[:20] + calls[21:]),
        ("other sizes", lambda calls: [c | {"input_sizes": [[n]]} for n, c in enumerate(calls)]),
        ("other types", lambda calls: [c | FLOAT for c in calls]),
        ("peers", lambda calls: [c | {"is_p2p": True} for c in calls]),
        ("other kinds", lambda calls: [c | {"profiling_name": "nccl:broadcast"} for c in calls]),
        ("of gloo", lambda calls: [c | {"profiling_name": "gloo:all_reduce"} for c in calls]),
        ("after the trace", lambda calls: [c | {"time_created_ns": AFTER * 2} for c in calls]),
        ("other groups", lambda calls: [c | {"process_group": ("9", "x")} for c in calls]),
        ("empty", lambda calls: calls[:0]),
        ("backwards", lambda calls: calls[::-1]),
        ("doubled", lambda calls: [c for call in calls for c in (call, call)]),
    ],
)
def test_a_damaged_recorder_gives_no_false_size(tmp_path: Path, how: str, change: Any) -> None:
    changed(record(tmp_path), change)
    rows = facts(trace(tmp_path, layers())).sort("start")
    if how == "other sizes":  # the three steps contradict each other; they agree on the group
        assert rows["bytes"].null_count() == rows.height
    else:
        assert rows.is_empty(), how


@pytest.mark.parametrize(("rank", "named"), [(1, 1), (2, 0)])
def test_the_recorder_of_another_rank_gives_nothing(tmp_path: Path, rank: int, named: int) -> None:
    record(tmp_path, rank, named)
    assert facts(trace(tmp_path, layers())).is_empty()


def test_a_recorder_whose_groups_lack_the_rank_is_refused_and_named(tmp_path: Path) -> None:
    path = record(tmp_path, 0)
    document = pickle.loads(path.read_bytes())
    document["pg_config"] = {"4": {"name": "4", "desc": "mesh_tp", "ranks": "[2, 3]"}}
    path.write_bytes(pickle.dumps(document, protocol=2))
    found = thence.open(trace(tmp_path, layers()))
    assert found.tables.collectives.is_empty()
    (text,) = [text for text in found.meta.warnings if path.name in text]
    assert "rank 0 is not in its process group '4'" in text


# Notes, and what else knows something


def test_a_note_states_how_many_kernels_have_facts(tmp_path: Path) -> None:
    record(tmp_path)
    found = thence.open(trace(tmp_path, layers())).tables.meta.notes
    assert found == ("flight recorders (nccl_trace_rank_0) give facts of 36 of 36 collective kernels of their ranks",)


def test_an_overwritten_recorder_says_what_to_set(tmp_path: Path) -> None:
    changed(record(tmp_path), lambda calls: calls[15:])
    (text,) = [x for x in thence.open(trace(tmp_path, layers())).tables.meta.notes if "facts" in x]
    assert "0 of 36" in text
    assert "overwritten its first 15 calls" in text
    assert "TORCH_FR_BUFFER_SIZE" in text


def test_what_had_begun_and_not_ended_is_named_with_its_line(tmp_path: Path) -> None:
    changed(record(tmp_path), lambda calls: [*calls[:-1], calls[-1] | {"state": "started"}])
    (text,) = [x for x in thence.open(trace(tmp_path, layers())).tables.meta.notes if "had begun" in x]
    # The last call of a step on rank 0: the broadcast in the group "experts", the third.
    line = 1 + (RECORDS / "make.py").read_text().splitlines().index(
        "        dist.broadcast(ones(5, dtype=torch.int64), 0, group=experts)"
    )
    assert (
        f"broadcast number 3 of process group 5 in nccl_trace_rank_0, called at /home/user/project/make.py:{line}"
        in text
    )


def test_ranks_that_made_fewer_calls_are_named(tmp_path: Path) -> None:
    paths = [record(tmp_path, rank) for rank in (0, 1)]
    changed(paths[1], lambda calls: calls[:-1])
    traces = [trace(tmp_path, layers(), rank) for rank in (0, 1)]
    notes = thence.open(*traces).tables.meta.notes
    (text,) = [text for text in notes if " made " in text]
    assert "in process group 5 (experts), rank 1 made 2 collective calls, another rank 3" in text


def test_a_recorder_is_found_beside_or_given_as_an_input(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = record(tmp_path / "elsewhere").rename(tmp_path / "elsewhere" / "dump_of_0")
    path = trace(tmp_path, layers())
    assert thence.open(path).tables.collectives.is_empty()
    assert thence.open(path, moved).tables.collectives.height == 36
    record(tmp_path)
    assert thence.open(tmp_path).tables.collectives.height == 36


def test_the_json_form_says_the_same(tmp_path: Path) -> None:
    content = (RECORDS / "fr_trace_0.json").read_bytes().replace(b"gloo:", b"nccl:")
    (tmp_path / "fr_trace_0.json").write_bytes(content)
    rows = facts(trace(tmp_path, layers())).sort("start")
    assert rows["bytes"].to_list() == 3 * [size for _, size in TRUTH]


def test_two_recorders_of_a_rank_count_once_and_must_agree(tmp_path: Path) -> None:
    record(tmp_path)
    content = (RECORDS / "fr_trace_0.json").read_bytes().replace(b"gloo:", b"nccl:")
    (tmp_path / "fr_trace_0.json").write_bytes(content)
    path = trace(tmp_path, layers())
    rows = facts(path).sort("start")
    assert rows["bytes"].to_list() == 3 * [size for _, size in TRUTH]
    smaller = json.loads(content)
    for call in smaller["entries"]:
        call |= {"input_sizes": [[1]]}
    (tmp_path / "fr_trace_0.json").write_text(json.dumps(smaller))
    rows = facts(path)
    assert rows["bytes"].null_count() == rows.height == 36
    assert rows["group_name"].unique().to_list() == ["3"]


def eager(folder: Path, *, shift_ns: int = 0) -> tuple[Path, list[int | None]]:
    """A trace of kernels launched one by one, 50 us after each call of the second step, and their true sizes."""
    calls = pickle.loads((RECORDS / "fr_trace_0").read_bytes())["entries"][15:30]
    document = json.loads(unzipped(TORCH / "graphs" / "comm_eager_rank0.json.gz"))
    (launch, *_) = [e for e in document["traceEvents"] if "LaunchKernel" in str(e.get("name"))]
    kernels = {kind: kernel(kind) for kind in ("AllReduce", "AllGather")}
    base = calls[0]["time_created_ns"]
    events: list[dict[str, Any]] = []
    sizes = []
    for number, call in enumerate(calls):
        name = call["profiling_name"].partition(":")[2]
        made = kernels["AllGather" if name == "all_gather" else "AllReduce"]
        reduced = "f32" if call["input_dtypes"] == ["Float"] else "bf16"
        title = made["name"].replace("bf16", reduced)
        if name == "broadcast":
            title = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        start = (call["time_created_ns"] - base) / 1000 + 50
        args = {"correlation": 900_000 + number}
        events.append(launch | {"ts": start, "dur": 5, "args": launch["args"] | args})
        events.append(made | {"name": title, "ts": start + 10, "dur": 20, "args": made["args"] | args})
        width = {"Float": 4, "BFloat16": 2, "Long": 8}[call["input_dtypes"][0]]
        sizes.append(call["input_sizes"][0][0] * width)
    document["traceEvents"] = events
    document["baseTimeNanoseconds"] = base + shift_ns
    document["distributedInfo"] |= {"world_size": 4}
    del document["distributedInfo"]["pg_config"]
    path = folder / "eager_rank0.json"
    path.write_text(json.dumps(document))
    return path, sizes


def test_kernels_outside_of_graphs_are_described_in_the_order_of_their_launches(tmp_path: Path) -> None:
    record(tmp_path)
    path, sizes = eager(tmp_path)
    rows = facts(path).sort("start")
    assert rows["bytes"].to_list() == sizes
    # gloo writes no members, and this trace lists none.
    assert rows["group_name"].to_list() == ["0", *12 * ["3"], "1", "5"]
    assert rows["group_size"].null_count() == rows.height


@pytest.mark.parametrize("shift_ns", [-(10**12), 10**12])
def test_a_recorder_of_another_time_says_nothing_of_eager_kernels(tmp_path: Path, shift_ns: int) -> None:
    record(tmp_path)
    assert facts(eager(tmp_path, shift_ns=shift_ns)[0]).is_empty()


def test_the_layout_of_a_recorder_gives_the_groups_of_another_rank(tmp_path: Path) -> None:
    """An eager run of rank 0 labels a replay of rank 1, whose trace lists no groups, but whose recorder does."""
    graphs = TORCH / "graphs"
    source = json.loads(unzipped(graphs / "comm_eager_rank0.json.gz"))
    target = json.loads(unzipped(graphs / "comm_replay_rank0.json.gz"))
    for event in source["traceEvents"]:
        if "Process Group Ranks" in event.get("args", {}):
            event["args"] |= {
                "Process Group Name": "3", "Process Group Description": "mesh_tp", "Process Group Ranks": "[0, 1]",
            }  # fmt: skip
    target["distributedInfo"] |= {"rank": 2, "world_size": 4, "pg_config": []}
    (tmp_path / "eager.json").write_text(json.dumps(source))
    (tmp_path / "replay.json").write_text(json.dumps(target))
    document = pickle.loads(record(tmp_path, 2).read_bytes())
    document["pg_config"] = {
        name: {"name": name, "desc": text, "ranks": str(ranks)} for name, (text, ranks) in GROUPS.items() if 2 in ranks
    }
    (tmp_path / "nccl_trace_rank_2").write_bytes(pickle.dumps(document, protocol=2))
    run = thence.open(tmp_path / "eager.json")
    found = thence.open(tmp_path / "replay.json").label(eager=run).tables.collectives
    assert found.select("group_name", "group_ranks").unique().rows() == [("4", "[2, 3]")]


@pytest.mark.parametrize("rank", [1])
def test_replays_are_described_by_what_nccl_recorded(rank: int) -> None:
    """A graph of four layers on two GPUs, replayed three times, whose trace describes no collective by itself.

    Layer n moves n x 64 numbers of bfloat16, as make.py says: the input of a rank, or of a reduce-scatter its output.
    """
    folder = RECORDS / "nccl"
    alone = thence.open(folder / f"replay_rank{rank}.json.gz").tables.collectives
    assert alone["bytes"].null_count() == alone.height
    described = thence.open([folder / f"replay_rank{rank}.json.gz", folder / f"nccl_fr_trace_{rank}"])
    kinds = ("all-gather", "all-reduce", "reduce-scatter")
    rows = described.collectives().rows.select("collective", "bytes", "group_size").rows()
    assert sorted(rows) == [(kind, 128 * layer, 2) for kind in kinds for layer in range(1, 5) for _ in range(3)]
