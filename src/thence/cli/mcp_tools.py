"""What ``thence mcp`` answers: questions about traces in one folder, read-only, bounded, and with typed errors.

Every reply is one JSON object. Tables in it have at most `MAX_ROWS` rows and one for the rest, as ``--top`` gives them.
Texts of the trace are values of the JSON: they are shortened and lose their control characters, and whatever they say,
they cannot change what the reply is. An error is ``{"error": {"code", "message"}}``; its code is a key of `ERRORS`.
"""

from __future__ import annotations

import shlex
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec
import polars as pl

from thence.cli.inputs import Inputs
from thence.cli.json_rows import with_most_rows
from thence.cli.output import SCHEMAS
from thence.errors import Contradiction, InputError, MissingData, MissingRequirement, ThenceError, UsageError
from thence.model.kernel_names import clip
from thence.model.places import BY
from thence.readers.torch_annotations import is_annotation_name

if TYPE_CHECKING:
    from pathlib import Path

    from thence.model.places import By
    from thence.trace import Trace

ERRORS: Mapping[str, str] = {
    "outside": "the path is not in the folder that the server was started with",
    "too_large": "the reply would be too large: ask for fewer rows",
    "input": "the input cannot be read",
    "missing_data": "the trace lacks what the question needs",
    "missing_requirement": "something is not installed",
    "usage": "the question is wrong for any trace",
    "contradiction": "figures contradict each other",
    "other": "another error of thence",
}
"""The codes of errors."""
MAX_ROWS = 50
MAX_CHARS = 100_000
"""Characters of a reply."""
MAX_TEXT = 400
"""Characters of a text in a reply."""
_KEPT = 4
"""Traces that are kept in memory."""
_QUERY_S, _QUERY_BYTES = 60.0, 4 * 10**9
_CODES: tuple[tuple[type[ThenceError], str], ...] = (
    (InputError, "input"), (MissingData, "missing_data"), (MissingRequirement, "missing_requirement"),
    (UsageError, "usage"), (Contradiction, "contradiction"), (ThenceError, "other"),
)  # fmt: skip


