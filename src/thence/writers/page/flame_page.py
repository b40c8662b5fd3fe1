"""A flame graph as one self-contained HTML page: it needs no server, no network and no other file.

Names come from traces and may contain any characters. They are in the page as JSON in which every character
that could end the script element is escaped, and the script shows them only as text, never as HTML.
"""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

from thence.model.phases import Phase
from thence.units import format_count, format_ns, format_share
from thence.writers.page.template import as_data, filled
from thence.writers.text.merged_sentences import merged
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from thence.analysis.flame.answer import Flame

MAX_NODES = 20_000
"""Most frames of a page; smaller frames are merged, which a note on the page states."""

_MAX_FULL_NAME = 2000


def flame_html(flame: Flame) -> str:
    """The page of a flame graph.

    Args:
        flame: flame graph with any number of frames; of more than `MAX_NODES`, the smallest are merged.
    """
    shown = flame.largest(MAX_NODES)
    inputs = ", ".join(printable(name) for name in flame.meta.inputs)
    text = json.dumps(_data(shown, inputs), separators=(",", ":"))  # ASCII: U+2028 escaped
    heading = escape(f"{flame.title} - {inputs}")
    return filled("flame.html", {"title": heading, "data": as_data(text)})


def _data(flame: Flame, inputs: str) -> dict[str, Any]:
    nodes = flame.nodes
    full_names = [name and name[:_MAX_FULL_NAME] for name in nodes["full_name"]]
    texts = dict.fromkeys([*nodes["name"], *(name for name in full_names if name is not None)])
    strings = {text: i for i, text in enumerate(texts)}
    kinds = nodes["kind"].unique(maintain_order=True).to_list()
    return {
        "title": flame.title,
        "inputs": inputs,
        "facts": _facts(flame),
        "notes": [*flame.notes, *(f"warning: {printable(text)}" for text in merged(flame.meta.warnings))],
        "files": flame.of_files,
        "unit": flame.weight.unit,
        "strings": list(strings),
        "kinds": kinds,
        "parent": nodes["parent"].fill_null(-1).to_list(),
        "name": [strings[name] for name in nodes["name"]],
        "full": [-1 if name is None else strings[name] for name in full_names],
        "kind": [kinds.index(kind) for kind in nodes["kind"]],
        "total": nodes["total_ns"].to_list(),
        "count": nodes["count"].to_list(),
        "phases": {
            phase.value: nodes[f"{phase.value}_ns"].to_list()
            for phase in Phase
            if int(nodes[f"{phase.value}_ns"].sum())
        },
    }


def _facts(flame: Flame) -> list[tuple[str, str]]:
    ranks = ", ".join(map(str, flame.ranks)) if len(flame.ranks) == 1 else len(flame.ranks)
    if flame.weight.unit == "bytes":
        return [("GPUs", format_count(flame.devices)), ("peak", flame.weight.text(flame.sum_ns))]
    busy = f"{format_ns(flame.busy_ns)} ({format_share(flame.busy_ns, flame.span_ns)})"
    return [
        ("rank" if len(flame.ranks) == 1 else "ranks", str(ranks)),
        ("GPUs", format_count(flame.devices)),
        ("span", format_ns(flame.span_ns)),
        ("busy", busy),
        ("idle", format_ns(flame.span_ns - flame.busy_ns)),
        ("sum of durations", format_ns(flame.sum_ns)),
        ("frames", format_count(flame.nodes.height)),
    ]
