"""Sessions of CUPTI with chosen records, for the benchmarks of boundaries."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SCRATCH = Path(tempfile.mkdtemp(prefix="thence-boundaries-"))
"""Where the compiled collector and recordings lie; the scripts remove it."""
DEVICE_KINDS = (10, 1, 22, 2)
"""Kernels, copies, peer copies, sets."""
LAUNCHING = {2: ("cudaLaunchKernel", "cudaLaunchKernelExC"), 1: ("cuLaunchKernel", "cuLaunchKernelEx")}
"""Functions that launch kernels, by the number of CUPTI's callback domain: 2 is the runtime, 1 the driver."""


class Session:
    """CUPTI with kernels and a counter, its buffers thrown away or kept.

    Args:
        probe: ``c``, ``python`` or None for no counter.
        latency: whether kernels hold when they were queued.
        calls: whether launch calls are recorded, too.
        callbacks: whether every launch is called back for.
        keep: whether buffers are read; else a collector in C throws them away.
    """

    def __init__(
        self,
        probe: str | None = None,
        *,
        latency: bool = False,
        calls: bool = False,
        callbacks: bool = False,
        keep: bool = False,
    ) -> None:
        from thence.capture.cuda import cupti, layouts
        from thence.capture.recorder.buffers import Buffers
        from thence.capture.recorder.counting import Counting

        os.environ["THENCE_PROBE"] = probe or "c"
        self.cupti, self.log = cupti.load(), None
        self.counting = Counting() if probe or callbacks else None
        self.handle = None
        self.buffers = Buffers(1 << 30) if keep else None
        if self.counting is not None:
            self.handle = self.cupti.subscribe(self.counting.callback)
        if self.buffers is not None:
            self.cupti.register(self.buffers.requested, self.buffers.completed)
        else:
            assert collector().collect(self.cupti.path.encode()) == 0
        self.cupti.buffers_are_zeroed()
        self.cupti.system_thread_ids()
        if self.counting is not None and probe:
            self.counting.begin(self.cupti, self.handle)
            assert self.counting.log is not None, self.counting.facts()
            self.log = self.counting.log
        if callbacks:
            self._call_back_for_launches()
        if latency:
            self.cupti.latency_timestamps(on=True)
        self.kinds = (*DEVICE_KINDS, *(layouts.CALLS if calls else ()))
        for kind in self.kinds:
            self.cupti.enable(kind)
            if kind in layouts.CALLS:
                self._record_launches(layouts.CALLS[kind])

    def _call_back_for_launches(self) -> None:
        for domain, names in LAUNCHING.items():
            for name in names:
                number = self.cupti.callback_id(domain, name)
                if number is not None:
                    self.cupti.enable_callback(self.handle, domain, number, on=True)

    def _record_launches(self, domain: int) -> None:
        from thence.capture.cuda import cupti
        from thence.capture.recorder.options import RecordOptions

        options = RecordOptions(launches=True)
        for number in range(1, cupti.MOST_CALLBACK_IDS):
            name = self.cupti.callback_name(domain, number)
            if name is None:
                break
            if not options.wants_call(name):
                self.cupti.api(domain, number, on=False)

    def end(self) -> None:
        import torch

        torch.cuda.synchronize()
        self.cupti.flush(unfinished=True)
        for kind in self.kinds:
            self.cupti.disable(kind)
        if self.handle is not None:
            self.cupti.unsubscribe(self.handle)
        self.cupti.finalize()

    def records(self) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
        """Rows by table, of a session that kept its buffers and has ended."""
        from thence.capture.cuda import layouts
        from thence.capture.recorder.activity_parser import ActivityParser

        assert self.buffers is not None
        parser, parts = ActivityParser(self.cupti), {}
        while not self.buffers.filled.empty():
            filled = self.buffers.filled.get()
            for kind, columns in parser.read(filled.address, filled.valid_bytes):
                parts.setdefault(layouts.LAYOUTS[kind].table, []).append(columns)
        return {
            table: {name: np.concatenate([part[name] for part in pieces]) for name in pieces[0]}
            for table, pieces in parts.items()
        }


def collector() -> ctypes.CDLL:
    """The collector in C, compiled once."""
    library = SCRATCH / "cupti_collector.so"
    if not library.exists():
        source = str(Path(__file__).with_name("cupti_collector.c"))
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), source, "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))
