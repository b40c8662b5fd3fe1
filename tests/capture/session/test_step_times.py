"""Windows of steps that are not recorded: labels after them, which steps they are, and what answers say of them."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from recorder_programs import Copies, description, program
from stores import stored
from thence.capture.boundaries.probe import choose_probe
from thence.capture.session.step_plans import AllButWindows, ScheduledSteps, plain_windows
from thence.capture.session.step_times import StepTimes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from thence.capture.session.step_plans import StepPlan

needs_monitoring = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
STEPS = 90
UNRECORDED = range(63, 70)
"""The steps of the first window: after 63 steps, seven steps are a tenth of all."""

_FUNCTION = """
import torch
from torch import nn

class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        launch("f" + name)
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        launch("b" + ctx.name)
        return g, None

class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x, name):
        return Op.apply(x * self.w, name)

class Sgd(torch.optim.SGD):
    def step(self, closure=None):
        launch(f"optimizer_{self.number}")
        return super().step(closure)
"""
PROGRAMS = {
    "training of nested modules": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Leaf(), Leaf()

    def forward(self, x, name):
        return self.two(self.one(x, name + "_1"), name + "_2")

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x, name):
        return self.b(self.a(x, name + "_a"), name + "_b")

model = Model()
optimizer = Sgd(model.parameters(), lr=0.1)
for n in range(STEPS):
    optimizer.zero_grad()
    optimizer.number = n
    loss = model(torch.ones(2), f"_{n}").sum()
    launch(f"between_{n}")
    loss.backward()
    optimizer.step()
""",
    "training without an optimizer": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Leaf(), Leaf()

    def forward(self, x, name):
        return self.b(self.a(x, name + "_a"), name + "_b")

model = Model()
for n in range(STEPS):
    loss = model(torch.ones(2), f"_{n}").sum()
    launch(f"between_{n}")
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            launch(f"update_{n}")
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
""",
    "generation in a generator": """
class Part(nn.Module):
    def forward(self, x, n, name):
        launch(f"{name}_{n}")
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Part(), Part()

    def forward(self, input_ids, n):
        x = self.a(input_ids, n, "a")
        launch(f"head_{n}")
        return self.b(x, n, "b")

def generate(model):
    for n in range(STEPS):
        with torch.no_grad():
            model(torch.ones(1, 1, dtype=torch.int64), n)
        launch(f"sample_{n}")
        yield n

for _ in generate(Model()):
    pass
""",
    "a module around all steps": """
class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Leaf(), Leaf()

    def forward(self):
        optimizer = Sgd(self.parameters(), lr=0.1)
        for n in range(STEPS):
            optimizer.number = n
            launch(f"loop_{n}")
            x = self.first(torch.ones(2), f"_{n}_1")
            self.second(x, f"_{n}_2").sum().backward()
            optimizer.step()
            if TELLS:
                recording.step()

