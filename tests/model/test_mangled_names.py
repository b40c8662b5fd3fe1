"""Kernels of AMD's libraries: mangled names that are too long for the C++ runtime, and the suffix of their compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from thence.model import kernel_names
from thence.model.kernel_names import demangle, function_of, short_names

SHORT = (
    "_ZN2ck13kernel_gemm_xINS_8GemmPipeINS_3rowEEELb1EEEvT_",
    "_ZN2at6native12_GLOBAL__N_115softmax_forwardIfEEvPT_",
    "_Z3addPfi",
)


def long(operation: str) -> str:
    """A name as composable kernels have it: longer than a C++ runtime reads, most of it types named again."""
    return f"_ZN2ck27kernel_gemm_xdl_cshuffle_v3INS_{len(operation)}{operation}I" + "S1_S2_DF16b" * 200 + "EEEEvT_.kd"


@pytest.mark.parametrize("name", SHORT)
def test_the_function_is_that_of_a_demangler(name: str) -> None:
    tool = shutil.which("c++filt")
    if tool is None:
        pytest.skip("no c++filt on this machine")
    done = subprocess.run([tool, name], capture_output=True, text=True, check=True)
    whole = done.stdout.replace("(anonymous namespace)::", "").removeprefix("void ")
    found = function_of(name)
    assert found is not None
    assert whole.startswith(found.partition("<")[0])
    assert function_of(name.removeprefix("_Z")) is None


def test_a_name_that_the_runtime_refuses_has_its_function_and_its_first_class() -> None:
    assert demangle(long("GridwiseGemm_v3")) == "ck::kernel_gemm_xdl_cshuffle_v3<GridwiseGemm_v3>"


def test_a_machine_without_a_runtime_reads_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(ctypes.util, "find_library", lambda _name: None)
    kernel_names._demangler.cache_clear()
    try:
        assert demangle(SHORT[1]) == "at::native::softmax_forward"
    finally:
        kernel_names._demangler.cache_clear()


def test_short_names_have_no_suffix_and_stay_different() -> None:
    names = [
        *(long("GridwiseGemm_v3"), long("GridwiseGemm_v3").replace("DF16b", "f")),
        *("Cijk_Ailk_Bljk_MT128x128x64.kd", "__amd_rocclr_fillBufferAligned.kd"),
    ]
    short = short_names(names)
    assert [short[name] for name in names[2:]] == [name.removesuffix(".kd") for name in names[2:]]
    assert all(short[name].startswith("kernel_gemm_xdl_cshuffle_v3") for name in names[:2])
    assert len(set(short.values())) == len(names)


@pytest.mark.parametrize("name", ["_Z", "_ZN", "_Z99999x", "_Z5abc", "_ZSt", "_ZN0E", "_Z" + "9" * 5000, ""])
def test_what_is_no_name_is_left_as_it_is(name: str) -> None:
    assert function_of(name) in (None, "std")
    assert short_names([name]) == {name: name} or name == "_ZSt"
