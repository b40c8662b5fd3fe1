"""Workers: processes that die, and a Ray cluster in which one does."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import FSDP
from stores import kill_worker_always, kill_worker_once, settings, stored
from thence.errors import MissingRequirement
from thence.store import workers as workers_module
from thence.store.ingest import ingest, sources_of
from thence.store.task import Job, Outcome
from thence.store.workers import LocalWorkers, RayWorkers, Workers

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parents[1]


def contents(store: Path) -> dict[str, bytes]:
    """Every Parquet file of a store, by its path in it."""
    return {str(f.relative_to(store)): f.read_bytes() for f in store.rglob("*.parquet")}


def jobs(store: Path, count: int = 3) -> list[Job]:
    (store / "ranks").mkdir(parents=True)
    return [Job(str(path), str(store), settings()) for path in FSDP[:count]]


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks of a process that has imported what they need; those of `thence ingest` start Python."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stores", "pytest"])
    monkeypatch.setattr(workers_module.multiprocessing, "get_context", lambda _: context)


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_is_killed_takes_no_job_with_it(tmp_path: Path) -> None:
    outcomes = list(LocalWorkers(2).run(kill_worker_once, jobs(tmp_path)))
    assert sorted(o.source for o in outcomes) == sorted(map(str, FSDP[:3]))
    assert [o.reason for o in outcomes] == [None] * 3
    assert (tmp_path / "killed").exists()


@pytest.mark.usefixtures("forked_workers")
def test_a_job_that_kills_its_worker_is_given_up_alone(tmp_path: Path) -> None:
    outcomes = {o.source: o for o in LocalWorkers(1).run(kill_worker_always, jobs(tmp_path, 2))}
    assert outcomes[str(FSDP[0])].folder is not None
    lost = outcomes[str(FSDP[1])]
    assert lost.why == "lost"
    assert lost.reason is not None
    assert "is there enough memory?" in lost.reason


class BreaksBetweenJobs(Executor):
    """A pool of which a process dies after the first job was given to it; that job never ends."""

    def __init__(self) -> None:
        self._given = False

    def submit(self, *_job: Any) -> Future[Any]:  # type: ignore[override]
        if self._given:
            raise BrokenProcessPool
        self._given = True
        return Future()


def test_a_job_that_ran_when_its_pool_broke_is_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pools = iter([BreaksBetweenJobs(), ThreadPoolExecutor(1), ThreadPoolExecutor(1)])
    monkeypatch.setattr(workers_module, "_pool", lambda _: next(pools))
    outcomes = LocalWorkers(2).run(lambda job: Outcome(job.source, folder="a"), jobs(tmp_path, 2))
    assert [(o.source, o.reason) for o in outcomes] == [(str(path), None) for path in FSDP[:2]]


def test_without_ray_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingRequirement, match=r"pip install 'thence\[ray\]'"):
        RayWorkers("auto")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Workers]:
    """A Ray cluster of two nodes on this machine."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    paths = os.pathsep.join([str(TESTS), str(TESTS / "support"), str(Path(thence.__file__).parents[1])])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = paths  # the processes of the cluster find thence and the tests
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    try:
        yield RayWorkers(nodes.address)
    finally:
        ray.shutdown()
        nodes.shutdown()
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def test_tasks_of_ray_import_nothing_from_the_current_directory(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    shutil.copy(FSDP[0], tmp_path / "rank0.json.gz")
    for name in ("json", "polars", "thence"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "thence", "ingest", "rank0.json.gz", "-o", "s", "--ray", "local"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(thence.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (tmp_path / "ran").exists()
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore")  # of Ray
def test_a_cluster_writes_the_same_store_to_the_byte(cluster: Workers, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"traceEvents": [')
    inputs = [*FSDP, bad]
    done = ingest(sources_of([str(i) for i in inputs]), tmp_path / "ray", settings(), workers=cluster)
    here = stored(tmp_path / "here", inputs)
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")
    assert [entry.ranks for entry in done.manifest.entries] == [(0,), (1,), (2,), (3,)]
    assert done.manifest.left == here.manifest.left
    assert [one.why for one in done.manifest.left] == ["unreadable"]
    found, expected = (thence.open(tmp_path / "ray").report("rank"), thence.open(FSDP).report("rank"))
    assert found.rows.equals(expected.rows)


@pytest.mark.filterwarnings("ignore")  # of Ray
def test_a_worker_of_the_cluster_that_is_killed_is_replaced(cluster: Workers, tmp_path: Path) -> None:
    outcomes = list(cluster.run(kill_worker_once, jobs(tmp_path)))
    assert sorted(o.source for o in outcomes) == sorted(map(str, FSDP[:3]))
    assert [o.reason for o in outcomes] == [None] * 3
    assert (tmp_path / "killed").exists()


@pytest.mark.filterwarnings("ignore")  # of Ray
def test_a_job_that_kills_every_worker_of_the_cluster_is_given_up(cluster: Workers, tmp_path: Path) -> None:
    outcomes = {o.source: o for o in cluster.run(kill_worker_always, jobs(tmp_path, 2))}
    assert outcomes[str(FSDP[0])].folder is not None
    assert outcomes[str(FSDP[1])].why == "lost"


def test_a_worker_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLARS_MAX_THREADS", raising=False)
    workers_module._one_thread()
    assert os.environ.pop("POLARS_MAX_THREADS") == "1"
