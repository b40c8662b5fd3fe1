"""Makes torch.profiler write, for each wait for a CUDA event, which call recorded the event.

With ``enable_cuda_sync_events`` PyTorch's profiler writes which stream waited for which event. Since CUDA 12.9, CUPTI
fills in the call that recorded the event only while its activity kind for CUDA events is enabled, too. The profiler
does not enable it, so the ids are -1. Kinds and signature: cupti_activity.h.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING

from thence.capture.cuda.libraries import mapped_copies
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Iterator

_CUDA_EVENT = 36
"""CUPTI_ACTIVITY_KIND_CUDA_EVENT"""


@contextmanager
def event_ids() -> Iterator[None]:
    """Provides exact ids of events in the running profile; enter it inside of ``torch.profiler.profile``.

    Example::

        settings = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
        with profile(activities=[...], experimental_config=settings) as p, thence.torch.event_ids():
            train()

    It adds about 2 us on the host to each pair of a record and a wait.

    Raises:
        MissingRequirement: this process has not loaded libcupti, which torch.profiler does when it begins, or
            CUPTI refuses.
    """
    copies = mapped_copies()
    if not copies:
        raise MissingRequirement(
            "no profile is running: enter thence.torch.event_ids() inside of torch.profiler.profile"
        )
    cupti = ctypes.CDLL(copies[0])
    code = cupti.cuptiActivityEnable(_CUDA_EVENT)
    if code:
        raise MissingRequirement(f"CUPTI refuses to record CUDA events (error {code})")
    try:
        yield
    finally:
        cupti.cuptiActivityDisable(_CUDA_EVENT)
