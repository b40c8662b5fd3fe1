"""What commands of thence printed and wrote, as values, and how two such results differ.

What is compared how is said in ``compare_outputs.py``, which uses this.
"""

from __future__ import annotations

import collections
import difflib
import itertools
import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

SHOWN = 4  # pairs of values of one difference
MOST_ALIGNED = 20_000  # items of two lists together


@dataclass
class Renamed:
    """Differences that are wanted."""

    keys: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def text(self, value: str) -> str:
        if value in self.values:
            return self.values[value]
        for old, new in self.texts.items():
            value = value.replace(old, new)
        return value

    def before(self, value: Any) -> Any:
        """A value of BEFORE as AFTER is meant to give it."""
        if isinstance(value, dict):
            kept = {key: item for key, item in value.items() if key not in self.gone}
            return {self.keys.get(key, self.text(key)): self.before(x) for key, x in kept.items()}
        if isinstance(value, Header):
            return Header(self.keys.get(key, key) for key in value if key not in self.gone)
        if isinstance(value, list):
            return type(value)(self.before(item) for item in value)  # Lines stay lines
        return self.text(value) if isinstance(value, str) else value

    def after(self, value: Any) -> Any:
        """A value of AFTER without what only it has."""
        if isinstance(value, dict):
            return {key: self.after(item) for key, item in value.items() if key not in self.new}
        if isinstance(value, Header):
            return Header(key for key in value if key not in self.new)
        if isinstance(value, list):
            return type(value)(self.after(item) for item in value)
        return value


class Lines(list[str]):
    """Lines of text."""


class Header(list[str]):
    """Names of the columns of a CSV file, in their order."""


