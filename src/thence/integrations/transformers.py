"""A callback for the Trainer of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thence.errors import MissingRequirement
from thence.integrations.training import Training

try:
    from transformers import TrainerCallback
except ImportError as problem:
    raise MissingRequirement(f"transformers is not installed ({problem}); pip install transformers") from problem

if TYPE_CHECKING:
    import os

    from thence.capture.recorder.options import RecordOptions, Schedule
    from thence.integrations.logged import Logged


class ThenceCallback(TrainerCallback):  # type: ignore[misc]
    """Records the training of a Trainer.

        trainer = Trainer(..., callbacks=[ThenceCallback("run")])

    A step is one of the optimizer, with all batches that it accumulates. Without a GPU one sentence says so, and the
    training goes on.

    Args:
        directory: where to; created if it does not exist.
        options: what to record; None: the defaults.
        schedule: which steps to record; None: all, but windows that show what recording costs.

    Attributes:
        training: the recording.
        logged: what was recorded, on rank 0 after the training; None before, and if nothing was.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        options: RecordOptions | None = None,
        *,
        schedule: Schedule | None = None,
    ) -> None:
        self.training = Training(directory, options, schedule=schedule)
        self.logged: Logged | None = None

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **_more: Any) -> None:
        """Begins to record."""
        self.training.begin()

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_more: Any) -> None:
        """A step of the optimizer has ended."""
        self.training.step()

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_more: Any) -> None:
        """Ends the recording, and prints the summary."""
        self.logged = self.training.end()
