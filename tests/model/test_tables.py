"""Facts of a trace, as sentences use them."""

from __future__ import annotations

import pytest

from thence.model.tables import Meta


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (("a.json",), "a.json"),
        (("a", "b", "c"), "a, b, c"),
        (("a", "b", "c", "d"), "a, b and 2 more"),
        (tuple(f"rank{n}" for n in range(512)), "rank0, rank1 and 510 more"),
    ],
)
def test_a_sentence_names_few_inputs(inputs: tuple[str, ...], text: str) -> None:
    assert Meta(inputs=inputs).named == text
