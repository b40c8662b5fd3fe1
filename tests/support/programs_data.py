"""A trace of XLA programs that is small enough to work out by hand."""

from __future__ import annotations

from thence.model.tables import COLLECTIVES, GPU, HOST, PROGRAMS, Tables

# program, start, duration, launch; thunks of each: (start, duration)
EXECUTIONS = [
    ("step.1", 100, 50, 90, [(100, 20), (110, 20), (140, 10)]),  # busy 40 of 50
    ("init.2", 160, 10, 155, [(160, 10)]),
    ("step.1", 200, 30, 196, [(200, 10), (220, 10)]),  # busy 20 of 30
    ("step.1", 250, 40, 249, [(250, 40), (260, 10)]),  # busy 40 of 40
    (None, 400, 10, 390, [(400, 10)]),  # the autotuner
]


def trace(*, compiled: str | None = None, communicates: bool = False) -> Tables:
    count = len(EXECUTIONS)
    names = [(program or "gemm").partition(".")[0] for program, *_ in EXECUTIONS]
    executions: dict[str | None, int] = {}
    numbers = []
    for program, *_ in EXECUTIONS:
        numbers.append(executions.get(program, 0))
        executions[program] = numbers[-1] + 1
    table = PROGRAMS.frame(
        {
            "rank": [0] * count,
            "device": [0] * count,
            "name": names,
            "execution": numbers,
            "program": [program for program, *_ in EXECUTIONS],
            "start": [row[1] for row in EXECUTIONS],
            "duration": [row[2] for row in EXECUTIONS],
            "launch": [row[3] for row in EXECUTIONS],
        }
    )
    thunks = [(number, *thunk) for number, row in enumerate(EXECUTIONS) for thunk in row[4]]
    gpu = GPU.frame(
        {
            "rank": [0] * len(thunks),
            "device": [0] * len(thunks),
            "kind": ["thunk"] * len(thunks),
            "name": ["x"] * len(thunks),
            "program": [number for number, *_ in thunks],
            "start": [start for _, start, _ in thunks],
            "duration": [duration for *_, duration in thunks],
        }
    )
    host = HOST.empty()
    if compiled:
        name, _, number = compiled.partition(".")
        label = f"XlaCompileBackend:#module={name},program_id={number}#"
        host = HOST.frame({"rank": [0], "category": ["compile"], "name": [label], "start": [0], "duration": [9]})
    some = COLLECTIVES.frame({"gpu": [0], "collective": ["all-reduce"]})
    return Tables(gpu=gpu, host=host, programs=table, collectives=some if communicates else COLLECTIVES.empty())
