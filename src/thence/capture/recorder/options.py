"""What to record, and in which steps."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from thence.capture.cuda import layouts
from thence.errors import UsageError
from thence.model.counter_names import BY_NAME, DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LAUNCHES = re.compile(r"cu(da)?(Launch(?!HostFunc)|GraphLaunch|Memcpy|Memset|Stream(Begin|End)Capture)")
_OUTER_LAUNCHES = re.compile(r"cudaLaunch(Cooperative)?Kernel")
"""Functions of the runtime API that launch a kernel by calling a function of the driver API (CUDA runtime API,
"Interactions with the CUDA Driver API"), for which CUPTI makes callbacks too. If only the driver function has a
callback, its call has the kernel's number, and each launch makes two callbacks instead of four."""
_GRAPHS = re.compile(r"cu(da)?(GraphAdd\w*Node|GraphInstantiate|GraphConditionalHandleCreate)")
"""Calls that build a CUDA graph: about one for each of its nodes, and one at its end."""
_ALLOCATIONS = re.compile(r"cu(da)?(Malloc|Free|HostAlloc|Mem(Alloc|Free|Create))")
"""Calls that allocate or free memory."""
_RARE = re.compile(r"cu(da)?(\w*Synchronize|StreamWaitEvent|EventRecord|Stream(Begin|End)Capture)")
"""Calls that wait, record events, and begin or end captures. A program makes few of them."""
_WAITS = re.compile(r"cu(da)?(\w*Synchronize|StreamWaitEvent|EventRecord)")
"""Calls that wait for the device, and those of events, by which streams wait for each other."""
MAX_COUNTER_BYTES = 300_000_000
"""Memory that sampling counters may need on each device."""
HARDWARE_BYTES = 16_000
"""Size of one sample in the buffer of the hardware, rounded up: 10.4 KB with seven counters on an H200."""
IMAGE_BYTES = 3_600
"""Size of one counter of one decoded sample, rounded up."""
_LONGEST_WINDOW_SECONDS = 1.0
"""While a window lasts, records are not written, and a process that is ended by a signal waits."""
_SHORTEST_US, _LONGEST_US = 5.0, 10_000.0
"""Intervals between samples of counters. On an H200, samples of multiprocessors were lost below 5 us."""
_SHORTEST_LASTING_US = 100.0
"""Interval where the last seconds are kept. Samples are decoded while others are taken: at 20 us, most were lost."""
_PART_SAMPLES, _SHORTEST_PART_SECONDS = 2_000, 0.2  # of the last seconds: how much is decoded at a time
_ROOM_OF_PARTS = 2.0
"""The recorder's thread decodes that many samples at a time, and has as long again until the buffer is full."""
_ROOM, _MORE_SAMPLES = 1.25, 500
"""A window may be longer by so much: the thread that ends it waits for others, but at most some ms for the GIL."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which steps are recorded, and what stays on disk, in a recording that runs as long as the program.

    Attributes:
        every: steps from the beginning of a window that is recorded to that of the next one, at least.
        steps: steps of a window that count; one more before them is recorded.
        ring: windows that stay on disk, at least; older ones are deleted and counted, except those that were asked for.
        ring_megabytes: size of what stays on disk; if windows are larger, fewer stay. Windows that were asked for may
            have as much besides.
        budget: the share of the program's time that the recording may cost, by its own measurement: windows are
            further apart where they would cost more. 0: they are not. Only for processes that are alone, because all
            ranks of a job record the same steps.
        slow_steps: whether a step that is far longer than the ones before it is followed by a window, once a minute.
    """

    every: int = 50
    steps: int = 1
    ring: int = 20
    ring_megabytes: int = 256
    budget: float = 0.01
    slow_steps: bool = True

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            UsageError: they make no sense.
        """
        if min(self.steps, self.ring, self.ring_megabytes) < 1 or self.every < 2 * (self.steps + 1):
            raise UsageError(
                "steps, ring and ring_megabytes are 1 or more, and every is at least twice the steps of a window, "
                f"which are one more than steps; got {self}"
            )
        if not 0 <= self.budget < 1:
            raise UsageError(f"budget is a share of the program's time, from 0 to less than 1; got {self.budget}")


@dataclass(frozen=True, slots=True)
class Counters:
    """Which hardware counters are sampled, and when.

    A device is sampled in windows, beside everything else that is recorded; each is decoded after it, by the thread
    that writes.

    Attributes:
        interval_us: from one sample to the next, microseconds.
        window_seconds: how long a window is.
        every_seconds: from the beginning of a window to that of the next one. The first ones, from the first kernels
            on, are closer together, so that short programs have some.
        metrics: names of counters (`thence.model.counter_names`); empty: `DEFAULT`, those that most questions need.
        last_seconds: instead of windows, sample all the time and keep the last so many seconds: those before the
            recording ends, and before somebody asks (`Recording.request`). CUPTI stays attached then. 0: windows.
    """

    interval_us: float = 10.0
    window_seconds: float = 0.04
    every_seconds: float = 5.0
    metrics: tuple[str, ...] = ()
    last_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Checks the numbers, and that a window fits into memory.

        Raises:
            UsageError: they make no sense, there is no such counter, or a window would need more than 300 MB of memory.
        """
        unknown = [name for name in self.metrics if name not in BY_NAME or BY_NAME[name].metric is None]
        if unknown:
            known = ", ".join(name for name, counter in BY_NAME.items() if counter.metric)
            raise UsageError(f"there is no counter {unknown[0]!r} that can be sampled; there are {known}")
        if not (_SHORTEST_US <= self.interval_us <= _LONGEST_US):
            raise UsageError(
                f"counters are sampled each {_SHORTEST_US:g} us to {_LONGEST_US:g} us, not each {self.interval_us:g} us"
            )
        if self.last_seconds and self.interval_us < _SHORTEST_LASTING_US:
            raise UsageError(
                f"where the last seconds are kept, counters are sampled each {_SHORTEST_LASTING_US:g} us or less "
                f"often, not each {self.interval_us:g} us: give an interval"
            )
        longest = min(_LONGEST_WINDOW_SECONDS, self.every_seconds)
        if not self.last_seconds and not self.interval_us * 1e-4 <= self.window_seconds <= longest:
            raise UsageError(
                f"a window of counters has at least 100 samples, lasts at most {_LONGEST_WINDOW_SECONDS:g} s and ends "
                f"before the next one begins; got {self.window_seconds:g} s, with a sample each "
                f"{self.interval_us:g} us and a window each {self.every_seconds:g} s"
            )
        if self.bytes > MAX_COUNTER_BYTES:
            seconds = self.last_seconds or self.window_seconds
            fits = MAX_COUNTER_BYTES / self.bytes * seconds
            raise UsageError(
                f"{'the last' if self.last_seconds else 'a window of counters of'} {seconds:g} s would need "
                f"{self.bytes / 1e6:,.0f} MB of memory, more than the {MAX_COUNTER_BYTES / 1e6:.0f} MB that there are "
                f"for it: make it {fits:.2g} s, sample less often, or ask for fewer counters"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the counters that are asked for."""
        return self.metrics or DEFAULT

    @property
    def samples(self) -> int:
        """The most samples at a time: more than there should be, because a window, or a part of it, may end late."""
        seconds, room = (self.part_seconds, _ROOM_OF_PARTS) if self.last_seconds else (self.window_seconds, _ROOM)
        return int(seconds * 1e6 / self.interval_us * room) + _MORE_SAMPLES

    @property
    def part_seconds(self) -> float:
        """How often samples are decoded, where the last seconds are kept."""
        return min(max(self.interval_us * 1e-6 * _PART_SAMPLES, _SHORTEST_PART_SECONDS), _LONGEST_WINDOW_SECONDS)

    @property
    def bytes(self) -> int:
        """About how much memory a device needs: the buffer of the hardware, the decoded samples, and those kept."""
        kept = int((self.last_seconds + self.part_seconds) * 1e6 / self.interval_us) if self.last_seconds else 0
        return self.samples * (HARDWARE_BYTES + IMAGE_BYTES * len(self.names)) + 8 * kept * (2 + len(self.names))


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What a recording holds in addition to kernels, copies and memsets, which it always holds.

    Attributes:
        launches: the API calls that launch work, those that begin and end a capture, in which nothing is
            launched, those that build CUDA graphs, so that XLA's graphs can be distinguished, and those that wait
            for the device or for events. Without them, the thread and place of a kernel are found by CUPTI's number
            of its launch, and callbacks note the calls that wait. That costs far less, but fails where several
            threads launch at the same time. None: they are recorded where they are needed, which is in programs that
            use JAX, and where that number cannot be read.
        nvtx: NVTX ranges of the program and of its libraries.
        collectives: what each collective of torch.distributed moves, and in which process group; see
            `thence.torch.label_collectives`, which need not be called then.
        modules: modules of PyTorch, phases and steps of training, without any annotation (Python 3.12 and newer).
        lines: lines of the user's own code that launch work, with their callers (Python 3.12 and newer). The
            compiled probe reads them from the stack at each launch where it can, else they are followed by events.
        samples: what threads that launch do while they launch nothing, sampled each millisecond (Python 3.12 and newer,
            with the compiled probe, and where modules or lines are recorded): the function, and whether it runs Python
            or C, waits or sleeps.
        own: packages, folders or files whose code counts as the user's own, too; a name after ``!`` does not count.
        baseline: leaves some windows of steps unrecorded, at most a tenth of the steps, so that the recording holds how
            long steps take without it (`thence.capture.session.step_times`); not with a schedule.
        sampling: records only windows of few steps, far apart, and keeps the latest; not with a schedule.
        overhead: time that CUPTI itself took.
        memory: every allocation of PyTorch's memory allocator, without stacks (`thence.capture.torch.memory_history`),
            and those of CUDA itself, as libraries make them.
        counters: hardware counters of the devices, sampled in windows; None: none.
        stalls: where in kernels warps wait, and for what: samples of program counters, all the time. CUPTI then stays
            attached, so that no steps are left out, and neither counters nor windows of steps can be recorded.
        flush_seconds: time between writes to disk, which is what a killed program may lose; in long runs, a
            500th of the time so far if that is more.
        buffer_megabytes: memory for records that are not yet on disk; records beyond it are dropped
            and counted.
    """

    launches: bool | None = None
    nvtx: bool = True
    collectives: bool = True
    modules: bool = True
    lines: bool = True
    samples: bool = True
    own: tuple[str, ...] = ()
    baseline: bool = True
    sampling: Sampling | None = None
    overhead: bool = False
    memory: bool = False
    counters: Counters | None = None
    stalls: bool = False
    flush_seconds: float = 2.0
    buffer_megabytes: int = 160

    def __post_init__(self) -> None:
        """Checks that what is asked for can be recorded together.

        Raises:
            UsageError: it cannot.
        """
        if self.stalls and self.counters is not None:
            raise UsageError("stalls and counters cannot be sampled together: record the program once for each")
        if self.stays_attached and self.sampling is not None:
            raise UsageError(
                "stalls, and counters of the last seconds, are sampled all the time, so windows of steps (--always) "
                "cannot have them"
            )

    def wants_call(self, function: str) -> bool:
        """Whether calls of an API function, named as in CUDA's headers, are recorded; `launches` None means no."""
        patterns = (_LAUNCHES, _GRAPHS, _WAITS, *([_ALLOCATIONS] if self.memory else []))
        return bool(self.launches) and any(pattern.match(function) for pattern in patterns)

    def calls_back(self, function: str, *, launches: bool) -> bool:
        """Whether calls of an API function are noted by callbacks, if API calls are not recorded as activities.

        Args:
            function: its name, as in CUDA's headers.
            launches: whether to note functions that launch work.
        """
        if _OUTER_LAUNCHES.match(function):
            return False
        rare = any(pattern.match(function) for pattern in (_RARE, _ALLOCATIONS, _GRAPHS))
        return bool(rare or (launches and _LAUNCHES.match(function)))

    @property
    def notes_launches(self) -> bool:
        """Whether callbacks note each launch: reading stacks needs this, and recorded API calls replace it.

        Otherwise a kernel's launch has the time at which the host queued it, which costs a tenth of a callback.
        """
        return (self.modules or self.lines) and not self.records_calls

    @property
    def stays_attached(self) -> bool:
        """Whether something is sampled all the time, so that no steps are left out."""
        return self.stalls or self.keeps_last

    @property
    def keeps_last(self) -> bool:
        """Whether the last seconds of counters are kept, which somebody may ask for."""
        return self.counters is not None and self.counters.last_seconds > 0

    @property
    def records_calls(self) -> bool:
        """Whether API calls are recorded as activities, by CUPTI's kinds for them."""
        return bool(self.launches)

    def kinds(self) -> tuple[int, ...]:
        """The CUpti_ActivityKinds to enable; `launches` None means that launches are not wanted."""
        wanted = [layouts.KERNEL, layouts.MEMCPY, layouts.MEMCPY2, layouts.MEMSET]
        wanted += [layouts.RUNTIME, layouts.DRIVER] if self.records_calls else []
        wanted += [layouts.MARKER] if self.nvtx else []
        wanted += [layouts.OVERHEAD] if self.overhead else []
        wanted += [layouts.MEMORY2] if self.memory else []
        return tuple(wanted)


def options_of(document: Mapping[str, Any]) -> RecordOptions:
    """The options that JSON states, by the names of their attributes; those that it leaves out have their defaults.

    Raises:
        UsageError: an option that there is not, or a value of another kind.
    """
    given = _checked(RecordOptions, document)
    if given.get("sampling") is not None:
        given["sampling"] = Sampling(**_checked(Sampling, given["sampling"]))
    if given.get("counters") is not None:
        given["counters"] = Counters(**_checked(Counters, given["counters"]))
    return RecordOptions(**given)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "bool | None": ("true, false or null", lambda value: value is None or isinstance(value, bool)),
    "int": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    "Sampling | None": ("an object or null", lambda value: value is None or isinstance(value, dict)),
    "Counters | None": ("an object or null", lambda value: value is None or isinstance(value, dict)),
    "tuple[str, ...]": (
        "a list of texts",
        lambda value: isinstance(value, list | tuple) and all(isinstance(item, str) for item in value),
    ),
}
"""By the type of an option, what JSON states for it."""


def _checked(options: type, document: Mapping[str, Any]) -> dict[str, Any]:
    types = {field.name: str(field.type) for field in fields(options)}
    for name, value in document.items():
        if name not in types:
            raise UsageError(f"there is no option {name!r}; there are {', '.join(types)}")
        kind, holds = _KINDS[types[name]]
        if not holds(value):
            raise UsageError(f"the option {name!r} is {kind}, not {value!r}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps of a program are recorded: after `skip` steps, the last `active` steps of each cycle.

    A cycle has `wait` + `active` steps.

    Attributes:
        skip: steps at the beginning that are not recorded.
        wait: steps at the beginning of each cycle that are not recorded.
        active: steps after them that are recorded.
        repeat: number of cycles; 0 means to the end of the program.
    """

    skip: int = 0
    wait: int = 0
    active: int = 1
    repeat: int = 0

    def __post_init__(self) -> None:
        if min(self.skip, self.wait, self.repeat) < 0 or self.active < 1:
            raise UsageError(
                f"a schedule counts steps: skip, wait and repeat are 0 or more, active is 1 or more; got {self}"
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
