"""thence.measure without a GPU: a torch, a CUPTI and a driver that only pretend."""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import thence
from cuda_fakes import FakeCupti, FakeDriver
from thence.capture.cuda import cuda_events, cupti
from thence.capture.recorder import recorder
from thence.errors import MissingData, MissingRequirement
from thence.timing import events_torch, kernel_times
from thence.timing import measure as measuring
from thence.timing import spin_kernel as head_start
from thence.timing.gpu_time import GpuTime

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    fake = FakeCupti()
    monkeypatch.setattr(cupti, "load", lambda: fake)
    return fake


class Tensor:
    """Stands for torch.Tensor."""

    __module__ = "torch"

    def __init__(self, device: int = 0) -> None:
        self.device = SimpleNamespace(type="cuda", index=device)


class Stream:
    def __init__(self, log: list[str], device: int) -> None:
        self.log, self.device = log, device
        self.cuda_stream = 0x50 + device

    def synchronize(self) -> None:
        self.log.append(f"wait for stream of {self.device}")


class TorchEvent:
    """An event whose time is the number of things that were done before."""

    log: list[str] = []  # noqa: RUF012 - set by the fixture

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Stream) -> None:
        self.log.append(f"event on {stream.device}")
        self.time = len(self.log)

    def synchronize(self) -> None:
        self.log.append("wait for event")

    def elapsed_time(self, end: TorchEvent) -> float:
        return float(end.time - self.time)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch with two devices that notes what is asked of it."""
    log: list[str] = []
    TorchEvent.log = log

    @contextlib.contextmanager
    def current(device: int) -> Iterator[None]:
        log.append(f"on {device}")
        yield

    def hold(stream: int, nanoseconds: int) -> None:
        log.append(f"hold {stream:#x} for {nanoseconds}")

    torch = ModuleType("torch")
    torch.Tensor = Tensor  # type: ignore[attr-defined]
    torch.log = log  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: True,
        current_device=lambda: 0,
        current_stream=lambda device: Stream(log, device),
        synchronize=lambda device: log.append(f"wait for {device}"),
        Event=TorchEvent,
        device=current,
    )
    monkeypatch.setattr(events_torch, "load_driver", lambda: None)
    monkeypatch.setattr(events_torch, "HeadStart", lambda _driver: SimpleNamespace(hold=hold))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    return torch


class Program:
    """A function that launches kernels: of each call, a list of (name, start, end)."""

    def __init__(self, fake: FakeCupti, *calls: list[tuple[str, int, int]]) -> None:
        self.fake, self.calls, self.made = fake, list(calls), 0

    def __call__(self, *tensors: Any) -> Any:
        kernels = self.calls[min(self.made, len(self.calls)) - 1] if self.made else []
        self.made += 1  # the first call warms up, and is not recorded
        for kernel in kernels:
            self.fake.launched(*kernel)
        return tensors[0] if tensors else None


KINDS = (10, 1, 22, 2)  # kernels, memcpys, those between devices, memsets
TWO = [("_Z3addPf", 1_000, 3_500), ("gemm", 4_000, 1_004_000)]


def test_cupti_adds_up_the_kernels(fake: FakeCupti, torch: Any) -> None:
    tensor = Tensor()
    out, ms = thence.measure(Program(fake, TWO))(tensor)
    assert out is tensor
    assert ms == pytest.approx(0.0025 + 1.0)
    enabled, disabled = ([f"{what} {kind}" for kind in KINDS] for what in ("enable", "disable"))
    assert fake.calls == ["subscribe", *enabled, *reversed(disabled), "unsubscribe", "finalize"]
    assert torch.log == ["wait for 0", "wait for 0"]  # after the warm-up, after the call


@pytest.mark.usefixtures("torch")
def test_cupti_can_be_left_loaded_for_the_next_measurement(fake: FakeCupti) -> None:
    measured = thence.measure(Program(fake, TWO), finalize=False)
    for _ in range(2):
        assert measured(Tensor())[1] == pytest.approx(1.0025)
    assert "finalize" not in fake.calls
    assert fake.calls.count("unsubscribe") == fake.calls.count("subscribe") == 2


@pytest.mark.usefixtures("torch")
def test_without_aggregation_there_is_a_list_in_order_of_start(fake: FakeCupti) -> None:
    _, kernels = thence.measure(Program(fake, TWO[::-1]), aggregate=False)(Tensor())
    assert [name for name, _ in kernels] == ["add(float*)", "gemm"]
    assert [ms for _, ms in kernels] == pytest.approx([0.0025, 1.0])


@pytest.mark.usefixtures("torch")
def test_iterations_are_measured_one_by_one(fake: FakeCupti) -> None:
    faster = [("gemm", 10_000, 20_000), ("_Z3addPf", 20_000, 21_000)]  # other order: other streams
    program = Program(fake, TWO, faster)
    _, times = thence.measure(program, iterations=2)(Tensor())
    assert times == pytest.approx([1.0025, 0.011])
    assert program.made == 3
    program.made = 0
    _, lists = thence.measure(program, aggregate=False, iterations=2)(Tensor())
    assert [[name for name, _ in kernels] for kernels in lists] == [["add(float*)", "gemm"], ["gemm", "add(float*)"]]


@pytest.mark.usefixtures("torch")
def test_iterations_with_other_kernels_are_refused(fake: FakeCupti) -> None:
    program = Program(fake, TWO, TWO[1:])
    with pytest.raises(thence.UsageError, match=r"call 2 ran other kernels.*1 and 2.*add\(float"):
        thence.measure(program, iterations=2)(Tensor())
    assert fake.calls[-1] == "finalize"


@pytest.mark.usefixtures("torch")
def test_without_kernels_there_is_no_time(fake: FakeCupti) -> None:
    assert thence.measure(Program(fake, []))(Tensor())[1] is None
    assert thence.measure(Program(fake, []), aggregate=False)(Tensor())[1] == []


@pytest.mark.usefixtures("torch")
def test_copies_do_not_count(fake: FakeCupti) -> None:
    def f(_tensor: Any) -> None:
        fake.launched("", 1_000, 2_000_000, kind=1)
        fake.launched("k", 5_000, 6_000)
        fake.launched("", 7_000, 9_000, kind=1)

    _, kernels = thence.measure(f, aggregate=False)(Tensor())
    assert kernels == [("k", pytest.approx(0.001))]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Unix times in ns that the host reads, one after the other."""
    times: list[int] = []
    monkeypatch.setattr(measuring, "time", SimpleNamespace(time_ns=lambda: times.pop(0)))
    return times


