"""Parts of recordings: what is written comes back, and whatever else is there is refused."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.model.column_file import MAX_ROWS, DamagedPart, decode, encode, rows_of

INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)


def as_lists(columns: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: list(map(int, v)) if isinstance(v, np.ndarray) else v for name, v in columns.items()}


@settings(max_examples=examples(200), deadline=None)
@given(st.data(), st.integers(0, 12))
def test_all_integers_and_texts_come_back(data: st.DataObject, rows: int) -> None:
    texts = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"])))
    column = st.lists(st.one_of(INTEGERS, st.integers(0, 3)), min_size=rows, max_size=rows)
    given_columns: dict[str, Any] = {
        name: np.array(data.draw(column), np.int64) for name in ("start", "end", "stream", "id")
    }
    given_columns["name"] = data.draw(st.lists(texts, min_size=rows, max_size=rows))
    content = encode(given_columns)
    assert as_lists(decode(content)) == as_lists(given_columns)
    assert rows_of(content) == rows


def test_unsigned_64_bit_numbers_keep_their_bits() -> None:
    nodes = np.array([(1 << 64) - 1, 0, 1 << 63, 7], np.uint64)
    back = decode(encode({"node": nodes}))["node"]
    assert isinstance(back, np.ndarray)
    assert back.astype(np.uint64).tolist() == nodes.tolist()


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.one_of(st.floats(), st.integers(-(1 << 60), 1 << 60).map(float), st.just(0.0)), max_size=12))
def test_all_real_numbers_come_back(values: list[float]) -> None:
    """The nearest float64 of each, and whatever is no number."""
    back = decode(encode({"start": np.arange(len(values)), "joules": np.array(values)}))["joules"]
    assert isinstance(back, np.ndarray)
    assert back.dtype == np.float64
    assert np.array_equal(back, np.array(values), equal_nan=True)


def test_amounts_that_are_whole_take_the_space_of_integers() -> None:
    """Cycles of a sample of 10 us: four bytes instead of eight."""
    cycles = np.arange(10_000) * 100_000.0
    assert len(encode({"cycles": cycles})) < 4.2 * len(cycles)
    assert len(encode({"cycles": cycles + 0.5})) > 8 * len(cycles)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.bool_])
def test_columns_of_any_integer_type(dtype: Any) -> None:
    back = decode(encode({"what": np.array([1, 0, 1], dtype)}))["what"]
    assert list(back) == [1, 0, 1]


def test_counters_and_constants_take_little_space() -> None:
    """100,000 rows of 32 bytes: times and ids take a byte a row each here, a constant nothing."""
    rows = 100_000
    start = 1_700_000_000_000_000_000 + np.arange(rows) * 100
    columns = {
        "start": start, "end": start + 42, "device": np.zeros(rows, np.int64),
        "correlation": np.arange(5, rows + 5),
    }  # fmt: skip
    assert len(encode(columns)) < 3.1 * rows


def test_a_part_is_a_zip_file_of_numpy_arrays() -> None:
    content = encode({"id": np.arange(1000, 1300), "stream": np.array([7] * 300)})
    loaded = np.load(io.BytesIO(content), allow_pickle=False)
    first = json.loads(loaded["columns.json"])["first"]["id"]
    assert (first + np.cumsum(loaded["id"].astype(np.int64))).tolist() == list(range(1000, 1300))
    assert json.loads(loaded["columns.json"])["first"]["stream"] == 7
    assert "stream" not in loaded


def test_equal_rows_are_equal_bytes() -> None:
    columns = {"id": np.arange(5), "name": ["a", None, "b", "", "c"]}
    assert encode(columns) == encode(columns)


def test_more_rows_than_a_part_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        encode({"id": np.zeros(MAX_ROWS + 1, np.int8)})


GOOD = encode({"start": np.arange(0, 4000, 10), "name": [f"kernel {n}" for n in range(400)]})


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_changed_byte_is_found_or_changes_nothing(place: int, change: int) -> None:
    """The bytes of a zip file that no checksum covers are those of headers that say the same twice."""
    damaged = bytearray(GOOD)
    damaged[place] ^= change
    try:
        columns = decode(bytes(damaged))
    except DamagedPart:
        return
    assert as_lists({k: v for k, v in columns.items() if k == "start"})["start"] == list(range(0, 4000, 10))


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, len(GOOD) - 1))
def test_a_truncated_part_is_refused(length: int) -> None:
    with pytest.raises(DamagedPart):
        decode(GOOD[:length])


def forged(index: Any, **members: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("columns.json", json.dumps(index))
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return content.getvalue()


def npy(array: Any) -> bytes:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=True)
    return content.getvalue()


def index(rows: Any, **columns: str) -> dict[str, Any]:
    return {"format": "thence.columns", "rows": rows, "columns": columns, "first": {}}


HUGE = (
    b"\x93NUMPY\x01\x00\x76\x00"
    + b"{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117)
    + b"\n"
)
HOSTILE = {
    "objects": forged(index(1, a="plain"), a=npy(np.array([object], object))),
    "floats": forged(index(1, a="plain"), a=npy(np.array([1.5]))),
    "two dimensions": forged(index(4, a="plain"), a=npy(np.zeros((2, 2), int))),
    "a huge shape": forged(index(1, a="plain"), a=HUGE),
    "too many rows": forged({**index(1 << 40, a="same"), "first": {"a": 0}}),
    "the same of nothing": forged(index(3, a="same")),
    "fewer values than rows": forged(index(3, a="plain"), a=npy(np.zeros(2, int))),
    "negative rows": forged(index(-1)),
    "rows that are no number": forged(index("3")),
    "an unknown way": forged(index(1, a="pickle"), a=npy(np.zeros(1, int))),
    "end without start": forged(index(1, end="since start"), end=npy(np.zeros(1, int))),
    "a missing column": forged(index(1, a="plain")),
    "no index": forged(None),
    "another format": forged({"format": "other", "rows": 0, "columns": {}, "first": {}}),
    "a difference from nothing": forged(index(1, a="difference"), a=npy(np.zeros(1, int))),
    "a difference from text": forged(
        {**index(1, a="difference"), "first": {"a": "1"}}, a=npy(np.zeros(1, int))
    ),
    "texts that do not add up": forged(
        index(2, a="text"), a=npy(np.zeros(3, np.uint8)), **{"a.lengths": npy(np.array([5, 5]))}
    ),
    "texts of negative size": forged(
        index(2, a="text"), a=npy(np.zeros(3, np.uint8)), **{"a.lengths": npy(np.array([1 << 62, 1 << 62]))}
    ),
    "a member far too large": forged(index(1, a="plain"), a=bytes(1 << 20)),
    "no zip file": b"ARROW1\x00\x00" + bytes(100),
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_no_recorder_writes_is_refused(content: bytes) -> None:
    with pytest.raises(DamagedPart):
        decode(content)
