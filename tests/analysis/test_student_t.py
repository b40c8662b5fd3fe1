"""Student's t distribution against printed tables, an integral, and the two cases that have a formula."""

from __future__ import annotations

import math

import numpy as np
import pytest

from thence.analysis.student_t import beta_share, highest_share, quantile, two_sided

# Two-sided 5 %, 1 % and 0.1 % points of t, as tables print them.
PRINTED = {
    1: (12.706, 63.657, 636.619),
    4: (2.776, 4.604, 8.610),
    8: (2.306, 3.355, 5.041),
    30: (2.042, 2.750, 3.646),
    120: (1.980, 2.617, 3.373),
}


@pytest.mark.parametrize("df", PRINTED)
def test_quantiles_are_those_of_printed_tables(df: int) -> None:
    for probability, expected in zip((0.05, 0.01, 0.001), PRINTED[df], strict=True):
        found = quantile(probability, np.array([float(df)]))[0]
        assert found == pytest.approx(expected, rel=3e-4)


def test_quantiles_between_and_beyond_the_computed_degrees_give_their_probability() -> None:
    df = np.array([1.7, 2.5, 7.3, 55.5, 1e4])
    for probability in (0.4, 0.05, 1e-3, 1e-6):
        back = two_sided(quantile(probability, df), df)
        assert back == pytest.approx(np.full(5, probability), rel=5e-3)


def test_one_and_two_degrees_of_freedom_have_formulas() -> None:
    t = np.array([0.0, 0.3, 1.0, 4.0, 1e3])
    cauchy = 1 - 2 / np.pi * np.arctan(t)
    assert two_sided(t, np.full(5, 1.0)) == pytest.approx(cauchy, rel=1e-9, abs=1e-12)
    assert two_sided(t, np.full(5, 2.0)) == pytest.approx(1 - t / np.sqrt(2 + t**2), rel=1e-9, abs=1e-9)


def test_the_tail_is_the_integral_of_the_density() -> None:
    df, t = 5.5, 2.2
    scale = math.gamma((df + 1) / 2) / math.gamma(df / 2) / math.sqrt(df * math.pi)
    x = np.linspace(-t, t, 200_001)
    inside = np.trapezoid(scale * (1 + x**2 / df) ** (-(df + 1) / 2), x)
    assert two_sided(np.array([t]), np.array([df]))[0] == pytest.approx(1 - inside, rel=1e-8)


def test_an_infinite_t_has_no_probability() -> None:
    assert two_sided(np.array([np.inf, -np.inf]), np.array([3.0, 3.0])).tolist() == [0.0, 0.0]


def test_the_beta_function_of_whole_numbers_is_a_binomial_tail() -> None:
    x, hits, of = 0.3, 3, 9
    tail = sum(math.comb(of, k) * x**k * (1 - x) ** (of - k) for k in range(hits, of + 1))
    found = beta_share(np.array([x]), np.array([float(hits)]), np.array([of - hits + 1.0]))
    assert found[0] == pytest.approx(tail, rel=1e-10)


def test_the_upper_bound_leaves_five_per_cent() -> None:
    bound = highest_share(50, 1000)
    at_most = sum(math.comb(1000, k) * bound**k * (1 - bound) ** (1000 - k) for k in range(51))
    assert at_most == pytest.approx(0.05, rel=1e-6)
    assert highest_share(0, 100) == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-9)
    assert highest_share(7, 7) == 1.0
