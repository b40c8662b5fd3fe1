"""What following generated code costs: ns per launch, by the length of the function, for two kinds of events.

    python benchmarks/generated_lines.py        Python 3.12 or newer

A function that launches N times is run plain, with a LINE event at each launch, and with an INSTRUCTION event at
each launch, as thence follows it; all other locations are switched off. Thread time, best of 30 rounds.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from command_line import documented_parser

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 30
TOOL = 4


def best(run: Callable[[], object]) -> float:
    """Seconds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        run()
        times.append(time.thread_time() - begin)
    return min(times)


def measure(launches: int) -> None:
    """Prints a row."""
    monitoring: Any = sys.monitoring
    text = "def call(launch):\n" + "    # facts\n    launch()\n    done = 1\n" * launches
    space: dict[str, Any] = {}
    exec(compile(text, "generated", "exec"), space)
    code = space["call"].__code__
    starts = {start: line for start, _, line in reversed(list(code.co_lines())) if line}
    lines = {line for line in starts.values() if line > 1 and line % 3 == 0}
    first: dict[int, int] = {}
    for start, line in starts.items():
        first[line] = min(start, first.get(line, start))
    offsets = {first[line] for line in lines}
    kinds = {"LINE": lines, "INSTRUCTION": offsets}
    plain = best(lambda: space["call"](int))
    texts = []
    for kind, wanted in kinds.items():
        event = getattr(monitoring.events, kind)
        monitoring.register_callback(
            TOOL, event, lambda _, at, wanted=wanted: None if at in wanted else monitoring.DISABLE
        )
        monitoring.set_local_events(TOOL, code, event)
        space["call"](int)
        texts.append(f"{kind} +{(best(lambda: space['call'](int)) - plain) / launches * 1e9:,.0f}")
        monitoring.set_local_events(TOOL, code, 0)
    print(f"{launches:>6} launches: plain {plain / launches * 1e9:.0f} ns each, {', '.join(texts)}")


def main() -> None:
    documented_parser(__doc__).parse_args()
    if not hasattr(sys, "monitoring"):
        raise SystemExit("sys.monitoring came with Python 3.12")
    sys.monitoring.use_tool_id(TOOL, "benchmark")
    for launches in (20, 100, 500, 2000):
        measure(launches)


if __name__ == "__main__":
    main()
