"""thence.measure with JAX on the CPU: XLA really calls the handlers; only its stream and CUDA are fakes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import thence

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402 - only where there is jax
import numpy as np  # noqa: E402

from thence.timing import compiled_jax, events_jax, xla_ffi  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROCESS = itertools.count()
CALL = ["hold 7 for 1000000", "start on 7", "end on 7"]


class Event:
    """A CUDA event that notes when it was recorded."""

    log: list[str] = []  # noqa: RUF012 - shared on purpose

    def __init__(self, name: str) -> None:
        self.name = name

    def record(self, stream: int) -> None:
        self.log.append(f"{self.name} on {stream}")


def _hold(stream: int, nanoseconds: int) -> None:
    Event.log.append(f"hold {stream} for {nanoseconds}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was recorded, in order."""
    names = iter(("start", "end"))
    number = next(_PROCESS)
    monkeypatch.setattr(events_jax, "_PLATFORM", "cpu")
    monkeypatch.setattr(events_jax, "_START", f"test_before_{number}")
    monkeypatch.setattr(events_jax, "_END", f"test_after_{number}")
    monkeypatch.setattr(events_jax, "load_driver", lambda: None)
    monkeypatch.setattr(events_jax, "Event", lambda _driver: Event(next(names)))
    monkeypatch.setattr(events_jax, "HeadStart", lambda _driver: SimpleNamespace(hold=_hold))
    monkeypatch.setattr(events_jax, "elapsed_ms", lambda *_: float(len(Event.log)))
    monkeypatch.setattr(xla_ffi, "_stream", lambda _api, _context: (7, None))
    monkeypatch.setattr(compiled_jax, "_GPUS", {"cpu"})
    events_jax._marks.cache_clear()
    Event.log.clear()
    yield Event.log
    # XLA keeps the handlers; nothing may free them before the process ends.
    _KEPT.append(events_jax._marks(events_jax._PLATFORM))
    events_jax._marks.cache_clear()


_KEPT: list[Any] = []


def dense(x: Any, w: Any, *, scale: float = 2.0) -> Any:
    return jnp.tanh(x @ w) * scale


@pytest.fixture
def x() -> Any:
    return jnp.arange(16.0).reshape(4, 4) / 10


@pytest.mark.parametrize("jitted", [True, False])
def test_events_come_before_and_after_each_call(log: list[str], x: Any, jitted: bool) -> None:
    f = jax.jit(dense, static_argnames="scale") if jitted else dense
    out, times = thence.measure(f, mode="events", iterations=2)(x, x, scale=3.0)
    np.testing.assert_allclose(out, np.tanh(np.asarray(x) @ np.asarray(x)) * 3.0, rtol=1e-5)
    assert log == CALL * 3  # one call to warm up
    assert times == [6.0, 9.0]  # what the clock of this test said after each


def test_one_iteration_gives_a_number(log: list[str], x: Any) -> None:
    _, ms = thence.measure(dense, "events")(x, x)
    assert ms == 6.0
    assert log == CALL * 2


def test_every_kind_of_argument_and_output_passes_unchanged(log: list[str], x: Any) -> None:
    key = jax.random.key(3)

    def f(tree: Any, n: int, flag: bool, *, name: str) -> Any:
        y = tree["x"]
        for _ in range(n):
            y = y + 1
        assert flag is True
        assert name == "n"
        return {"y": y, "again": y, "same": tree["x"], "key": tree["key"], "three": 3}

    out, _ = thence.measure(f, "events")({"x": x, "key": key}, 2, True, name="n")
    for name in ("y", "again"):
        np.testing.assert_array_equal(out[name], np.asarray(x) + 2)
    np.testing.assert_array_equal(out["same"], x)
    assert out["three"] == 3
    np.testing.assert_array_equal(jax.random.key_data(out["key"]), jax.random.key_data(key))
    assert log == CALL * 2


@pytest.mark.usefixtures("log")
def test_equal_arguments_of_other_types_are_compiled_anew(x: Any) -> None:
    measured = thence.measure(lambda x, n: x * n if n is True else x, "events")
    np.testing.assert_array_equal(measured(x, 1)[0], x)
    np.testing.assert_array_equal(measured(x, True)[0], x)
    measured = thence.measure(lambda x, n: x + (10 if isinstance(n, float) else 0), "events")
    np.testing.assert_array_equal(measured(x, 1)[0], x)
    np.testing.assert_array_equal(measured(x, 1.0)[0], np.asarray(x) + 10)


@pytest.mark.usefixtures("log")
def test_a_second_call_compiles_nothing(x: Any) -> None:
    traces = []

    def f(x: Any) -> Any:
        traces.append(1)
        return x + 1

    measured = thence.measure(f, "events", iterations=3)
    measured(x)
    measured(x)
    assert len(traces) == 1


@pytest.mark.usefixtures("log")
def test_donated_arguments_survive(x: Any) -> None:
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    thence.measure(donating, "events", iterations=2)(x)
    assert not x.is_deleted()


@pytest.mark.parametrize(
    ("f", "args", "message"),
    [
        (lambda: jnp.ones(3), (), "array among the arguments"),
        (jnp.ones, (3,), "array among the arguments"),
        (lambda _x: None, (np.ones(3, np.float32),), "array among the outputs"),
        (lambda x: float(x.sum()), (np.ones(3, np.float32),), "pass the jitted part"),
        (np.asarray, (np.ones(3, np.float32),), "pass the jitted part"),
        (lambda x, _s: x, (np.ones(3, np.float32), {1, 2}), "nor hashable"),
    ],
)
@pytest.mark.usefixtures("log")
def test_what_cannot_be_timed_is_explained(f: Any, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(thence.UsageError, match=message):
        thence.measure(jax.tree_util.Partial(f), "events")(*args)


@pytest.mark.usefixtures("log")
def test_a_program_compiled_ahead_of_time_is_refused(x: Any) -> None:
    compiled = jax.jit(dense).lower(x, x).compile()
    with pytest.raises(thence.UsageError, match="compiled already"):
        thence.measure(compiled, "events")(x, x)


@pytest.mark.usefixtures("log")
def test_nothing_is_measured_while_jax_traces(x: Any) -> None:
    with pytest.raises(thence.UsageError, match="inside jit"):
        jax.jit(lambda x: thence.measure(dense, "events")(x, x))(x)


@pytest.mark.usefixtures("log")
def test_an_error_inside_the_program_comes_out(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Event, _stream: int) -> None:
        raise thence.MissingRequirement("cuEventRecord failed with CUDA error 1")

    monkeypatch.setattr(Event, "record", refuse)
    with pytest.raises(Exception, match="cuEventRecord failed with CUDA error 1"):
        thence.measure(dense, "events")(x, x)


@pytest.mark.parametrize("mode", ["cupti", "events"])
def test_on_the_cpu_it_says_so(x: Any, mode: Any) -> None:
    with pytest.raises(thence.MissingRequirement, match="runs on cpu"):
        thence.measure(dense, mode)(x, x)


def test_cupti_refuses_a_function_that_donates(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_jax, "_GPUS", {"cpu"})
    consumed = jax.jit(lambda x: x + 1, donate_argnums=0)
    given = x + 0
    consumed(given)
    if not given.is_deleted():
        pytest.skip("this jax does not donate on the CPU")
    with pytest.raises(thence.UsageError, match="donates its arguments"):
        thence.measure(consumed)(x)
