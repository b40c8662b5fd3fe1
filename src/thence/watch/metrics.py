"""Metrics of a running program or job, in the text format of Prometheus on an HTTP port of this machine.

The port also takes requests for a window, from whoever knows the token: any user of the machine, and any page in a
browser, can reach it.

Counters hold what windows showed; a rate of one over that of another is a share: GPU busy is
``rate(thence_window_busy_seconds_total) / rate(thence_window_seconds_total)``. Labels are bounded: at most
`MAX_PROCESSES` ranks, and the first `MAX_MODULES` modules; later ones count as ``(others)``.
"""

from __future__ import annotations

import hmac
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import TYPE_CHECKING, NamedTuple

from thence.errors import UsageError
from thence.model.formats import REQUEST_FILE
from thence.watch.summary_file import Tails

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from thence.watch.summary_file import Window

MAX_MODULES = 50
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OTHERS, _NONE = "(others)", "(none)"
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class Metric(NamedTuple):
    """A metric: its type, what it means, and its labels."""

    kind: str
    meaning: str
    labels: tuple[str, ...]


METRICS: Mapping[str, Metric] = {
    "thence_steps_total": Metric("counter", "Steps that ended, recorded or not.", ("rank",)),
    "thence_step_seconds_total": Metric("counter", "Time in these steps.", ("rank",)),
    "thence_step_median_seconds": Metric("gauge", "Median duration of the latest steps.", ("rank",)),
    "thence_step_max_seconds": Metric("gauge", "Longest of the latest steps.", ("rank",)),
    "thence_windows_total": Metric("counter", "Recorded windows.", ("rank",)),
    "thence_window_end_timestamp_seconds": Metric("gauge", "Unix time at which the last window ended.", ("rank",)),
    "thence_window_seconds_total": Metric("counter", "Time in steps of windows, summed over GPUs.", ("rank",)),
    "thence_window_busy_seconds_total": Metric("counter", "Of that, time with work on the GPU.", ("rank",)),
    "thence_window_exposed_seconds_total": Metric("counter", "Of that, time with communication alone.", ("rank",)),
    "thence_window_idle_seconds_total": Metric("counter", "Time in windows without work.", ("rank", "cause")),
    "thence_window_module_seconds_total": Metric("counter", "GPU time in windows, of all ranks.", ("module",)),
    "thence_window_collective_seconds_total": Metric("counter", "Time of collectives' kernels.", ("rank", "group")),
    "thence_recorder_overhead_ratio": Metric("gauge", "What recording costs, as it measures itself.", ("rank",)),
    "thence_recorder_dropped_records_total": Metric("counter", "Records that were lost.", ("rank",)),
}
"""Every metric that is exported, by name."""


