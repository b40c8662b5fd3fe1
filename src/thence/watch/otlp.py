"""Metrics of a running program or job for a collector of OpenTelemetry: OTLP over HTTP, as JSON.

Names are those of `thence.watch.metrics` as OpenTelemetry writes them, without unit and type: ``thence.window_busy``
with the unit ``s`` for ``thence_window_busy_seconds_total``. A collector that exports to Prometheus adds both again, so
dashboards find the same names.

Specification: https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

from __future__ import annotations

import os
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import msgspec

from thence.errors import UsageError
from thence.version import __version__
from thence.watch.metrics import METRICS, Metric

if TYPE_CHECKING:
    from thence.watch.metrics import Metrics

_PATH = "/v1/metrics"
_TIMEOUT_S = 10
_CUMULATIVE = 2
"""Sums count from when the first window began; a restart of thence counts all again."""
_UNITS = {"_seconds": "s", "_ratio": "1", "_steps": "{step}", "_windows": "{window}", "_records": "{record}"}


class Exporter:
    """Sends metrics to a collector, with the headers of ``OTEL_EXPORTER_OTLP_HEADERS`` (``name=value,...``).

    Args:
        metrics: what is sent.
        url: of the collector, such as http://127.0.0.1:4318.

    Raises:
        UsageError: the URL is none of HTTP.
    """

    def __init__(self, metrics: Metrics, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--otlp {url}: the URL of a collector begins with http:// or https:// and names a host")
        path = parts.path.rstrip("/")
        self._metrics = metrics
        self._url = parts._replace(path=path if path.endswith(_PATH) else path + _PATH).geturl()

    def send(self, now_ns: int) -> str | None:
        """Send all metrics; None if the collector took them, else why it did not.

        Args:
            now_ns: Unix time.
        """
        headers = {"Content-Type": "application/json", **_headers()}
        body = msgspec.json.encode(document(self._metrics, now_ns))
        request = urllib.request.Request(self._url, body, headers)  # noqa: S310 - HTTP, as `__init__` saw
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310
                return None
        except urllib.error.HTTPError as error:
            with error:
                return f"the collector answers {error.code} ({error.reason})"
        except (OSError, ValueError) as error:  # ValueError: a header that HTTP does not allow
            return f"the collector does not answer: {getattr(error, 'reason', None) or error}"


def document(metrics: Metrics, now_ns: int) -> dict[str, Any]:
    """All metrics as an ``ExportMetricsServiceRequest`` in Protobuf's JSON, whose 64-bit numbers are texts.

    Args:
        metrics: what is sent.
        now_ns: Unix time.
    """
    service = os.environ.get("OTEL_SERVICE_NAME") or "thence"
    values = metrics.values()
    since = str(metrics.since_unix_ns)
    listed = []
    for name, metric in METRICS.items():
        points = [
            {
                "attributes": [_text(key, text) for key, text in zip(metric.labels, labels, strict=True)],
                "startTimeUnixNano": since,
                "timeUnixNano": str(now_ns),
                "asDouble": value,
            }
            for (counted, labels), value in values
            if counted == name
        ]
        if points:
            listed.append(_metric(name, metric, points))
    scope = {"scope": {"name": "thence", "version": __version__}, "metrics": listed}
    return {
        "resourceMetrics": [{"resource": {"attributes": [_text("service.name", service)]}, "scopeMetrics": [scope]}]
    }


def _metric(name: str, metric: Metric, points: list[dict[str, Any]]) -> dict[str, Any]:
    name = name.removesuffix("_total")
    suffix = next(suffix for suffix in _UNITS if name.endswith(suffix))
    if suffix in ("_seconds", "_ratio"):
        name = name.removesuffix(suffix)
    named = {"name": name.replace("_", ".", 1), "description": metric.meaning, "unit": _UNITS[suffix]}
    if metric.kind == "counter":
        return named | {"sum": {"aggregationTemporality": _CUMULATIVE, "isMonotonic": True, "dataPoints": points}}
    return named | {"gauge": {"dataPoints": points}}


def _text(key: str, text: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": text}}


def _headers() -> dict[str, str]:
    given = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    pairs = (part.partition("=") for part in given.split(",") if "=" in part)
    return {name.strip(): urllib.parse.unquote(value.strip()) for name, _, value in pairs}
