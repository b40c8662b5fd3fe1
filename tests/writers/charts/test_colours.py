"""Colours of series can be told from the page and from each other, also by people who are colour-blind."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from thence.writers.charts.description import COLOURS, NEUTRAL

LIGHT, DARK = "#ffffff", "#14171b"
# Machado, Oliveira and Fernandes (2009), severity 1: what is seen, in linear sRGB.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
LMS = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
LAB = [
    [0.2104542553, 0.793617785, -0.0040720468],
    [1.9779984951, -2.428592205, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.808675766],
]


def linear(colour: str) -> np.ndarray:
    """Linear sRGB."""
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """By WCAG 2."""
    luminance = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) + 0.05 for colour in (one, other))
    return luminance[1] / luminance[0]


def oklab(colour: str, sight: str) -> np.ndarray:
    seen = np.clip(np.array(SIGHT[sight]) @ linear(colour), 0, 1)
    return np.array(LAB) @ np.cbrt(np.array(LMS) @ seen)


@pytest.mark.parametrize("ground", [LIGHT, DARK])
def test_every_colour_is_seen_on_both_pages(ground: str) -> None:
    assert {colour: c for colour in (*COLOURS, NEUTRAL) if (c := contrast(colour, ground)) < 3} == {}


@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_colours_differ(sight: str) -> None:
    seen = [oklab(colour, sight) for colour in COLOURS]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 0.08
