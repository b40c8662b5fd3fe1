"""Every JSON document states its schema, and no key disappears while that number stays the same.

`PYTHONPATH=tests:tests/support python tests/cli/test_schemas.py` writes the keys of today to json_keys.json.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from helpers import output
from thence.cli.output import SCHEMAS

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).parent
STORED = HERE / "json_keys.json"
"""By verb: the schema when this was written, and the keys that there were."""
WITHOUT = {"sql"}
"""Verbs whose document is a list of rows with the columns of a query."""


def script(name: str) -> ModuleType:
    """A script of docs/, which runs every verb on recordings or says what the keys mean."""
    sys.path.insert(0, str(HERE.parents[1] / "docs"))
    try:
        return importlib.import_module(name)
    finally:
        del sys.path[0]


@functools.cache
def documents(verb: str) -> list[dict[str, Any]]:
    """What a verb prints for its samples."""
    samples = script("json_samples")
    return [samples._document(verb, a) for a in samples.SAMPLES.get(verb, samples._DEFAULT)]


def keys_today(verb: str) -> list[str]:
    """Every key that a verb prints; keys that are data are left out."""
    maps = frozenset(script("json_keys").MAPS.get(verb, ()))
    walk = script("json_samples")._walk
    paths = {path for document in documents(verb) for path, _ in walk(document, "", maps)}
    return sorted(path for path in paths if "*" not in path)


def test_every_verb_with_json_has_a_schema() -> None:
    assert set(script("json_samples").verbs_with_json()) - WITHOUT == set(SCHEMAS)
    assert all(isinstance(number, int) and number >= 1 for number in SCHEMAS.values())


@pytest.mark.parametrize("verb", SCHEMAS)
def test_every_document_states_the_schema_of_its_verb_first(verb: str) -> None:
    for document in documents(verb):
        assert next(iter(document)) == "schema"
        assert document["schema"] == SCHEMAS[verb]


@pytest.mark.parametrize("verb", SCHEMAS)
def test_a_key_disappears_only_with_a_new_schema(verb: str) -> None:
    stored: dict[str, Any] | None = json.loads(STORED.read_text()).get(verb)
    assert stored is not None, f"{STORED.name} lacks {verb}: the first lines of this file say how to renew it"
    assert SCHEMAS[verb] >= stored["schema"]
    if SCHEMAS[verb] == stored["schema"]:
        assert set(stored["keys"]) - set(keys_today(verb)) == set()


def test_files_state_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(HERE.parent / "data" / "torch" / "torch_eager_rank0.json.gz")
    output(capsys, "report", trace, "-o", tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["schema"] == SCHEMAS["report"]


if __name__ == "__main__":
    written = {verb: {"schema": n, "keys": keys_today(verb)} for verb, n in SCHEMAS.items()}
    STORED.write_text(json.dumps(written, indent=1) + "\n")
