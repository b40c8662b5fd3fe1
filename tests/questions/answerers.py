"""What answers the questions in tests: each verb of thence alone, by its JSON, and any command.

A verb answers what its JSON states, and abstains on everything else. No answer is computed from two of its values but
by a plain division.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import thence
from thence.errors import ThenceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from question import World
    from thence.trace import Trace

    Answers = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What an answerer said about a world.

    Attributes:
        answers: by ``ask``.
        text: everything it printed.
    """

    answers: Mapping[str, Any]
    text: str


@dataclass(frozen=True)
class Asked:
    """A world with its trace, opened once for all verbs."""

    world: World
    trace: Trace

    @classmethod
    def of(cls, world: World) -> Asked:
        """The world with its trace; of a run with several files, the first one counts as the trace."""
        paths = world.paths[:1] if world.before else world.paths
        return cls(world, thence.open(*paths))


def ask_verb(verb: str, asked: Asked) -> Reply:
    """What a verb answers; nothing if it refuses."""
    try:
        document = json.loads(json.dumps(_DOCUMENTS[verb](asked), default=_plain))
    except ThenceError as error:
        return Reply({}, str(error))
    answers: Answers = {}
    for question in asked.world.questions:
        topic, _, rest = question.ask.partition(":")
        what, _, of = rest.partition(":")
        reader = _READERS[verb].get(f"{topic}:{what}")
        if reader is not None:
            answers[question.ask] = reader(document, of)
    return Reply(answers, json.dumps(document))


def _plain(value: Any) -> Any:
    return value.to_dicts() if hasattr(value, "to_dicts") else str(value)


def ask_command(template: str, world: World) -> Reply:
    """What a command answers.

    Args:
        template: a command line with ``{trace}`` (the inputs), and perhaps ``{before}`` (those of the run before) and
            ``{questions}`` (a JSON file: trace, before, and questions with id, ask and question). It prints a JSON
            object: answers by ``ask`` or ``id``, below the key ``answers`` or at the top.
        world: asked about.
    """
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(folder) / "questions.json"
        told = world.to_json()
        questions.write_text(json.dumps(told))
        line = template.format(
            trace=shlex.join(told["trace"]), before=shlex.join(told["before"]), questions=shlex.quote(str(questions))
        )
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    try:
        document = json.loads(done.stdout)
    except json.JSONDecodeError:
        return Reply({}, done.stdout + done.stderr)
    found = document.get("answers", document)
    answers = {q["ask"]: found.get(q["ask"], found.get(q["id"])) for q in told["questions"]}
    return Reply(answers, done.stdout + done.stderr)


# ---- What verbs say


def _largest(document: Any, _: str) -> Any:
    named = [row["name"] for row in document["rows"] if row["attributed"]]
    return named[0] if named else None


def _share(document: Any, of: str) -> Any:
    return next((row["share"] for row in document["rows"] if row["name"] == of), None)


def _verdict(document: Any, _: str) -> Any:
    code = document["verdict"]["code"]
    return None if code == "unknown" else code


def _step(key: str) -> Callable[[Any, str], Any]:
    return lambda document, _: None if document["steps"] is None else document["steps"][key]


def _cause(document: Any, _: str) -> Any:
    causes = document["causes"]
    return causes[0]["cause"] if causes and causes[0]["cause"] != "unknown" else None


def _cause_share(document: Any, of: str) -> Any:
    """As a share of the idle time's windows: ``idle`` states shares of idle time, so the span is needed as well."""
    found = [cause["share"] for cause in document["causes"] if cause["cause"] == of]
    return found[0] * document["idle_share"] if found else None


def _place(by: str) -> Callable[[Any, str], Any]:
    def place(document: Any, _: str) -> Any:
        rows = document["causes"][0]["rows"] if document["causes"] else []
        return next((row["name"] for row in rows if row["by"] == by), None)

    return place


def _late(document: Any, _: str) -> Any:
    if document["stragglers"]:
        return document["stragglers"][0]["rank"]
    return "none" if document["statement"].startswith("no straggler:") else None


def _of_late(key: str) -> Callable[[Any, str], Any]:
    def value(document: Any, _: str) -> Any:
        late = [row[key] for row in document["ranks"] if row["straggler"]]
        return late[0] if late else None

    return value


def _late_line(document: Any, _: str) -> Any:
    for row in document["ranks"]:
        if row["straggler"]:
            return next((r["name"] for r in row["reasons"] if r["by"] == "source"), None)
    return None


def _code(document: Any, _: str) -> Any:
    return document["findings"][0]["code"] if document["findings"] else None