class _Refused(Exception):
    """A question that is not answered."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Tools:
    """The questions. Each method returns the JSON of its reply.

    Attributes:
        folder: the only folder whose files are read.
    """

    folder: Path
    _traces: OrderedDict[object, Trace] = field(default_factory=OrderedDict, repr=False)

    def explain(self, trace: str, max_chars: int = 4000) -> str:
        """What limits the program in a trace, why, and what would help: start here.

        Says whether the trace is sound; findings with ids, intervals, evidence and gains; and what cannot be known.

        Args:
            trace: a file, or a folder with the ranks of a job, in the server's folder.
            max_chars: of the reply, from 1,000 to 100,000.
        """

        def answer() -> str:
            from dataclasses import replace

            from thence.writers.text.explanation import MIN_CHARS, explanation_text

            if not MIN_CHARS <= max_chars <= MAX_CHARS:
                raise UsageError(f"max_chars is from {MIN_CHARS:,} to {MAX_CHARS:,}")
            explanation = replace(self._opened(trace).explain(), inputs=shlex.quote(trace))
            return explanation_text(explanation, "json", max_chars, SCHEMAS["explain"])

        return _reply(answer)

    def rows(self, trace: str, by: str = "kernel", filter: str = "", limit: int = 20) -> str:  # noqa: A002 - the word that agents use
        """GPU time by kind of place: kernel, label, module, op, source, phase, step, stream, rank and others.

        Args:
            trace: as for explain.
            by: the kind of place.
            filter: regular expression of names to keep; empty: all.
            limit: rows, at most 50; one more is for the rest.
        """

        def answer() -> dict[str, Any]:
            if by not in BY:
                raise UsageError(f"by is one of {', '.join(BY)}")
            summary = self._opened(trace).report(cast("By", by))
            rows = summary.rows
            if filter:
                try:
                    rows = rows.filter(rows["name"].str.contains(filter))
                except pl.exceptions.ComputeError as error:
                    raise UsageError(f"filter is no regular expression: {error}") from None
            totals = {
                "sum_ns": summary.sum_ns,
                "busy_ns": summary.busy_ns,
                "idle_ns": summary.idle_ns,
                "idle_is": summary.idle_is,
            }
            return {"schema": SCHEMAS["report"], "by": by, **totals, "rows": rows, "soundness": _findings(summary)}

        return _reply(answer, limit)

    def sql(self, trace: str, query: str, limit: int = 20) -> str:
        """Answers an SQL query over gpu, host, places, activities, collectives, steps and others; times are ns.

        Args:
            trace: as for explain.
            query: SQL, which can read these tables and no files.
            limit: rows, at most 50.
        """

        def answer() -> dict[str, Any]:
            from thence.analysis.sql import check_query
            from thence.cli.bounded_query import bounded_answer
            from thence.cli.output import flat_cells

            check_query(query)
            rows = bounded_answer(self._opened(trace).frames(query), query, _QUERY_S, _QUERY_BYTES)
            return {"rows": flat_cells(rows)}

        return _reply(answer, limit)

    def diff(self, before: str, after: str, limit: int = 20) -> str:
        """What changed between two runs, with intervals; refuses runs that should not be compared.

        Args:
            before: as trace for explain.
            after: likewise.
            limit: rows, at most 50.
        """
        return _reply(
            lambda: {"schema": SCHEMAS["diff"], **self._opened(before).diff(self._opened(after)).document()}, limit
        )

    def whatif(
        self,
        trace: str,
        free: Sequence[str] = (),
        scale: Sequence[str] = (),
        no_wait: Sequence[str] = (),
        on_time: Sequence[str] = (),
        at_roofline: Sequence[str] = (),
        limit: int = 20,
    ) -> str:
        """Predicts the gain of changes, each with its interval; without any, of those that gain most.

        Args:
            trace: as for explain.
            free: work that takes no time, such as label:^attention$, kernel:gemm, collective:all-gather, cause:loader.
            scale: work that takes a fraction of its time, such as kernel:gemm=0.5.
            no_wait: calls that return at once: item, all, stream, event, device.
            on_time: ranks that no other waits for, such as rank:3.
            at_roofline: work that takes as long as the GPU allows, such as module:mlp.
            limit: rows, at most 50.
        """

        def answer() -> dict[str, Any]:
            predicted = self._opened(trace).whatif(free, scale, no_wait, on_time, at_roofline)
            return {"schema": SCHEMAS["whatif"], **predicted.document()}

        return _reply(answer, limit)

    def check(self, trace: str) -> str:
        """Whether the figures of a trace can be trusted: lost work, impossible times, ranks recorded apart.

        Args:
            trace: as for explain.
        """
        return _reply(lambda: {"schema": SCHEMAS["check"], **self._opened(trace).check().document()})

    @property
    def all(self) -> tuple[Callable[..., str], ...]:
        """Every question."""
        return (self.explain, self.rows, self.sql, self.diff, self.whatif, self.check)

    def _opened(self, trace: str) -> Trace:
        """The trace at a path in the folder; the last few stay in memory."""
        path = self._inside(trace)
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_symlink():
                self._check(file.resolve(), trace)
        states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
        key = (str(path), tuple(states))
        if key not in self._traces:
            self._traces[key] = Inputs((str(path),)).whole()
        self._traces.move_to_end(key)
        while len(self._traces) > _KEPT:
            self._traces.popitem(last=False)
        return self._traces[key]

    def _inside(self, trace: str) -> Path:
        """The path of an input; it must be in the folder, and be a file or folder there."""
        if "\0" in trace or not trace:
            raise _Refused("outside", ERRORS["outside"])
        root = self.folder.resolve()
        path = (root / trace).resolve()
        self._check(path, trace)
        if not path.exists():
            raise _Refused("input", f"{trace}: no such file or directory in the server's folder")
        # Annotations of PyTorch are also read from the folder above a trace, which is not the server's.
        if root in (path, path.parent) and any(is_annotation_name(str(file)) for file in root.parent.iterdir()):
            raise _Refused("outside", "annotation files above the server's folder belong to it: start the server there")
        return path

    def _check(self, path: Path, trace: str) -> None:
        if not path.is_relative_to(self.folder.resolve()):
            raise _Refused("outside", f"{trace}: {ERRORS['outside']}")


def _findings(explanation: Any) -> list[dict[str, Any]]:
    findings: list[dict[str, Any]] = explanation.soundness.findings_json()
    return findings


def _reply(answer: Callable[[], Any], limit: int = MAX_ROWS) -> str:
    """The JSON of a reply, or of an error."""
    try:
        if not 1 <= limit <= MAX_ROWS:
            raise UsageError(f"limit is from 1 to {MAX_ROWS}")
        reply = answer()
        text = reply if isinstance(reply, str) else _json(_bounded(with_most_rows(reply, limit)))
    except _Refused as error:
        return _error(error.code, str(error))
    except ThenceError as error:
        return _error(next(code for kind, code in _CODES if isinstance(error, kind)), str(error))
    if len(text) > MAX_CHARS:
        return _error("too_large", f"the reply has {len(text):,} characters, more than {MAX_CHARS:,}: ask for less")
    return text


def _error(code: str, message: str) -> str:
    return _json({"error": {"code": code, "message": _text(message)}})


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _bounded(value: Any) -> Any:
    """JSON values with texts that are short and printable."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {_text(str(key)): _bounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_bounded(item) for item in value]
    return value


def _text(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in clip(text, MAX_TEXT))
