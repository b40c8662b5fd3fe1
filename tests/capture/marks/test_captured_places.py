"""Operators of the nodes of a captured graph: which call made which node."""

from __future__ import annotations

from thence.capture.marks.captured_places import Called, with_calls
from thence.capture.marks.graph_labels import NodeCall, NodePlace


def called(name: str, begin: int, end: int, node: int | None = None, *, backward: bool = False) -> Called:
    return Called(name, "{}", node, backward, begin, end)


def test_nodes_have_the_call_that_made_them_and_keep_their_place() -> None:
    inside = NodePlace(module="layer")
    places = with_calls([(0, None), (1, inside)], [called("mm", 1, 3), called("view", 3, 3), called("add", 3, 4)])
    assert places == [
        (0, None),
        (1, inside._replace(call=NodeCall("mm", "{}", 0, 2))),
        (2, inside._replace(call=NodeCall("mm", "{}", 1, 2))),
        (3, inside._replace(call=NodeCall("add", "{}", 0, 1))),
        (4, inside),
    ]


def test_of_nested_calls_the_inner_one_decides() -> None:
    places = dict(with_calls([], [called("custom", 0, 3), called("inner", 1, 2)]))
    assert [(place.call.name if place and place.call else None) for _, place in sorted(places.items())] == [
        "custom", "inner", "custom", None,
    ]  # fmt: skip


def test_a_backward_call_has_the_place_of_the_forward_that_made_its_autograd_node() -> None:
    forward = NodePlace(module="mlp", stack=("model.py:3 forward",))
    outside = NodePlace(stack=("train.py:9 step",))
    calls = [called("mm", 0, 1, 7), called("mm", 1, 2, 7, backward=True), called("mm", 2, 3, 8, backward=True)]
    places = dict(with_calls([(0, forward), (1, outside)], calls))
    known, unknown = places[1], places[2]
    assert known is not None
    assert unknown is not None
    assert (known.module, known.stack) == ("mlp", ("model.py:3 forward",))
    assert (unknown.module, unknown.stack) == (None, ("train.py:9 step",)), "no forward call made its node"


def test_a_recomputed_call_keeps_its_own_module() -> None:
    again = NodePlace(module="mlp.again")
    places = dict(with_calls([(0, None), (1, again)], [called("mm", 0, 1, 7), called("mm", 1, 2, 7, backward=True)]))
    assert places[1] is not None
    assert places[1].module == "mlp.again"
