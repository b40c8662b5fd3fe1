"""Random events in random layouts: pieces, processes and the decoder against json.loads."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thence
from helpers import RECORDINGS, assert_same_tables, examples, recording, shared, unzipped
from thence.readers.kineto import decoding, envelope, events, processes
from thence.readers.kineto import envelope as chunks
from thence.readers.kineto.envelope import boundaries, split_events

settings.register_profile("thence", deadline=None, max_examples=examples(80))
settings.load_profile("thence")

TRICKY = (
    "}", "{", "]", "[", '"', "\\", '\\"', '}, {"ph"', '},\n{"ph":"X"', "\n  },\n  {", '"traceEvents": [',
    '}],"traceName":"', "\u2028", "ä", "𝄞", "\x7f", "<script>", "a" * 50, "", " ",
)  # fmt: skip
texts = st.lists(st.sampled_from(TRICKY), max_size=4).map("".join)
identifiers = st.integers(0, 2**63 - 1)
arguments = st.fixed_dictionaries(
    {"stream": st.integers(0, 9), "device": st.just(0)},
    optional={
        "correlation": identifiers,
        "graph node id": st.integers(0, 2**64 - 1),
        "Call stack": texts,
        "occupancy": st.fixed_dictionaries({"limitingFactors": texts, "list": st.lists(texts, max_size=2)}),
        "grid": st.lists(st.integers(1, 2**31), min_size=3, max_size=3),
    },
)
kernels = st.fixed_dictionaries(
    {
        "ph": st.sampled_from(["X", "X", "X", "i"]),
        "cat": st.sampled_from(["kernel", "gpu_memcpy", "cpu_op", "Trace"]),
        "name": texts,
        "pid": st.just(0),
        "tid": st.just(7),
        "ts": st.integers(0, 10**12),
        "dur": st.integers(0, 1000),
        "args": arguments,
    }
).map(lambda e: e if e["ph"] == "X" else {k: v for k, v in e.items() if k != "dur"})
layouts = st.sampled_from(
    [
        json.dumps,
        lambda e: json.dumps(e, separators=(",", ":")),
        lambda e: json.dumps(e, indent=2, ensure_ascii=False),
        lambda e: json.dumps(e, indent=0),
        lambda e: "[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in e) + "\n]",
        lambda e: "[" + " ,\t".join(json.dumps(one) for one in e) + "]",
    ]
)


def expected_rows(document: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """(start, duration, stream, name, node) of the device activities, in the order of a set."""
    rows = [
        (e["ts"] * 1000, e["dur"] * 1000, e["args"]["stream"], e["name"], e["args"].get("graph node id") or None)
        for e in document
        if e["ph"] == "X" and e["cat"] in ("kernel", "gpu_memcpy")
    ]
    return sorted(rows, key=repr)


def found_rows(trace: thence.Trace) -> list[tuple[Any, ...]]:
    import polars as pl

    columns = ["start", "duration", "stream", pl.col("name").cast(pl.String), "node"]
    return sorted(trace.recorded.gpu.select(columns).rows(), key=repr)


@pytest.mark.slow_oracle
@given(st.lists(kernels, min_size=1, max_size=12), layouts, st.booleans(), st.sampled_from([64, 300, 1 << 22]))
def test_every_layout_in_pieces_of_any_size_holds_the_events(
    document: list[dict[str, Any]], layout: Any, wrapped: bool, piece: int
) -> None:
    text = layout(document)
    assert json.loads(text) == document
    text = f'{{"schemaVersion": 1, "traceEvents": {text}, "traceName": "x"}}' if wrapped else text
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        small_pieces(patch, piece)
        # Label files are looked for in the folder of a trace and in its parent.
        path = Path(folder) / "alone" / "trace.json"
        path.parent.mkdir()
        path.write_text(text, "utf-8")
        trace = thence.open(path)
    assert found_rows(trace) == expected_rows(document)
    # Events of no category are of no program that is known.
    assert trace.meta.warnings == () or (trace.recorded.gpu.is_empty() and trace.recorded.host.is_empty())
    if wrapped:
        assert trace.meta.facts[0]["traceName"] == "x"


@given(st.lists(kernels, min_size=1, max_size=5), layouts, st.sampled_from([1, 7, 1 << 20]))
def test_boundaries_are_the_ends_of_the_events(document: list[dict[str, Any]], layout: Any, block: int) -> None:
    text = layout(document).encode()
    inner = text[text.index(b"[") + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelope, "_BLOCK_BYTES", block)
        found = boundaries(inner)
    assert inner[found.array_end : found.array_end + 1] == b"]"
    assert len(found.ends) == len(document)
    assert json.loads(b"[" + inner[: found.ends[-1]] + b"]") == document


@given(st.lists(kernels, min_size=1, max_size=10))
def test_splitting_a_piece_loses_no_event_of_plain_text(document: list[dict[str, Any]]) -> None:
    for number, item in enumerate(document):
        item["name"] = f"kernel {number}"
        item["args"] = {}
    # Exporters begin an event with one of a few keys.
    document = [{"ph": item.pop("ph"), **item} for item in document]
    parts = split_events(json.dumps(document).encode())
    assert [json.loads(part) for part in parts] == document


@given(st.lists(kernels, min_size=1, max_size=10))
def test_columns_of_one_piece_count_its_events(document: list[dict[str, Any]]) -> None:
    columns = events.decode(json.dumps(document).encode())
    assert columns["events"] == len(document)
    assert columns["damaged"] == 0
    assert len(columns["gpu.start"]) == len(expected_rows(document))


def small_pieces(patch: pytest.MonkeyPatch, size: int) -> None:
    """Everything that the envelope measures, in proportion."""
    if size < processes.PIECE_BYTES:
        patch.setattr(envelope, "PIECE_BYTES", size)
        patch.setattr(processes, "PIECE_BYTES", size)
        patch.setattr(envelope, "_WINDOW_BYTES", max(32, size // 2))
        patch.setattr(envelope, "_READ_BYTES", max(32, size // 4))


@pytest.mark.parametrize(("size", "packed"), [(50_000, False), (10_000, True)], ids=["plain", "gzipped"])
def test_tiny_pieces_give_the_same_tables_as_one(
    size: int, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = recording("torch_fsdp_rank2")
    whole = shared(stored)
    plain = tmp_path / "torch_fsdp_rank2.json"
    plain.write_bytes(unzipped(stored))
    small_pieces(monkeypatch, size)
    assert_same_tables(thence.open(stored if packed else plain).recorded, whole.recorded)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
def test_decoding_in_processes_gives_the_same_tables(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = recording("torch_fsdp_rank3")
    whole = shared(stored)
    plain = tmp_path / "torch_fsdp_rank3.json"
    plain.write_bytes(unzipped(stored))
    small_pieces(monkeypatch, 200_000)
    monkeypatch.setattr(decoding, "BYTES_BEFORE_PROCESSES", 1)
    monkeypatch.setattr(processes, "_usable_cores", lambda: 2)
    assert_same_tables(thence.open(stored if packed else plain).recorded, whole.recorded)


@pytest.mark.parametrize("path", RECORDINGS[:3], ids=lambda p: p.name)
def test_real_files_have_a_separator_that_is_found_by_bytes(path: Path) -> None:
    content = unzipped(path)
    head = content[content.index(b"[", content.index(b'"traceEvents"')) + 1 :][: 1 << 20]
    separator = chunks.find_separator(head)
    assert separator is not None
    assert b"\n" in separator
