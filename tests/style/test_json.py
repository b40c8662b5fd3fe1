"""JSON is decoded in one way: into types whose integers have a range."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import msgspec.inspect
import pytest

import thence
from source_trees import nodes
from thence.model.json_fields import Count, JsonInt64, NotAsWritten, Rank, decoded, field

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(thence.__file__).parent
CHECKED_AS_COLUMNS = {
    "thence.readers.kineto.event_structs": "kineto/repair.py repairs events with integers that no column holds",
    "thence.readers.kineto.events": "device, stream and correlation are compared with those of the gpu table",
    "thence.readers.kineto.repair": "times stay text",
}
"""Modules whose Structs have integers of any size, and what checks them."""
OTHERWISE = {
    "doctor/probe.py": "what a child process of thence's own prints",
    "capture/launcher/content.py": "what the recorder of this run wrote",
    "capture/launcher/first_use.py": "settings that thence passes to a child process",
    "capture/marks/graph_labels.py": "metadata of this process",
    "capture/marks/launch_facts.py": "comments in code that Inductor generated in this process",
    "capture/session/rank_requests.py": "imported in the recorded process, which does not import msgspec",
    "model/column_file.py": "imported in the recorded process, which does not import msgspec",
    "readers/kineto/events.py": "decoders made once",
    "readers/kineto/rows.py": "a decoder made once",
    "readers/kineto/scanner.py": "decoders made once",
    "readers/kineto/repair.py": "events that strict decoding refused",
    "readers/recording/host.py": "metadata of marks, which may hold NaN",
    "writers/timelines/relabelled.py": "events of the input, copied as they are",
}
"""Modules that decode JSON without `thence.model.json_fields`, and why."""


def modules() -> dict[str, Path]:
    return {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def structs() -> Iterator[type[msgspec.Struct]]:
    for name, path in modules().items():
        if any("msgspec.Struct" in ast.unparse(base) for node in nodes(path)
               if isinstance(node, ast.ClassDef) for base in node.bases):  # fmt: skip
            module = importlib.import_module(f"thence.{name.removesuffix('.py').replace('/', '.')}")
            for value in vars(module).values():
                if isinstance(value, type) and issubclass(value, msgspec.Struct):
                    yield value


def integers(kind: Any, path: str = "") -> Iterator[tuple[str, msgspec.inspect.IntType]]:
    """Every integer within a type, by the names of the fields around it."""
    if isinstance(kind, msgspec.inspect.IntType):
        yield path, kind
    for name in ("item_type", "key_type", "value_type"):
        if (inner := getattr(kind, name, None)) is not None:
            yield from integers(inner, path)
    for inner in (*getattr(kind, "item_types", ()), *getattr(kind, "types", ())):
        yield from integers(inner, path)
    for inner in getattr(kind, "fields", ()):
        yield from integers(inner.type, f"{path}.{inner.name}")


def test_every_integer_of_every_document_has_a_range() -> None:
    known = {kind for kind in structs() if kind.__module__ not in CHECKED_AS_COLUMNS}
    assert len(known) > 20
    without = [
        f"{kind.__module__}.{kind.__name__}{path}"
        for kind in known
        for path, integer in integers(msgspec.inspect.type_info(kind))
        if (integer.ge is None and integer.gt is None) or (integer.le is None and integer.lt is None)
    ]
    assert without == []


def test_json_is_decoded_in_one_place() -> None:
    calls = {
        name
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("json.load", "json.loads", "msgspec.json.decode", "msgspec.json.Decoder")
    }  # fmt: skip
    assert calls == {"model/json_fields.py", *OTHERWISE}


class Document(msgspec.Struct):
    rank: Rank
    sizes: dict[str, Count] = {}


@pytest.mark.parametrize(
    "text",
    [
        b'{"rank": 18446744073709551615}', b'{"rank": -1}', b'{"rank": 2147483648}', b'{"rank": 1.5}', b'{"rank": "1"}',
        b'{"rank": true}', b'{"rank": null}', b"{}", b"[]", b'{"rank": 1', b"", b'{"rank": 1, "sizes": {"a": -1}}',
        b'{"rank": 1, "sizes": {"a": 9223372036854775808}}', b'{"rank": 1, "sizes": {"\xff": 1}}', b"[" * 100_000,
        b'{"rank": 1e400}', b'{"rank": NaN}',
    ],
)  # fmt: skip
def test_what_is_not_as_written_is_one_error(text: bytes) -> None:
    with pytest.raises(NotAsWritten):
        decoded(text, Document)


def test_a_damaged_field_leaves_the_others() -> None:
    values = {"rank": 1 << 64, "size": 3, "name": ["x"]}
    assert field(values, "rank", Rank) is None
    assert field(values, "size", JsonInt64) == 3
    assert field(values, "name", str) is None
    assert field(values, "missing", str) is None
