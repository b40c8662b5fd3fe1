"""Device work and launches that are listed twice, and what only looks like it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from helpers import event, kernel, launch, opened

if TYPE_CHECKING:
    from pathlib import Path

    from thence.analysis.soundness.findings import Finding


def found(folder: Path, events: list[dict[str, Any]]) -> list[Finding]:
    return [f for f in opened(folder, events).check().findings if f.code == "listed_twice"]


RUN = [launch(1, 1), kernel(1, 10, 7), launch(2, 3), kernel(2, 20, 7)]


def test_an_equal_activity_is_a_copy(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, [*RUN, kernel(1, 10, 7)])
    assert (finding.count, finding.span_ns) == (1, 7_000)
    assert "1 device activity, 7.000 us in sum (such as gemm), is listed more than once" in finding.text
    assert found(tmp_path, RUN) == []


def test_three_times_are_two_copies(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, [*RUN, kernel(1, 10, 7), kernel(1, 10, 7)])
    assert (finding.count, finding.span_ns) == (2, 14_000)


def test_what_runs_at_the_same_time_on_another_stream_or_device_is_no_copy(tmp_path: Path) -> None:
    others = [kernel(2, 10, 7, args={"stream": 8}), kernel(3, 10, 7, args={"device": 1})]
    assert found(tmp_path, [launch(1, 1), kernel(1, 10, 7), launch(2, 3), launch(3, 5), *others]) == []


def test_a_launch_of_a_kernel_runs_one(tmp_path: Path) -> None:
    """The copy is later; a copy of another length or name is not the same kernel twice."""
    (finding,) = found(tmp_path, [*RUN, kernel(2, 40, 7)])
    assert finding.count == 1
    assert found(tmp_path, [*RUN, kernel(2, 40, 8)]) == []
    assert found(tmp_path, [*RUN, kernel(2, 40, 7, name="other")]) == []


def replays(nodes: list[list[int]], equal: bool = True) -> list[dict[str, Any]]:
    """Launches of one graph, each with the numbers of the nodes that ran."""
    events = []
    for number, ran in enumerate(nodes, start=1):
        begin = 1000 * number
        arguments = {"correlation": number}
        events.append(event("cuda_runtime", "cudaGraphLaunch", begin, 2, args=arguments))
        for place, node in enumerate(ran):
            of_graph = {"graph id": 4, "graph node id": (4 << 32) + node}
            length = 5 if equal else 5 + place
            events.append(kernel(number, begin + 10 + 8 * place, length, args=of_graph))
    return events


def test_a_node_that_ran_twice_in_one_launch_only_is_a_copy(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, replays([[1, 2, 3], [1, 2, 2, 3], [1, 2, 3]]))
    assert finding.count == 1


def test_nodes_of_loops_run_several_times(tmp_path: Path) -> None:
    assert found(tmp_path, replays([[1, 2, 2, 2, 3], [1, 2, 2, 3], [1, 2, 2, 3]])) == []


def test_equal_kernels_of_a_graph_without_ids_are_no_copies(tmp_path: Path) -> None:
    """A layer of a graph takes as long as the next one."""
    events = replays([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    for one in events:
        one["args"].pop("graph id", None)
        one["args"].pop("graph node id", None)
    assert found(tmp_path, events) == []


def test_a_launch_that_is_listed_twice_is_a_copy_and_not_one_without_work(tmp_path: Path) -> None:
    soundness = opened(tmp_path, [*RUN, launch(2, 30)]).check()
    (finding,) = soundness.findings
    assert (finding.code, finding.count) == ("listed_twice", 1)
    assert "1 launch" in finding.text


def test_an_id_that_was_given_again_to_another_launch_is_no_copy(tmp_path: Path) -> None:
    other = launch(2, 30) | {"dur": 9}
    assert found(tmp_path, [*RUN, other]) == []