@pytest.mark.usefixtures("torch")
def test_gaps_copies_overlap_launch_and_return_add_up(fake: FakeCupti, clock: list[int]) -> None:
    """By hand: called at 0, copy 10 to 30, kernels 40 to 100 and 80 to 130, set 150 to 155, back at 200."""
    clock += [1_000, 201_000]

    def f(_tensor: Any) -> None:
        fake.launched("", 11_000, 31_000, kind=1)
        fake.launched("k", 41_000, 101_000)
        fake.launched("k", 81_000, 131_000)
        fake.launched("", 151_000, 156_000, kind=2)

    _, ms = thence.measure(f)(Tensor())
    told = ms.to_json()
    us = {
        name: value if value is None else pytest.approx(value * 1000) for name, value in told.items() if name != "mode"
    }
    assert us == {
        "ms": 110, "kernels_ms": 110, "copies_ms": 25, "overlap_ms": 20, "gaps_ms": 30, "span_ms": 145,
        "before_ms": 10, "after_ms": 45, "between_events_ms": None, "host_launch_ms": None, "head_start_ms": None,
        "waiting_for_host_ms": None,
    }  # fmt: skip
    assert ms.kernels_ms + ms.copies_ms - ms.overlap_ms + ms.gaps_ms == pytest.approx(ms.span_ms)
    assert told["mode"] == "cupti"
    assert repr(ms) == (
        "110.0 us in kernels; 145.0 us from the first start to the last end, "
        "with 30.00 us of gaps in which nothing ran; "
        "25.00 us in memcpys and memsets; 20.00 us counted more than once (activities at the same time); "
        "10.00 us from the call to the first start, 45.00 us from the last end to the return"
    )


@pytest.mark.usefixtures("torch")
def test_a_measured_time_is_a_float_for_everybody_else(fake: FakeCupti) -> None:
    _, ms = thence.measure(Program(fake, TWO))(Tensor())
    assert isinstance(ms, float)
    assert (f"{ms:.3f}", str(ms), json.dumps(ms)) == ("1.002", "1.0025", "1.0025")
    assert type(ms * 2) is float
    again = pickle.loads(pickle.dumps(ms))
    assert (again, again.to_json()) == (ms, ms.to_json())
    assert ms.before_ms is None  # the kernels of this test ran in 1970
    assert "the clocks of host and GPU differ" in repr(ms)


