"""Prefill and decode, by the names that servers give to their ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers import event, kernel, launch, opened
from thence.attribution.serving import serving_of
from thence.model.phases import Serving

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {
    "execute_context_2(640)_generation_0(0)": "prefill",
    "execute_context_0(0)_generation_14(14)": "decode",
    "execute_context_1(640)_generation_14(14)": "mixed",
    "execute_context_0(0)_generation_0(0)": None,
    "execute_77_context_3(sq128sk256sqsq1sqsk1)_generation_2(sq1sk300sqsq1sqsk1)": "mixed",
    "step[EXTEND bs=2 toks=107]": "prefill",
    "step[prefill bs=1 toks=12]": "prefill",
    "step[DECODE bs=63]": "decode",
    "step[TARGET_VERIFY bs=4]": "decode",
    "step[MIXED bs=2 ext=1 dec=1]": "mixed",
    "step[IDLE]": None,
    "[Executor] _forward_step 7: 1 ctx reqs, 640 ctx tokens, 14 gen reqs": "mixed",
    "[Executor] _forward_step 8: 0 ctx reqs, 0 ctx tokens, 32 gen reqs": "decode",
    "_forward_step 9: 3 ctx reqs, 0 gen reqs": "prefill",
    "prefill": "prefill",
    "Decode 12": "decode",
    "decode (batch 4)": "decode",
    "decode_jpeg": None,
    "image decode": None,
    "scheduler.run_batch": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_name_says(name: str) -> None:
    expected = NAMES[name]
    assert serving_of(name) == (None if expected is None else Serving(expected))


def test_the_innermost_range_decides_also_for_a_graph(tmp_path: Path) -> None:
    graph = event("cuda_runtime", "cudaGraphLaunch", 120, 1, args={"correlation": 3})
    events = [
        event("user_annotation", "scheduler.run_batch", 0, 200),
        event("user_annotation", "step[EXTEND bs=2 toks=107]", 0, 90),
        event("user_annotation", "execute_context_1(90)_generation_1(1)", 5, 40),
        *(launch(1, 10), kernel(1, 300)),
        *(launch(2, 60), kernel(2, 310)),
        *(event("user_annotation", "step[DECODE bs=2]", 100, 50), graph),
        *(kernel(3, 320), kernel(3, 330), launch(4, 190), kernel(4, 340)),
    ]
    trace = opened(tmp_path, events)
    rows = trace.activities.select("serving", "serving_rule")
    assert rows["serving"].to_list() == ["mixed", "prefill", "decode", "decode", None]
    assert rows["serving_rule"].to_list()[-1] == "no_serving"
    assert {row["name"]: row["count"] for row in trace.report("serving").rows.to_dicts()} == {
        "mixed": 1,
        "prefill": 1,
        "decode": 2,
        "[no range around it says prefill or decode]": 1,
    }
