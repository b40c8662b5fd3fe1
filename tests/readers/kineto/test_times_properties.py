"""Microseconds as text become nanoseconds exactly."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.readers.kineto.times import NO_TIME_NS, nanoseconds

settings.register_profile("thence", deadline=None, max_examples=examples(150))
settings.load_profile("thence")

LARGEST = 2**63 // 1000  # microseconds: 292 years


def exact(text: str) -> int:
    return int((Decimal(text) * 1000).to_integral_value(ROUND_HALF_EVEN))


three_decimals = st.integers(0, LARGEST * 1000 - 1).map(lambda ns: f"{ns // 1000}.{ns % 1000:03}")
whole = st.integers(-LARGEST + 1, LARGEST - 1).map(str)
any_decimals = st.decimals(-LARGEST + 1, LARGEST - 1, allow_nan=False, allow_infinity=False).map(str)
shortest = st.floats(-1e15, 1e15, allow_nan=False).map(repr)


@given(st.lists(three_decimals))
def test_as_kineto_writes_them(texts: list[str]) -> None:
    assert nanoseconds([t.encode() for t in texts]).tolist() == [exact(t) for t in texts]


@given(st.lists(whole))
def test_whole_microseconds(texts: list[str]) -> None:
    assert nanoseconds([t.encode() for t in texts]).tolist() == [exact(t) for t in texts]


@given(st.lists(st.one_of(three_decimals, whole, any_decimals, shortest)))
def test_every_notation_side_by_side(texts: list[str]) -> None:
    assert nanoseconds([t.encode() for t in texts]).tolist() == [exact(t) for t in texts]


@given(
    st.lists(
        st.one_of(
            three_decimals,
            st.sampled_from(
                ["", "null", "NaN", "-inf", "[\n1\n]", '"x"', "[]", "1e99", "9223372036854775.808", "-9300000000000000"]
            ),
        )
    )
)
def test_what_is_no_time_stands_alone(texts: list[str]) -> None:
    known = {t for t in texts if t[:1].isdigit() and t not in ("1e99", "9223372036854775.808")}
    # 2**63 ns is one too many.
    expected = [exact(t) if t in known else NO_TIME_NS for t in texts]
    assert nanoseconds([t.encode() for t in texts]).tolist() == expected
