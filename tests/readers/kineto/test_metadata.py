"""What the metadata and the name of a torch.profiler trace say."""

from __future__ import annotations

import pytest

from thence.readers.kineto.metadata import node_of


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("run/gpu-7.cluster_4711.1719000000000000000.pt.trace.json.gz", "gpu-7.cluster"),
        ("run/rank_3.1719000000000000000.pt.trace.json", None),
        ("run/node03/rank24.json.gz", "node03"),
        ("host-12/node3.json", "host-12"),
        ("nodes/rank0.json", None),
    ],
)
def test_the_machine_is_that_of_the_file_name_or_the_folder(name: str, node: str | None) -> None:
    assert node_of(name) == node
