"""Flame graphs as files: folded stacks read back, speedscope by its schema, pages that hold any name."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from html.parser import HTMLParser
from importlib import resources
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import polars as pl
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import ExportProfilesServiceRequest

from helpers import FSDP, STACK, run_thence, shared
from thence.analysis.flame.answer import Flame, Split
from thence.analysis.flame.prefix_tree import PHASE_SUMS, Groups, build_tree
from thence.cli import main
from thence.cli.flame import command
from thence.cli.verbs import group as main_group
from thence.model.places import FLAMES
from thence.model.tables import Meta
from thence.writers.flame.chart import IMAGE_WIDTH, flame_chart
from thence.writers.flame.folded import folded_lines
from thence.writers.flame.otlp import otlp_file
from thence.writers.flame.pprof import pprof_file
from thence.writers.flame.speedscope import speedscope_document
from thence.writers.page.flame_page import flame_html

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--",
    "a;b",
    "# comment",
    "two\nlines 12",
    "\u2028\u2029&amp;",
    "\x1b[31m",
    "{{data}}",
    "日本語 🙂",
    "",
    "ends in a number 5",
)


def made(stacks: Sequence[tuple[tuple[str, ...], int]]) -> Flame:
    """A flame graph of these stacks and times."""
    frames = [tuple((name, "frame", None) for name in names) for names, _ in stacks]
    times = [ns for _, ns in stacks]
    sums = pl.DataFrame({"self_ns": times, "count": 1, **dict.fromkeys(PHASE_SUMS, 0)})
    nodes = build_tree(Groups.of_paths(frames, sums.cast(pl.Int64)), "GPU time")
    total = sum(times)
    meta = Meta(inputs=("<b>.json",))
    return Flame(meta, "label", "label", Split.NONE, (0,), 1, total, total, total, nodes, ())


def parsed(lines: str) -> dict[tuple[str, ...], int]:
    """Folded stacks as flamegraph.pl and inferno take them apart: the value follows the last space."""
    found: dict[tuple[str, ...], int] = {}
    for line in lines.split("\n")[:-1]:
        assert not line.startswith("#")
        stack, _, value = line.rpartition(" ")
        path = tuple(stack.split(";"))
        found[path] = found.get(path, 0) + int(value)
    return found


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["flame", *map(str, arguments)])
    printed = capsys.readouterr()
    assert stopped.value.code == code, printed.err
    return printed.out if code == 0 else printed.err


def test_folded_stacks_read_back() -> None:
    graph = shared(STACK).flame("module")
    found = parsed("".join(folded_lines(graph)))
    assert found == {tuple(re.sub(";", "\uff1b", name) for name in names): ns for names, ns in graph.stacks()}
    assert sum(found.values()) == graph.total_ns


def test_folded_frames_hold_any_name() -> None:
    stacks = [((name, f"{number} kernel"), 10 + number) for number, name in enumerate(HOSTILE)]
    found = parsed("".join(folded_lines(made(stacks))))
    assert sorted(found.values()) == sorted(ns for _, ns in stacks)
    assert ("a\uff1bb", "2 kernel") in found
    assert ("\uff03 comment", "3 kernel") in found
    assert ("two lines 12", "4 kernel") in found
    assert ("(no name)", "9 kernel") in found
    assert all(len(path) == 2 for path in found)


def check_speedscope(document: dict[str, Any]) -> None:
    """The schema of a file with sampled profiles, from speedscope's public description of its format."""
    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert document.keys() <= {"$schema", "shared", "profiles", "name", "activeProfileIndex", "exporter"}  # fmt: skip
    assert document.keys() >= {"$schema", "shared", "profiles"}
    frames = document["shared"]["frames"]
    for frame in frames:
        assert isinstance(frame["name"], str)
        assert frame.keys() <= {"name", "file", "line", "col"}
    assert 0 <= document["activeProfileIndex"] < len(document["profiles"])
    for profile in document["profiles"]:
        keys = {"type", "name", "unit", "startValue", "endValue", "samples", "weights"}
        assert profile.keys() == keys
        assert profile["type"] == "sampled"
        assert profile["unit"] == "nanoseconds"
        assert len(profile["samples"]) == len(profile["weights"])
        assert all(0 <= i < len(frames) for sample in profile["samples"] for i in sample)
        assert all(type(weight) is int and weight > 0 for weight in profile["weights"])
        assert profile["endValue"] - profile["startValue"] == sum(profile["weights"])


