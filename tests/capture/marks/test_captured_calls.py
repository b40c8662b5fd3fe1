"""Operators and their inputs as a capture sees them, with PyTorch on the CPU, against its own counter of FLOP."""

from __future__ import annotations

from typing import Any

import pytest

from thence.attribution.work.flop import FLOP
from thence.attribution.work.operands import Tensor, arguments_of
from thence.capture.marks.captured_calls import CapturedCalls

torch = pytest.importorskip("torch")


class Seen:
    """The calls of operators, and those that have returned."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.nodes: list[tuple[str, int | None, bool]] = []
        self.ended = 0
        self.captured = CapturedCalls(torch, self.begun)

    def begun(self, name: str, inputs: str, node: int | None, backward: bool) -> Any:
        self.calls.append((name, inputs))
        self.nodes.append((name, node, backward))

        def ended() -> None:
            self.ended += 1

        return ended

    def flop(self) -> int:
        return sum(FLOP[name](arguments_of(inputs) or ()) or 0 for name, inputs in self.calls if name in FLOP)


def test_flop_of_a_forward_and_backward_pass_are_those_of_the_counter() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 5)
    )
    seen = Seen()
    seen.captured.enter()
    model(torch.randn(2, 3, 6, 6)).sum().backward()
    seen.captured.leave()
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, 3, 6, 6)).sum().backward()
    assert seen.flop() == counter.get_total_flops() > 0
    assert seen.ended == len(seen.calls)
    before = len(seen.calls)
    model(torch.randn(2, 3, 6, 6))
    assert len(seen.calls) == before, "nothing is seen after the capture"


def test_inference_is_taken_apart_as_without_the_mode() -> None:
    seen = Seen()
    layer, x = torch.nn.Linear(4, 6), torch.randn(5, 4)
    with torch.inference_mode():
        plain = layer(x)
        seen.captured.enter()
        same = layer(x)
        seen.captured.leave()
    assert torch.equal(plain, same)
    assert seen.flop() == 2 * 5 * 4 * 6
    assert "aten::linear" not in dict(seen.calls)


def test_inputs_are_described_as_kineto_describes_them() -> None:
    seen = Seen()
    seen.captured.enter()
    torch.cat([torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(4, 3, dtype=torch.bfloat16)])
    torch.zeros(3, 2).t().add(1.5)
    torch.zeros(5).to(torch.bfloat16)
    seen.captured.leave()
    arguments = {name: arguments_of(inputs) for name, inputs in seen.calls}
    assert arguments["aten::cat"] == ((Tensor((2, 3), "c10::BFloat16"), Tensor((4, 3), "c10::BFloat16")), "0")
    assert (arguments["aten::_to_copy"] or ())[1] == "15", "the number of bfloat16"
    assert arguments["aten::add"] == (Tensor((2, 3), "float", (1, 2)), "1.5", "1")


def test_modes_of_the_program_stay_in_their_order() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    class Own(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    seen, own = Seen(), Own()
    seen.captured.enter()
    own.__enter__()
    seen.captured.leave()
    assert _get_current_dispatch_mode_stack() == [own]
    own.__exit__(None, None, None)
    assert _get_current_dispatch_mode_stack() == []
    seen.captured.leave()


def test_a_failing_operator_raises_what_it_raised() -> None:
    seen = Seen()
    seen.captured.enter()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        torch.mm(torch.zeros(2, 3), torch.zeros(4, 5))
    seen.captured.leave()
    assert seen.ended == len(seen.calls)


def test_operators_of_the_backward_pass_name_the_node_that_their_forward_made() -> None:
    seen = Seen()
    first, second, x = torch.nn.Linear(4, 6), torch.nn.Linear(6, 5), torch.randn(3, 4)
    seen.captured.enter()
    second(first(x).relu()).sum().backward()
    seen.captured.leave()
    forward = [node for name, node, backward in seen.nodes if name == "aten::addmm" and not backward]
    products = [node for name, node, backward in seen.nodes if name == "aten::mm" and backward]
    assert len(set(forward)) == 2
    assert products == [forward[1], forward[1], forward[0]], "the gradients of the second layer come first"
