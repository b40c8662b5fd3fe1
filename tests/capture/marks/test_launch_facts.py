"""What the nodes of a compiled graph say of a launch, with nodes made of Python."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from thence.capture.marks.launch_facts import (
    Part,
    comment_of,
    frames_of,
    main_marks,
    main_part,
    parts_of_nodes,
    parts_of_text,
)

TRACE = """  File "/home/me/train.py", line 7, in step
    return model(x)
  File "/venv/site-packages/torch/nn/modules/container.py", line 240, in forward
    input = module(input)
  File "/home/me/model.py", line 12, in forward
    return self.norm(x)
  File "/venv/site-packages/torch/nn/functional.py", line 2955, in layer_norm
    return torch.layer_norm(
"""
FRAMES = ("/home/me/train.py:7 step", "/home/me/model.py:12 forward")


def node(aten, module=None, seq=1, *, view=False, trace=TRACE, forward_module=None, **meta):
    """A node as AOTAutograd leaves it; `forward_module` as on nodes of the backward."""
    own = {"stack_trace": trace, "original_aten": aten, "seq_nr": seq, **meta}
    for key, path in (("nn_module_stack", module), ("fwd_nn_module_stack", forward_module)):
        if path is not None:
            own[key] = {"outer": ("L['self']", object), "inner": (path, object)}
    return SimpleNamespace(meta=own, target=SimpleNamespace(is_view=view), kwargs={}, op="call_function")


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("L['self'].layers.0.attention", "layers.0.attention"),
        ("L['self'].layers[0].attention", "layers.0.attention"),
        ("L['self']._modules['layers']._modules['3']", "layers.3"),
        ("G['net'].head", "head"),
        ("L['fn']", ""),
    ],
)
def test_the_path_of_a_module_is_relative_to_what_was_compiled(written, path) -> None:
    (part,) = parts_of_nodes([node("aten.mm", written)], backward=False)
    assert part == Part(path, FRAMES, "aten.mm", "forward", 1.0)


def test_frames_of_torch_are_left_out_and_the_others_stay_in_order() -> None:
    assert frames_of(TRACE) == FRAMES
    assert frames_of(None) == ()


def test_operators_count_once_each_however_many_nodes_they_became() -> None:
    nodes = [node("aten.native_layer_norm", "L['self'].norm", seq=4) for _ in range(5)]
    nodes.append(node("aten.add", "L['self']", seq=5))
    parts = parts_of_nodes(nodes, backward=False)
    assert [(part.op, part.share) for part in parts] == [("aten.native_layer_norm", 0.5), ("aten.add", 0.5)]
    assert main_part(parts).op == "aten.add"  # of equals the last


def test_operators_without_gradients_are_told_apart_by_their_places() -> None:
    other = TRACE.replace("line 12", "line 13")
    parts = parts_of_nodes(
        [
            node("aten.mul", "L['self']", seq=0),
            node("aten.mul", "L['self']", seq=0, trace=other),
            node("aten.mul", "L['self']", seq=0, trace=other),
        ],
        backward=False,
    )
    assert [(part.stack[-1], part.share) for part in parts] == [
        ("/home/me/model.py:12 forward", 0.5),
        ("/home/me/model.py:13 forward", 0.5),
    ]


def test_views_and_nodes_of_the_compiler_tell_nothing_beside_work() -> None:
    work = node("aten.gelu", "L['self'].mlp")
    view = node("aten.t", "L['self'].attention", view=True)
    made = node(None, trace=None, seq=None)
    assert parts_of_nodes([view, work, made], backward=False) == (Part("mlp", FRAMES, "aten.gelu", "forward", 1.0),)
    assert parts_of_nodes([view], backward=False)[0].module == "attention"
    assert parts_of_nodes([made], backward=False)[0].stack == ()


def test_phases_of_a_backward_graph() -> None:
    summed = "Gradient addition node due to multiple use of tensor around:, " + TRACE
    nodes = [
        node("aten.gelu", "L['self'].mlp", seq=1, partitioner_tag="is_forward"),
        node("aten.gelu_backward", forward_module="L['self'].mlp", partitioner_tag="is_backward"),
        node("aten.add", seq=9, trace=summed, partitioner_tag="is_backward"),
    ]
    parts = parts_of_nodes(nodes, backward=True)
    assert [(part.module, part.phase) for part in parts] == [
        ("mlp", "recompute"),
        ("mlp", "backward"),
        (None, "gradient"),
    ]
    assert main_part(parts).op == "aten.gelu_backward"
    assert main_part(parts[:1]).phase == "recompute"
    step = node("aten._foreach_add", trace=TRACE.replace("/nn/functional.py", "/optim/adamw.py"))
    assert parts_of_nodes([step], backward=False)[0].phase == "optimizer"


def test_a_comment_says_what_it_was_made_of_and_those_of_others_say_nothing() -> None:
    parts = (
        Part("layers.0", FRAMES, "aten.mm", "forward", 0.75, ("step", "mlp: é # 'x'")),
        Part(None, (), "", "", 0.25),
    )
    line = f"        # {comment_of(parts)}\n"
    assert line.count("\n") == 1
    assert parts_of_text(line) == parts
    for text in ("# thence: what follows", "# thence: [1, 2", "# thence: 7", "x = 1  # thence: []"):
        assert parts_of_text(text) is None
    assert parts_of_text('# thence: [["m", "stack", "op", "phase", 1]]') is None
    assert parts_of_text("# thence: []") == ()


def test_the_marks_of_a_launch_are_those_of_most_of_it_first() -> None:
    def part(share: float, *marks: str) -> Part:
        return Part("m", share=share, marks=marks)

    assert main_marks([part(0.25, "a"), part(0.5, "b"), part(0.25, "a")]) == [("a",), ("b",)]
    assert main_marks([part(0.75), part(0.25, "b", "c")]) == [("b", "c")]
    assert main_marks([part(1.0)]) == []