def test_speedscope_follows_its_schema_and_loses_nothing() -> None:
    graph = shared(*FSDP[:2]).flame("ops")
    document = json.loads(json.dumps(speedscope_document(graph, "thence")))
    check_speedscope(document)
    frames = [frame["name"] for frame in document["shared"]["frames"]]
    (profile,) = document["profiles"]
    found = [
        (tuple(frames[i] for i in sample), weight)
        for sample, weight in zip(profile["samples"], profile["weights"], strict=True)
    ]
    assert found == list(graph.stacks())


def test_speedscope_holds_any_name() -> None:
    document = speedscope_document(made([((name,), 1) for name in HOSTILE]), "thence")
    check_speedscope(json.loads(json.dumps(document)))
    assert {frame["name"] for frame in document["shared"]["frames"]} == set(HOSTILE)


class _Page(HTMLParser):
    """Elements of a page, what they name outside of it, and the text of its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.data = self.title = self.policy = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        self.outside += [name for name in ("src", "href", "action") if name in given]
        self._inside = "data" if given.get("id") == "data" else tag
        if given.get("http-equiv"):
            self.policy = given.get("content") or ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        if self._inside == "title":
            self.title += data

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 - its signature
        self._inside = ""


def test_a_page_holds_any_name_as_data_alone() -> None:
    harmless = _Page(flame_html(made([(("a",), 1)])))
    text = flame_html(made([((name, "kernel"), 1) for name in HOSTILE]))
    page = _Page(text)
    assert page.tags == harmless.tags
    assert not re.search("[<>&\u2028\u2029]", page.data)
    assert set(json.loads(page.data)["strings"]) == {*HOSTILE, "kernel", "GPU time"}
    assert page.title.endswith("<b>.json")


def test_a_page_needs_nothing_from_outside() -> None:
    page = _Page(flame_html(made([(("a",), 1)])))
    template = (resources.files("thence.writers.page") / "templates" / "flame.html").read_text("utf-8")
    assert page.outside == []
    assert page.policy == ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'")
    for forbidden in ("http:", "https:", "//cdn", "@import", "url(", "innerHTML", "eval(", "fetch("):
        assert forbidden not in template, forbidden


def test_the_command_line_knows_every_kind() -> None:
    (by,) = [option for option in command.params if option.name == "by"]
    assert tuple(by.type.choices) == FLAMES


def test_the_suffix_says_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.html", "a.folded", "a.speedscope.json"):
        run(capsys, STACK, "-o", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.folded", "a.html", "a.speedscope.json",
    ]  # fmt: skip
    check_speedscope(json.loads((tmp_path / "a.speedscope.json").read_text()))
    total = shared(STACK).flame().total_ns
    assert sum(parsed((tmp_path / "a.folded").read_text()).values()) == total
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert "must end in one of" in run(capsys, STACK, "-o", tmp_path / "a.png", code=2)


def test_a_file_is_overwritten_only_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.folded"
    path.write_text("mine")
    assert "exists already; --force replaces it" in run(capsys, STACK, "-o", path, code=2)
    assert path.read_text() == "mine"
    run(capsys, STACK, "-o", path, "--force")
    assert path.read_text() != "mine"
    assert "there is no folder" in run(capsys, STACK, "-o", tmp_path / "no" / "a.html", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.folded"]


def test_a_dash_prints_folded_stacks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*FSDP[:2], "-o", "-", "--by", "ops", "--rank", "1", "--split", "phase")
    found = parsed(run(capsys, *arguments, "--idle", "exclude"))
    assert sum(found.values()) == shared(FSDP[1]).report().sum_ns
    assert {"forward", "backward"} <= {path[0] for path in found}


def test_a_pipe_gets_utf8() -> None:
    done = run_thence("flame", STACK, "-o", "-", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert parsed(done.stdout.decode())
    assert done.stderr == b""


SVG = "{http://www.w3.org/2000/svg}"


def image_of(flame: Flame) -> str:
    return flame_chart(flame).to_svg(IMAGE_WIDTH)


def svg_boxes(image: str) -> list[tuple[str, float, float, float]]:
    """Name, and x in %, y in px and width in % of every frame of the image."""
    boxes = []
    for box in ET.fromstring(image).iter(f"{SVG}rect"):
        tip = box.findtext(f"{SVG}title")
        assert tip is not None
        x, width = (float(box.attrib[key].removesuffix("%")) for key in ("x", "width"))
        boxes.append((tip.split("\n")[0], x, float(box.attrib["y"]), width))
    return boxes


def test_svg_frames_are_as_wide_as_their_time_and_below_the_frame_around() -> None:
    """Expected by hand: 100 % stand for 1,000 ns; larger siblings come first."""
    stacks = ((("a", "b"), 300), (("a", "c"), 500), (("d",), 200))
    boxes = {tip: (x, y, width) for tip, x, y, width in svg_boxes(image_of(made(stacks)))}
    expected = {  # start and width in ns, row
        "GPU time": (0, 1000, 0), "a": (0, 800, 1), "d": (800, 200, 1), "c": (0, 500, 2), "b": (500, 300, 2),
    }  # fmt: skip
    assert boxes.keys() == expected.keys()
    for name, (start, ns, row) in expected.items():
        x, y, width = boxes[name]
        assert x == pytest.approx(start / 10, abs=0.01)
        assert width == pytest.approx(ns / 10, abs=0.01)
        assert y == 18 * row


def test_svg_holds_hostile_names_as_text() -> None:
    image = image_of(made([((name,), 100 + number) for number, name in enumerate(HOSTILE)]))
    root = ET.fromstring(image)
    tags = ("svg", "title", "desc", "style", "rect", "text", "g")
    assert {element.tag for element in root.iter()} == {f"{SVG}{tag}" for tag in tags}
    tips = {tip for tip, *_ in svg_boxes(image)}
    assert {"</script><script>alert(1)</script>", "a;b", "日本語 🙂"} <= tips
    assert "\x1b" not in image


def test_svg_says_what_it_does_not_draw() -> None:
    deep = tuple(f"level {number}" for number in range(300))
    image = image_of(made([(deep, 1_000_000), (("tiny",), 1)]))
    assert len(svg_boxes(image)) == 256
    assert "46 of 302 frames are too narrow or too deep" in image


def test_svg_from_the_command_line(tmp_path: Path) -> None:
    done = run_thence("flame", STACK, "--by", "stack", "-o", tmp_path / "flame.svg")
    assert done.returncode == 0, done.stderr
    image = (tmp_path / "flame.svg").read_text(encoding="utf-8")
    assert len(svg_boxes(image)) == len(svg_boxes(image_of(shared(STACK).flame("stack")))) > 10


def test_a_folded_file_is_not_many_times_what_its_names_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names around many stacks are written for each of them: 1,000 times 100 names of 2,000 characters."""
    around = tuple(f"{level} " + "x" * 2000 for level in range(100))
    graph = made([((*around, f"kernel {i}"), 10 + i) for i in range(1000)])
    monkeypatch.setattr("thence.writers.flame.folded.MAX_TEXT", 3_000_000)
    lines = list(folded_lines(graph))
    assert sum(map(len, lines)) < 3_000_000 + 5000 * 1000
    found = parsed("".join(lines))
    assert sum(found.values()) == graph.total_ns
    assert len(found) == 1000
    assert {len(path) for path in found} == {101}


