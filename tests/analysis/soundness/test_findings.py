"""The result of the check: order, statement, and its page."""

from __future__ import annotations

from pathlib import Path

import thence
from thence.analysis.soundness.findings import MISSING_WORK, RULES, Finding, NotChecked, Soundness

PAGE = Path(thence.__file__).parents[2] / "docs" / "soundness.md"
LOST = Finding("launch_without_work", 1, 0, 3, 50, 0.25, "three launches have no work")
EARLY = Finding("work_before_launch", 0, 0, 2, 10, 0.5, "two kernels started early")


def test_the_page_names_every_rule_with_its_meaning() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for code, meaning in RULES.items():
        assert f"| `{code}` | {meaning}" in text, code


def test_a_sound_trace_states_nothing() -> None:
    sound = Soundness(not_checked=(NotChecked("outlier", "a reason"),))
    assert sound.sound
    assert sound.lines == ()
    assert sound.to_json() == {
        "sound": True,
        "rules": {code: "not checked" if code == "outlier" else "sound" for code in RULES},
        "findings": [],
        "notes": [],
        "not_checked": [{"code": "outlier", "text": "a reason"}],
    }


def test_idle_is_a_bound_where_work_is_missing_only() -> None:
    assert Soundness((LOST,)).work_missing
    assert not Soundness((EARLY,)).work_missing
    assert set(RULES) >= MISSING_WORK


def test_the_statement_is_one_line_about_the_first_finding() -> None:
    (line,) = Soundness((EARLY, LOST)).lines
    assert line == (
        "this trace is not sound: two kernels started early (touches 50.0 % of the span); 1 more finding;"
        " see thence check. Idle time is at most what is shown."
    )


def test_reasons_are_said_once_for_all_rules() -> None:
    same = [NotChecked(code, "no launches") for code in ("launch_without_work", "broken_order")]
    other = NotChecked("outlier", "no kernels")
    assert Soundness(not_checked=(*same, other)).not_checked_reasons() == {
        "no launches": ["launch_without_work", "broken_order"],
        "no kernels": ["outlier"],
    }


def test_the_frame_has_a_row_for_each_entry() -> None:
    rows = Soundness((LOST,), (EARLY,), (NotChecked("outlier", "x"),)).to_frame().to_dicts()
    assert [row["verdict"] for row in rows] == ["unsound", "note", "not checked"]
    assert rows[0]["span_share"] == 0.25
    assert rows[2]["rank"] is None
