"""The recorder beside a real PyTorch, on a libcupti made for the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from test_recorder import program

import thence

if TYPE_CHECKING:
    from pathlib import Path


def test_recording_begins_while_cuda_is_initialised_and_follows_autograd(tmp_path: Path) -> None:
    body = """
        import torch
        from thence.recording import hooks

        # torch.cuda._lazy_init holds this lock while it calls what waited for CUDA.
        with torch.cuda._initialization_lock:
            hooks._begin({"directory": str(OUT), "options": {}})
        x = torch.randn(4, 4, requires_grad=True)
        with thence.mark("attention"):
            y = (x @ x).relu().sum()
        y.backward()
        fake.emit(kernel())
    """
    program(body, tmp_path)
    trace = thence.open(tmp_path)
    assert trace.gpu.height == 1
    assert not [text for text in trace.meta.warnings if "cut" in text]
    host = trace.host.with_columns(trace.host["name"].cast(str)).with_row_index("row")
    nodes = host.filter(host["name"].str.contains("evaluate_function: .*Backward"))
    # One node each for mm, relu and sum; all belong to the mark that was open around their forward.
    assert nodes.height == 3
    [mark] = host.filter(host["name"] == "attention")["row"]
    assert nodes["forward"].to_list() == [mark] * 3
