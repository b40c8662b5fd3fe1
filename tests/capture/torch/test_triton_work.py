"""Work that Triton kernels state, with Triton's hooks called as its launcher calls them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from recorder_programs import program
from thence.attribution.work.activity_work import activity_work
from thence.capture.torch.triton_work import stated_work, triton_work

if TYPE_CHECKING:
    from pathlib import Path

TRITON = """
        import types
        import thence.torch

        class Chain(list):
            add = list.append
            def __call__(self, *given):
                for hook in self:
                    hook(*given)

        class Lazy:
            def __init__(self, compute):
                self.get = compute

        runtime = types.SimpleNamespace(launch_enter_hook=Chain(), launch_exit_hook=Chain())
        sys.modules["triton"] = triton = types.ModuleType("triton")
        triton.knobs = types.SimpleNamespace(runtime=runtime)

        def run(name, compute):
            metadata = Lazy(compute)
            runtime.launch_enter_hook(metadata)
            launch(name)
            runtime.launch_exit_hook(metadata)
"""


def test_launches_that_state_their_work_are_marks_in_a_recording(tmp_path: Path) -> None:
    program(
        TRITON
        + """
        with thence.record(OUT, thence.RecordOptions(launches=True)), thence.torch.triton_work():
            run("_matmul", lambda: {"name": "matmul [M=8]", "flops16": 4096, "bytes": 384})
            run("_add", lambda: {"name": "_add"})
            run("_broken", lambda: 1 / 0)
        run("_late", lambda: 1 / 0)
        assert not runtime.launch_enter_hook and not runtime.launch_exit_hook
        """,
        tmp_path,
    )
    tables = thence.open(tmp_path).tables
    work = tables.gpu.select(pl.col("name").cast(pl.String)).hstack(activity_work(tables))
    found = {row[0]: row[1:] for row in work.select("name", "flop", "bytes", pl.col("dtype").cast(pl.String)).rows()}
    assert found["_matmul"] == (4096, 384, "float16")
    assert found["_add"] == found["_broken"] == (None, None, None)
    labels = tables.places["label"].cast(pl.String).drop_nulls().to_list()
    assert labels == ["matmul [M=8]"]


@pytest.mark.parametrize(("facts", "expected"), [
    ({"name": "k", "flops8": 7, "bytes": 3.0}, {"flop": 7, "dtype": "fp8", "bytes": 3.0}),
    ({"name": "k", "flops8": 7, "flops32": 5}, {"flop": 12}),
    ({"name": "k", "flops": 7}, {"flop": 7}),
    ({"name": "k", "flops16": SimpleNamespace(item=lambda: 7), "bytes": None}, {}),
])  # fmt: skip
def test_numbers_are_what_is_stated(facts: dict[str, Any], expected: dict[str, Any]) -> None:
    assert stated_work(facts) == expected


@pytest.mark.parametrize("runtime", [None, SimpleNamespace(), SimpleNamespace(launch_enter_hook=None)])
def test_triton_without_chains_of_hooks_is_refused(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    triton = ModuleType("triton")
    if runtime is not None:
        triton.knobs = SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.knobs", None)  # a Triton that is installed
    with pytest.raises(thence.MissingRequirement, match=r"needs Triton 3\.5"), triton_work():
        pass
