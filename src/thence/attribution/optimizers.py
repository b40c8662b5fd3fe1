"""Names of ranges, files and scopes that show that work is the update of the parameters.

Used for launches (ranges and Python frames around them) and for HLO (source stacks and scopes).
"""

from __future__ import annotations

import re

OPTIMIZER_RANGES = r"^Optimizer\.(?:step|zero_grad)#"
"""Regular expression of the ranges that torch.optim opens, ``Optimizer.step#AdamW.step``."""

_FILES = re.compile(
    r"(?:^|/)(?:torch/optim/|torch/distributed/optim/|apex/optimizers/|apex/contrib/optimizers/|"
    r"bitsandbytes/optim/|deepspeed/ops/(?:adam|adagrad|lamb|lion)/|transformer_engine/pytorch/optimizers/|"
    r"megatron/core/optimizer/|optax/|flax/optim/|flax/training/train_state\.py|"
    r"jax/example_libraries/optimizers\.py|praxis/optimizers\.py|t5x/optimizers\.py|haiku/_src/optim)"
)
_SCOPES = re.compile(
    r"(?:optimizer|opt_update|apply_updates|apply_gradients|update_params|"
    r"adam|adamw|adafactor|adagrad|lamb|lion|muon|rmsprop|sgd|shampoo)(?:[_.](?:step|update|apply))?",
    re.IGNORECASE,
)


def is_optimizer_file(file: str) -> bool:
    """Whether a source file belongs to a library's optimizers."""
    return bool(_FILES.search(file.replace("\\", "/")))


def is_optimizer_scope(scope: str) -> bool:
    """Whether a scope or function has the name of an optimizer, such as ``adamw`` or ``apply_gradients``."""
    return bool(_SCOPES.fullmatch(scope))
