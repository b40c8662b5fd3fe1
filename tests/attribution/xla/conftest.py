"""A recording of a program with loops and branches, and HLO modules made by hand."""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING

import pytest

from helpers import DATA
from hlo_building import module_of
from thence.readers.recording.read import read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from thence.model.hlo import HloModule
    from thence.model.tables import Tables


@pytest.fixture(scope="session")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """The first execution of numpyro's NUTS, 110 ms of it: 6 graphs, launched 486 times."""
    folder = tmp_path_factory.mktemp("loops")
    with tarfile.open(DATA / "jax" / "loops_recording.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return read(str(folder), lambda _done: None)


@pytest.fixture(scope="session")
def hlo() -> Callable[[Mapping[int, Sequence[Mapping[str, object]]]], HloModule]:
    """Makes a module from the instructions of each computation, in the order of the schedule; 0 is the entry.

    An instruction is a mapping with name and opcode, and whatever else of `INSTRUCTIONS` matters.
    """

    def module(computations: Mapping[int, Sequence[Mapping[str, object]]]) -> HloModule:
        rows = [
            {
                "computation": computation,
                "id": computation * 1000 + step,
                "step": step,
                "called": [],
                "operands": [],
                "result_bytes": 4,
                "operand_bytes": 4,
                **instruction,
            }
            for computation, instructions in computations.items()
            for step, instruction in enumerate(instructions)
        ]
        return module_of(rows)

    return module