PROFILE = {
    "ValueType": {"type": (1, "int64", 1), "unit": (2, "int64", 1)},
    "Sample": {"location_id": (1, "uint64", 3), "value": (2, "int64", 3)},
    "Line": {"function_id": (1, "uint64", 1), "line": (2, "int64", 1)},
    "Location": {"id": (1, "uint64", 1), "line": (4, "Line", 3)},
    "Function": {"id": (1, "uint64", 1), "name": (2, "int64", 1), "filename": (4, "int64", 1)},
    "Profile": {
        "sample_type": (1, "ValueType", 3),
        "sample": (2, "Sample", 3),
        "location": (4, "Location", 3),
        "function": (5, "Function", 3),
        "string_table": (6, "string", 3),
        "duration_nanos": (10, "int64", 1),
        "comment": (13, "int64", 3),
    },
}
"""Fields of github.com/google/pprof's profile.proto: number, type, and 3 where they repeat."""


def profile(content: bytes) -> Any:
    """A pprof file as Google's protobuf reads it."""
    kinds = {"int64": 3, "uint64": 4, "string": 9}
    file = descriptor_pb2.FileDescriptorProto(name="profile_of_tests.proto", package="tests", syntax="proto3")
    for message, fields in PROFILE.items():
        described = file.message_type.add(name=message)
        for name, (number, kind, label) in fields.items():
            of_message = {} if kind in kinds else {"type_name": f".tests.{kind}"}
            described.field.add(name=name, number=number, label=label, type=kinds.get(kind, 11), **of_message)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("tests.Profile"))
    return kind.FromString(gzip.decompress(content))


