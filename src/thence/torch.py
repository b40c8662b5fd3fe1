"""What thence offers to PyTorch programs, as ``import thence.torch``; PyTorch is imported when a function needs it."""

from thence.capture.torch.collectives import collective, label_collectives
from thence.capture.torch.events import event_ids
from thence.capture.torch.triton_work import triton_work

__all__ = ["collective", "event_ids", "label_collectives", "triton_work"]
