"""What `thence doctor` says of machines that are described by hand."""

from __future__ import annotations

import json
import shutil
import sys
from collections import namedtuple
from typing import TYPE_CHECKING, Any

import pytest

from cuda_fakes import FakeCupti, FakeDriver
from thence.capture.cuda import cuda_events, cupti
from thence.cli import main
from thence.cli.doctor import command
from thence.doctor import examine as doctor
from thence.doctor import probe as probing
from thence.doctor.probe import STEPS, probe
from thence.doctor.versions import COMPILED, IN_PYTHON, SCANNER_AS_ASKED, UNPICKLER_AS_ASKED

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FUNCTIONS = ["cuptiGetGraphNodeId", "InitializeInjectionNvtx2"]
H200 = {"name": "NVIDIA H200", "capability": [9, 0]}
GOOD: dict[str, dict[str, Any]] = {
    "driver": {"version": 13000, "devices": [H200, H200]},
    "libcupti": {"path": "/w/libcupti.so.13", "version": 130001, "functions": FUNCTIONS},
    "recording": {"kernel": "thence_doctor", "microseconds": 1.5},
    "graphs": {"node": 1 << 32},
    "counters": {"sampled": ["tensor_cycles"]},
}
INSTALLED = {
    "torch": "2.11.0+cu130",
    "jax": "0.11.2",
    "jax-cuda13-plugin": "0.11.2",
    "cupy-cuda13x": "14.2",
    "triton": "3.6.0",
}
ADMINS_ONLY = "RmProfilingAdminOnly: 1\n"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a driver whose files lie in a folder of the test."""
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x)\n"
    )
    (tmp_path / "params").write_text("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 0\n")
    monkeypatch.setattr(doctor, "_PROC", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda _name: "/opt/nsys")
    monkeypatch.setattr(doctor, "scanner_kind", lambda: COMPILED)
    monkeypatch.setattr(doctor, "unpickler_kind", lambda: COMPILED)
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def examined(
    findings: Mapping[str, Any] | None = None, installed: Mapping[str, str] | None = None
) -> dict[str, doctor.Capability]:
    """What is said of the good machine with some findings replaced."""
    versions = INSTALLED if installed is None else installed
    capabilities = doctor.examine({**GOOD, **(findings or {})}, versions.get)
    return {capability.name: capability for capability in capabilities}


def test_on_a_good_machine_everything_works() -> None:
    found = examined()
    assert [c.name for c in found.values() if not c.works] == []
    assert all(not c.cure for c in found.values())
    assert "580.95.05 for CUDA 13.0; 2 x NVIDIA H200" in found["driver"].found
    assert "1.5 us" in found["recording"].found
    assert "modules and lines" in found["recording"].found
    assert "CUDA 13.1; this one is for CUDA 13.0" in found["graphs"].found
    assert "CuPy 14.2" in found["inside"].found


def test_every_refusal_comes_with_a_way_out() -> None:
    nothing = {step: {"error": "broken"} for step in STEPS}
    found = examined(nothing, {})
    assert [c.name for c in found.values() if c.works] == ["variable", "nsys", "scanner", "unpickler", "disk"]
    assert all(c.found and c.cure for c in found.values() if not c.works)
    # Where the cause is elsewhere, it is pointed to instead of repeated.
    assert found["recording"].cure == "see driver"
    assert found["nvtx"].cure == "see driver"


@pytest.mark.parametrize(
    ("name", "kind", "cure"),
    [
        ("scanner", IN_PYTHON, "C compiler"),
        ("scanner", SCANNER_AS_ASKED, "unset THENCE_SCANNER"),
        ("unpickler", IN_PYTHON, "C compiler"),
        ("unpickler", UNPICKLER_AS_ASKED, "unset THENCE_UNPICKLER"),
    ],
)
def test_a_missing_compiled_reader_is_told(name: str, kind: str, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, f"{name}_kind", lambda: kind)
    found = examined()[name]
    assert not found.works
    assert kind in found.found
    assert cure in found.cure


@pytest.mark.parametrize(
    ("loaded", "hidden", "cure"),
    [
        (True, None, "--gpus all"),
        (False, None, "needs no GPU"),
        (True, "", "hides every GPU"),
        (True, "0", "--gpus all"),
    ],
)
def test_a_driver_that_cannot_be_used(
    machine: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool, hidden: str | None, cure: str
) -> None:
    if not loaded:
        (machine / "version").unlink()
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = examined({"driver": {"error": "cuInit failed"}})["driver"]
    assert not found.works
    assert cure in found.cure


@pytest.mark.parametrize(
    ("code", "params", "root", "cure"),
    [
        (35, "RmProfilingAdminOnly: 0\n", True, "SYS_ADMIN"),
        (999, ADMINS_ONLY, False, "NVreg_RestrictProfilingToAdminUsers=0"),
        (999, ADMINS_ONLY, True, "mode='events'"),
        (39, "", True, "unset that variable"),
    ],
)
def test_a_recording_that_fails(
    machine: Path, monkeypatch: pytest.MonkeyPatch, code: int, params: str, root: bool, cure: str
) -> None:
    (machine / "params").write_text(params)
    monkeypatch.setattr(doctor, "_may_profile", lambda: root)
    if code == 39:
        monkeypatch.setenv("CUDA_INJECTION64_PATH", "/opt/tool.so")
    found = examined({"recording": {"error": "no", "code": code}})
    assert not found["recording"].works
    assert cure in found["recording"].cure
    assert found["measure"].works
    assert "mode='cupti' needs recording" in found["measure"].found


def test_counters_for_administrators_only_do_not_stop_a_recording(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "params").write_text(ADMINS_ONLY)
    monkeypatch.setattr(doctor, "_may_profile", lambda: False)
    assert examined()["recording"].works
    found = examined()["counters"]
    assert not found.works
    assert "administrators only" in found.found
    assert "--cap-add SYS_ADMIN" in found.cure


@pytest.mark.parametrize(
    ("code", "why", "cure", "stalls"),
    [
        (35, "are for administrators only here", "SYS_ADMIN", False),
        (43, "not supported on this MIG device", "record without --counters", False),
        (33, "not possible on this virtual device", "record without --counters", False),
        (26, "another process, samples the counters", "each window is tried again", True),
        (None, "the check was ended by SIGSEGV", "record without --counters", True),
    ],
)
def test_what_sampling_meets_is_said_before_a_recording(code: int | None, why: str, cure: str, stalls: bool) -> None:
    error = f"a call failed: {cupti.MEANINGS[code]}" if code else why
    found = examined({"counters": {"error": error, "code": code}})
    assert found["recording"].works
    assert not found["counters"].works
    assert why in found["counters"].found
    assert cure in found["counters"].cure
    assert found["stalls"].works == stalls
    assert stalls or why in found["stalls"].found


def test_a_libcupti_without_its_host_library_cannot_sample_counters() -> None:
    findings = {"libcupti": {**GOOD["libcupti"], "why_no_counters": "libnvperf_host.so is not beside it"}}
    found = examined(findings)
    assert found["recording"].works
    assert not found["counters"].works
    assert found["counters"].found.endswith("libnvperf_host.so is not beside it")


def test_a_libcupti_of_unknown_layout_is_named_and_refused() -> None:
    findings = {"libcupti": {**GOOD["libcupti"], "version": 990000, "error": "not known"}}
    found = examined(findings)
    assert not found["libcupti"].works
    assert "/w/libcupti.so.13, version 990000: not known" in found["libcupti"].found
    assert found["recording"].cure == "see libcupti"


def test_ranges_that_go_to_another_tool_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/nsys/libToolsInjection64.so")
    found = examined()["nvtx"]
    assert not found.works
    assert "libToolsInjection64.so" in found.found
    assert "/opt/nsys" not in found.found


@pytest.mark.parametrize(
    ("name", "installed", "works", "said"),
    [
        ("torch", {"torch": "2.12.1"}, True, "names the nodes"),
        ("torch", {"torch": "2.9.0"}, True, "does not name the nodes"),
        ("torch", {"torch": "2.11.0+cpu"}, False, "CPU only"),
        ("jax", {"jax": "0.5.3", "jax-cuda12-plugin": "0.5.3"}, False, "too old"),
        ("jax", {"jax": "0.12.0"}, False, "no CUDA plugin"),
        ("jax", {"jax": "0.6.2", "jax-cuda12-plugin": "0.6.2"}, True, "jax-cuda12-plugin 0.6.2"),
        ("measure", {}, False, "neither torch nor jax"),
        ("inside", {}, False, "decoded"),
    ],
)
def test_what_is_installed_decides(name: str, installed: dict[str, str], works: bool, said: str) -> None:
    found = examined(installed=installed)[name]
    assert found.works is works
    assert said in found.found


def test_a_disk_that_is_full_or_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - like shutil's
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 9, 1 << 30))
    assert "1.1 GB free" in examined()["disk"].found
    assert not examined()["disk"].works
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 9, 1 << 40))
    monkeypatch.setattr(doctor.os, "access", lambda _path, _mode: False)
    assert "cannot be written to" in examined()["disk"].found


def script(text: str) -> dict[str, Any]:
    return probe((sys.executable, "-c", text))


def test_what_was_found_before_a_crash_is_kept() -> None:
    found = script(
        "import os, signal\n"
        "print('a library says hello')\n"
        'print(\'{"step": "driver", "version": 13000}\', flush=True)\n'
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    assert found["driver"] == {"version": 13000}
    assert "SIGSEGV" in found["libcupti"]["error"]
    assert "not tried" in found["recording"]["error"]


def test_a_trial_that_fails_says_how() -> None:
    assert "exit code 3" in script("raise SystemExit(3)")["driver"]["error"]
    assert "NameError: name 'oops'" in script("oops")["driver"]["error"]
    assert "printed no result" in script("pass")["driver"]["error"]
    assert "could not be started" in probe(("/nonexistent/python",))["driver"]["error"]
    odd = script("print('{\"step\": \"other\"}'); print('[1]'); print('{')")
    assert all("error" in found for found in odd.values())


def test_a_trial_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thence.doctor.probe._PATIENCE_S", 1)
    found = script('import time; print(\'{"step": "driver"}\', flush=True); time.sleep(60)')
    assert found["driver"] == {}
    assert "longer than 1 s" in found["libcupti"]["error"]


def test_without_libcupti_or_driver_the_trial_itself_says_so(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THENCE_LIBCUPTI", str(machine / "none.so"))
    found = probe()
    assert set(found) == set(STEPS)
    assert "THENCE_LIBCUPTI names" in found["libcupti"]["error"]
    (machine / "not.so").write_bytes(b"no library")
    monkeypatch.setenv("THENCE_LIBCUPTI", str(machine / "not.so"))
    assert "cannot be loaded" in probe()["libcupti"]["error"]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A driver whose launches a CUPTI sees."""
    fake = FakeCupti()
    driver = FakeDriver(lambda name: fake.launched(name, 1_000, 2_500))
    monkeypatch.setattr(cupti, "load", lambda: fake)
    monkeypatch.setattr(cuda_events, "load_driver", lambda: driver)
    return driver


