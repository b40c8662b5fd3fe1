"""Sentences that say the same of several inputs become one, which names three of them at most."""

from __future__ import annotations

import pytest

from thence.writers.text.merged_sentences import merged


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["a.json: cut", "b.json: cut"], ["a.json, b.json: cut"]),
        (["a.json: cut", "b.json: 3 lost", "c.json: cut"], ["a.json, c.json: cut", "b.json: 3 lost"]),
        ([f"{i}.json: cut" for i in range(512)], ["0.json, 1.json and 510 more: cut"]),
        (["a.json: cut", "a.json: cut"], ["a.json: cut"]),
        (["one clock", "one clock"], ["one clock"]),
        (["s3://a: cut", "s3://b: cut: why"], ["s3://a: cut", "s3://b: cut: why"]),
        ([f"{i}.json: holds rank {i}, as new/{i}.json" for i in range(3)],) * 2,
        (
            [f"{i}.json: holds rank {i}, as new/{i}.json" for i in range(300)],
            ["0.json: holds rank 0, as new/0.json; likewise 1.json, 2.json and 297 more"],
        ),
        ([f"in {i} of 9 steps" for i in range(5)],) * 2,
        ([], []),
    ],
)  # fmt: skip
def test_equal_sentences_become_one(texts: list[str], shown: list[str]) -> None:
    assert merged(texts) == shown
