"""What to record, and in which steps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from thence.cuda import layouts
from thence.errors import UsageError

__all__ = ["RecordOptions", "Schedule"]

_LAUNCHES = re.compile(
    r"cu(da)?(Launch(?!HostFunc)|GraphLaunch|Memcpy|Memset|Stream(Begin|End)Capture)"
)
_OUTER_LAUNCHES = re.compile(r"cudaLaunch(Cooperative)?Kernel")
"""Functions of the runtime that launch a kernel by calling one of the driver's (CUDA runtime API, "Interactions with
the CUDA Driver API"), for which CUPTI calls back too. Without a callback for the runtime's, the driver's call has the
number that the kernel has, and there are two callbacks a launch, not four."""
_GRAPHS = re.compile(r"cu(da)?(GraphAdd\w*Node|GraphInstantiate|GraphConditionalHandleCreate)")
"""Calls that build a CUDA graph: about one for each of its nodes, and one at its end."""
_FEW = re.compile(
    r"cu(da)?(\w*Synchronize|StreamWaitEvent|EventRecord|Stream(Begin|End)Capture|Malloc|Free|HostAlloc|Mem(Alloc|Free))"
)
"""Calls that wait, record events, end captures, or allocate: of which there are few."""
_WAITS = re.compile(r"Synchronize|StreamWaitEvent")


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What a recording holds, beside kernels, copies and sets, which are always in it.

    Attributes:
        launches: the API calls that launch work, those that begin and end a capture, in which nothing is
            launched, and those that build CUDA graphs, so that XLA's graphs can be told apart. Without them a
            kernel finds its thread and place by CUPTI's number of its launch, which costs far less, but not
            where several threads launch at the same time. None: where they are needed, that is in programs
            that use JAX, and where that number cannot be read.
        nvtx: NVTX ranges of the program and of its libraries.
        collectives: what each collective of torch.distributed moves, and in which process group; see
            `thence.torch.label_collectives`, which need not be called then.
        modules: modules of PyTorch, phases and steps of training, without any annotation (Python 3.12 and newer).
        lines: lines of the user's own code that launch work, with their callers (Python 3.12 and newer). They are
            read of the stack at each launch where the compiled probe can do that, and else followed by events.
        own: packages, folders or files whose code counts as the user's own, too; after a ``!`` what does not.
        synchronization: the API calls that wait for the device.
        overhead: time that CUPTI itself took.
        flush_seconds: how often records go to disk, at least: what a killed program may lose.
        buffer_megabytes: memory for records that are not yet on disk; beyond it they are dropped,
            and counted.
    """

    launches: bool | None = None
    nvtx: bool = True
    collectives: bool = True
    modules: bool = True
    lines: bool = True
    own: tuple[str, ...] = ()
    synchronization: bool = False
    overhead: bool = False
    flush_seconds: float = 2.0
    buffer_megabytes: int = 160

    def wants_call(self, function: str) -> bool:
        """Whether calls of an API function, named as in CUDA's headers, are recorded; None counts as False."""
        return bool(
            (self.launches and (_LAUNCHES.match(function) or _GRAPHS.match(function)))
            or (self.synchronization and _WAITS.search(function))
        )

    def calls_back(self, function: str, *, launches: bool) -> bool:
        """Whether calls of an API function are noted by callbacks, where no kind of API call is recorded.

        Args:
            function: its name, as in CUDA's headers.
            launches: whether what launches work counts.
        """
        if _OUTER_LAUNCHES.match(function):
            return False
        few = _FEW.match(function) or _GRAPHS.match(function)
        return bool(few or (launches and _LAUNCHES.match(function)))

    @property
    def notes_launches(self) -> bool:
        """Whether callbacks note each launch: what reads stacks needs that, and kinds of API calls replace it.

        Without it a kernel's launch has the time at which CUPTI queued it, which takes a tenth of the time of a
        callback.
        """
        return (self.modules or self.lines) and not self.records_calls

    @property
    def records_calls(self) -> bool:
        """Whether API calls are recorded by their kinds."""
        return bool(self.launches or self.synchronization)

    def kinds(self) -> tuple[int, ...]:
        """The CUpti_ActivityKinds to enable; launches not said count as not wanted."""
        wanted = [layouts.KERNEL, layouts.MEMCPY, layouts.MEMCPY2, layouts.MEMSET]
        wanted += [layouts.RUNTIME, layouts.DRIVER] if self.records_calls else []
        wanted += [layouts.MARKER] if self.nvtx else []
        wanted += [layouts.OVERHEAD] if self.overhead else []
        return tuple(wanted)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps of a program are recorded: `skip` not, then `wait` not and `active` recorded, ...

    Attributes:
        skip: steps at the beginning that are not recorded.
        wait: steps of each cycle that are not recorded.
        active: steps of each cycle that are.
        repeat: cycles; 0 means to the end of the program.
    """

    skip: int = 0
    wait: int = 0
    active: int = 1
    repeat: int = 0

    def __post_init__(self) -> None:
        if min(self.skip, self.wait, self.repeat) < 0 or self.active < 1:
            raise UsageError(
                "a schedule counts steps: skip, wait and repeat are 0 or more, active is 1 or more; "
                f"got {self}"
            )

    def records(self, step: int) -> bool:
        """Whether step number `step`, counted from 0, is recorded."""
        cycle, within = divmod(step - self.skip, self.wait + self.active)
        if step < self.skip or (self.repeat and cycle >= self.repeat):
            return False
        return within >= self.wait

    def over(self, step: int) -> bool:
        """Whether nothing is recorded from this step on."""
        return bool(self.repeat) and step >= self.skip + self.repeat * (self.wait + self.active)