def tried(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    probing.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("fakes")
def test_the_trial_finds_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    driver, libcupti, recording, graphs, counters = tried(capsys)
    assert driver["version"] == 13000
    assert driver["devices"] == [{"name": "GPU 0", "capability": [9, 0]}, {"name": "GPU 1", "capability": [9, 0]}]
    assert libcupti["version"] == 130000
    assert libcupti["functions"] == ["cuptiGetGraphNodeId", "InitializeInjectionNvtx2"]
    assert recording == {"step": "recording", "kernel": "thence_head_start", "microseconds": 1.5}
    assert graphs["node"] == (1 << 32) + 0x6B
    assert "libnvperf_host.so is not beside /w/libcupti.so.13" in counters["error"]
    found = doctor.examine({f.pop("step"): f for f in (driver, libcupti, recording, graphs, counters)})
    assert {c.name for c in found if c.works} >= {"driver", "libcupti", "recording", "nvtx", "graphs"}


def test_a_step_that_fails_does_not_stop_the_others(fakes: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.launched = str  # the kernel runs, and no record comes
    fakes.failing = "cuGraphCreate"
    driver, _, recording, graphs, _ = tried(capsys)
    assert "error" not in driver
    assert "CUPTI recorded 0" in recording["error"]
    assert "cuGraphCreate failed with CUDA error 700" in graphs["error"]


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, findings: Mapping[str, Any]) -> int | str | None:
    monkeypatch.setattr(doctor, "probe", lambda: {**GOOD, **findings})
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return ended.value.code


def test_the_exit_code_says_whether_what_is_needed_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"recording": {"error": "broken [bold]here[/]"}}
    assert run([], monkeypatch, broken) == 0
    assert "[bold]here[/]" in capsys.readouterr().out  # shown as it is
    assert run(["--need", "driver", "--need", "libcupti"], monkeypatch, broken) == 0
    assert run(["--need", "driver", "--need", "recording"], monkeypatch, broken) == 1
    assert "recording is needed" in capsys.readouterr().err
    assert run(["--need", "magic"], monkeypatch, broken) == 2


