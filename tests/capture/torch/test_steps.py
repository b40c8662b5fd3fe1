"""Where steps begin without being told, by the calls that tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from thence.capture.boundaries.places import MODEL_CALL, Places
from thence.capture.torch.steps import Steps


class Parameters:
    """Something that holds parameters: an optimizer, or a model."""

    _modules = ("inner",)


def watched(fact: str = "name") -> tuple[Steps, list[str | None], Any]:
    """Steps, a fact of each place that was crossed into so far, and a thread."""
    places, crossed = Places(), []
    common: Any = SimpleNamespace(cross=lambda _thread, number: crossed.append(getattr(places[number], fact)))
    return Steps(common, places, lambda: None), crossed, SimpleNamespace()


CALL: Any = SimpleNamespace(f_locals={"args": (), "kwargs": {}})


def test_the_first_call_of_a_model_begins_the_first_step() -> None:
    steps, crossed, thread = watched()
    model, loss = Parameters(), Parameters()
    steps.differentiated(thread, model, CALL)
    assert crossed == ["step"]
    steps.differentiated(thread, loss, CALL)  # the same step: its loss may be a module with parts
    assert crossed == ["step"]
    steps.optimizer_stepped(thread, Parameters())
    assert crossed == ["step", "step"]
    for _ in range(5):  # accumulates: only the optimizer begins steps from now on
        steps.differentiated(thread, model, CALL)
    assert crossed == ["step", "step"]


def test_a_step_that_began_with_the_recording_lasts_until_the_optimizer_stepped() -> None:
    steps, crossed, thread = watched()
    steps.begin(thread)
    steps.differentiated(thread, Parameters(), CALL)
    assert crossed == ["step"]


def test_a_model_called_without_gradients_begins_a_step_at_each_call() -> None:
    steps, crossed, thread = watched()
    model = Parameters()
    for _ in range(3):
        steps.model_called(thread, model, CALL)
    assert crossed == [MODEL_CALL] * 3


def test_training_without_an_optimizer_has_a_step_for_each_call_of_the_model() -> None:
    """Before it, a validation without gradients; the loss is a module with parts."""
    steps, crossed, thread = watched()
    model, loss = Parameters(), Parameters()
    for _ in range(4):
        steps.differentiated(thread, model, CALL)
        steps.differentiated(thread, loss, CALL)
    assert crossed == ["step", *[MODEL_CALL] * 3]


def test_of_models_called_in_turns_one_begins_steps() -> None:
    """A step of both, not one of each: these would be of two kinds, whose median says nothing."""
    steps, crossed, thread = watched()
    teacher, student = Parameters(), Parameters()
    for _ in range(5):
        steps.model_called(thread, teacher, CALL)
        steps.model_called(thread, student, CALL)
    assert crossed == [MODEL_CALL] * 5


def test_training_on_token_ids_is_no_prefill() -> None:
    steps, details, thread = watched("detail")
    ids = SimpleNamespace(dtype="torch.int64", shape=(4, 128))
    frame: Any = SimpleNamespace(f_locals={"args": (), "kwargs": {"input_ids": ids}})
    model = Parameters()
    for _ in range(2):
        steps.differentiated(thread, model, frame)
    steps.model_called(thread, model, frame)
    assert details == [None, None, "prefill batch=4 tokens=128"]
