"""mark(): nesting, decorators, listeners, and who else is told."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import types
from contextlib import contextmanager

import pytest

import thence
from marks_notes import Notes
from thence.capture.marks import listen, unlisten
from thence.capture.marks.frames import LOG_LIMIT, Log, label_of, top
from thence.capture.marks.graph_labels import write_whole
from thence.capture.marks.marking import LibraryMark
from thence.capture.marks.watching import Watch
from thence.capture.recorder.names import Names
from thence.capture.session.mark_log import MarkLog


@pytest.fixture
def notes():
    listener = Notes()
    listen(listener)
    yield listener
    unlisten(listener)
    assert top.get() is None


def path() -> tuple[str, ...] | None:
    label = label_of(top.get(), set())
    return None if label is None else label.path


def test_marks_nest_into_a_path(notes) -> None:
    with thence.mark("a"):
        with thence.mark("b", lane="side", layer=3):
            assert path() == ("a", "b")
        assert path() == ("a",)
    assert path() is None
    assert notes.events == [("+", "a"), ("+", "b"), ("-", "b"), ("-", "a")]
    assert notes.opened_with[1][:3] == ("b", "side", {"layer": 3})


def test_metadata_and_lane_of_inner_marks_win() -> None:
    with thence.mark("a", lane="outer", x=1, y=[1, 2]), thence.mark("b", x=2), thence.mark("c", lane="inner"):
        label = label_of(top.get(), set())
    assert label is not None
    assert label.metadata == '{"x": 2, "y": [1, 2]}'
    assert label.lane == "inner"
    assert label.phase == "forward"


def test_one_mark_serves_again_and_inside_itself(notes) -> None:
    one = thence.mark("again")
    with one, one:
        assert path() == ("again", "again")
    with one:
        assert path() == ("again",)
    assert len(set(notes.names)) == 3


def test_a_mark_closes_when_its_body_raises(notes) -> None:
    with pytest.raises(KeyError), thence.mark("a"), thence.mark("b"):
        raise KeyError
    assert notes.events[-2:] == [("-", "b"), ("-", "a")]


def test_threads_have_marks_of_their_own(notes) -> None:
    paths: list[object] = []

    def work() -> None:
        with thence.mark("theirs"):
            paths.append(path())

    with thence.mark("mine"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert path() == ("mine",)
    assert paths == [("theirs",)]
    assert len({ident for *_, ident in notes.opened_with}) == 2


def test_asyncio_tasks_take_turns_without_mixing_marks() -> None:
    seen: list[tuple[str, object]] = []

    @thence.mark("task")
    async def work(name: str, wait: asyncio.Event, tell: asyncio.Event) -> None:
        with thence.mark(name):
            tell.set()
            await wait.wait()
            seen.append((name, path()))

    async def both() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        await asyncio.gather(work("one", second, first), work("two", first, second))

    asyncio.run(both())
    assert sorted(seen) == [("one", ("task", "one")), ("two", ("task", "two"))]
    assert path() is None


def test_a_decorated_function_keeps_name_result_and_arguments(notes) -> None:
    @thence.mark("f")
    def add(a: int, *, b: int) -> int:
        """Adds."""
        assert path() == ("f",)
        return a + b

    assert (add(1, b=2), add.__name__, add.__doc__) == (3, "add", "Adds.")
    assert notes.events == [("+", "f"), ("-", "f")]


def test_a_generator_is_marked_only_while_it_runs(notes) -> None:
    @thence.mark("g")
    def count():
        try:
            received = yield path()
            yield received
        except ValueError as error:
            yield f"caught {error}"
        return "end"

    generator = count()
    assert next(generator) == ("g",)
    assert path() is None
    assert generator.send("sent") == "sent"
    assert generator.throw(ValueError("it")) == "caught it"
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == "end"
    assert notes.events == [("+", "g"), ("-", "g")] * 4


def test_closing_a_marked_generator_runs_its_cleanup() -> None:
    cleaned: list[object] = []

    @thence.mark("g")
    def endless():
        try:
            while True:
                yield
        finally:
            cleaned.append(path())

    generator = endless()
    next(generator)
    generator.close()
    assert cleaned == [("g",)]


def test_an_asynchronous_generator_is_marked_only_while_it_runs() -> None:
    @thence.mark("g")
    async def count():
        yield path()
        await asyncio.sleep(0)
        yield path()

    async def collect() -> list[object]:
        found: list[object] = []
        async for one in count():
            found += [one, path()]
        return found

    assert asyncio.run(collect()) == [("g",), None, ("g",), None]


def test_a_mark_that_a_generator_holds_open_is_closed_out_of_order(notes) -> None:
    def holds():
        with thence.mark("held"):
            yield

    generator = holds()
    next(generator)
    with thence.mark("caller"):
        assert path() == ("held", "caller")
        generator.close()
        assert path() == ("caller",)
    assert notes.events == [("+", "held"), ("+", "caller"), ("-", "held"), ("-", "caller")]


def test_what_a_library_marks_is_a_name_only_where_there_is_no_other() -> None:
    with LibraryMark("nccl:allreduce", "group", size=2):
        alone = label_of(top.get(), set())
        with thence.mark("mine"):
            pass
    with thence.mark("mine"), LibraryMark("nccl:allreduce", "group", size=2):
        inside = label_of(top.get(), set())
    assert alone is not None
    assert inside is not None
    assert (alone.path, inside.path) == (("nccl:allreduce",), ("mine",))
    assert alone.metadata == inside.metadata == '{"size": 2}'
    assert inside.lane == "group"


def test_a_name_must_be_text_and_only_functions_are_decorated() -> None:
    with pytest.raises(thence.UsageError, match="needs a name"):
        thence.mark(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(thence.UsageError, match="decorates functions"):
        thence.mark("x")(3)  # type: ignore[type-var]


def test_a_node_belongs_to_the_mark_that_was_innermost_at_its_sequence_number() -> None:
    # numbers:    0 1 | 2 3 4 | 5 | 6 ...      marks: none, a, b inside a, none
    a, b = (None, 1, "a", None), (None, 2, "b", None)
    log = Log()
    for start, frame in ((2, a), (5, b), (6, a), (6, None)):
        log.note(start, frame)
    expected = [None, None, a, a, a, b, None, None]
    assert [log.innermost(n) for n in range(8)] == expected
    assert Log().innermost(3) is None


def test_a_log_forgets_what_is_long_ago() -> None:
    log = Log()
    frames = [(None, n, "mark", None) for n in range(3 * LOG_LIMIT)]
    for n, frame in enumerate(frames):
        log.note(n, frame)
    assert len(log.starts) == len(log.frames) <= 2 * LOG_LIMIT
    assert log.innermost(0) is None
    assert all(log.innermost(n) is frames[n] for n in range(2 * LOG_LIMIT, 3 * LOG_LIMIT, 997))


def test_nvtx_ranges_where_a_tool_collects_them(monkeypatch) -> None:
    pushed: list[object] = []
    fake = types.SimpleNamespace(push_range=pushed.append, pop_range=lambda: pushed.append("pop"))
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/some/tool.so")
    watch = Watch()
    watch.look()
    assert watch.ranges
    for one in reversed(watch.open_ranges("named")):
        one.__exit__(None, None, None)
    assert pushed == ["named", "pop"]
    listener = Notes()
    watch.listen(listener)  # has the marks already: no range twice
    assert not watch.ranges
    assert watch.open_ranges("named") == []
    watch.unlisten(listener)
    assert watch.ranges


def test_marks_after_a_recording_that_collected_nvtx_itself(monkeypatch) -> None:
    watch, listener = Watch(), Notes()
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/libcupti.so")
    watch.look()
    watch.listen(listener)
    monkeypatch.delenv("NVTX_INJECTION64_PATH")
    watch.unlisten(listener)
    assert not watch.ranges


def test_every_listener_is_told(notes) -> None:
    other = Notes()
    listen(other)
    with thence.mark("for both"):
        unlisten(other)
    assert notes.events == [("+", "for both"), ("-", "for both")]
    assert other.events == [("+", "for both")]


def test_a_tool_that_cannot_be_told_is_a_warning(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)  # cannot be imported
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    watch = Watch()
    watch.look()
    with pytest.warns(RuntimeWarning, match="pip install nvtx"):
        watch.open_ranges("named")


def test_named_scopes_while_jax_traces(monkeypatch) -> None:
    scopes: list[str] = []

    @contextmanager
    def scope(name: str):
        scopes.append(name)
        yield

    tracing = types.SimpleNamespace(trace_state_clean=lambda: not tracing.on, on=False)
    state = types.SimpleNamespace(profile_session=None)
    jax = types.SimpleNamespace(
        named_scope=scope, profiler=types.SimpleNamespace(TraceAnnotation=lambda name: scope(f"host {name}"))
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax._src.core", tracing)
    monkeypatch.setitem(sys.modules, "jax._src.profiler", types.SimpleNamespace(_profile_state=state))
    with thence.mark("eager"):
        pass
    tracing.on = True
    with thence.mark("traced"):
        pass
    tracing.on, state.profile_session = False, object()
    with thence.mark("profiled"):
        pass
    assert scopes == ["traced", "host profiled"]


def test_without_frameworks_marks_import_none() -> None:
    code = (
        "import sys, thence\nwith thence.mark('a'): pass\n"
        "print(*sorted({'torch', 'jax', 'numpy', 'polars'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
    assert run.stderr == ""


def test_saving_without_a_capture_says_why(tmp_path) -> None:
    code = "import thence\ntry: thence.save_labels('labels.json')\nexcept thence.MissingData as error: print(error)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "no CUDA graph was captured" in run.stdout
    assert not (tmp_path / "labels.json").exists()


def test_lanes_known_by_number_are_text_and_stream_is_pytorchs_word_for_them() -> None:
    assert thence.mark("a", lane=62).lane == thence.mark("a", stream=62).lane == "62"
    assert thence.mark("a", lane="side").lane == thence.mark("a", stream="side").lane == "side"
    assert thence.mark("a", layer=3).lane is None
    assert thence.mark("a", stream=62, layer=3).metadata == {"layer": 3}


def test_a_mark_takes_the_dict_that_pytorchs_mark_kernels_takes() -> None:
    mark = thence.mark({"name": "attention", "stream": 61, "layer": 3, "In msg nelems": 8})
    assert (mark.name, mark.lane, mark.metadata) == ("attention", "61", {"layer": 3, "In msg nelems": 8})
    assert thence.mark({"name": "attention", "layer": 3}, layer=4).metadata == {"layer": 4}
    with pytest.raises(thence.WrongArgument, match=r"mark needs a name, as in .*, not {'layer': 3}"):
        thence.mark({"layer": 3})


@pytest.mark.parametrize("words", [{"lane": 1.5}, {"lane": []}, {"stream": object()}, {"lane": True}])
def test_a_lane_that_is_neither_name_nor_number_is_refused_at_once(words: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a lane must be a name or a number"):
        thence.mark("a", **words)  # type: ignore[arg-type]
    with pytest.raises(thence.UsageError, match="give one of them"):
        thence.mark("a", lane="x", stream=62)


class Silent:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_a_value_that_cannot_be_shown_costs_neither_its_mark_nor_another(tmp_path) -> None:
    with thence.mark("bad \ud800", value=Silent(), layer=3):
        label = label_of(top.get(), set())
    assert label is not None
    assert json.loads(label.metadata) == {"value": "<Silent>", "layer": 3}
    write_whole(tmp_path / "labels.json", {"labels": [label._asdict(), {"path": ["good"]}]})
    read = json.loads((tmp_path / "labels.json").read_bytes())["labels"]
    assert (read[0]["path"], read[1]["path"]) == (["bad ?"], ["good"])


def test_bad_marks_cost_a_recording_nothing() -> None:
    log, names = MarkLog(), Names()
    log.opened(1, "good", None, {})
    log.opened(2, "bad", "62", {"value": Silent()})
    log.opened(3, "worse \ud800", None, {"self": [Silent()]})
    assert len(log.take(names)["marks"]["serial"]) == 3
