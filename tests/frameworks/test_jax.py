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


def test_the_decorator_says_what_is_missing_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    decorate = thence.jax.on_stream(n=1)
    with pytest.raises(thence.MissingRequirement):
        decorate(abs)