class Metrics:
    """Adds up the summaries of a recording.

    Args:
        directory: of the recording.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tails = Tails(directory)
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._dropped: dict[Path, int] = {}
        self._modules: set[str] = set()
        self._groups: set[str] = set()
        self._lock = Lock()
        self.since_unix_ns = 0
        """When the first window began; 0 if there is none yet."""

    def look(self) -> None:
        """Add the summaries that have come since the last look."""
        with self._lock:
            for folder, new in self._tails.new():
                for window in new.windows:
                    self._add(folder, window)

    def ask(self) -> None:
        """Asks all processes for a window, as `thence.model.formats.REQUEST_FILE` does.

        Raises:
            OSError: the file cannot be written.
        """
        (self._directory / REQUEST_FILE).touch()

    def text(self) -> str:
        """All metrics, in Prometheus's text format."""
        with self._lock:
            return "".join(self._lines())

    def values(self) -> list[tuple[tuple[str, tuple[str, ...]], float]]:
        """The value of each metric for each of its labels' values. Control characters in labels are ``?``."""
        with self._lock:
            return list(self._values.items())

    def _add(self, folder: Path, window: Window) -> None:
        rank = str(window.rank)
        self.since_unix_ns = min(self.since_unix_ns or window.begin_unix_ns, window.begin_unix_ns)
        steps = window.all_steps
        if steps is not None:
            self._count("thence_steps_total", steps.count, rank)
            self._count("thence_step_seconds_total", steps.total_ns / 1e9, rank)
            self._set("thence_step_median_seconds", steps.median_ns / 1e9, rank)
            self._set("thence_step_max_seconds", steps.max_ns / 1e9, rank)
        self._set("thence_window_end_timestamp_seconds", window.end_unix_ns / 1e9, rank)
        self._count("thence_recorder_dropped_records_total", window.dropped - self._dropped.get(folder, 0), rank)
        self._dropped[folder] = window.dropped
        if window.cost_share is not None:
            self._set("thence_recorder_overhead_ratio", window.cost_share, rank)
        if window.asked is not None:
            return  # slow steps, which would make all steps look slow
        self._count("thence_windows_total", 1, rank)
        self._count("thence_window_seconds_total", window.duration_ns / 1e9, rank)
        self._count("thence_window_busy_seconds_total", window.busy_ns / 1e9, rank)
        self._count("thence_window_exposed_seconds_total", window.exposed_ns / 1e9, rank)
        for cause, total in window.idle_ns.items():
            self._count("thence_window_idle_seconds_total", total / 1e9, rank, cause)
        for module, total in window.modules.items():
            self._count("thence_window_module_seconds_total", total / 1e9, _bounded(self._modules, module))
        for module, total in ((_OTHERS, window.other_ns), (_NONE, window.unattributed_ns)):
            self._count("thence_window_module_seconds_total", total / 1e9, module)
        for c in window.collectives:
            group = _NONE if c.group is None else _bounded(self._groups, c.group)
            self._count("thence_window_collective_seconds_total", c.total_ns / 1e9, rank, group)

    def _count(self, name: str, value: float, *labels: str) -> None:
        key = name, _printable(labels)
        self._values[key] = self._values.get(key, 0.0) + max(0.0, value)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[name, _printable(labels)] = value

    def _lines(self) -> Iterator[str]:
        for name, metric in METRICS.items():
            yield f"# HELP {name} {metric.meaning}\n# TYPE {name} {metric.kind}\n"
            for (metric_name, values), value in self._values.items():
                if metric_name == name:
                    labels = ",".join(
                        f'{label}="{_escaped(text)}"' for label, text in zip(metric.labels, values, strict=True)
                    )
                    yield f"{name}{{{labels}}} {value!r}\n"


def _bounded(known: set[str], name: str) -> str:
    """The name, if it is one of the first `MAX_MODULES`."""
    if len(known) < MAX_MODULES:
        known.add(name)
    return name if name in known else _OTHERS


def _printable(labels: Iterable[str]) -> tuple[str, ...]:
    return tuple(_UNSAFE.sub("?", label) for label in labels)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def server(metrics: Metrics, port: int, token: str | None = None) -> ThreadingHTTPServer:
    """Serves ``/metrics`` on 127.0.0.1 on a thread of its own, and asks for windows.

    ``POST /record`` with the token (``Authorization: Bearer``) asks all processes for a window.

    Args:
        metrics: what is served.
        port: 0 takes a free one.
        token: None refuses all requests for a window.

    Raises:
        UsageError: the port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in {"/", "/metrics"}:
                self.send_error(404)
                return
            content = metrics.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            if self.path != "/record":
                self.send_error(404)
                return
            given = self.headers.get("Authorization", "").removeprefix("Bearer ").encode("latin-1", "replace")
            if token is None or not hmac.compare_digest(given, token.encode()):
                self.send_error(403, "a window needs the token of THENCE_TOKEN")
                return
            try:
                metrics.ask()
            except OSError as error:
                self.send_error(503, f"nothing can be asked: {error.strerror}")
                return
            self.send_response(202)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    try:
        serving = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"port {port} of 127.0.0.1 cannot be used: {reason}; name another port") from None
    serving.daemon_threads = True
    Thread(target=serving.serve_forever, name="thence-metrics", daemon=True).start()
    return serving
