"""The fields of an event in a Kineto file that identify a device activity."""

from __future__ import annotations

import msgspec

from thence.readers.kineto.events import NO_TIME


class DeviceArgs(msgspec.Struct, frozen=True, gc=False):
    """The arguments that identify a device activity."""

    correlation: int = -1
    device: int | None = None
    stream: int | None = None
    original_stream: int | None = None
    from_device: int | None = msgspec.field(default=None, name="fromDevice")


class DeviceEvent(msgspec.Struct, gc=False):
    """The fields that identify a device activity."""

    ts: msgspec.Raw = NO_TIME
    dur: msgspec.Raw = NO_TIME
    pid: int | str = 0
    tid: int | str = 0
    args: DeviceArgs = DeviceArgs()

    def key(self, start: int, duration: int) -> tuple[int, ...]:
        """Device, stream, start, duration and correlation as in the gpu table, with -1 for a null correlation.

        Args:
            start: ns.
            duration: ns.
        """
        args = self.args
        device = next((d for d in (args.device, args.from_device, self.pid) if isinstance(d, int)), 0)
        stream = next((s for s in (args.original_stream, args.stream, self.tid) if isinstance(s, int)), 0)
        return device, stream, start, duration, args.correlation