def test_pprof_has_the_stacks_with_files_and_lines() -> None:
    stacks = [
        (("train.py:45 step", "model.py:27 Block.forward", "gemm<1>"), 70),
        (("train.py:45 step", "torch/nn/linear.py(130): forward"), 25),
        (("train.py:45 step",), 5),
        ((HOSTILE[0], "two\nlines 12"), 1),
    ]
    flame = dataclasses.replace(made(stacks), by="stack")
    read = profile(pprof_file(flame))
    texts, functions = read.string_table, {f.id: f for f in read.function}
    assert texts[0] == ""
    places = {
        location.id: (
            texts[functions[line.function_id].filename], line.line, texts[functions[line.function_id].name]
        )
        for location in read.location for line in location.line
    }  # fmt: skip
    step = ("train.py", 45, "step")
    assert {tuple(places[i] for i in s.location_id): list(s.value) for s in read.sample} == {
        (("", 0, "gemm<1>"), ("model.py", 27, "Block.forward"), step): [70],
        (("torch/nn/linear.py", 130, "forward"), step): [25],
        (step,): [5],
        (("", 0, "two\ufffdlines 12"), ("", 0, HOSTILE[0])): [1],
    }
    assert [(texts[t.type], texts[t.unit]) for t in read.sample_type] == [("gpu_time", "nanoseconds")]
    assert read.duration_nanos == flame.span_ns
    assert pprof_file(flame) == pprof_file(flame)


def test_otlp_has_the_stacks_with_files_lines_and_frame_types() -> None:
    stacks = [
        (("train.py:45 step", "model.py:27 Block.forward", "gemm<1>"), 70),
        (("train.py:45 step", "torch/nn/linear.py(130): forward"), 25),
        (("two\nlines 12",), 1),
    ]
    flame = dataclasses.replace(made(stacks), by="stack", start_ns=5)
    kernel = pl.col("name") == "gemm<1>"
    nodes = flame.nodes.with_columns(kind=pl.when(kernel).then(pl.lit("compute")).otherwise("kind"))
    flame = dataclasses.replace(flame, nodes=nodes, meta=Meta(inputs=("a",), epoch_ns=1_700_000_000_000_000_000))
    request = ExportProfilesServiceRequest.FromString(otlp_file(flame, "training"))
    tables = request.dictionary
    texts = tables.string_table
    for table in (tables.mapping_table, tables.location_table, tables.function_table, tables.link_table, texts):
        assert not table[0] or not table[0].ByteSize()
    assert not tables.attribute_table[0].ByteSize()
    assert not tables.stack_table[0].ByteSize()

    def frame(index: int) -> tuple[str, int, str, str | None]:
        location = tables.location_table[index]
        (line,) = location.lines
        function = tables.function_table[line.function_index]
        kinds = [tables.attribute_table[i] for i in location.attribute_indices]
        assert all(texts[kind.key_strindex] == "profile.frame.type" for kind in kinds)
        kind = kinds[0].value.string_value if kinds else None
        return texts[function.filename_strindex], line.line, texts[function.name_strindex], kind

    (resource,) = request.resource_profiles
    assert [(a.key, a.value.string_value) for a in resource.resource.attributes] == [("service.name", "training")]
    (profile,) = resource.scope_profiles[0].profiles
    step = ("train.py", 45, "step", "cpython")
    assert {
        tuple(map(frame, tables.stack_table[s.stack_index].location_indices)): list(s.values) for s in profile.samples
    } == {
        (("", 0, "gemm<1>", "cuda"), ("model.py", 27, "Block.forward", "cpython"), step): [70],
        (("torch/nn/linear.py", 130, "forward", "cpython"), step): [25],
        (("", 0, "two\ufffdlines 12", None),): [1],
    }
    kind = profile.sample_type
    assert (texts[kind.type_strindex], texts[kind.unit_strindex]) == ("gpu_time", "nanoseconds")
    assert profile.time_unix_nano == 1_700_000_000_000_000_005
    assert profile.duration_nano == flame.span_ns
    assert len(profile.profile_id) == 16
    assert otlp_file(flame, "training") == otlp_file(flame, "training")


def test_pprof_of_a_recording_adds_up_to_its_gpu_time(tmp_path: Path) -> None:
    events = json.loads(gzip.decompress(STACK.read_bytes()))["traceEvents"]
    work = ("kernel", "gpu_memcpy", "gpu_memset")
    total = sum(round(1000 * event["dur"]) for event in events if event.get("cat") in work)
    for by in ("stack", "source", "module"):
        out = tmp_path / f"{by}.pb.gz"
        main_group(["flame", str(STACK), "--by", by, "--idle", "exclude", "-o", str(out)], standalone_mode=False)
        assert sum(sample.value[0] for sample in profile(out.read_bytes()).sample) == total
