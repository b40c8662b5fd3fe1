"""Which devices are late in more than noise: bounds hold together, and the step since which one is late is found."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import examples
from thence.analysis.ranks.lateness import late_since
from thence.model.thresholds import LATE_RANK_SHARE

STEP = 1e9


def draws(devices: int, steps: int, noise: float, seed: int) -> np.ndarray:
    """What equal devices cause: in each step one is last, by the difference of the two latest arrivals."""
    arrivals = np.random.default_rng(seed).normal(0, noise * STEP, (devices, steps))
    caused = np.zeros((devices, steps))
    last = arrivals.argmax(axis=0)
    caused[last, np.arange(steps)] = arrivals.max(axis=0) - arrivals.min(axis=0)
    return caused


@pytest.mark.parametrize("devices", [2, 8])
def test_equal_devices_are_not_named(devices: int) -> None:
    tries = examples(400)
    named = 0
    for seed in range(tries):
        caused = draws(devices, (3, 8, 24)[seed % 3], (0.01, 0.05, 0.2)[seed // 3 % 3], seed)
        named += int(late_since(caused, STEP)["straggler"].any())
    # 1 % are allowed; so many more are seen in less than one of a thousand runs of such a rule.
    assert named <= 0.01 * tries + 3 * (0.01 * tries) ** 0.5


def test_a_device_that_costs_less_than_the_least_share_is_not_named() -> None:
    caused = np.zeros((4, 20))
    caused[1] = 0.9 * LATE_RANK_SHARE * STEP
    assert not late_since(caused, STEP)["straggler"].any()
    caused[1] = 1.1 * LATE_RANK_SHARE * STEP
    assert late_since(caused, STEP)["straggler"].to_list() == [False, True, False, False]


def test_the_bound_is_that_of_the_mean_of_what_it_causes_more_than_the_others() -> None:
    caused = np.zeros((2, 4))
    caused[0] = [100e6, 120e6, 80e6, 100e6]
    caused[1] = [0.0, 0.0, 40e6, 0.0]
    found = late_since(caused, STEP)
    sample = np.array([100e6, 120e6, 40e6, 100e6])
    error = sample.std(ddof=1) / 2
    # Two tests of each of two devices share the 5 %: the one-sided 1.25 % point of Student's t with 3 degrees.
    t = 4.1765
    assert found["low_ns"][0] == pytest.approx(sample.mean() - t * error, rel=1e-3)
    assert found["mean_ns"][0] == 100e6


def test_fewer_than_three_steps_say_nothing() -> None:
    found = late_since(np.full((3, 2), 5e8), STEP)
    assert not found["straggler"].any()
    assert found["low_ns"].null_count() == 3


@pytest.mark.parametrize("since", [0, 5, 14])
def test_since_when(since: int) -> None:
    caused = draws(8, 20, 0.002, 7)
    caused[3, since:] += 0.1 * STEP
    found = late_since(caused, STEP)
    assert found["straggler"].to_list() == [number == 3 for number in range(8)]
    assert found["since"][3] == since
    assert found["steps"][3] == 20 - since


def test_a_late_device_that_began_in_the_middle_of_a_long_run_is_found_though_its_mean_is_small() -> None:
    caused = draws(8, 100, 0.001, 3)
    caused[2, 90:] += 0.1 * STEP
    found = late_since(caused, STEP)
    assert caused[2].mean() < LATE_RANK_SHARE * STEP
    assert found.filter(found["straggler"])["since"].to_list() == [90]


def test_one_step_far_longer_than_all_others_hides_no_straggler() -> None:
    caused = draws(2, 12, 0.002, 5)
    caused[1] += 0.05 * STEP
    caused[1, 4] = 5 * STEP
    samples = caused[1] - caused[0]
    assert samples.mean() < 1.5 * samples.std(ddof=1)  # so that the mean alone says little
    assert late_since(caused, STEP)["straggler"].to_list() == [False, True]


def test_one_long_step_makes_no_straggler() -> None:
    caused = draws(2, 12, 0.002, 5)
    caused[1, 4] = 5 * STEP
    assert not late_since(caused, STEP)["straggler"].any()


def test_a_device_that_was_late_before_and_is_twice_as_late_now_is_late_since_then() -> None:
    caused = draws(2, 20, 0.001, 9)
    caused[1] += 0.04 * STEP
    caused[1, 8:] += 0.1 * STEP
    found = late_since(caused, STEP)
    assert found.filter("straggler").select("since", "steps").rows() == [(8, 12)]
