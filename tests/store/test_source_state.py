"""Labels beside a trace are part of what it was read as."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers import PAIR, written
from stores import InProcess, stored
from thence.errors import InputError
from thence.store.source_state import SourceStates

if TYPE_CHECKING:
    from pathlib import Path


def test_a_trace_is_read_again_when_labels_beside_it_come_and_go(tmp_path: Path) -> None:
    folder, store = tmp_path / "run", tmp_path / "s"
    folder.mkdir()
    trace = written(folder / "rank0.json", PAIR, distributedInfo={"rank": 0})
    labels = folder / "labels.json"

    def read_now() -> int:
        workers = InProcess()
        stored(store, [trace], workers)
        return len(workers.asked)

    assert (read_now(), read_now()) == (1, 0)
    labels.write_text("{}")
    assert (read_now(), read_now()) == (1, 0)
    labels.unlink()
    assert read_now() == 1


@pytest.mark.parametrize("name", ["labels.json", "my_labels_rank0.json.gz", "kernel_annotations_rank0.pkl"])
def test_labels_that_come_change_or_go_are_another_state(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    trace, labels = str(written(folder / "rank0.json", PAIR)), folder / name
    states = [SourceStates().of(trace)]
    for text in ("{}", "{} "):
        labels.write_text(text)
        states += [SourceStates().of(trace)]
        assert SourceStates().of(trace) == states[-1]
    labels.unlink()
    assert SourceStates().of(trace) == states[0]
    assert len(set(states)) == 3


def test_annotations_of_the_folder_above_count_and_other_files_do_not(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "traces"
    folder.mkdir(parents=True)
    trace = str(written(folder / "trace_labels.json", PAIR))
    before = SourceStates().of(trace)
    assert before.files == 1  # the trace itself is named like labels
    (folder / "settings.json").write_text("{}")
    assert SourceStates().of(trace) == before
    (folder.parent / "kernel_annotations_rank3.json").write_text("{}")
    assert SourceStates().of(trace).files == 2


def test_a_source_that_is_gone_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        SourceStates().of(str(tmp_path / "gone.json"))
