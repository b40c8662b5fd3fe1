"""Whether intervals of what-if hold: programs simulated with noise, without and with the change that is asked about.

The simulation knows nothing of thence's graph: a host that loads, launches and waits, and two streams, step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from thence.analysis.whatif.answer import WhatIf, what_if
from thence.analysis.whatif.changes import Change, parse_change
from thence.analysis.whatif.graph import program_graph
from thence.attribution.attribute import attribute
from thence.model.tables import GPU, HOST, Tables

STEPS, LATENCY, CALL, RETURN = 12, 6_000, 3_000, 4_000
PROGRAMS = 8


@dataclass(frozen=True)
class Program:
    """A step: ns of the loader; name, ns of the host and of the device, and stream of each kernel; whether it waits."""

    load: int
    kernels: tuple[tuple[str, int, int, int], ...]
    waits: bool


@dataclass
class Run:
    """What a run of a program left: rows of host and of the device, and ns of a step."""

    host: list[tuple[str, str, int, int, int | None]] = field(default_factory=list)
    gpu: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    step: float = 0.0


def run(program: Program, random: np.random.Generator, paces: tuple[float, ...] = (1.0,)) -> Run:
    """Runs it; each duration is some percent off, every time, and those of the host by the pace of the step."""
    found, time, free = Run(), 0, {7: 0, 8: 0}

    def about(ns: int, spread: float) -> int:
        return round(ns * float(random.lognormal(0, spread)))

    for number in range(STEPS):
        begin = time
        took = about(program.load, 0.05)
        found.host.append(("load", "range", time, took, None))
        time += took
        for name, host, device, stream in program.kernels:
            took = about(round(host * paces[number % len(paces)]), 0.08)
            correlation = len(found.gpu) + 1
            launched = time + took // 2
            found.host.append((name, "range", time, took, None))
            found.host.append(("cudaLaunchKernel", "runtime", launched, CALL, correlation))
            start = max(launched + LATENCY, free[stream] + 1_000)
            free[stream] = start + about(device, 0.03)
            found.gpu.append((name, start, free[stream] - start, stream, correlation))
            time += took
        if program.waits:
            until = max(time + RETURN, free[7] + RETURN)
            found.host.append(("aten::item", "op", time, until - time + 1_000, None))
            call = ("cudaStreamSynchronize", "runtime", time + 500, until - time - 500, None)
            found.host.append(call)
            time = until + 1_000
        found.host.append((f"ProfilerStep#{number}", "step", begin, time - begin, None))
    found.step = max(time, *free.values()) / STEPS
    return found


def tables(found: Run) -> Tables:
    """The run as a trace."""
    rows = sorted(found.host, key=lambda row: (row[2], -row[3]))
    names, categories, starts, durations, correlations = zip(*rows, strict=True)
    count, activities = len(rows), list(zip(*found.gpu, strict=True))
    host: dict[str, Any] = {
        "rank": [0] * count, "process": [1] * count, "thread": [1] * count, "name": names, "category": categories,
        "start": starts, "duration": durations, "correlation": correlations, "parent": parents(rows),
    }  # fmt: skip
    count = len(found.gpu)
    gpu = {
        "rank": [0] * count, "device": [0] * count, "kind": ["kernel"] * count, "name": activities[0],
        "start": activities[1], "duration": activities[2], "stream": activities[3], "correlation": activities[4],
    }  # fmt: skip
    return Tables(gpu=GPU.frame(gpu), host=HOST.frame(host))


def parents(rows: list[tuple[str, str, int, int, int | None]]) -> list[int | None]:
    """The row around each one."""
    result: list[int | None] = []
    around: list[int] = []
    for number, (_, _, start, _, _) in enumerate(rows):
        while around and rows[around[-1]][2] + rows[around[-1]][3] <= start:
            around.pop()
        result.append(around[-1] if around else None)
        around.append(number)
    return result


def programs(random: np.random.Generator) -> list[Program]:
    """Programs from limited by the host to limited by the device."""
    result = []
    for _ in range(PROGRAMS):
        scale = float(random.choice([0.3, 1.0, 4.0]))
        drawn = [
            (name, int(random.integers(15, 60)) * 1000, round(scale * random.integers(20, 120) * 1000), stream)
            for name, stream in (("a", 7), ("b", 8), ("c", 7), ("a", 7), ("d", 7))
        ]  # fmt: skip
        load = int(random.integers(20, 400)) * 1000
        result.append(Program(load, tuple(drawn), bool(random.integers(2))))
    return result


def counterfactuals(program: Program) -> list[tuple[str, str, str, Program]]:
    """Changes: action, text and part as they are asked about, and the program with them."""

    def times(name: str, factor: float) -> Program:
        scaled = tuple(
            (n, host, round(device * factor) if n == name else device, stream)
            for n, host, device, stream in program.kernels
        )
        return replace(program, kernels=scaled)

    gone = tuple(kernel for kernel in program.kernels if kernel[0] != "a")
    result = [
        ("free", "cause:loader", "", replace(program, load=0)),
        ("scale", "cause:loader=2", "", replace(program, load=2 * program.load)),
        ("scale", "kernel:^a$=0.5", "", times("a", 0.5)),
        ("scale", "label:^b$=3", "kernels", times("b", 3)),
        ("free", "label:^a$", "with host work", replace(program, kernels=gone)),
        ("scale", "kernel:^c$=1", "", program),
    ]
    return [*result, ("no-wait", "item", "", replace(program, waits=False))][: len(result) + program.waits]


def answers(base: Run, asked: list[Change]) -> WhatIf:
    whole = attribute(tables(base))
    return what_if(whole, program_graph(whole), asked)


def test_intervals_cover_what_the_changed_program_takes() -> None:
    random = np.random.default_rng(7)
    covered, errors = [], []
    for program in programs(random):
        base = run(program, random)
        changes = counterfactuals(program)
        asked = [parse_change(action, text) for action, text, _, _ in changes]
        rows = answers(base, asked).rows.to_dicts()
        predicted = {(row["change"], row["part"]): row for row in rows}
        for action, text, part, other in changes:
            gain = 1 - run(other, random).step / base.step
            row = predicted[f"{action} {text}", part]
            covered.append(row["low_share"] <= gain <= row["high_share"])
            errors.append(abs(row["gain_share"] - gain))
    assert len(covered) > 6 * PROGRAMS
    assert float(np.mean(covered)) >= 0.9
    assert float(np.median(errors)) <= 0.02


FREED = Program(20_000, tuple((name, 50_000, 400_000 if name == "a" else 20_000, 7) for name in 4 * "abc"), True)
"""The device decides, until kernel a takes no time: then the host does, whose work takes 50 us for each kernel."""


def freed(paces: tuple[float, ...], later: float) -> tuple[dict[str, Any], float]:
    """What is said of kernel a taking no time, and what it gains where the host then has another pace."""
    random = np.random.default_rng(3)
    kernels = tuple((n, host, 0 if n == "a" else device, s) for n, host, device, s in FREED.kernels)
    base = run(FREED, random, paces)
    asked = [parse_change("free", "kernel:^a$")]
    said = answers(base, asked).rows.row(0, named=True)
    gone = run(replace(FREED, kernels=kernels), random, (later,))
    return said, 1 - gone.step / run(FREED, random, (later,)).step


def test_a_host_whose_pace_differs_in_the_trace_may_have_another_later() -> None:
    for later in (1.2, 2.2):
        said, gain = freed((1.0, 1.0, 1.0, 2.4, 2.4, 2.4), later)
        assert said["low_share"] <= gain <= said["high_share"]
        assert abs(said["gain_share"] - gain) > 0.05  # what one trace cannot tell


def test_a_host_of_one_pace_has_a_narrow_interval() -> None:
    said, gain = freed((1.0,), 1.0)
    assert said["low_share"] <= gain <= said["high_share"]
    assert said["high_share"] - said["low_share"] < 0.2
