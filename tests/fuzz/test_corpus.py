"""Mutants that reach new lines are kept and grown again; failures are made smaller as long as they fail alike."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuzz.corpus import Corpus, kind_of, smallest

TREE = {"events": [{"name": "a", "ts": 1}, {"name": "b", "ts": 2}], "rank": 3}
RUN = Path(__file__).with_name("run.py")


def test_a_mutant_is_made_again_from_what_the_file_holds(tmp_path: Path) -> None:
    corpus = Corpus.of(tmp_path, "kineto", probed=False)
    corpus.new = {"readers/x.py:7"}
    corpus.ended(("kineto 1 3", "kineto 1 9"), tree=True)
    corpus.new = {"readers/x.py:8"}
    corpus.ended(("kineto 1 10",), tree=False)  # damaged bytes are no tree to go on with
    again = Corpus.of(tmp_path, "kineto", probed=False)
    assert again.chains == [("kineto 1 3", "kineto 1 9")]
    assert again.reached == {"readers/x.py:7", "readers/x.py:8"}
    (chain,) = {again.parent(random.Random(i)) for i in range(50)} - {()}
    assert again.grown(TREE, chain) == corpus.grown(TREE, chain)
    assert any(corpus.grown(TREE, (f"kineto 1 {i}",)) != TREE for i in range(9))


def test_the_smallest_failure_holds_only_what_fails() -> None:
    def fails(tree: Any) -> bool:
        events = tree.get("events") if isinstance(tree, dict) else None
        return any(isinstance(e, dict) and e.get("ts") == 2 for e in events or [])

    assert smallest(TREE, fails) == {"events": [{"ts": 2}]}


def test_failures_are_alike_by_their_place_and_exception() -> None:
    text = 'File "/x/a.py", line 3, in f\n  File "/x/b.py", line 9, in g\n{}: {}\n'
    first, second = text.format("KeyError", "'a'"), text.format("KeyError", "'b'")
    assert kind_of(first) == kind_of(second) != kind_of(text.format("ValueError", "a"))
    assert kind_of("exit code 17") == kind_of("exit code 3")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in Python 3.12")
def test_a_run_with_a_corpus_goes_on_from_the_one_before(tmp_path: Path) -> None:
    for seed in (1, 2):
        command = [sys.executable, str(RUN), "labels", "--cases", "40", "--every", "100", "--seed", str(seed)]
        subprocess.run([*command, "--corpus", str(tmp_path)], check=True, timeout=600)
    lines = (tmp_path / "labels.lines").read_text().splitlines()
    chains = (tmp_path / "labels.mutants").read_text().splitlines()
    assert any(line.startswith("readers/label_files.py:") for line in lines)
    assert len(lines) == len(set(lines))
    assert len(chains) > 3


PLANTED = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
import fuzz.run
def broken(inputs):
    try:
        document = json.loads((Path(inputs[0]) / "labels.json").read_bytes())
    except ValueError:
        return
    labels = document.get("labels") if isinstance(document, dict) else None
    if isinstance(labels, list) and any(isinstance(x, dict) and "path" not in x for x in labels):
        raise KeyError("planted")
fuzz.run.read = broken
sys.exit(fuzz.run.main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits are those of POSIX")
def test_beside_an_input_that_fails_is_the_smallest_that_fails_alike(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PLANTED, str(RUN.parents[1]), "labels", "--cases", "300"]
    more = ["--every", "1000", "--first", "1", "--keep", str(tmp_path)]
    done = subprocess.run([*command, *more], stdout=subprocess.PIPE, timeout=600, check=False)
    assert done.returncode == 1
    kept = [folder for folder in tmp_path.iterdir() if (folder / "smallest").exists()]  # no bytes
    assert kept
    for folder in kept:
        assert "KeyError: 'planted'" in (folder / "failure.txt").read_text()
        assert (folder / "labels.json").stat().st_size > 1000
        assert (folder / "smallest" / "labels.json").read_text() == '{"labels": [{}]}'
