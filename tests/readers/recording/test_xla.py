"""Recordings of JAX programs: which program, HLO op and compile phase everything is."""

from __future__ import annotations

import gzip
import importlib.util
import json
import lzma
import os
import subprocess
import sys
import textwrap
import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

import thence
from helpers import DATA
from protowire import every, fields, first, message
from thence.capture.cuda import nvtx
from thence.capture.jax import programs as xla_programs
from thence.capture.jax.programs import XlaPrograms
from thence.capture.recorder.names import Names
from thence.capture.recorder.parts import Parts
from thence.model.formats import RECORDING, RECORDING_VERSION
from thence.readers.jax.hlo import decode_hlo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JAX = DATA / "jax"
COMPILED = "/jax/core/compile/backend_compile_duration"
NUMBER = 14654
"""XLA's number of the recorded program (the files of its dump were named so)."""
SECOND = 1_000_000_000


# --- what the tests make recordings of ------------------------------------------------------------


def kernels() -> list[dict[str, Any]]:
    """What CUPTI recorded of four steps, in order."""
    found = json.loads(gzip.decompress((JAX / "command_buffer.kernels.json.gz").read_bytes()))
    return sorted(found, key=lambda kernel: kernel["start_ns"])


def module(number: int, before: bytes = b"", after: bytes = b"") -> bytes:
    """The HLO of those steps as JAX hands it out (HloModuleProto): with another number."""
    content = lzma.decompress((JAX / "command_buffer.hlo.pb.xz").read_bytes())
    own = first(content)[1]
    text = message(*((key, number if key == 5 else value) for key, value in fields(own)))
    return text.replace(before, after) if before else text


def thunks() -> list[tuple[int, str]]:
    """Number and HLO instruction of the thunks of one step that run kernels, in order, by XLA's own list."""
    rows = []
    for thunk in every((JAX / "command_buffer.thunk_metadata.pb").read_bytes(), 1):
        told = first(thunk)
        info = first(told[1])
        if 3 in info and told[2] != b"kCopy":
            rows.append((info[3], info[1].decode()))
    return sorted(rows)


class Executable:
    """What JAX's client lists."""

    def __init__(self, name: str, *modules: bytes, fingerprint: bytes | None = None) -> None:
        self.fingerprint = fingerprint
        self._modules = [SimpleNamespace(name=name, as_serialized_hlo_module_proto=lambda m=m: m) for m in modules]

    def hlo_modules(self) -> list[Any]:
        return self._modules