def _slower(document: Any, _: str) -> Any:
    grown = [row for row in document["rows"] if row["by"] == "kernel" and row["verdict"] == "slower"]
    if grown:
        return max(grown, key=lambda row: row["after_ns"] - row["before_ns"])["name"]
    return "none" if document["comparable"] else None


def _grown(document: Any, of: str) -> Any:
    name = _slower(document, of)
    rows = [row for row in document["rows"] if row["by"] == "kernel" and row["name"] == name]
    return rows[0]["after_ns"] - rows[0]["before_ns"] if rows else None


def _verdict_of(document: Any, of: str) -> Any:
    rows = [row for row in document["rows"] if row["by"] == "kernel" and row["name"] == of]
    return rows[0]["verdict"] if rows and rows[0]["verdict"] != "unknown" else None


def _total(document: Any, _: str) -> Any:
    verdict = document["total"]["step"]["verdict"] if "step" in document["total"] else document["total"]["verdict"]
    return None if verdict == "unknown" else verdict


def _gain(document: Any, of: str) -> Any:
    rows = [row for row in document["rows"] if row["change"].endswith(of) and row["gain_ns"] is not None]
    return rows[0]["gain_ns"] if rows else None


def _mfu(document: Any, _: str) -> Any:
    found = [row["mfu"] for row in document["steps"] if row["mfu"] is not None]
    return found[0] if found else None


def _roofline(document: Any, _: str) -> Any:
    totals = document["totals"]
    modelled = totals["flop_modelled_ns"] + totals["bytes_only_ns"]
    return totals["roofline_ns"] / modelled if modelled else None


def _bound(document: Any, of: str) -> Any:
    found = [row["bound"] for row in document["rows"] if row["name"] == of]
    return found[0] if found and found[0] != "unknown" else None


def _idle(asked: Asked) -> Any:
    part = asked.trace.typical
    found, span = part.idle(), part.report().span_ns
    return found.document() | {"idle_share": (found.idle_ns or 0) / max(span, 1)}


def _what_if(asked: Asked) -> Any:
    """With the changes that questions name."""
    named: dict[str, list[str]] = {"free": [], "scale": [], "no_wait": [], "on_time": []}
    for question in asked.world.questions:
        _, _, rest = question.ask.partition(":")
        what, _, of = rest.partition(":")
        change = {
            "free_cause": ("free", f"cause:{of}"), "half_kernel": ("scale", f"kernel:{of}=0.5"),
            "no_wait": ("no_wait", of), "on_time": ("on_time", f"rank:{of}"),
        }  # fmt: skip
        if what in change:
            action, text = change[what]
            named[action].append(text)
    return asked.trace.whatif(**named).document()


def _diff(asked: Asked) -> Any:
    from thence.analysis.diff.answer import compare

    if not asked.world.before:
        return {"comparable": False, "rows": [], "total": {"verdict": "unknown"}}
    sides = [[thence.open(path).sample() for path in paths] for paths in (asked.world.before, asked.world.paths)]
    return compare(*sides).document()


def _of_kind(document: Any, kind: str, place: str = "") -> Any:
    """The first finding of a kind, perhaps about one place; None if there is none."""
    found = (f for f in document["findings"] if f["kind"] == kind and place in ("", f["place"]))
    return next(found, None)


def _field(kind: str, *keys: str) -> Callable[[Any, str], Any]:
    """A value of the first finding of a kind."""

    def value(document: Any, _: str) -> Any:
        found = _of_kind(document, kind)
        for key in keys:
            found = None if found is None else found[key]
        return found

    return value


def _row_name(row: Any) -> str:
    return str(row["name"]).strip("`")


def _first_row(kind: str, by: str = "") -> Callable[[Any, str], Any]:
    def first(document: Any, _: str) -> Any:
        found = _of_kind(document, kind)
        return None if found is None or by not in ("", found["place"]) else _row_name(found["evidence"]["rows"][0])

    return first


def _share_of_row(kind: str, by: str = "") -> Callable[[Any, str], Any]:
    def share(document: Any, of: str) -> Any:
        found = _of_kind(document, kind)
        rows = [] if found is None or by not in ("", found["place"]) else found["evidence"]["rows"]
        return next((row["share"] for row in rows if _row_name(row) == of), None)

    return share


def _idle_place(by: str) -> Callable[[Any, str], Any]:
    def place(document: Any, _: str) -> Any:
        found = _of_kind(document, "idle")
        rows = [] if found is None else found["evidence"]["rows"]
        return next((_row_name(row) for row in rows if row["by"] == by), None)

    return place


