"""`check` applies all rules to the tables of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thence.analysis.soundness.evidence import Evidence
from thence.analysis.soundness.findings import MISSING_WORK, Soundness
from thence.analysis.soundness.launch_rules import (
    launch_without_work,
    listed_twice,
    partial_replay,
    work_without_launch,
)
from thence.analysis.soundness.recording_rules import (
    copied_ranks,
    damaged_input,
    empty_steps,
    lost_records,
    missing_ranks,
    no_device_work,
    profiler_overhead,
    windows_apart,
)
from thence.analysis.soundness.time_rules import broken_order, clocks, impossible_time, outlier

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.analysis.soundness.evidence import Judgement
    from thence.model.tables import Tables

_LATE = "started_late"
_RULES: tuple[Callable[[Evidence], Judgement], ...] = (
    launch_without_work,
    partial_replay,
    listed_twice,
    work_without_launch,
    no_device_work,
    empty_steps,
    windows_apart,
    outlier,
    impossible_time,
    broken_order,
    clocks,
    profiler_overhead,
    damaged_input,
    lost_records,
    missing_ranks,
    copied_ranks,
)


def check(tables: Tables) -> Soundness:
    """Checks whether a trace is sound, by the rules of `thence.analysis.soundness.findings.RULES`.

    Args:
        tables: the whole trace. In a part of a trace, launches could lack their device work.
    """
    evidence = Evidence(tables)
    judgements = [rule(evidence) for rule in _RULES]
    findings = [finding for judgement in judgements for finding in judgement.findings]
    # What is known to be missing explains why other work started late.
    known = {finding.rank for finding in findings if finding.code in MISSING_WORK - {_LATE}}
    findings = [
        finding for finding in findings if finding.code != _LATE or not (finding.rank in known or None in known)
    ]
    return Soundness(
        tuple(sorted(findings, key=lambda finding: -finding.span_share)),
        tuple(note for judgement in judgements for note in judgement.notes),
        tuple(dict.fromkeys(x for judgement in judgements for x in judgement.not_checked)),
    )
