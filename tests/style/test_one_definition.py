"""Facts that several modules need are written down once: kinds of places, reasons, ways to read inputs."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import thence
from source_trees import nodes
from thence.model.places import PLACES
from thence.model.reasons import ADVICE, CODES, REASONS, RULES

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(thence.__file__).parent
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if "protos" not in path.parts]
MOST_KINDS = 4
"""Kinds of places that a module may list for a reason of its own."""


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def texts(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_kinds_of_places_are_listed_in_one_table() -> None:
    lists = [
        (name(path), node.lineno)
        for path in MODULES
        if name(path) != "model/places.py"
        for node in nodes(path)
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and len({e.value for e in node.elts if isinstance(e, ast.Constant)} & set(PLACES)) > MOST_KINDS
    ]
    assert lists == []


def test_sentences_of_rules_and_reasons_stand_in_one_table() -> None:
    sentences = {*RULES.values(), *REASONS.values()}
    found = {(name(path), text) for path in MODULES for text in texts(path) if text in sentences and len(text) > 20}
    assert {module for module, _ in found} == {"model/reasons.py"}


def test_only_one_module_starts_python_processes() -> None:
    """Elsewhere the current directory would come first in their sys.path; see `thence.child_python`."""
    starting = {
        name(path)
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and (node.attr, getattr(node.value, "id", None))
        in {("executable", "sys"), ("get_context", "multiprocessing"), ("init", "ray")}
    }
    # The workers do so within `safe_path`; those of the launcher print the name, and compare it.
    launcher = {"capture/launcher/startup/sitecustomize.py", "capture/launcher/first_use.py"}
    assert starting == {"child_python.py", "store/workers.py", *launcher}


def test_every_code_has_one_meaning_and_advice_is_for_codes_that_there_are() -> None:
    assert len(set(CODES)) == len(CODES)
    assert not set(RULES) & set(REASONS)
    for advice in ADVICE.values():
        assert set(advice) <= set(REASONS)


def test_inputs_are_opened_in_one_place_of_the_command_line() -> None:
    """So that every verb selects, refuses and reports alike."""
    users = [path for path in (PACKAGE / "cli").glob("*.py") if "open_trace" in path.read_text()]
    assert [path.name for path in users] == ["inputs.py"]
    writers = [p for p in (PACKAGE / "cli").glob("*.py") if "exists already" in p.read_text()]
    assert [path.name for path in writers] == ["output.py"]


def test_the_page_of_codes_is_up_to_date() -> None:
    docs = PACKAGE.parents[1] / "docs"
    made = runpy.run_path(str(docs / "make_reasons.py"))["page"]()
    assert (docs / "reasons.md").read_text(encoding="utf-8") == made


def test_the_table_of_thresholds_is_up_to_date() -> None:
    docs = PACKAGE.parents[1] / "docs"
    text = (docs / "numbers.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(docs / "make_thresholds.py"))["page"](text) == text


def test_latencies_are_defined_among_the_thresholds() -> None:
    """So that one meaning has one value; others only say how a computation ends or what it shows."""
    number = re.compile(r"^(_?[A-Z][A-Z_]*_NS) = [\d_.]+\b", re.MULTILINE)
    rooms = [path for room in ("analysis", "attribution") for path in (PACKAGE / room).rglob("*.py")]
    rooms = [path for path in rooms if path.parent.name != "inside"]
    defined = {name for path in rooms for name in number.findall(path.read_text(encoding="utf-8"))}
    assert defined == {
        "_SETTLED_NS",  # when an iteration has converged
        "_MIN_BIN_NS",  # the first bin of a histogram
        "_DAY_NS", "_SECOND_NS",  # units
        "_LATE_NS", "_CLOCKS_NS", "TOLERANCE_NS", "_FAR_OFF_NS",  # matching of labels, flight records and calls
        "_BEFORE_NS", "_ROUNDED_NS",  # matching of records of NCCL's Inspector
    }  # fmt: skip
