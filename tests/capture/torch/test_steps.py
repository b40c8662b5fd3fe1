"""Where steps begin without being told, by the calls that tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from thence.capture.boundaries.places import STEP, Places
from thence.capture.torch.steps import Steps


class Parameters:
    """Something that holds parameters: an optimizer, or a model."""

    _modules = ("inner",)


def watched() -> tuple[Steps, list[int], Any]:
    """Steps, the numbers of the places that were crossed into so far, and a thread."""
    places, crossed = Places(), []
    common: Any = SimpleNamespace(cross=lambda _thread, number: crossed.append(places[number].kind))
    return Steps(common, places, lambda: None), crossed, SimpleNamespace()


def test_the_first_call_of_a_model_begins_the_first_step() -> None:
    steps, crossed, thread = watched()
    steps.differentiated(thread)
    assert crossed == [STEP]
    steps.differentiated(thread)  # the same step: its loss may be a module of its own
    assert crossed == [STEP]
    steps.optimizer_stepped(thread, Parameters())
    steps.differentiated(thread)
    assert crossed == [STEP, STEP]


def test_a_step_that_began_with_the_recording_lasts_until_the_optimizer_stepped() -> None:
    steps, crossed, thread = watched()
    steps.begin(thread)
    steps.differentiated(thread)
    assert crossed == [STEP]


def test_a_model_called_without_gradients_begins_a_step_at_each_call() -> None:
    steps, crossed, thread = watched()
    model, frame = Parameters(), SimpleNamespace(f_locals={"args": (), "kwargs": {}})
    for _ in range(3):
        steps.model_called(thread, model, frame)
    assert crossed == [STEP] * 3
