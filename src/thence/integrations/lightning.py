"""A callback for the Trainer of Lightning."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from thence.errors import MissingRequirement
from thence.integrations.training import RecordsTraining

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback() -> Any:
    """The class Callback of the Lightning that the program has imported, else of the one that is installed."""
    for package in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return import_module(package).Callback
        except ImportError as error:
            problem = error
    raise MissingRequirement(f"Lightning is not installed ({problem}); pip install lightning")


class Thence(RecordsTraining, _callback()):  # type: ignore[misc]
    """Records the training of a Trainer.

        trainer = Trainer(..., callbacks=[Thence("run")])

    A step is one of the optimizer, with all batches that it accumulates. Without a GPU one sentence says so, and the
    training goes on.

    Args:
        directory: where to; created if it does not exist.
        options: what to record; None: the defaults.
        schedule: which steps to record; None: all, but windows that show what recording costs.

    Attributes:
        training: the recording.
        logged: what was recorded, on rank 0 after the training; None before, and if nothing was. Its scalars went to
            all loggers of the Trainer.
    """

    _optimizer_steps = 0

    def on_train_start(self, trainer: Any, _module: Any) -> None:
        """Begins to record."""
        self._optimizer_steps = trainer.global_step
        self.training.begin()

    def on_train_batch_end(self, trainer: Any, _module: Any, *_more: Any) -> None:
        """A step has ended, if the optimizer made one."""
        if trainer.global_step != self._optimizer_steps:
            self._optimizer_steps = trainer.global_step
            self.training.step()

    def on_train_end(self, trainer: Any, _module: Any) -> None:
        """Ends the recording, prints the summary, and logs the scalars."""
        self.logged = logged = self.training.end()
        if logged is not None:
            for logger in trainer.loggers:
                logger.log_metrics(logged.scalars, step=trainer.global_step)

    def on_exception(self, _trainer: Any, _module: Any, _exception: BaseException) -> None:
        """Ends the recording: the training was interrupted."""
        self.training.end(summary=False)
