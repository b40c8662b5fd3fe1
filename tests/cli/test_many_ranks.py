"""Jobs of thousands of ranks: the verbs about ranks run no query of Polars for each rank.

A query takes some 30 us and analyses have hundreds of them, so one a rank is minutes for thousands of ranks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from helpers import event, kernel, launch, run_thence, written

if TYPE_CHECKING:
    from pathlib import Path

FEW, MANY = 4, 9
BLOCKS = {"grid": [8, 1, 1], "block": [128, 1, 1]}


def job(folder: Path, ranks: int) -> Path:
    """A file for each rank: four steps with a kernel and an all_reduce; all ranks end each of them together."""
    folder.mkdir()
    for rank in range(ranks):
        events = []
        for step in range(4):
            begin = 100 * step
            reduce: dict[str, Any] = {
                **BLOCKS, "stream": 20, "Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024,
                "Group size": ranks, "dtype": "Float", "Process Group Name": "0", "Seq": step,
                "Process Group Description": "default_pg", "Process Group Ranks": "[]",
            }  # fmt: skip
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            late = rank % 3
            events += [
                event("user_annotation", f"ProfilerStep#{step}", begin, 99),
                launch(2 * step + 1, begin + 1), kernel(2 * step + 1, begin + 3, 10 + late, args=BLOCKS),
                launch(2 * step + 2, begin + 5),
                kernel(2 * step + 2, begin + 20 + late, 30 - late, name=name, args=reduce),
            ]  # fmt: skip
        events.append(event("cuda_runtime", "cudaDeviceSynchronize", 400, 9, args={"correlation": 99}))
        about = {"backend": "nccl", "rank": rank, "world_size": ranks}
        written(folder / f"rank{rank}.json", events, baseTimeNanoseconds=10**18, distributedInfo=about)
    return folder


class Queries:
    """Counts the queries of Polars, those of methods of frames as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("collect", "_collect_eager"):  # the second is what frames use since Polars 2
            if hasattr(pl.LazyFrame, name):
                monkeypatch.setattr(pl.LazyFrame, name, self._counted(getattr(pl.LazyFrame, name)))

    def _counted(self, method: Any) -> Any:
        def counted(frame: pl.LazyFrame, *arguments: Any, **options: Any) -> Any:
            self.count += 1
            return method(frame, *arguments, **options)

        return counted

    def of(self, *arguments: str | Path) -> int:
        """The queries of a verb."""
        before = self.count
        done = run_thence(*arguments)
        assert done.returncode == 0, done.stderr
        return self.count - before


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> Queries:
    found = Queries(monkeypatch)
    pl.DataFrame({"a": [1]}).filter(pl.col("a") > 0)
    assert found.count == 1
    return found


def test_a_folder_of_ranks_is_not_listed_for_each_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Label files, flight recorders and files of NCCL's Inspector beside a trace are looked for by their names."""
    listed: list[str] = []

    def counted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            listed.extend(map(str, arguments))
            return function(*arguments)

        return call

    times = []
    for ranks in (3, 12):
        folder = job(tmp_path / str(ranks), ranks)
        with monkeypatch.context() as patched:
            for name in ("listdir", "scandir"):
                patched.setattr(os, name, counted(getattr(os, name)))
            assert run_thence("check", folder).returncode == 0
        times.append(listed.count(str(folder)))
    assert times[0] == times[1] > 0


def test_no_verb_about_ranks_has_a_query_for_each_rank(queries: Queries, tmp_path: Path) -> None:
    first, few, many = (job(tmp_path / str(n), ranks) for n, ranks in enumerate((2, FEW, MANY)))
    more = {}
    for verb in (("ranks",), ("report", "--by", "rank"), ("idle",), ("check",)):
        queries.of(*verb, first)  # what is asked once for all traces
        more[verb] = queries.of(*verb, many) - queries.of(*verb, few)
    assert {verb: count for verb, count in more.items() if count > 0} == {}
