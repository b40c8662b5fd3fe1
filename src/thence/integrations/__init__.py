"""Recordings where people train, and answers where they look: ``import thence.integrations``.

    thence.integrations.transformers.ThenceCallback    a callback for transformers' Trainer
    thence.integrations.lightning.Thence               a callback for Lightning's Trainer
    thence.integrations.Training                       for any other loop, such as one with Accelerate
    thence.integrations.log(run)                       figures and a page for W&B, MLflow and TensorBoard

The libraries are imported when they are used: those of the callbacks by their modules. Experimental: names may change
in any version.
"""

from thence.integrations.logged import SCALARS, Logged, log
from thence.integrations.training import Training

__all__ = ["SCALARS", "Logged", "Training", "log"]
