"""What thence offers to PyTorch programs, as ``import thence.torch``; PyTorch is imported when a function needs it."""

from thence.capture.torch.collectives import collective, label_collectives
from thence.capture.torch.events import event_ids

__all__ = ["collective", "event_ids", "label_collectives"]
