"""Summaries of the windows of a recording: what is in them, and how they are kept."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from recorder_programs import only_folder, program
from thence.model.formats import OLDER_SUMMARIES_FILE, SUMMARIES_FILE
from thence.watch import summary_file
from thence.watch.follow import Follower, sidecar
from thence.watch.summary_file import Tail, Window, append, read

if TYPE_CHECKING:
    from pathlib import Path

LOOP = """
        options = thence.RecordOptions(
            sampling=thence.Sampling(every=20, steps=2, ring=30, budget=0, slow_steps=False), flush_seconds=0.1
        )
        with thence.record(OUT, options) as recording:
            for step in range(170):
                for layer in range(3):
                    with thence.mark(f"layer{layer}"):
                        number, now = fake.launch(), time.time_ns()
                        fake.emit(kernel(f"k{layer}", now, now + 100_000 * (layer + 1),
                                         correlationId=number, queued=now))
                    time.sleep(0.001)
                if step == 90:
                    recording.request("asked")
                recording.step()
"""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows of three steps from each 20th step on, of which two count; one more from step 91 on, asked for.

    Each step has kernels of 0.1, 0.2 and 0.3 ms, one after the other, in a label each. The sidecar follows.
    """
    out = tmp_path_factory.mktemp("always")
    with sidecar(out):
        program(LOOP, out)
    return out


def test_each_window_has_one_line_with_what_was_in_it(recording: Path) -> None:
    summaries = read(only_folder(recording))
    windows = summaries.windows
    assert summaries.damaged == 0
    assert [(w.first_step, w.steps) for w in windows] == [
        (2, 1), *((first, 2) for first in (21, 41, 61, 81)), (92, 2), *((first, 2) for first in (101, 121, 141, 161)),
    ]  # fmt: skip
    assert [w.asked for w in windows] == [*[None] * 5, "asked", *[None] * 4]
    for w in windows:
        assert w.busy_ns == w.steps * 600_000
        assert w.modules == {f"layer{layer}": w.steps * (layer + 1) * 100_000 for layer in range(3)}
        assert w.kernels == {f"k{layer}": w.steps * (layer + 1) * 100_000 for layer in range(3)}
        assert (w.other_ns, w.unattributed_ns, w.exposed_ns, w.dropped) == (0, 0, 0, 0)
        assert sum(w.idle_ns.values()) == w.duration_ns - w.busy_ns
        assert w.duration_ns == pytest.approx(w.end_unix_ns - w.begin_unix_ns, rel=0.5)
        assert w.interval == 20
        assert len(msgspec.json.encode(w)) < 4_000


def test_every_step_is_in_one_line_recorded_or_not(recording: Path) -> None:
    steps = [w.all_steps for w in read(only_folder(recording)).windows]
    assert all(each is not None for each in steps)
    after = 1  # the time of the first one is not known: it has the beginning of the program
    for each in steps:
        assert each is not None
        assert each.first == after
        after = each.first + each.count
        assert each.durations_us is not None
        assert len(each.durations_us) == each.count
        assert sum(each.durations_us) == pytest.approx(each.total_ns / 1000, abs=each.count)
        assert max(each.durations_us) == each.max_ns // 1000
        assert each.durations_us[each.longest - each.first] == each.max_ns // 1000
        assert each.begin_unix_ns < each.end_unix_ns
    assert after == 163  # the last window ended with step 162


def test_windows_are_summarized_once_and_by_one_follower(recording: Path) -> None:
    folder = only_folder(recording)
    before = (folder / SUMMARIES_FILE).read_bytes()
    follower, other = Follower(recording), Follower(recording)
    follower.look()
    assert follower.troubles == {}
    assert (folder / SUMMARIES_FILE).read_bytes() == before
    # While one follows, the lock keeps others out; of another host, processes are left alone.
    (folder / SUMMARIES_FILE).unlink()
    other.look()
    assert not (folder / SUMMARIES_FILE).exists()
    follower.end()
    elsewhere = Follower(recording, "elsewhere")
    elsewhere.look()
    assert not (folder / SUMMARIES_FILE).exists()
    other.look()
    other.end()
    assert len(read(folder).windows) == 10
    lock = os.open(folder / "summaries.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)


def test_where_the_file_system_has_no_locks_windows_are_summarized_once_too(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = only_folder(recording)
    windows = read(folder).windows
    (folder / SUMMARIES_FILE).unlink()
    followers = Follower(recording), Follower(recording)
    for follower in followers:
        follower.look()
        assert follower.troubles == {}
    assert read(folder).windows == windows
    for follower in followers:
        follower.end()


def window(end: int, **more: object) -> Window:
    """A window that ended then."""
    fields = {
        "schema": 1, "rank": 0, "host": "a", "pid": 7, "first_step": 1, "steps": 1, "begin_unix_ns": end - 10,
        "end_unix_ns": end, "duration_ns": 10, "busy_ns": 5, "exposed_ns": 0, "idle_ns": {"host": 5}, "modules": {},
        "other_ns": 0, "unattributed_ns": 5, "kernels": {},
    }  # fmt: skip
    return msgspec.convert(fields | more, Window)


def test_a_line_that_was_cut_is_counted_and_those_after_it_are_read(tmp_path: Path) -> None:
    append(tmp_path, [window(100)])
    with (tmp_path / SUMMARIES_FILE).open("ab") as stream:
        stream.write(b'{"schema":1,"rank":0,"ho')  # the disk was full
    tail = Tail(tmp_path)
    assert [w.end_unix_ns for w in tail.new().windows] == [100]
    append(tmp_path, [window(200)])
    found = tail.new()
    assert ([w.end_unix_ns for w in found.windows], found.damaged) == ([200], 1)
    for line in (b"[]", b"\xff\xfe", b'{"schema": 2}', b"[" * 40_000, b"x" * 40_000, b"null"):
        (tmp_path / SUMMARIES_FILE).write_bytes(line + b"\n")
        assert read(tmp_path) == summary_file.Summaries((), 1)


def test_the_files_of_a_process_are_bounded_and_a_reader_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary_file, "MAX_FILE", 2_000)
    tail, seen = Tail(tmp_path), []
    for end in range(100, 130):
        append(tmp_path, [window(end)])
        if end % 3 == 0:
            seen += [w.end_unix_ns for w in tail.new().windows]
    seen += [w.end_unix_ns for w in tail.new().windows]
    assert seen == list(range(100, 130))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 2_000 + 1_000
    kept = [w.end_unix_ns for w in read(tmp_path).windows]
    assert kept == list(range(kept[0], 130))
    assert {path.name for path in tmp_path.iterdir()} <= {SUMMARIES_FILE, OLDER_SUMMARIES_FILE}