def values(folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Everything that a command gave."""
    stderr = (folder / "stderr").read_text()
    if "Traceback (most recent call last)" in stderr:
        stderr = stderr.strip().splitlines()[-1]  # where it was raised may differ
    form = arguments[arguments.index("--format") + 1] if "--format" in arguments else ""
    result = {
        "exit code": int((folder / "code").read_text()),
        "stderr": lines(stderr),
        "stdout": parsed((folder / "stdout").read_text(), form),
    }
    return result | {path.name: written(path) for path in sorted(folder.glob("out.*"))}


def parsed(text: str, form: str) -> Any:
    """JSON and CSV as values, all else as lines."""
    try:
        if form == "json":
            return json.loads(text)
    except ValueError:
        return lines(text)
    if form == "csv" and text:
        import polars as pl

        frame = pl.read_csv(text.encode(), infer_schema_length=None)
        return {"columns": Header(frame.columns), "rows": frame.to_dicts()}
    return lines(text)


def lines(text: str) -> Lines:
    return Lines(re.sub(r"[ \u2500\u2501]{2,}", "  ", line).rstrip() for line in text.splitlines())


def written(path: Path) -> Any:
    """A file or folder that a command wrote."""
    if path.suffix == ".parquet":
        return {part.name: columns(part) for part in sorted(path.iterdir())}
    if path.suffix == ".pftrace":
        return timeline(path.read_bytes())
    text = path.read_text()
    if path.suffix == ".folded":
        pairs = [line.rpartition(" ") for line in text.splitlines()]
        return [{"name": stack, "value": int(value)} for stack, _, value in pairs]
    value = parsed(text, path.suffix[1:])
    if isinstance(value, dict) and "traceEvents" in value:
        value["traceEvents"].sort(key=lambda event: json.dumps(event, sort_keys=True))
    return value


def columns(path: Path) -> Any:
    import polars as pl

    if path.suffix != ".parquet":
        return parsed(path.read_text(), path.suffix[1:])
    frame = pl.read_parquet(path)
    return {name: {"type": str(series.dtype), "values": series.to_list()} for name, series in frame.to_dict().items()}


def timeline(content: bytes) -> dict[str, Any]:
    """A Perfetto trace: its size, packets by kind, names of tracks, slices and counters."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

    kinds: collections.Counter[str] = collections.Counter()
    tracks: dict[int, str] = {}
    names: dict[int, str] = {}
    slices: list[dict[str, Any]] = []
    counters: dict[str, list[Any]] = collections.defaultdict(list)
    open_ = collections.defaultdict(list)
    for packet in protos.Trace.FromString(content).packet:
        kinds.update(key.name for key, _ in packet.ListFields())
        names.update({entry.iid: entry.name for entry in packet.interned_data.event_names})
        if packet.HasField("track_descriptor"):
            one = packet.track_descriptor
            title = one.process.process_name or one.thread.thread_name or one.name
            tracks[one.uuid] = f"{tracks.get(one.parent_uuid, '')}/{title}"
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        track = tracks.get(event.track_uuid, "")
        if event.type == protos.TrackEvent.TYPE_COUNTER:
            number = event.counter_value or event.double_counter_value
            counters[track].append([packet.timestamp, number])
        elif event.type == protos.TrackEvent.TYPE_SLICE_END:
            begun = open_[event.track_uuid].pop()
            begun["duration"] = packet.timestamp - begun["start"]
        else:
            name = event.name or names[event.name_iid]
            slices.append({"track": track, "start": packet.timestamp, "name": name})
            open_[event.track_uuid].append(slices[-1])
    return {
        "bytes": len(content),
        "packets": dict(kinds),
        "tracks": sorted(tracks.values()),
        "slices": sorted(slices, key=lambda s: (s["track"], s["start"], -s.get("duration", 0))),
        "counters": dict(counters),
    }


Difference = tuple[str, str, str, str]  # path with * for what varies, exact path, before, after


def differences(before: Any, after: Any, path: str = "", exact: str = "") -> Iterator[Difference]:
    """Where two values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            here = f"{path}.{key}".lstrip("."), f"{exact}.{key}".lstrip(".")
            if key not in after or key not in before:
                only = ("there", "missing") if key in before else ("missing", "there")
                yield (*here, *only)
            else:
                yield from differences(before[key], after[key], *here)
    elif isinstance(before, list) and isinstance(after, list):
        yield from of_lists(before, after, path, exact)
    elif not same(before, after):
        yield path, exact, shown(before), shown(after)


def same(before: Any, after: Any) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        both_nan = math.isnan(before) and math.isnan(after)
        return both_nan or math.isclose(before, after, rel_tol=1e-12)
    return type(before) is type(after) and before == after


def of_lists(before: list[Any], after: list[Any], path: str, exact: str) -> Iterator[Difference]:
    keys = telling_apart(before, after)
    if keys:
        yield from of_rows(by_keys(before, keys), by_keys(after, keys), path, exact)
    elif len(before) == len(after) and not isinstance(before, Lines):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}[*]", f"{exact}[{number}]")
    elif len(before) + len(after) > MOST_ALIGNED:
        old, new = (collections.Counter(map(shown, side)) for side in (before, after))
        for text, count in (old - new).items():
            yield f"{path}[*]", exact, text, f"missing {count} times"
        for text, count in (new - old).items():
            yield f"{path}[*]", exact, f"missing {count} times", text
    else:
        old, new = (list(map(shown, side)) for side in (before, after))
        matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
        for kind, a, b, c, d in matcher.get_opcodes():
            if kind != "equal":
                for one, other in itertools.zip_longest(old[a:b], new[c:d], fillvalue="missing"):
                    yield f"{path}[*]", f"{exact}[{a}]", one, other


def telling_apart(before: list[Any], after: list[Any]) -> tuple[str, ...]:
    """The first columns that tell rows apart on both sides; none if nothing does."""
    rows = [*before, *after]
    if not before or not after or not all(isinstance(row, dict) for row in rows):
        return ()
    keys = [key for key, value in before[0].items() if not isinstance(value, (dict, list, float)) and key in after[0]]
    for count in range(1, len(keys) + 1):
        chosen = tuple(keys[:count])
        if all(len(by_keys(rows, chosen)) == len(rows) for rows in (before, after)):
            return chosen
    return ()


def by_keys(rows: Iterable[dict[str, Any]], keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {" ".join(str(row.get(key)) for key in keys): row for row in rows}


def of_rows(before: Any, after: Any, path: str, exact: str) -> Iterator[Difference]:
    for key in before | after:
        here = f"{path}[*]", f"{exact}[{key}]"
        if key not in after:
            yield (*here, "there", "missing")
        elif key not in before:
            yield (*here, "missing", "there")
        else:
            yield from differences(before[key], after[key], *here)
    common = [[key for key in side if key in before and key in after] for side in (before, after)]
    if common[0] == common[1]:
        return
    numbers = {k for row in before.values() for k, x in row.items() if isinstance(x, int | float)}
    rows = [[side[key] for key in order] for side, order in zip((before, after), common, strict=True)]
    if not any([r.get(n) for r in rows[0]] == [r.get(n) for r in rows[1]] for n in numbers):
        at = next(i for i, (a, b) in enumerate(zip(*common, strict=True)) if a != b)
        yield f"{path} order", f"{exact}[{at}]", shown(common[0][at]), shown(common[1][at])


def shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 120 else f"{text[:60]} ... {text[-50:]} ({len(text)} characters)"


class Report:
    """All differences, grouped by verb and path, then by the pair of values."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str], dict[tuple[str, str], list[tuple[str, str]]]] = {}

    def compare(self, arguments: Sequence[str], before: Path, after: Path, renamed: Renamed) -> None:
        """Adds the differences between the results of a command, each in a folder."""
        if identical(before, after):
            return
        old = renamed.before(values(before, arguments))
        new = renamed.after(values(after, arguments))
        command = " ".join(word.removeprefix("in/") for word in arguments)
        for path, exact, one, other in differences(old, new):
            group = self.groups.setdefault((arguments[0], path), {})
            group.setdefault((one, other), []).append((command, exact))

    def show(self) -> int:
        """Prints them and returns how many there are."""
        for (verb, path), pairs in sorted(self.groups.items()):
            places = list(itertools.chain.from_iterable(pairs.values()))
            commands = {command for command, _ in places}
            print(f"\n{verb}  {path}: {len(places):,} differences in {len(commands):,} commands")
            most = sorted(pairs.items(), key=lambda item: -len(item[1]))
            for (old, new), found in most[:SHOWN]:
                print(f"{len(found):8,} x  {old}  ->  {new}")
                print(f"            thence {found[0][0]}: {found[0][1]}")
            if len(most) > SHOWN:
                print(f"            and {len(most) - SHOWN:,} other pairs of values")
        return sum(len(found) for pairs in self.groups.values() for found in pairs.values())


def identical(before: Path, after: Path) -> bool:
    """Whether all files of two results have the same bytes."""
    sides = [{path.relative_to(side): path for path in side.rglob("*") if path.is_file()} for side in (before, after)]
    return sides[0].keys() == sides[1].keys() and all(
        path.read_bytes() == sides[1][name].read_bytes() for name, path in sides[0].items()
    )
