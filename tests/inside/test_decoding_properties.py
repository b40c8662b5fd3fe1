"""Whatever a kernel does comes back from every layout, and whatever is missing costs nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from inside_data import (
    ENTER,
    EXIT,
    INSTANT,
    LOW,
    NAMES,
    START,
    Event,
    Trace,
    description,
    flashinfer_buffer,
    mosaic_buffer,
    proton_buffer,
    thence_buffer,
)
from thence.inside import decode

Found = list[tuple[int, int, int, int, bool]]  # name, begin, end, depth, closed


@dataclass
class Open:
    name: int
    begin: int
    row: int


@st.composite
def programs(draw: st.DrawFn, kinds: int = 3, most_step: int = 5000) -> list[Event]:
    """Events of one trace that nest, with all closed."""
    events: list[Event] = []
    stack: list[int] = []
    now = 0
    for _ in range(draw(st.integers(0, 20))):
        now += draw(st.integers(0, most_step))
        choice = draw(st.integers(0, kinds))
        if choice == 0 and stack:
            events.append((EXIT, stack.pop(), now))
        elif choice == 3:
            events.append((INSTANT, draw(st.integers(0, 2)), now))
        else:
            stack.append(draw(st.integers(0, 2)))
            events.append((ENTER, stack[-1], now))
    while stack:
        now += draw(st.integers(0, most_step))
        events.append((EXIT, stack.pop(), now))
    return events


def slowly(events: list[Event], end: int) -> Found:
    """Ranges and instants by a stack, one event after another, in order of their beginning."""
    found: Found = []
    stack: list[Open] = []
    for kind, name, at in events:
        if kind == INSTANT:
            found.append((name, at, at, len(stack), True))
        elif kind == ENTER:
            stack.append(Open(name, at, len(found)))
            found.append((name, at, end, len(stack) - 1, False))
        elif stack and stack[-1].name == name:
            opened = stack.pop()
            found[opened.row] = (name, opened.begin, at, len(stack), True)
        else:
            raise AssertionError("these events do not nest")
    return found


def compare(decoded: Any, expected: list[tuple[int, Found]], to_ns: Any) -> None:
    """Every range of every trace, in whole ns."""
    rows = decoded.ranges.select("trace", "name", "start_ns", "duration_ns", "depth", "closed").rows()
    wanted = [
        (trace, NAMES[name], to_ns(trace, begin), to_ns(trace, end) - to_ns(trace, begin), depth, closed)
        for trace, found in expected
        for name, begin, end, depth, closed in found
    ]
    assert rows == wanted


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_thence_round_trip(data: st.DataObject) -> None:
    traces: list[Trace | None] = []
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.integers(0, 5)) == 0:
            traces.append(None)
            continue
        events = data.draw(programs(most_step=data.draw(st.sampled_from([50, 10_000, LOW]))))
        cycles = max([2000, *(at for *_, at in events)]) + 1
        ns = max(1024, int(cycles / data.draw(st.floats(0.5, 2.5))))
        start, clock = START + data.draw(st.integers(0, 10**9)), data.draw(st.integers(0, 1 << 40))
        traces.append(Trace(events, start, clock, ns, cycles, data.draw(st.integers(0, 131))))
    capacity = max((len(t.events) for t in traces if t), default=0) + data.draw(st.integers(0, 3))
    about = description(len(traces), capacity, overhead_cycles=0)
    decoded = decode(thence_buffer(traces, capacity), about)
    expected = [(n, slowly(t.events, t.cycles)) for n, t in enumerate(traces) if t]

    def to_ns(number: int, cycles: int) -> int:
        trace = traces[number]
        assert trace is not None
        return trace.start + round(cycles / (trace.cycles / trace.ns))

    compare(decoded, expected, to_ns)
    assert not [text for text in decoded.warnings if "no events in" not in text]


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(programs(2), min_size=1, max_size=5), st.integers(0, LOW), st.booleans())
def test_mosaic_round_trip(events: list[list[Event]], clock: int, old: bool) -> None:
    moved = [[(k, n, at - (e[0][2] if e else 0)) for k, n, at in e] for e in events]
    traces = [Trace(e, START + 32 * i, clock) for i, e in enumerate(moved)]
    entries = 3 + 2 * max(map(len, events)) + 1
    flavour = "mosaic-2024" if old else "mosaic"
    about = description(len(traces), entries // 2 - 2, flavour=flavour, words_per_trace=entries)
    decoded = decode(mosaic_buffer(traces, entries, counts_header=old), about, clock_ghz=1.0)
    expected = [(n, slowly(e, e[-1][2] if e else 0)) for n, e in enumerate(moved)]
    compare(decoded, expected, lambda n, cycles: (START & LOW) + 32 * n + cycles)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(programs(2), min_size=1, max_size=6), st.sampled_from(["flashinfer", "flashinfer-old", "mirage"]))
def test_flashinfer_round_trip(events: list[list[Event]], flavour: str) -> None:
    traces = [Trace(e, START, sm=n) for n, e in enumerate(events)]
    room = max(map(len, events)) + 1
    about = description(len(traces), 0, flavour=flavour)
    decoded = decode(flashinfer_buffer(traces, 1, room, flavour), about)
    expected = [(n, slowly(e, e[-1][2])) for n, e in enumerate(events) if e]
    compare(decoded, expected, lambda _n, ns: (START & LOW) + ns)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(programs(2), min_size=1, max_size=4), st.integers(0, (1 << 43) - 1))
def test_proton_round_trip(events: list[list[Event]], clock: int) -> None:
    blocks = [[Trace(e, START + 32 * n, clock)] for n, e in enumerate(events)]
    about = description(len(blocks), 0, flavour="proton")
    bits = 43 if clock >> 33 else 32
    decoded = decode(proton_buffer(blocks, 64, clock_bits=bits), about, clock_ghz=1.0)
    first = [e[0][2] if e else 0 for e in events]
    expected = [(n, slowly(e, 0)) for n, e in enumerate(events)]
    compare(decoded, expected, lambda n, cycles: START + 32 * n + cycles - first[n])


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=24), st.integers(0, 3))
def test_any_events_are_ranges_strays_or_unclosed(events: list[tuple[int, int]], others: int) -> None:
    timed = [(kind, name, 10 * i) for i, (kind, name) in enumerate(events)]
    plain = [(ENTER, 0, 5), (EXIT, 0, 25)]
    traces = [Trace(plain), Trace(timed), *(Trace(plain) for _ in range(others))]
    decoded = decode(thence_buffer(traces, 24), description(len(traces), 24, overhead_cycles=0))
    of_trace = decoded.ranges.filter(decoded.ranges["trace"] == 1)
    enters, exits, instants = ([k for k, *_ in events].count(kind) for kind in (ENTER, EXIT, INSTANT))
    lasting = of_trace.filter(of_trace["kind"] == "range")
    assert lasting.height == enters
    assert of_trace.height - lasting.height == instants
    closed = int(lasting["closed"].sum())
    strays = [text for text in decoded.warnings if "were not entered" in text]
    assert exits - closed == (int(strays[0].split()[0]) if strays else 0)
    for name in range(3):
        of_name = [kind for kind, n in events if n == name and kind != INSTANT]
        stack = matched = 0
        for kind in of_name:
            matched += kind == EXIT and stack > 0
            stack = stack + 1 if kind == ENTER else max(stack - 1, 0)
        mine = lasting.filter(lasting["name"].cast(str) == NAMES[name])
        assert int(mine["closed"].sum()) == matched
    rest = decoded.ranges.filter(decoded.ranges["trace"] != 1)
    assert rest["closed"].all()
    assert rest.height == 1 + others