def _explained_late(document: Any, _: str) -> Any:
    found = _of_kind(document, "late")
    return found["rank"] if found else "none" if _of_kind(document, "no_late_rank") else None


def _explained_line(document: Any, _: str) -> Any:
    found = _of_kind(document, "late")
    rows = [] if found is None else found["evidence"]["rows"]
    return next((_row_name(row) for row in rows if row["by"] == "source"), None)


def _explained_gain(place: str) -> Callable[[Any, str], Any]:
    def gain(document: Any, of: str) -> Any:
        for found in document["findings"]:
            if (
                found["gain"] is not None
                and found["place"] in (place.format(of), of)
                and found["kind"] in ("gain", "idle")
            ):
                return found["gain"]["ns_per_step"]
        return None

    return gain


def _explained_mfu(document: Any, _: str) -> Any:
    found = _of_kind(document, "use")
    said = None if found is None else re.search(r"MFU ([\d.]+) %", found["claim"])
    return float(said[1]) / 100 if said else None


def _explained_step(key: str) -> Callable[[Any, str], Any]:
    return lambda document, _: None if document["steps"] is None else document["steps"][key]


_DOCUMENTS: dict[str, Callable[[Asked], Any]] = {
    "explain": lambda asked: asked.trace.explain().document(),
    "report": lambda asked: asked.trace.headline.to_json() | asked.trace.report().document(),
    "report --by label": lambda asked: asked.trace.headline.to_json() | asked.trace.report("label").document(),
    "report --by module": lambda asked: asked.trace.headline.to_json() | asked.trace.report("module").document(),
    "idle": _idle,
    "check": lambda asked: asked.trace.check().document(),
    "ranks": lambda asked: asked.trace.ranks().document(),
    "whatif": _what_if,
    "roofline --by op": lambda asked: asked.trace.roofline("op").document(),
    "diff": _diff,
}
_HEADLINE: dict[str, Callable[[Any, str], Any]] = {
    "limit:verdict": _verdict,
    "step:median_ns": _step("median_ns"),
    "step:busy_share": _step("busy_share"),
    "step:count": _step("count"),
}
_READERS: dict[str, dict[str, Callable[[Any, str], Any]]] = {
    "explain": {
        **_HEADLINE,
        "sound:sound": lambda document, _: document["sound"]["sound"],
        "sound:code": lambda document, _: next((f["code"] for f in document["sound"]["findings"]), None),
        "where:kernel": _first_row("kernel"),
        "where:kernel_share": _share_of_row("kernel"),
        "where:label": _first_row("where", "label"),
        "where:label_share": _share_of_row("where", "label"),
        "where:module": _first_row("where", "module"),
        "idle:cause": _field("idle", "place"),
        "idle:cause_share": lambda document, of: (_of_kind(document, "idle", of) or {}).get("share"),
        "idle:place": _idle_place("label"),
        "idle:line": _idle_place("source"),
        "late:rank": _explained_late,
        "late:wait_ns": _field("late", "value"),
        "late:share": _field("late", "share"),
        "late:line": _explained_line,
        "gain:free_cause": _explained_gain("free cause:{}"),
        "gain:no_wait": _explained_gain("no-wait {}"),
        "use:mfu": _explained_mfu,
        "use:roofline_share": _field("use", "value"),
    },
    "report": {**_HEADLINE, "where:kernel": _largest, "where:kernel_share": _share},
    "report --by label": {**_HEADLINE, "where:label": _largest, "where:label_share": _share},
    "report --by module": {**_HEADLINE, "where:module": _largest},
    "idle": {
        "idle:cause": _cause, "idle:cause_share": _cause_share, "idle:place": _place("label"),
        "idle:line": _place("source"),
    },
    "check": {"sound:sound": lambda document, _: document["sound"], "sound:code": _code},
    "ranks": {
        "late:rank": _late, "late:wait_ns": _of_late("mean_ns"), "late:share": _of_late("late_share"),
        "late:line": _late_line,
    },
    "whatif": dict.fromkeys(("gain:free_cause", "gain:half_kernel", "gain:no_wait", "gain:on_time"), _gain),
    "roofline --by op": {
        "use:mfu": _mfu, "use:roofline_share": _roofline, "use:bound": _bound,
        "use:flop": lambda document, _: document["totals"]["flop"],
    },
    "diff": {
        "change:kernel": _slower, "change:kernel_ns": _grown, "change:total": _total, "change:verdict": _verdict_of,
    },
}  # fmt: skip
VERBS = tuple(_DOCUMENTS)
"""Verbs that are scored alone."""