def test_events_tell_how_long_the_gpu_can_have_waited_for_the_host() -> None:
    quick, slow = GpuTime.of_events(0.79, 0.05, 0.03), GpuTime.of_events(0.79, 0.05, 0.12)
    assert (quick.waiting_for_host_ms, slow.waiting_for_host_ms) == (0, pytest.approx(0.07))
    assert slow.gaps_ms is None
    assert GpuTime.of_events(0.01, 0.05, 5.0).waiting_for_host_ms == 0.01  # no more than was measured
    assert "none is the GPU waiting for the host" in repr(quick)
    assert "up to 70.00 us may be the GPU waiting for the host" in repr(slow)
    assert "how long launching took is not known" in repr(GpuTime.of_events(0.79, 1.0))
    assert slow.to_json()["between_events_ms"] == 0.79


def test_every_device_of_the_tensors_is_waited_for(fake: FakeCupti, torch: Any) -> None:
    thence.measure(Program(fake, TWO))([Tensor(0), {"a": Tensor(1)}])
    assert torch.log == ["wait for 0", "wait for 1"] * 2


@pytest.mark.usefixtures("torch")
def test_lost_records_are_an_error(fake: FakeCupti) -> None:
    fake.lost = 7
    with pytest.raises(MissingData, match="lost 7 records"):
        thence.measure(Program(fake, TWO))(Tensor())
    assert fake.calls[-1] == "finalize"


@pytest.mark.usefixtures("torch")
def test_kernels_without_times_are_an_error(fake: FakeCupti) -> None:
    with pytest.raises(MissingData, match="no times"):
        thence.measure(Program(fake, [("k", 0, 0)]))(Tensor())


