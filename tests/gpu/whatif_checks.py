"""A part of whatif.py: predictions beside what was measured.

Each round is predicted from the trace of the unchanged program that was recorded right before it. For every pair:
what was predicted and measured, as medians over the rounds; the median over the rounds of their difference; by how
much it is more than the repeats differ, which is how far the medians of three thirds of the rounds are apart; the
interval; the share of the traces whose interval holds what was measured over all rounds; the largest error of a single
trace beside what was measured over all rounds; and the pace of the host: how long it takes for the same work in the
changed program, as a multiple of the time in the unchanged one, where both were traced in a round.

Recordings by thence are scored twice: as they are, and with the plain step known, which is the median step that the
unchanged program took without thence (a recording knows it where the recorder left some steps unrecorded).
"""

from __future__ import annotations

import json
import math
import statistics
import tarfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

    Row = dict[str, Any]
    Said = dict[tuple[str, str], Row]

COLUMNS = (
    "predicted", "measured", "error", "beyond", "spread", "low", "high", "worst", "covers", "pace",
)  # fmt: skip


def check(folder: Path) -> int:
    """Predicts every change from the traces of its program, and compares; 1 when errors are more than wanted."""
    runs = [run for path in sorted(folder.glob("runs?.json")) for run in json.loads(path.read_text())]
    print(f"{'program':8} {'change':36}{'step us':>9}" + "".join(f"{name:>10}" for name in COLUMNS))
    rows: list[Row]
    names = list(dict.fromkeys(run["program"] for run in runs))
    recorded = any((folder / f"{name}.tar.xz").exists() for name in names)
    wrong = 0
    for known in (False, True) if recorded else (False,):
        if recorded:
            print("with the plain step known" if known else "from the recordings alone")
        rows = []
        for name in names:
            of_program = [run for run in runs if run["program"] == name]
            said = _predicted(folder, name, of_program, known=known)
            rows += [_compared(folder, run, number, said) for number, run in enumerate(of_program)]
        scores = folder / ("scores_plain.json" if known else "scores.json")
        scores.write_text(json.dumps(rows, indent=1))
        wrong = _summary(rows)
    return wrong


def _traces(folder: Path, name: str, variant: int) -> dict[int, list[Path]]:
    """The files of all ranks, by round; variant 0 is the unchanged program. A recording by thence is of all rounds."""
    found: dict[int, list[Path]] = {}
    packed = folder / f"{name}.tar.xz"
    if packed.exists():
        if not packed.with_suffix("").with_suffix("").exists():
            with tarfile.open(packed) as archive:
                archive.extractall(folder, filter="data")
        return {} if variant else {0: [folder / name]}
    for ranks in ("", "_rank?"):
        for path in sorted(folder.glob(f"??_{variant:02}_{name}{ranks}.json*")):  # .json.gz or unpacked
            found.setdefault(int(path.name[:2]), []).append(path)
    return found


def _predicted(folder: Path, name: str, runs: list[Row], *, known: bool) -> dict[int, Said | str]:
    """By round of which there is a trace: rows of the answers by change and meaning, or why there are none.

    Args:
        folder: of the traces.
        name: of the program.
        runs: its pairs.
        known: whether the step that was measured without thence is told as the plain step.
    """
    import thence
    from thence.errors import ThenceError

    asked: dict[str, list[str]] = {}
    for run in runs:
        texts = asked.setdefault(run["action"].replace("-", "_"), [])
        if run["text"] not in texts:
            texts.append(run["text"])
    result: dict[int, Said | str] = {}
    for number, paths in _traces(folder, name, 0).items():
        try:
            trace = thence.open(paths)
            answer = _with_plain_step(trace, runs, asked) if known else trace.whatif(**asked)
        except ThenceError as error:
            result[number] = str(error)
            continue
        result[number] = {
            (row["change"], row["part"]): {**row, "step_us": answer.step_ns / 1000} for row in answer.rows.to_dicts()
        }
    return result


def _with_plain_step(trace: Any, runs: list[Row], asked: dict[str, list[str]]) -> Any:
    """The answer if the plain step is that of the unchanged program without thence."""
    from thence.analysis.steps.windows import steps
    from thence.analysis.whatif.answer import what_if
    from thence.analysis.whatif.changes import parse_change
    from thence.analysis.whatif.graph import program_graph
    from thence.analysis.whatif.prediction import PlainPace

    us = _step_us(runs[0], "base")
    recorded = steps(trace.whole).typical["duration"].median() / 1000
    plain = PlainPace(statistics.median(us) / recorded, _spread(us) / statistics.median(us))
    changes = [parse_change(action.replace("_", "-"), text) for action, texts in asked.items() for text in texts]
    return what_if(trace.whole, program_graph(trace.whole), changes, plain)


