"""The page of a captured CUDA graph: its nodes in order, with edges, places, mean times, and its critical path.

Names come from traces and may contain any characters. They are in the page as JSON in which every character that
could end the script element is escaped, and the script shows them only as text, never as HTML. Equal texts are stored
once; a page has some 40 bytes for each node, and the distinct names.
"""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

from thence.model.kernel_names import short_names
from thence.units import format_count, format_ns, format_share
from thence.writers.page.template import as_data, filled
from thence.writers.text.merged_sentences import merged
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from thence.analysis.cuda_graphs.replayed_graph import ReplayedGraph
    from thence.model.tables import Meta

_MAX_NAME = 600
"""Characters of a kernel's full name: templates have thousands, of which the first tell what it is."""


def graph_html(graph: ReplayedGraph, meta: Meta) -> str:
    """The page of a captured graph.

    Args:
        graph: with the times of its replays.
    """
    inputs = ", ".join(printable(name) for name in meta.inputs)
    title = f"CUDA {graph.title}"
    text = json.dumps(_data(graph, meta, title, inputs), separators=(",", ":"))  # ASCII
    return filled("graph.html", {"title": escape(f"{title} - {inputs}"), "data": as_data(text)})


def _data(graph: ReplayedGraph, meta: Meta, title: str, inputs: str) -> dict[str, Any]:
    nodes = graph.nodes
    names = [name or "" for name in nodes["name"]]
    short = short_names(names)
    strings: dict[str, int] = {}

    def numbers(texts: list[str | None]) -> list[int]:
        """The position of each text among the strings of the page; -1 for none."""
        return [-1 if text is None else strings.setdefault(text, len(strings)) for text in texts]

    columns = {
        "name": numbers([short[name][:_MAX_NAME] for name in names]),
        "full": numbers([None if short[name] == name else name[:_MAX_NAME] for name in names]),
        **{kind: numbers(nodes[kind].to_list()) for kind in ("kind", "label", "module", "phase")},
    }
    return {
        "title": title,
        "inputs": inputs,
        "facts": _facts(graph),
        "notes": [*graph.sentences[1:], *(f"warning: {printable(text)}" for text in merged(meta.warnings))],
        "strings": list(strings),
        **columns,
        "number": nodes["number"].to_list(),
        "start": nodes["start_ns"].round().cast(int).to_list(),
        "duration": nodes["duration_ns"].round().cast(int).to_list(),
        "critical": nodes["critical"].arg_true().to_list(),
        "edges": graph.edges.reshape(-1).tolist(),
        "replay": round(graph.replay_ns),
        "path": round(graph.path_ns),
    }


def _facts(graph: ReplayedGraph) -> list[tuple[str, str]]:
    return [
        ("nodes", format_count(graph.nodes.height)),
        ("edges", format_count(len(graph.edges))),
        ("replays", format_count(graph.replays)),
        ("mean replay", format_ns(graph.replay_ns)),
        ("GPU busy", f"{format_ns(graph.busy_ns)} ({format_share(graph.busy_ns, graph.replay_ns)})"),
        ("critical path", f"{format_ns(graph.path_ns)} ({format_share(graph.path_ns, graph.replay_ns)})"),
    ]