class Jax:
    """The parts of JAX that are asked: its clients and its events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executables: list[Executable] = []
        self.on_cpu: list[Executable] = []
        self.listeners: list[Any] = []
        self.now = 0
        clients = {
            "cuda": SimpleNamespace(platform="cuda", live_executables=lambda: [*self.executables]),
            "cpu": SimpleNamespace(platform="cpu", live_executables=lambda: [*self.on_cpu]),
        }
        monitoring = SimpleNamespace(register_event_duration_secs_listener=self.listeners.append)
        for name, content in {
            "jax": SimpleNamespace(),
            "jax._src": SimpleNamespace(),
            "jax._src.monitoring": monitoring,
            "jax._src.xla_bridge": SimpleNamespace(_backends=clients),
        }.items():
            monkeypatch.setitem(sys.modules, name, content)
        monkeypatch.setattr(xla_programs, "time", SimpleNamespace(time_ns=lambda: self.now))

    def compile(self, executable: Executable, now: int) -> None:
        """JAX compiles on this thread, and says so."""
        self.now = now
        self.executables.insert(0, executable)
        for listener in self.listeners:
            listener(COMPILED, 0.5, fun_name="jit(f)")


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Jax:
    return Jax(monkeypatch)


class Made:
    """A recording, written part by part as the recorder does."""

    def __init__(self, directory: Path, pid: int = 77) -> None:
        self.parts = Parts(directory, lambda: f"host-rank0-{pid}")
        self.names = Names()
        self.steps = kernels()
        self.began = self.steps[0]["start_ns"] - 10 * SECOND
        self.thread = threading.get_native_id()
        self._ranges = 0

    @property
    def folder(self) -> Path:
        assert self.parts.folder is not None
        return self.parts.folder

    def range(self, name: str, start: int, end: int, thread: int | None = None) -> None:
        """An NVTX range of XLA's domain."""
        self._ranges += 1
        self.parts.add(
            "ranges",
            {
                "flags": np.array([2, 4], np.uint32),  # CUPTI_ACTIVITY_FLAG_MARKER_START, _END
                "time": np.array([start, end], np.uint64),
                "id": np.array([self._ranges] * 2, np.uint32),
                "process": np.array([77, 77], np.uint32),
                "thread": np.array([thread or self.thread] * 2, np.uint32),
                "name": np.array([self.names.of_text(name), 0], np.uint32),
                "domain": np.array([self.names.of_text("TSL")] * 2, np.uint32),
            },
        )

    def compilation(self, number: int, start: int, name: str = "jit_train_step") -> int:
        """The ranges of a compilation of 500 ms; the moment at which it ended."""
        self.range(f"XlaCompile:#module={name}#", start, start + SECOND // 2)
        told = f"module={name},program_id={number}#"
        self.range(f"XlaPassPipeline:#name=optimization,{told}", start + 100, start + SECOND // 4)
        self.range(f"XlaPass:#name=dce,{told}", start + 200, start + 300)
        return start + SECOND // 2

    def launches(self, number: int = NUMBER) -> None:
        """The four steps, each a graph launched inside the ranges of its program and thunk."""
        column = {key: [kernel[key] for kernel in self.steps] for key in self.steps[0]}
        rows = len(self.steps)
        nothing = dict.fromkeys(
            (
                "registers", "device", "context", "grid_x", "grid_y", "grid_z", "block_x", "block_y",
                "block_z", "static_shared", "dynamic_shared",
            ),
            np.zeros(rows, np.uint32),
        )  # fmt: skip
        self.parts.add(
            "kernels",
            {
                **nothing,
                "start": np.array(column["start_ns"], np.uint64),
                "end": np.array(column["end_ns"], np.uint64),
                "stream": np.full(rows, 14, np.uint32),
                "correlation": np.array(column["correlation"], np.uint32),
                "name": np.array([self.names.of_text(n) for n in column["name"]], np.uint32),
                "node": np.array(column["graph_node_id"], np.uint64),
                "graph": np.array(column["graph_id"], np.uint32),
            },
        )
        for correlation in dict.fromkeys(column["correlation"]):
            start = next(k["start_ns"] - 50_000 for k in self.steps if k["correlation"] == correlation)
            told = f"hlo_module=jit_train_step,program_id={number}#"
            self.range(f"XlaModule:#{told}", start, start + 40_000)
            first, _ = thunks()[0]
            self.range(f"Thunk:#hlo_op=command_buffer_{first}#", start + 1000, start + 39_000)
            self.parts.add(
                "calls",
                {
                    "function": np.array([self.names.of_text("cuGraphLaunch")], np.uint32),
                    "start": np.array([start + 2000], np.uint64),
                    "end": np.array([start + 30_000], np.uint64),
                    "thread": np.array([self.thread], np.uint32),
                    "correlation": np.array([correlation], np.uint32),
                    "api": np.array([4], np.uint8),  # CUPTI_ACTIVITY_KIND_DRIVER
                },
            )

    def save(self) -> Path:
        """All of it, on disk: the directory."""
        told = {
            "format": RECORDING, "version": RECORDING_VERSION, "rank": 0, "pid": 77, "began_ns": self.began,
            "finished": True,
        }  # fmt: skip
        self.parts.write(self.parts.take(self.names.new()), lambda: told)
        return self.parts.directory


def instructions(trace: thence.Trace) -> dict[int, list[str | None]]:
    """HLO op of each kernel in the order of their starts, by launch."""
    found: dict[int, list[str | None]] = {}
    for launch, hlo in trace.activities.sort("start").select("correlation", "hlo").iter_rows():
        found.setdefault(launch, []).append(hlo)
    return found


# --- the reader -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[thence.Trace]:
    """The steps, and another program of that name compiled before and never run."""
    with pytest.MonkeyPatch.context() as patch:
        yield with_two_programs(tmp_path_factory.mktemp("recorded"), Jax(patch))


def with_two_programs(folder: Path, jax: Jax) -> thence.Trace:
    made = Made(folder)
    other = made.compilation(15, made.began + SECOND)
    ended = made.compilation(NUMBER, made.began + 3 * SECOND)
    made.launches()
    made.save()
    programs = XlaPrograms()
    programs.look()
    jax.compile(Executable("jit_train_step", module(0, b"input_gather", b"other_gather")), other)
    jax.compile(Executable("jit_train_step", module(1)), ended)
    programs.end()
    programs.save(made.folder)
    return thence.open(folder)


def test_every_graphed_kernel_has_the_instruction_of_its_thunk(recorded: thence.Trace) -> None:
    found = instructions(recorded)
    assert len(found) == 4
    assert all(ran == [name for _, name in thunks()] for ran in found.values())
    assert recorded.meta.warnings == ()
    recorded.self_check()


def test_source_lines_are_those_of_the_module_that_ran(recorded: thence.Trace) -> None:
    sources = recorded.activities["source"].cast(pl.String)
    assert sources.null_count() == 0
    assert sources.str.contains(r"jax_gpt\.py:\d+ |jax_graph_nodes\.py:\d+ ").all()
    assert [m.id for m in recorded.recorded.hlo] == [NUMBER]


def test_executions_and_compile_phases_are_there(recorded: thence.Trace) -> None:
    programs = recorded.tables.programs.with_columns(pl.col("name").cast(pl.String))
    launches = {kernel["correlation"] for kernel in kernels()}
    assert programs["name"].to_list() == ["jit_train_step"] * len(launches)
    assert programs["execution"].to_list() == [0, 1, 2, 3]
    compiled = recorded.tables.host.filter(pl.col("category") == "compile")
    names = compiled["name"].cast(pl.String).str.extract(r"^(\w+)").value_counts()
    assert dict(names.iter_rows()) == {"XlaCompile": 2, "XlaPassPipeline": 2, "XlaPass": 2}
    assert recorded.compile().wall_ns == SECOND
    summary = recorded.report("hlo")
    assert summary.attributed_ns["hlo"] == sum(k["end_ns"] - k["start_ns"] for k in kernels())


def test_the_flame_graph_has_the_scopes_of_the_program(recorded: thence.Trace) -> None:
    names = set(recorded.flame("op_name").nodes["name"].cast(pl.String))
    assert {"jit(train_step)", "jvp(block0)", "transpose(jvp(block3))", "attention", "mlp"} <= names


def test_programs_without_a_compilation_are_told_apart_by_their_order(tmp_path: Path, jax: Jax) -> None:
    # Out of a cache: JAX says that it has an executable, XLA compiled nothing.
    made = Made(tmp_path)
    made.launches()
    made.save()
    programs = XlaPrograms()
    programs.look()
    jax.compile(Executable("jit_train_step", module(4)), made.began)
    programs.save(made.folder)
    assert all(ran == [name for _, name in thunks()] for ran in instructions(thence.open(tmp_path)).values())


def test_modules_that_cannot_be_told_apart_are_left_out_and_named(tmp_path: Path, jax: Jax) -> None:
    made = Made(tmp_path)
    made.launches()
    made.save()
    jax.executables += [
        Executable("jit_train_step", module(1, b"input_gather", b"other_gather")),
        Executable("jit_train_step", module(2)),
    ]
    programs = XlaPrograms()
    programs.look()  # compiled before the recording began
    programs.save(made.folder)
    trace = thence.open(tmp_path)
    assert {hlo for ran in instructions(trace).values() for hlo in ran} == {None}
    assert any("several compilations of jit_train_step" in text for text in trace.meta.warnings)
    trace.self_check()


def test_without_ranges_of_xla_the_recording_says_what_it_lacks(tmp_path: Path, jax: Jax) -> None:
    made = Made(tmp_path)
    made.launches()
    made.parts._pending.pop("ranges")  # as with --no-nvtx
    made.save()
    jax.executables.append(Executable("jit_train_step", module(2)))
    programs = XlaPrograms()
    programs.look()
    programs.save(made.folder)
    trace = thence.open(tmp_path)
    assert trace.tables.gpu.height == len(kernels())
    assert trace.tables.programs.is_empty()
    assert any("no NVTX ranges of XLA" in text for text in trace.meta.warnings)


@pytest.mark.parametrize("damage", ["module", "no index", "hostile"])
def test_damage_costs_no_more_than_the_hlo(tmp_path: Path, jax: Jax, damage: str) -> None:
    made = Made(tmp_path)
    ended = made.compilation(NUMBER, made.began + SECOND)
    made.launches()
    made.save()
    programs = XlaPrograms()
    programs.look()
    jax.compile(Executable("jit_train_step", module(2)), ended)
    programs.save(made.folder)
    (file,) = (made.folder / "hlo").glob("*.hlo.pb")
    index = made.folder / "hlo" / "compiled.json"
    if damage == "module":
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "no index":
        index.unlink()
    else:
        told = json.loads(index.read_text())
        told["modules"].append({"file": "../../../etc/passwd", "name": "jit_x", "thread": 1, "ended_ns": -5})
        told["modules"][0] |= {"thread": None, "ended_ns": 1 << 62}
        index.write_text(json.dumps(told))
    trace = thence.open(tmp_path)
    known = {hlo for ran in instructions(trace).values() for hlo in ran} != {None}
    # Where the index is gone there is only one module of that name: it must be it.
    assert known == (damage != "module")
    assert trace.tables.gpu.height == len(kernels())
    trace.self_check()
    if damage == "no index":
        index.write_text("{")
        assert thence.open(tmp_path).recorded.hlo[0].id == trace.recorded.hlo[0].id


# --- a recording of a real GPU: products of different shapes, one after the other ------------------

SIZES = (256, 1024, 512, 2048, 128, 4096, 768, 384, 3072, 640, 256)
"""Columns of each factor; rows are those of the one before. The first has 512 rows."""
EXECUTIONS = 23


@pytest.fixture(scope="module")
def chain() -> thence.Trace:
    return thence.open(JAX / "recording")


def of_chain(trace: thence.Trace) -> pl.DataFrame:
    """Activities of the program, as text."""
    activities = trace.activities.with_columns(
        pl.col("program", "op_name", "name", "kind", "hlo", "hlo_rule", "source").cast(pl.String)
    )
    return activities.filter(pl.col("program") == "jit_chain")


def test_kernels_are_those_of_the_chain_in_its_order(chain: thence.Trace) -> None:
    # Each product needs the one before: the order of their starts is that of the program's lines.
    activities = of_chain(chain)
    assert activities["graph"].null_count() == 0
    kernels = activities.filter(pl.col("kind") == "kernel").sort("start")
    wanted = [
        (f"jit(chain)/product{i}/{op}", op == "dot_general")
        for i in range(len(SIZES) - 1)
        for op in ("dot_general", "tanh")
    ]
    of_library = pl.col("name").str.starts_with("nvjet")
    ran = kernels.group_by("correlation", maintain_order=True).agg("op_name", of_library)
    assert ran.height == EXECUTIONS
    for op_names, library in ran.select("op_name", "name").iter_rows():
        assert list(zip(op_names, library, strict=True)) == wanted


def test_copies_move_what_their_instruction_holds(chain: thence.Trace) -> None:
    (module,) = [module for module in chain.recorded.hlo if module.name == "jit_chain"]
    copies = of_chain(chain).filter(pl.col("kind") == "memcpy")
    assert copies.height == EXECUTIONS * (len(SIZES) - 1)
    held = dict(module.instructions.select("name", "result_bytes").iter_rows())
    assert [held[hlo] for hlo in copies["hlo"]] == copies["bytes"].to_list()
    first = copies.filter(pl.col("correlation") == copies["correlation"][0])
    assert sorted(first["bytes"]) == sorted(2 * rows * columns for rows, columns in pairwise(SIZES))


def test_all_of_the_program_has_hlo_and_source(chain: thence.Trace) -> None:
    activities = of_chain(chain)
    assert activities.select("hlo", "source", "op_name").null_count().row(0) == (0, 0, 0)
    assert set(activities["hlo_rule"]) == {"hlo_creation"}
    assert chain.meta.warnings == ()
    chain.self_check()


def test_compilations_of_one_name_are_told_apart(chain: thence.Trace) -> None:
    # Eleven arrays of ones, each made by a program of its own that JAX calls jit_broadcast_in_dim.
    modules = {
        module.id: int(module.instructions.filter(pl.col("opcode") == "fusion")["result_bytes"][0])
        for module in chain.recorded.hlo
        if module.name == "jit_broadcast_in_dim"
    }
    wanted = [2 * rows * columns for rows, columns in pairwise((512, *SIZES))]
    assert [size for _, size in sorted(modules.items())] == wanted
    programs = chain.tables.programs.filter(pl.col("name").cast(pl.String) == "jit_broadcast_in_dim")
    found = [chain.recorded.hlo[i].id for i in programs.sort("start")["hlo"]]
    assert found == sorted(modules)


def test_what_the_autotuner_ran_is_called_so(chain: thence.Trace) -> None:
    rules = chain.tables.places.select(
        pl.col("program", "program_rule", "source_rule").cast(pl.String),
        chain.tables.gpu["name"].cast(pl.String),
        chain.tables.gpu["kind"].cast(pl.String),
    )
    outside = rules.filter(pl.col("program").is_null())
    tuning = outside.filter(pl.col("program_rule") == "autotuning")
    assert outside.filter(pl.col("name").str.contains("Redzone|RepeatBuffer")).height > 0
    assert outside.filter(pl.col("kind") == "kernel").height == (tuning.filter(pl.col("kind") == "kernel").height)
    others = outside.filter(pl.col("program_rule") != "autotuning")
    assert set(others["kind"]) <= {"memcpy"}
    assert 0 < others.height < 20  # constants and weights, put on the device by the program
    unnumbered = rules.filter(pl.col("program").cast(pl.String) == "extracted")
    assert unnumbered.height > 0
    assert set(unnumbered["source_rule"]) == {"autotuning"}


# --- the collection ---------------------------------------------------------------------------------


def test_modules_are_written_once_and_those_of_the_cpu_never(tmp_path: Path, jax: Jax) -> None:
    programs = XlaPrograms()
    jax.executables = [Executable("jit_old", b"old")]
    jax.on_cpu = [Executable("jit_host", b"host")]
    programs.look()
    programs.look()
    jax.compile(Executable("jit_f", b"one", fingerprint=b"1"), 5)
    programs.save(tmp_path)
    jax.compile(Executable("jit/../f<g>", b"two"), 6)
    programs.look()
    programs.save(tmp_path)
    files = sorted(p.name for p in (tmp_path / "hlo").iterdir())
    assert files == [
        "00001.jit_old.hlo.pb", "00002.jit_f.hlo.pb", "00003.jit_.._f_g_.hlo.pb", "compiled.json",
    ]  # fmt: skip
    index = json.loads((tmp_path / "hlo" / "compiled.json").read_text())
    here = threading.get_native_id()
    assert [(m["name"], m["thread"], m["ended_ns"]) for m in index["modules"]] == [
        ("jit_old", None, None), ("jit_f", here, 5), ("jit/../f<g>", here, 6),
    ]  # fmt: skip
    assert (tmp_path / "hlo" / files[1]).read_bytes() == b"one"


def test_what_is_compiled_after_the_end_is_not_taken(tmp_path: Path, jax: Jax) -> None:
    programs = XlaPrograms()
    programs.look()
    programs.end()
    jax.compile(Executable("jit_f", b"one"), 5)
    programs.look()
    programs.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_jax_that_answers_otherwise_harms_nothing(
    tmp_path: Path, jax: Jax, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    programs = XlaPrograms()
    programs.look()
    strange = SimpleNamespace(_backends={"cuda": SimpleNamespace(platform="cuda")})
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", strange)
    jax.compile(Executable("jit_f", b"one"), 5)
    programs.look()
    programs.save(tmp_path)
    assert [record.message for record in caplog.records if "live_executables" in record.message]
    assert len(caplog.records) == 1


def test_a_full_disk_is_said_once(tmp_path: Path, jax: Jax, caplog: pytest.LogCaptureFixture) -> None:
    programs = XlaPrograms()
    programs.look()
    (tmp_path / "hlo").write_text("a file is in the way")
    for moment in (5, 6):
        jax.compile(Executable("jit_f", b"%d" % moment), moment)
        programs.save(tmp_path)
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.records[0].message


def test_nvtx_is_collected_while_recording_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nvtx.VARIABLE, raising=False)
    monkeypatch.setattr(nvtx, "find_libcupti", lambda: "/lib/libcupti.so.13")
    assert nvtx.collect_nvtx()
    assert os.environ[nvtx.VARIABLE] == "/lib/libcupti.so.13"
    assert not nvtx.collect_nvtx()  # somebody does already
    nvtx.leave_nvtx()
    assert nvtx.VARIABLE not in os.environ
    monkeypatch.setattr(nvtx, "find_libcupti", lambda: "libcupti.so.13")
    assert not nvtx.collect_nvtx()  # NVTX could load another copy


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_a_real_jax_gives_what_it_compiles_before_and_meanwhile(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        import jax, jax.numpy as jnp
        from thence.capture.jax.programs import XlaPrograms

        jax.jit(lambda x: jnp.sin(x) + 1, inline=False)(jnp.ones(3))
        before = jax.jit(jnp.cumsum)
        before(jnp.ones(4))
        programs = XlaPrograms(frozenset())
        programs.look()

        def freed(x):
            return x * 2

        jax.jit(freed).lower(jnp.ones(5)).compile()
        programs.end()
        programs.save(Path(sys.argv[1]))
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        check=True, timeout=120, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    index = json.loads((tmp_path / "hlo" / "compiled.json").read_text())
    seen = {m["name"]: m["ended_ns"] is not None for m in index["modules"]}
    assert seen["jit_cumsum"] is False
    assert seen["jit_freed"] is True
    (file,) = [m["file"] for m in index["modules"] if m["name"] == "jit_freed"]
    module = decode_hlo((tmp_path / "hlo" / file).read_bytes(), file)
    assert module.name == "jit_freed"
    assert module.instructions["step"].drop_nulls().len() > 0
    assert "freed" in module.frames["function"].to_list()