Trainer()()
""",
}


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    """Runs programs in which torch was imported before thence."""
    pytest.importorskip("torch")
    with Copies("import torch", tmp_path_factory.mktemp("copies")) as programs:
        yield programs


WAYS = {
    "all": ("baseline=False", 0),
    "baseline": ("baseline=True", 1),
    "sampling": ("sampling=thence.Sampling(every=10, ring=50, budget=0, slow_steps=False)", 9),
}
"""Options of a recording of 90 steps, and how often it is detached."""


def labelled(copies: Copies, source: str, folder: Path, way: str, *, tells: bool) -> pl.DataFrame:
    """The activities of a program that launches kernels named by their steps, with their places."""
    option, detachments = WAYS[way]
    script = folder / "train.py"
    script.write_text(_FUNCTION + source)
    out = folder / way
    body = f"""
    import runpy
    recording = thence.record(OUT, thence.RecordOptions(own=("!fake_cupti",), {option}))
    given = {{"launch": launch, "STEPS": {STEPS}, "TELLS": {tells}, "recording": recording}}
    recording.start()
    runpy.run_path({str(script)!r}, init_globals=given)
    recording.stop()
    """
    copies.program(body, out)
    assert description(out)["detachments"] == detachments
    activities = thence.open(out).activities
    return activities.select(pl.col("name", "module", "source", "stack", "phase").cast(pl.String))


@needs_monitoring
@pytest.mark.parametrize(
    ("kind", "tells"), [*((kind, False) for kind in PROGRAMS), ("a module around all steps", True)]
)
def test_kernels_after_steps_that_were_not_recorded_have_the_places_of_a_full_recording(
    tmp_path: Path, copies: Copies, kind: str, *, tells: bool
) -> None:
    full = labelled(copies, PROGRAMS[kind], tmp_path, "all", tells=tells)
    found = labelled(copies, PROGRAMS[kind], tmp_path, "baseline", tells=tells)
    assert full["module"].null_count() < full.height
    step = pl.col("name").str.extract(r"_(\d+)").cast(pl.Int64)
    left_out = sorted(set(full.select(step).to_series()) - set(found.select(step).to_series()))
    # A step that hooks find begins where the optimizer has stepped, or the model is called: some kernels between two
    # steps belong to the step before. So the numbers may differ by one.
    assert left_out in ([*UNRECORDED], [number + 1 for number in UNRECORDED])
    for recorded in (found, labelled(copies, PROGRAMS[kind], tmp_path, "sampling", tells=tells)):
        kept = full.join(recorded.select("name"), on="name", how="semi")
        assert kept.height > 20
        assert kept.sort("name").equals(recorded.sort("name"))


class Switches:
    """Notes pauses instead of making them."""

    def __init__(self, *, attached: str | None = None, plain: bool = True) -> None:
        self.attached = attached
        self.plain = plain
        self.calls: list[str] = []

    def why_attached(self) -> str | None:
        return self.attached

    def pause(self) -> bool:
        self.calls.append("pause")
        return self.plain

    def resume(self, frame: FrameType | None) -> None:
        assert frame is None
        self.calls.append("resume")


def unrecorded(steps: int, switches: Switches, plan: StepPlan | None = None) -> list[int]:
    """The numbers of the steps that are not recorded."""
    noted = StepTimes(switches, AllButWindows() if plan is None else plan)
    return [number for number in range(steps) if not noted.begins(None)]


def test_at_no_time_more_than_a_tenth_of_the_steps_and_none_of_the_first_twenty_is_left_out() -> None:
    numbers = unrecorded(20_000, Switches())
    assert numbers[:7] == [*UNRECORDED]
    assert numbers[0] >= 20
    assert all(10 * count <= number + 1 for count, number in enumerate(numbers, 1))
    windows = list(itertools.takewhile(lambda window: window[0] < 20_000, plain_windows()))
    assert numbers == [n for start, length in windows for n in range(start, start + length)]
    starts = [start for start, _ in windows]
    # Spread over the run: also in a run of twice the steps, there is a window in its second half.
    assert all(later <= 2.4 * start for start, later in itertools.pairwise(starts))


def test_windows_are_the_same_on_all_ranks_however_long_their_steps_take() -> None:
    slow = StepTimes(Switches(), AllButWindows())
    numbers = []
    for number in range(100):
        if number % 10 == 0:
            time.sleep(0.001)
        if not slow.begins(None):
            numbers.append(number)
    assert numbers == unrecorded(100, Switches()) == [*UNRECORDED]


def test_without_baseline_every_step_is_recorded() -> None:
    switches = Switches()
    assert unrecorded(500, switches, ScheduledSteps(None)) == []
    assert switches.calls == []


def test_no_step_is_left_out_where_cupti_cannot_be_detached() -> None:
    switches = Switches(attached="several threads launch")
    noted = StepTimes(switches, AllButWindows())
    assert all(noted.begins(None) for _ in range(200))
    assert switches.calls == []
    assert noted.trouble == "several threads launch"


def test_a_pause_that_does_not_make_steps_plain_ends_at_once() -> None:
    switches = Switches(plain=False)
    noted = StepTimes(switches, AllButWindows())
    assert all(noted.begins(None) for _ in range(100))
    assert set(zip(switches.calls[::2], switches.calls[1::2], strict=True)) == {("pause", "resume")}
    assert noted.trouble is not None


def test_rows_are_taken_while_a_pause_waits_for_the_thread_that_takes_them() -> None:
    taken = []

    class Waiting(Switches):
        def pause(self) -> bool:
            other = threading.Thread(target=lambda: taken.append(len(noted.take()["number"])))
            other.start()
            other.join(5)
            return not other.is_alive()

    noted = StepTimes(Waiting(), AllButWindows())
    assert [noted.begins(None) for _ in range(64)][-1] is False
    assert taken == [63]


def test_a_schedule_of_the_program_wins() -> None:
    noted = StepTimes(Switches(), ScheduledSteps(thence.Schedule(wait=2, active=2)))
    found = [noted.begins(None) for _ in range(200)]
    assert found == [number % 4 >= 2 for number in range(200)]


def test_the_first_step_after_a_switch_does_not_count() -> None:
    noted = StepTimes(Switches(), AllButWindows())
    for _ in range(81):
        noted.begins(None)
    rows = pl.DataFrame(noted.take())
    plain = rows.filter(pl.col("recorded") == 0)
    assert plain["number"].to_list() == [*UNRECORDED]
    assert plain.filter(pl.col("counted") == 1)["number"].to_list() == [*UNRECORDED[1:]]
    beside = rows.filter(pl.col("counted") == 1, pl.col("recorded") == 1)["number"].to_list()
    assert beside == [*range(56, 63), *range(71, 77)]


def test_steps_of_another_kind_are_counted_anew() -> None:
    noted = StepTimes(Switches(), AllButWindows())
    for _ in range(80):
        noted.begins(None, kind="call of a model")
    began = time.time_ns()
    numbers = [number for number in range(80) if not noted.begins(None, kind="step")]
    assert numbers == [*UNRECORDED]
    rows = pl.DataFrame(noted.take())
    before = rows.filter(pl.col("start") < noted.since)
    assert began <= noted.since
    assert before["number"].to_list() == [*range(80)]
    assert rows.filter(pl.col("start") >= noted.since)["number"].to_list() == [*range(79)]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> thence.Trace:
    """A recording of 160 steps, each of 1 ms with a kernel of 0.1 ms; two windows of 7 steps are left out."""
    if choose_probe().compiled is None:
        pytest.skip("the probe was not compiled")
    out = tmp_path_factory.mktemp("windowed")
    program(
        """
        with thence.record(OUT) as recording:
            for step in range(160):
                if step:
                    recording.step()
                number, now = fake.launch(), time.time_ns()
                fake.emit(kernel("k", now, now + 100_000, correlationId=number, queued=now))
                time.sleep(0.001)
        """,
        out,
    )
    assert description(out)["detachments"] == 2
    return thence.open(out)


def test_steps_that_were_not_recorded_are_no_idle_time_and_no_loss(windowed: thence.Trace) -> None:
    assert windowed.check().sound
    times = windowed.tables.step_times.filter(~pl.col("recorded"))
    assert times["number"].to_list() == [*range(63, 70), *range(133, 140)]
    assert windowed.tables.gpu.height == 160 - 14
    gaps = windowed.idle().pieces.sort("start")
    for start, duration in times.select("start", "duration").rows():
        middle = start + duration // 2
        inside = (gaps["start"] <= middle) & (gaps["start"] + gaps["duration"] > middle)
        assert not inside.any()
    assert windowed.report().idle_ns == windowed.idle().idle_ns


def test_answers_about_steps_lead_with_the_step_that_was_not_recorded(windowed: thence.Trace) -> None:
    counted = windowed.tables.step_times.filter("counted")
    plain = float(counted.filter(~pl.col("recorded"))["duration"].median())  # type: ignore[arg-type]
    recorded = float(counted.filter("recorded")["duration"].median())  # type: ignore[arg-type]
    assert len(counted.filter(~pl.col("recorded"))) == 12
    document = windowed.headline.to_json()
    assert document["plain_step_ns"]["median"] == plain
    assert document["plain_step_ns"]["recorded"]["median"] == recorded
    assert document["steps"]["busy_share"] == pytest.approx(100_000 / plain)
    assert windowed.steps().to_json()["plain_step_ns"] == document["plain_step_ns"]
    idle = windowed.idle()
    added = max(recorded - plain, 0) * 146
    # The first and the last step lie in part before the first kernel and after the last one.
    stated = idle.to_json()["recording_added_at_most_ns"]
    assert stated <= added
    assert stated == pytest.approx(added, rel=0.1, abs=1)
    assert "14 steps that were not recorded" in idle.notes[0]


def test_a_store_and_sql_hold_the_times_of_steps(windowed: thence.Trace, tmp_path: Path) -> None:
    query = "select recorded, counted, count(*) as n from step_times group by recorded, counted"
    folder = Path(windowed.meta.inputs[0])
    stored(tmp_path / "store", [folder])
    again = thence.open(tmp_path / "store")
    assert again.sql(query).sort("recorded", "counted").equals(windowed.sql(query).sort("recorded", "counted"))
    assert again.headline.to_json()["plain_step_ns"] == windowed.headline.to_json()["plain_step_ns"]
    windowed.convert(tmp_path / "steps.parquet")
    exported = pl.read_parquet(tmp_path / "steps.parquet" / "step_times.parquet")
    assert exported.height == windowed.tables.step_times.height
