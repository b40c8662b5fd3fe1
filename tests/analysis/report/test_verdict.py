"""The verdict: each code, its thresholds, and what comes first where several hold."""

from __future__ import annotations

import pytest

from thence.analysis.idle.host_causes import CAUSES
from thence.analysis.report.verdict import CODES, COMPARING, GROUPS, Late, Measured, Pace, verdict
from thence.analysis.soundness.findings import RULES, Finding, Soundness

SOUND = Soundness()


def finding(code: str) -> Soundness:
    return Soundness((Finding(code, 0, 0, 1, 0, 0.0, f"something about {code}"),))


def code(busy: float, exposed: float = 0.0, late: float = 0.0, **causes: float) -> str:
    """Of a step whose idle time has these causes."""
    ranks = (Late(3, late, late),) if late else ()
    return verdict(Measured(True, busy, exposed, causes, "", ranks), SOUND).code


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ({"loader": 0.3, "python": 0.2}, "input_bound"),
        ({"launch": 0.15, "operator": 0.15, "loader": 0.2}, "launch_bound"),
        ({"python": 0.2, "sync": 0.1, "operator": 0.2}, "host_bound"),
        ({"gc": 0.5}, "host_bound"),
        ({"host": 0.2, "lock": 0.1, "sleep": 0.1, "operator": 0.3}, "host_bound"),
        ({"allocation": 0.5}, "host_bound"),
        ({"compile": 0.5}, "host_bound"),
        ({"queued": 0.3, "event_wait": 0.1, "python": 0.1}, "gpu_bound"),
        ({"unknown": 0.3, "python": 0.2}, "unknown"),
        ({"unknown": 0.2, "python": 0.3}, "host_bound"),
    ],
)
def test_the_largest_group_of_causes_decides(causes: dict[str, float], expected: str) -> None:
    assert code(0.5, **causes) == expected


def test_every_cause_has_a_group_and_every_group_a_code() -> None:
    assert set(GROUPS) <= set(CAUSES)
    assert set(GROUPS.values()) <= set(CODES)
    assert set(RULES) >= COMPARING


def test_below_a_tenth_idle_time_decides_nothing() -> None:
    assert code(0.91, loader=0.09) == "gpu_bound"
    assert code(0.89, loader=0.11) == "input_bound"
    assert code(0.89, queued=0.11) == "gpu_bound"


def test_exposed_communication_decides_from_a_fifth_on_if_it_is_more_than_idle_time() -> None:
    assert code(0.95, exposed=0.19) == "gpu_bound"
    assert code(0.95, exposed=0.21) == "communication_bound"
    assert code(0.70, exposed=0.29, loader=0.3) == "input_bound"
    assert code(0.70, exposed=0.31, loader=0.3) == "communication_bound"


def test_a_late_rank_comes_before_communication_but_not_before_larger_causes() -> None:
    assert code(0.95, exposed=0.6, late=0.1) == "waits_for_rank"
    assert code(0.60, exposed=0.1, late=0.2, loader=0.4) == "input_bound"
    assert code(0.60, exposed=0.1, late=0.4, loader=0.3, python=0.1) == "waits_for_rank"
    told = verdict(Measured(True, 0.6, 0.1, {"loader": 0.4}, "", (Late(3, 0.2, 0.2),)), SOUND)
    assert told.text.endswith("; the other ranks wait for rank 3 (20.0 % of a step)")


def test_two_late_ranks_are_both_named() -> None:
    late = (Late(3, 0.2, 0.2), Late(1, 0.15, 0.15))
    told = verdict(Measured(True, 0.95, 0.5, {}, "", late), SOUND)
    assert told.text == "the other ranks wait for ranks 3 (20.0 % of a step), 1 (15.0 % of a step)"


def test_communication_that_is_mostly_waiting_is_no_time_of_transfers() -> None:
    def told(waits: float, busy: float, exposed: float, **causes: float) -> tuple[str, str]:
        pace = Pace(2, 0, waits, Measured(True, busy, exposed, causes))
        found = verdict(Measured(True, 0.9, 0.6, {"loader": 0.1}, pace=pace), SOUND)
        return found.code, found.text

    assert told(0.4, 0.3, 0.0, loader=0.7)[0] == "communication_bound"
    assert told(0.4, 0.3, 0.0, loader=0.7)[1].endswith("computes nothing, 40.0 % of it waiting for other ranks")
    code, text = told(0.9, 0.3, 0.0, loader=0.7)
    assert code == "input_bound"
    assert text.endswith(
        "; for 60.0 % of a step the GPU communicates and computes nothing, 90.0 % of it waiting for other ranks"
    )
    assert text.startswith("input-bound: on rank 2 GPU 0, which waits least, the GPU is idle for 70.0 % of a step")
    assert told(0.9, 0.95, 0.1)[0] == "gpu_bound"
    assert told(0.9, 0.95, 0.5)[0] == "waits_for_rank"  # even that rank mostly waits: they wait in turn


@pytest.mark.parametrize("rule", RULES)
def test_figures_that_are_wrong_come_before_everything(rule: str) -> None:
    measured = Measured(True, 0.95, 0.5, {"loader": 0.05}, "", (Late(3, 0.3, 0.3),))
    expected = "waits_for_rank" if rule in COMPARING else "not_sound"
    assert verdict(measured, finding(rule)).code == expected


def test_without_causes_the_verdict_says_why_they_are_unknown() -> None:
    told = verdict(Measured(True, 0.5, 0.0, None, "the trace holds no host ranges"), SOUND)
    assert told.code == "unknown"
    assert told.text.endswith("why is unknown: the trace holds no host ranges")
    assert verdict(Measured(True, 0.95, 0.0, None, "x"), SOUND).code == "gpu_bound"


def test_the_sentence_names_the_largest_causes_of_its_group_and_what_it_is_of() -> None:
    causes = {"operator": 0.3, "launch": 0.1, "python": 0.1}
    text = verdict(Measured(True, 0.5, 0.0, causes), SOUND).text
    assert text.endswith("while the host launches its work (operator 30.0 %, launch 10.0 %)")
    whole = verdict(Measured(False, 0.5, 0.0, causes), SOUND).text
    assert "the GPU is idle for 50.0 % of the time from the first to the last GPU activity (no steps" in whole
