"""A callback for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

from thence.errors import MissingRequirement
from thence.integrations.training import RecordsTraining

try:
    from transformers import TrainerCallback
except ImportError as problem:
    raise MissingRequirement(f"transformers is not installed ({problem}); pip install transformers") from problem


class ThenceCallback(RecordsTraining, TrainerCallback):  # type: ignore[misc]
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

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **_more: Any) -> None:
        """Begins to record."""
        self.training.begin()

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_more: Any) -> None:
        """A step of the optimizer has ended."""
        self.training.step()

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_more: Any) -> None:
        """Ends the recording, and prints the summary."""
        self.logged = self.training.end()
