"""A window that one rank asks for is recorded by all ranks of the job, from the same step on."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from recorder_programs import PREAMBLE, fake_libraries
from thence.capture.session import rank_requests
from thence.capture.session.rank_requests import RankRequests

if TYPE_CHECKING:
    from pathlib import Path


class Store:
    """The calls of a store of `torch.distributed` that never wait, and what becomes of them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.gone = False
        self.checks: dict[int, int] = {}

    def check(self, keys: list[str]) -> bool:
        thread = threading.get_ident()
        self.checks[thread] = self.checks.get(thread, 0) + 1
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            if expected == self.values.get(key, b"").decode():
                self.values[key] = desired.encode()
            return self.values[key]


class Rank:
    """One rank at some step, and the windows that were agreed on."""

    def __init__(self, number: int, store: Store, step: int) -> None:
        self.store, self.step = store, step
        self.windows: list[tuple[str, int]] = []
        self.requests = RankRequests(
            lambda why, step: self.windows.append((why, step)), lambda: self.step, lambda: (store, number)
        )

    def polled(self) -> list[tuple[str, int]]:
        """The windows, after two looks at the store, or when it is gone."""
        thread = self.requests._thread
        assert thread is not None
        before = self.store.checks.get(thread.ident or 0, 0)
        while self.store.checks.get(thread.ident or 0, 0) < before + 3 and thread.is_alive():
            time.sleep(0.005)
        return self.windows


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_requests, "POLL_SECONDS", 0.02)


def test_all_ranks_hear_the_same_step_which_lies_ahead() -> None:
    store = Store()
    ranks = [Rank(number, store, 100 + number) for number in range(3)]
    for rank in ranks:
        assert not rank.requests.ask("too early")  # it is alone until it has looked
        rank.requests.look()
    assert ranks[2].requests.ask("SIGUSR2")
    (heard,) = {tuple(rank.polled()) for rank in ranks}
    ((why, step),) = heard
    assert step >= 102 + 4
    assert why == f"rank 2: SIGUSR2 (all ranks from step {step} on)"
    # Asked again by another rank before that step: it is the same window.
    ranks[0].requests.ask("record-now was touched")
    assert [len(rank.polled()) for rank in ranks] == [1, 1, 1]
    # Later, but within seconds of it: heard when the time is over, and not lost.
    for rank in ranks:
        rank.step = step + 10
    ranks[1].requests.ask("slow")
    assert [len(rank.polled()) for rank in ranks] == [1, 1, 1]
    for rank in ranks:
        rank.requests._agreed_at -= rank_requests.SECONDS_BETWEEN_REQUESTS
    assert [[why.partition(" (")[0] for why, _ in rank.polled()] for rank in ranks] == [
        ["rank 2: SIGUSR2", "rank 1: slow"]
    ] * 3
    for rank in ranks:
        rank.requests.end()


def test_a_rank_whose_store_is_gone_or_does_not_answer_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    gone, stuck = Rank(0, store, 5), Rank(1, Store(), 5)
    for rank in (gone, stuck):
        rank.requests.look()
        assert rank.requests.ask("before")
        rank.polled()
    store.gone = True
    gone.polled()
    assert not gone.requests.ask("afterwards")
    gone.requests.look()
    assert not gone.requests.ask("afterwards")
    monkeypatch.setattr(rank_requests, "monotonic", lambda: time.monotonic() + 60)
    stuck.requests._answered = time.monotonic()
    assert not stuck.requests.ask("afterwards")
    stuck.requests.end()


JOB = """
    from thence.capture.session import rank_requests
    rank_requests.POLL_SECONDS = 0.1
    {join}
    options = thence.RecordOptions(
        sampling=thence.Sampling(every=100_000, budget=0, slow_steps=False), flush_seconds=0.1
    )
    with thence.record(OUT, options) as recording:
        for step in range(4000):
            launch(f"k{{step}}", step + 1)
            together(step)
            recording.step()
            if step == 300 and RANK == 1:
                os.kill(os.getpid(), 12)
            requests = recording._steps.plan.requests
            if requests and step > requests[0]["step"] + 10:
                break
    {leave}
"""


def job(python: str, out: Path, join: str, leave: str = "") -> None:
    """Two ranks of a program, of which rank 1 gets SIGUSR2 in a step; checks that both have recorded one window."""
    body = PREAMBLE + textwrap.dedent(JOB.format(join="RANK = int(sys.argv[2])\n    " + join, leave=leave))
    environment = {"PATH": "/usr/bin:/bin", "WORLD_SIZE": "2", **fake_libraries()}
    environment["PYTHONPATH"] = ":".join(entry for entry in sys.path if entry.endswith(("src", "site-packages")))
    ranks = [
        subprocess.Popen(
            [python, "-c", body, str(out), str(rank)],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(out.rglob("recording.json"))]
    assert [about["rank"] for about in found] == [0, 1]
    steps = {request["step"] for about in found for request in about["sampling"]["requests"]}
    whys = {request["why"] for about in found for request in about["sampling"]["requests"]}
    (step,) = steps
    assert step > 301
    assert whys == {f"rank 1: SIGUSR2 (all ranks from step {step:,} on)"}


FILES = """
    import mmap
    shared = mmap.mmap(os.open(OUT / "steps", os.O_RDWR), 16)
    def together(step):  # as if each step had a collective
        shared[8 * RANK : 8 * RANK + 8] = step.to_bytes(8, "little")
        time.sleep(0.001)
        while int.from_bytes(shared[8 - 8 * RANK : 16 - 8 * RANK], "little") < step and not (OUT / "left").exists():
            time.sleep(0.0005)
    class Files:
        def __init__(self): self.folder = OUT
        def path(self, key): return self.folder / key.replace("/", "-")
        def check(self, keys): return all(self.path(key).exists() for key in keys)
        def get(self, key): return self.path(key).read_bytes()
        def compare_set(self, key, expected, desired):
            mine = self.path(key + f".{RANK}")
            mine.write_text(desired)
            try: os.link(mine, self.path(key))
            except FileExistsError: pass
            return self.get(key)
    rank_requests._store_of_job = lambda: (Files(), RANK)
"""


def test_two_processes_record_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "steps").write_bytes(bytes(16))
    job(sys.executable, tmp_path, FILES.strip(), '(OUT / "left").touch()')


def test_two_processes_of_torch_record_the_same_step(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    join = f"""
    import torch.distributed
    torch.distributed.init_process_group("gloo", init_method={(tmp_path / "meet").as_uri()!r}, rank=RANK, world_size=2)
    def together(step):
        torch.distributed.barrier()
    """
    job(sys.executable, tmp_path / "run", join.strip(), "torch.distributed.destroy_process_group()")