@pytest.mark.usefixtures("torch")
def test_records_of_an_unknown_size_are_an_error(fake: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda_fakes.KERNEL_BYTES", 112)  # CUDA 4's
    with pytest.raises(MissingData, match="cannot read"):
        thence.measure(Program(fake, TWO))(Tensor())


@pytest.mark.usefixtures("torch")
def test_cupti_is_given_back_when_the_function_fails(fake: FakeCupti) -> None:
    calls = []

    def f(_tensor: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        thence.measure(f)(Tensor())
    enabled, disabled = ([f"{what} {kind}" for kind in KINDS] for what in ("enable", "disable"))
    assert fake.calls == ["subscribe", *enabled, *reversed(disabled), "unsubscribe", "finalize"]


def test_who_holds_cupti_is_left_alone(fake: FakeCupti, torch: Any) -> None:
    fake.taken = True
    torch.autograd = SimpleNamespace(_profiler_enabled=lambda: True)
    with pytest.raises(MissingRequirement, match=r"torch\.profiler has it.*mode='events'"):
        thence.measure(Program(fake, TWO))(Tensor())
    assert fake.calls == []


@pytest.mark.usefixtures("torch")
def test_a_recording_of_our_own_is_left_alone(fake: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_running", SimpleNamespace(alive=True))
    with pytest.raises(thence.UsageError, match="thence records this process"):
        thence.measure(Program(fake, TWO))(Tensor())
    assert fake.calls == []


@pytest.mark.usefixtures("torch")
def test_an_unknown_cupti_is_refused(fake: FakeCupti) -> None:
    fake.known_version = 990000
    with pytest.raises(MissingRequirement, match=r"990000.*mode='events'"):
        thence.measure(Program(fake, TWO))(Tensor())
    assert fake.calls == []


@pytest.mark.usefixtures("torch")
def test_records_that_came_too_late_count_for_nobody(fake: FakeCupti) -> None:
    with kernel_times.KernelTimes() as recorded:
        fake.launched("late", 1, 2)
        fake.flush(unfinished=True)
    assert recorded.take().names == []


def test_torch_events_go_around_each_call(torch: Any) -> None:
    tensor = Tensor(1)

    def f(given: Any) -> Any:
        torch.log.append("work")
        return given

    out, times = thence.measure(f, mode="events", iterations=2)(tensor)
    assert out is tensor
    hold = ["on 1", "hold 0x51 for 50000"]
    once = ["wait for stream of 1", *hold, "event on 1", "work", "event on 1", "wait for event"]
    made = ["on 1", "hold 0x51 for 0", "event on 1", "event on 1"]
    assert torch.log == ["work", "wait for 1", *made, *once, *once]
    assert times == [2.0, 2.0]  # the second event came two entries after the first


@pytest.mark.parametrize("attribute", ["_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl"])
def test_a_compiled_function_is_launched_as_a_whole(torch: Any, attribute: str) -> None:
    def f(given: Any) -> Any:
        return given

    setattr(f, attribute, None)  # as on a module that was not compiled
    thence.measure(f, mode="events")(Tensor())
    assert "hold 0x50 for 50000" in torch.log
    setattr(f, attribute, abs)
    thence.measure(f, mode="events")(Tensor())
    assert torch.log.count("hold 0x50 for 1000000") == 1


@pytest.mark.usefixtures("torch")
def test_torch_events_time_one_device() -> None:
    with pytest.raises(thence.UsageError, match="tensors are on 2: use mode='cupti'"):
        thence.measure(lambda *tensors: tensors, mode="events")(Tensor(0), Tensor(1))


def test_the_current_device_is_meant_where_there_is_no_tensor(torch: Any) -> None:
    thence.measure(lambda: None, mode="events")()
    assert "event on 0" in torch.log


@pytest.mark.parametrize("mode", ["cupti", "events"])
def test_torch_without_a_gpu_says_so(torch: Any, mode: Any) -> None:
    torch.cuda.is_available = lambda: False
    with pytest.raises(MissingRequirement, match="thence doctor"):
        thence.measure(lambda tensor: tensor, mode)(Tensor())


def test_the_function_keeps_its_name() -> None:
    def attention() -> None:
        """Mine."""

    measured = thence.measure(attention)
    assert measured.__name__ == "attention"
    assert measured.__doc__ == "Mine."
    thence.measure(functools.partial(attention))  # which has none


@pytest.mark.parametrize(
    ("f", "options", "message"),
    [
        (3, {}, "needs a function"),
        (abs, {"mode": "cuda"}, "'cupti' or 'events', not 'cuda'"),
        (abs, {"iterations": 0}, "at least 1, not 0"),
        (abs, {"iterations": 1.5}, r"at least 1, not 1\.5"),
        (abs, {"iterations": True}, "at least 1"),
        (abs, {"mode": "events", "aggregate": False}, "cannot distinguish kernels"),
        (abs, {"mode": "events", "finalize": False}, "uses no CUPTI"),
    ],
)
def test_questions_that_make_no_sense_are_refused(f: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(thence.UsageError, match=message) as raised:
        thence.measure(f, **options)
    assert isinstance(raised.value, ValueError)  # as jax's own measure raises


def test_without_a_framework_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    with pytest.raises(thence.UsageError, match="neither is imported"):
        thence.measure(abs)(3)


def test_an_event_is_made_once_for_the_context_of_its_stream() -> None:
    driver = FakeDriver()
    event = cuda_events.Event(driver)
    event.record(9)
    event.record(0)
    made = ["cuStreamGetCtx", "push 0xc1", "cuEventCreate", "pop", "record 0xe2 on 9"]
    assert driver.log == [*made, "cuStreamGetCtx", "record 0xe2 on 0"]
    driver.log.clear()
    driver.context = 0xC2  # another device: an event belongs to one
    event.record(9)
    assert driver.log[1:3] == ["destroy 0xe2", "push 0xc2"]


def test_the_time_between_events_is_waited_for() -> None:
    driver = FakeDriver()
    start, end = cuda_events.Event(driver), cuda_events.Event(driver)
    with pytest.raises(thence.UsageError, match="never recorded"):
        cuda_events.elapsed_ms(driver, start, end)
    start.record(1)
    end.record(1)
    driver.log.clear()
    assert cuda_events.elapsed_ms(driver, start, end) == 1.25
    assert driver.log == [f"wait for {end.handle:#x}", "elapsed"]


def test_an_error_of_the_driver_says_what_it_means() -> None:
    driver = FakeDriver()
    driver.failing = "cuEventCreate"
    event = cuda_events.Event(driver)
    with pytest.raises(MissingRequirement, match=r"cuEventCreate.*700: an illegal memory access"):
        event.record(1)
    assert driver.log[-1] == "pop"
    with pytest.raises(MissingRequirement, match="has no cuStreamGetCtx"):
        cuda_events.Event(SimpleNamespace()).record(1)


@pytest.mark.parametrize(
    ("capability", "target"), [((9, 0), "sm_75"), ((7, 5), "sm_75"), ((7, 0), "sm_50"), ((12, 1), "sm_75")]
)
def test_the_head_start_is_translated_once_for_each_context(capability: tuple[int, int], target: str) -> None:
    driver = FakeDriver()
    driver.capability = capability
    start = head_start.HeadStart(driver)
    start.hold(9, 50_000)
    assert driver.log[-2:] == ["launch for 50000 on 9", "pop"]
    assert f".target {target}\n" in driver.code
    driver.log.clear()
    start.hold(0, 7)
    assert driver.log == ["cuStreamGetCtx", "push 0xc1", "launch for 7 on 0", "pop"]
    driver.context = 0xC2
    start.hold(0, 7)
    assert driver.log.count("cuModuleLoadData") == 1
    driver.failing = "cuStreamGetCtx"
    with pytest.raises(MissingRequirement, match="cuStreamGetCtx failed"):
        start.hold(0, 7)