def test_json_says_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    assert run(["--format", "json", "--need", "nvtx"], monkeypatch, {}) == 0
    text = capsys.readouterr().out
    document = json.loads(text)
    assert document["failed"] == []
    assert [c["name"] for c in document["capabilities"]] == list(doctor.CHECKS)
    assert set(document["capabilities"][0]) == {"name", "works", "found", "cure"}
    assert "s3cret" not in text


def test_every_capability_can_be_needed() -> None:
    need = next(parameter for parameter in command.params if parameter.name == "needed")
    assert list(need.type.choices) == list(doctor.CHECKS)  # type: ignore[attr-defined]


def test_the_variable_is_examined_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(value: str) -> tuple[bool, str]:
        monkeypatch.setenv("THENCE_RECORD", value)
        found = examined()["variable"]
        return found.works, found.found

    assert answer("/runs/one") == (True, "THENCE_RECORD: every process that uses a GPU is recorded to /runs/one")
    assert answer('{"directory": "/runs/one", "options": {"sampling": {"every": 100}}}')[0]
    works, why = answer('{"directory": "/runs/one", "options": {"smpling": {"every": 100}}}')
    assert not works
    assert "smpling" in why
    assert not answer('{"directry": "/runs/one"}')[0]
    assert not answer("{")[0]
