"""What the framework helpers do where the framework is missing or too old, and how they read HLO."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

import thence


class Compiled:
    """Stands for a compiled program with this text."""

    def __init__(self, text: Any) -> None:
        self.text = text

    def as_text(self) -> Any:
        return self.text


def annotated(stream: int) -> str:
    return f'frontend_attributes={{_xla_stream_annotation="{stream}",inlineable="false"}}'


# As jax 0.11.2 prints a program compiled for an H200, shortened.
MOVED = f"""\
HloModule jit_f, is_scheduled=true
%compute_on.1 (Arg_0.1: bf16[8,8], Arg_1.1: bf16[8,8]) -> bf16[8,8] {{
  ROOT %dot.1 = bf16[8,8]{{1,0}} dot(%Arg_0.1, %Arg_1.1), {annotated(7)}, metadata={{op_name="f"}}
}}
ENTRY %main.2 (x.1: bf16[8,8], k.1: bf16[8,8]) -> bf16[8,8] {{
  %call-start = ((bf16[8,8]), bf16[8,8]) call-start(%x.1, %k.1), to_apply=%compute_on.1, {annotated(2)}
  %call-start.1 = ((bf16[8,8]), bf16[8,8]) async-start(%x.1), calls=%async, {annotated(1)}
  ROOT %call-done = bf16[8,8]{{1,0}} call-done(%call-start), {annotated(9)}
}}
"""


def test_streams_of_a_program_are_those_of_its_asynchronous_calls() -> None:
    assert thence.jax.stream_of(Compiled(MOVED)) == (1, 2)
    assert thence.jax.stream_of(Compiled("HloModule jit_f\n")) == ()


@pytest.mark.parametrize("compiled", [Compiled(None), Compiled("module @jit_f {}"), "text", None])
def test_a_program_without_hlo_is_refused(compiled: Any) -> None:
    with pytest.raises(thence.UsageError, match="compiled program"):
        thence.jax.stream_of(compiled)


def test_without_jax_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(thence.MissingRequirement, match="not installed: pip install"):
        thence.jax.on_stream(abs, 1)


@pytest.mark.parametrize("version", ["0.4.38", "0.5.3"])
def test_an_old_jax_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("jax")
    old.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", old)
    with pytest.raises(thence.MissingRequirement, match=rf"{version} cannot.*0\.6"):
        thence.jax.on_stream(abs, 1)


def test_the_decorator_says_what_is_missing_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    decorate = thence.jax.on_stream(n=1)
    with pytest.raises(thence.MissingRequirement):
        decorate(abs)


HLO = """\
HloModule jit_layer, is_scheduled=true, entry_computation_layout={(bf16[64,64]{1,0})->bf16[64,64]{1,0}}

%side.1 (p.1: bf16[64,64], p.2: bf16[64,64]) -> bf16[64,64] {
  %p.1 = bf16[64,64]{1,0} parameter(0)
  %p.2 = bf16[64,64]{1,0} parameter(1)
  ROOT %custom-call.3 = (bf16[64,64], s8[4096]) custom-call(%p.1, %p.2), custom_call_target="te_gemm_ffi"
}

%async_computation (q.1: bf16[64,64], q.2: bf16[64,64]) -> bf16[64,64] {
  %q.1 = bf16[64,64]{1,0} parameter(0)
  %q.2 = bf16[64,64]{1,0} parameter(1)
  ROOT %call.2 = bf16[64,64]{1,0} call(%q.1, %q.2), to_apply=%side.1
}

ENTRY %main.9 (Arg_0.1: bf16[64,64]) -> bf16[64,64] {
  %Arg_0.1 = bf16[64,64]{1,0} parameter(0)
  %custom-call.1 = (bf16[64,64], s8[4096]) custom-call(%Arg_0.1, %Arg_0.1), custom_call_target="te_gemm_ffi"
  %call-start = ((bf16[8,8]), bf16[8,8]) async-start(%x), calls=%async_computation, frontend_attributes={ANNOTATION}
  %call-done = bf16[64,64]{1,0} async-done(%call-start)
  ROOT %custom-call.5 = bf16[64,64]{1,0} custom-call(%call-done), custom_call_target="te_norm_ffi"
}
"""


def test_custom_calls_are_counted_with_and_without_the_stream_annotation() -> None:
    with_it = HLO.replace("ANNOTATION", '_xla_stream_annotation="1"')
    assert thence.jax.custom_calls(with_it) == [
        *[("te_gemm_ffi", None, 1), ("te_gemm_ffi", 1, 1)],
        ("te_norm_ffi", None, 1),
    ]
    without = thence.jax.custom_calls(HLO.replace("ANNOTATION", ""))
    assert without == [("te_gemm_ffi", None, 2), ("te_norm_ffi", None, 1)]


def test_custom_calls_need_a_compiled_program() -> None:
    with pytest.raises(thence.UsageError, match="custom_calls needs the compiled program"):
        thence.jax.custom_calls(3)
