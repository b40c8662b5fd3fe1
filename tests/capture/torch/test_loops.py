"""Programs that nothing divides into steps: the rounds of their loop are, and recording leaves windows of them out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from recorder_programs import description, program
from thence.capture.boundaries.probe import choose_probe

if TYPE_CHECKING:
    from pathlib import Path

needs_monitoring = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
RECORD = """
from thence.capture.torch import hooks, loops
hooks._cuda_is_used = lambda: True  # where PyTorch uses no GPU
loops._COUNT_NS = 300_000_000
import runpy

def launch(name):
    number, now = fake.launch(), time.time_ns()
    fake.emit(kernel(name, now, now + 100_000, correlationId=number, queued=now))

recording = thence.record(OUT, thence.RecordOptions(own=("!fake_cupti",), flush_seconds=0.2{options}))
recording.start()
runpy.run_path({script!r}, init_globals={{"launch": launch, "recording": recording}})
recording.stop()
"""
LOOP = """
import time

def work(n, pause):
    for part in range(3):
        launch(f"kernel_{n}_{part}")
        time.sleep(pause / 3)

def loop(rounds, pause):
    for n in range(rounds):
        if n % 7 == 0:
            time.sleep(0.0001)
        work(n, pause)
        launch(f"end_{n}")
"""


# Nearly always, these are at a line of every third round.
AT_A_BRANCH = """
for n in range(450):
    launch(f"end_{n}")
    if n % 3 == 0:
        time.sleep(0.012)
"""
CONTINUES = """
n = -1
while (n := n + 1) < 450:
    launch(f"end_{n}")
    if n % 3:
        continue
    time.sleep(0.012)
"""
# The loop of a library calls the program's function; the loop in it makes no steps.
CALLED = """
def part(n):
    for again in range(2):
        time.sleep(0.006)
    launch(f"end_{n}")

for _ in map(part, range(200)):
    pass
"""


def recorded(folder: Path, source: str, options: str = "") -> thence.Trace:
    """The recording of a program."""
    script = folder / "script.py"
    script.write_text(source)
    program(RECORD.format(script=str(script), options=options), folder / "run")
    return thence.open(folder / "run")


@needs_monitoring
@pytest.mark.parametrize(("rounds", "pause_ms", "together"), [(250, 10.5, range(1, 2)), (3000, 0.09, range(2, 31))])
def test_rounds_of_the_outermost_loop_are_steps_and_some_windows_of_them_are_plain(
    tmp_path: Path, rounds: int, pause_ms: float, together: range
) -> None:
    if choose_probe().compiled is None:
        pytest.skip("the probe was not compiled")
    trace = recorded(tmp_path, LOOP + f"loop({rounds}, {pause_ms / 1000})\n")
    times = trace.tables.step_times
    plain = times.filter(~pl.col("recorded"))
    assert plain["number"].to_list()[:7] == [*range(63, 70)]
    assert description(tmp_path / "run")["detachments"] >= 1
    launched = trace.tables.gpu["name"].cast(pl.String)
    ends = launched.str.extract(r"end_(\d+)").drop_nulls().cast(pl.Int64)
    left_out = sorted(set(range(rounds)) - set(ends))
    # So many rounds are a step of about 5 ms; one that begins as the loop ends has none.
    each = len(left_out) / plain.height
    assert together.start - 1 < each < together.stop
    steps = trace.steps().steps
    assert steps.kind == "step"
    # Nothing measures the last one, which may have no work: a step ends as the loop does.
    assert steps.frame.height + plain.height - times.height in (0, 1)
    document = trace.headline.to_json()
    assert document["plain_step_ns"]["count"] == plain.filter("counted").height
    assert document["plain_step_ns"]["median"] > round(each) * pause_ms * 1_000_000
    assert trace.headline.lines[0].startswith(f"{trace.steps().plain.text}: GPU busy")  # type: ignore[union-attr]
    assert trace.check().sound


@needs_monitoring
@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("for n in range(300):\n    recording.step()\n    work(n, 0.003)\n", ""),  # the program says what its steps are
        ("loop(300, 0.003)\n", ", modules=False"),
        ("work(0, 0.003)\ntime.sleep(1)\nwork(1, 0.003)\n", ""),  # no line comes back
    ],
)
def test_no_round_begins_a_step_where_it_should_not(tmp_path: Path, source: str, options: str) -> None:
    trace = recorded(tmp_path, LOOP + source, options)
    names = trace.tables.host.filter(pl.col("category") == "step")["name"].cast(pl.String).to_list()
    assert names.count("step") <= 1  # which began with the recording


@needs_monitoring
@pytest.mark.parametrize(
    "loop",
    [pytest.param(AT_A_BRANCH, id="branch"), pytest.param(CONTINUES, id="continue"), pytest.param(CALLED, id="called")],
)
def test_a_line_that_does_not_come_in_each_round_is_no_step(tmp_path: Path, loop: str) -> None:
    if choose_probe().compiled is None:
        pytest.skip("the probe was not compiled")
    trace = recorded(tmp_path, "import time\n\n" + loop)
    rounds = trace.tables.gpu.select(
        pl.col("name").cast(pl.String).str.extract(r"end_(\d+)").cast(pl.Int64), pl.col("start")
    ).sort("start")
    borders = trace.tables.step_times.filter("recorded").sort("start")
    each = borders.join_asof(rounds, on="start")["name"].diff().drop_nulls()
    assert each.median() == 1  # rounds take 4 and 12 ms; not three of them, and not half a one


@needs_monitoring
def test_two_loops_after_each_other_are_not_compared(tmp_path: Path) -> None:
    quick = "import thence.capture.torch.loops as loops\nloops._OVER_NS, loops._OVER_ROUNDS = 300_000_000, 3\n"
    source = quick + LOOP + "loop(400, 0.003)\nfor n in range(500):\n    time.sleep(0.006)\n    launch(f'second_{n}')\n"
    trace = recorded(tmp_path, source)
    since = trace.meta.facts[0]["plain_steps"]["since_ns"]
    assert since > 0
    first = trace.tables.gpu.filter(pl.col("name").cast(pl.String).str.starts_with("second"))["start"].min()
    counted = trace.tables.step_times.filter("counted")
    assert counted.height
    assert counted["start"].min() > first