def _compared(folder: Path, run: Row, number: int, said: dict[int, Said | str]) -> Row:
    """Compares and prints one pair, the one of that number of its program."""
    us = {side: _step_us(run, side) for side in ("base", "after")}
    shares = [1 - after / before for before, after in zip(*us.values(), strict=True)]
    base, gain = statistics.median(us["base"]), statistics.median(shares)
    row = {**run, "measured": gain}
    title = f"{run['program']:8} {run['action'] + ' ' + run['text']:36}{base:9.0f}"
    key = f"{run['action']} {run['text']}", run["meaning"]
    answers = {}
    for at, of_round in said.items():
        if isinstance(of_round, str):
            print(f"{title} refused: {of_round}")
            return row
        answers[at] = of_round.get(key, {"verdict": "no such meaning", "gain_share": None})
        if answers[at]["gain_share"] is None:
            print(f"{title} {answers[at]['verdict']}")
            return row
    before = [answers[max(at for at in answers if at <= turn)] for turn in range(len(shares))]
    errors = [one["gain_share"] - share for one, share in zip(before, shares, strict=True)]
    every = list(answers.values())
    row["predicted"] = statistics.median(one["gain_share"] for one in before)
    row["error"], row["spread"] = statistics.median(errors), _spread(errors)
    row["beyond"] = max(0.0, abs(row["error"]) - row["spread"])
    row["low"] = statistics.median(one["low_share"] for one in every)
    row["high"] = statistics.median(one["high_share"] for one in every)
    row["worst"] = max((one["gain_share"] - gain for one in every), key=abs)
    row["covers"] = statistics.mean(one["low_share"] <= gain <= one["high_share"] for one in every)
    row["recorded"] = statistics.median(one["step_us"] for one in every) / base - 1
    row["pace"] = _pace(folder, run["program"], number + 1)
    shown = "".join(f"{100 * row[name]:+9.1f}%" for name in COLUMNS[:-2])
    print(f"{title}{shown}{100 * row['covers']:9.0f}%{row['pace']:10.2f}")
    return row


def _step_us(run: Row, side: str) -> list[float]:
    """Microseconds of a step by round: of the slowest rank, or of those for which a late one is in time."""
    of_ranks = run[side]
    if run["action"] == "on-time":
        late = int(run["text"].partition(":")[2])
        of_ranks = [us for rank, us in enumerate(of_ranks) if rank != late]
    return [max(us) for us in zip(*of_ranks, strict=True)]


def _spread(shares: list[float]) -> float:
    """How far the medians of three thirds of the rounds are apart."""
    third = max(len(shares) // 3, 1)
    medians = [statistics.median(shares[at : at + third]) for at in range(0, 3 * third, third)]
    return max(medians) - min(medians)


def _pace(folder: Path, name: str, variant: int) -> float:
    """Median over the rounds of how long the host takes for the same work, beside the unchanged program."""
    unchanged = _traces(folder, name, 0)
    paces = [_pace_beside(unchanged[number], paths) for number, paths in _traces(folder, name, variant).items()]
    return statistics.median(paces) if paces else math.nan


def _pace_beside(unchanged: list[Path], changed: list[Path]) -> float:
    """How long the host takes in one trace for what it does in both, as a multiple of the other."""
    import polars as pl

    kind = ["rank", "before", "behind"]
    both = [_pieces(paths).group_by(kind).agg(pl.col("ns").median(), count=pl.len()) for paths in (unchanged, changed)]
    same = both[0].join(both[1], on=kind, suffix="_changed")
    same = same.with_columns(count=pl.min_horizontal("count", "count_changed"))
    slow, fast = ((same[column] * same["count"]).sum() for column in ("ns_changed", "ns"))
    return slow / fast


def _pieces(paths: list[Path]) -> pl.DataFrame:
    import polars as pl

    import thence
    from thence.analysis.whatif.graph import program_graph
    from thence.analysis.whatif.prediction import host_pieces

    trace = thence.open(paths)
    program = program_graph(trace.whole, *trace._of_ranks)
    return host_pieces(trace.whole, program).with_columns(pl.col("before", "behind").cast(pl.String))


def _summary(rows: list[Row]) -> int:
    """Prints errors by what limits the program; 1 when they are more than wanted."""
    for limit in (*dict.fromkeys(row["limit"] for row in rows), "all"):
        of = [row for row in rows if limit in (row["limit"], "all")]
        accepted = [row for row in of if "error" in row]
        if not accepted:
            print(f"{limit:7}: {len(of)} pairs, all refused")
            continue
        errors = [abs(row["error"]) for row in accepted]
        beyond = [row["beyond"] for row in accepted]
        print(
            f"{limit:7}: {len(of)} pairs, {len(of) - len(accepted)} refused; error of the step: median "
            f"{100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %; beyond the repeats' spread: "
            f"median {100 * statistics.median(beyond):.1f} %, worst {100 * max(beyond):.1f} %; intervals cover "
            f"{100 * statistics.mean(row['covers'] for row in accepted):.0f} %"
        )
    nulls = {row["program"]: 100 * row["measured"] for row in rows if row["part"] == "none"}
    print("null controls differ: " + ", ".join(f"{name} {of:+.2f} %" for name, of in nulls.items()))
    traced = {row["program"]: 100 * row["recorded"] for row in rows if "recorded" in row}
    print(
        "the recorded step beside the measured one: " + ", ".join(f"{name} {of:+.1f} %" for name, of in traced.items())
    )
    accepted = [row for row in rows if "error" in row]
    good = (
        len(rows) - len(accepted) <= 8
        and all("error" in row for row in rows if row["limit"] == "device")
        and statistics.median(row["beyond"] for row in accepted) <= 0.02
        and max(row["beyond"] for row in accepted) <= 0.05
        and statistics.mean(row["covers"] for row in accepted) >= 0.9
    )
    print("as wanted" if good else "NOT as wanted")
    return 0 if good else 1
