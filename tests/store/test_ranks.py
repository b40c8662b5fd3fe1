"""Which rank a part is shown as."""

from __future__ import annotations

from stores import settings
from thence.store.ingest import StoredPart, numbered
from thence.store.layout import Fingerprint, Part


def found(source: str, *ranks: int, stated: bool = True, window: tuple[int, int] | None = (0, 100)) -> StoredPart:
    part = Part(
        source=source, fingerprint=Fingerprint(1, "1"), settings=settings(), ranks=ranks, stated=stated,
        window=window, rows={"gpu": 1}, memory_bytes=1,
    )  # fmt: skip
    return StoredPart(f"rank-{ranks[0]:05}-{source}", part)


def shown(*parts: StoredPart, add: bool = False) -> dict[str, tuple[int, ...]]:
    return {entry.source: entry.ranks for entry in numbered(parts, add=add).entries}


def test_ranks_that_are_stated_stay() -> None:
    assert shown(found("b", 3), found("a", 1), found("c", 0, 2)) == {"c": (0, 2), "a": (1,), "b": (3,)}


def test_what_does_not_say_its_rank_gets_the_next_number() -> None:
    parts = [found(name, 0, stated=False) for name in "cab"]
    assert shown(*parts) == {"c": (0,), "a": (1,), "b": (2,)}  # as files: in the order of the inputs
    result = numbered(parts)
    assert [entry.renumbered for entry in result.entries] == [{}, {0: 1}, {0: 2}]
    assert sum("does not state a rank that is free" in text for text in result.warnings) == 2


def test_what_was_recorded_at_another_time_is_no_rank_of_this_job() -> None:
    result = numbered([found("now", 0), found("then", 0, stated=False, window=(500, 600))])
    assert [entry.source for entry in result.entries] == ["now"]
    assert [(one.source, one.why) for one in result.left] == [("then", "other_time")]


def test_of_one_rank_the_newest_counts_in_any_order() -> None:
    old, new = found("old", 1), found("new", 1, window=(500, 600))
    for parts in ([old, new], [new, old]):
        result = numbered(parts)
        assert [entry.source for entry in result.entries] == ["new"]
        assert [(one.source, one.why) for one in result.left] == [("old", "duplicate")]
    assert shown(old, new, add=True) == {"old": (1,), "new": (2,)}


def test_gaps_are_told() -> None:
    assert numbered([found("a", 0), found("b", 1)]).warnings == ()
    assert numbered([found("a", 2), found("b", 5)]).warnings == ("of the ranks 0 to 5, 4 are missing: 0, 1, 3, 4",)


def test_the_last_rank_that_there_can_be_takes_no_time() -> None:
    last = (1 << 31) - 1
    (warning,) = numbered([found("a", last)]).warnings
    assert warning.startswith("of the ranks 0 to 2,147,483,647, 2,147,483,647 are missing: 0, 1, 2, ")
    assert shown(found("a", last), found("b", last), add=True) == {"a": (last,), "b": (0,)}
