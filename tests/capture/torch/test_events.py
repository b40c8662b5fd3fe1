"""Exact ids of events: what is asked of CUPTI, and what is said where there is none."""

from __future__ import annotations

import pytest

from thence.capture.torch import events as torch_events
from thence.errors import MissingRequirement


class Cupti:
    """Notes the kinds that are enabled."""

    def __init__(self, code: int) -> None:
        self.code, self.calls = code, list[tuple[str, int]]()

    def cuptiActivityEnable(self, kind: int) -> int:  # noqa: N802 - CUPTI's name
        self.calls.append(("enable", kind))
        return self.code

    def cuptiActivityDisable(self, kind: int) -> int:  # noqa: N802 - CUPTI's name
        self.calls.append(("disable", kind))
        return 0


def loaded(monkeypatch: pytest.MonkeyPatch, cupti: Cupti) -> None:
    monkeypatch.setattr(torch_events, "mapped_copies", lambda: ["libcupti.so.13"])
    monkeypatch.setattr(torch_events.ctypes, "CDLL", lambda _path: cupti)


def test_the_kind_is_enabled_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    cupti = Cupti(0)
    loaded(monkeypatch, cupti)
    with torch_events.event_ids():
        assert cupti.calls == [("enable", 36)]
    assert cupti.calls == [("enable", 36), ("disable", 36)]


def test_a_refusal_and_a_missing_profile_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, Cupti(15))
    with pytest.raises(MissingRequirement, match="error 15"), torch_events.event_ids():
        pass
    monkeypatch.setattr(torch_events, "mapped_copies", list)
    with pytest.raises(MissingRequirement, match="no profile is running"), torch_events.event_ids():
        pass
