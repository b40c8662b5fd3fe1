"""Speedscope's file format: one sampled profile, a sample for each stack, weighed in nanoseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thence.analysis.flame.answer import Flame

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope_document(flame: Flame, exporter: str) -> dict[str, Any]:
    """The file as JSON values.

    Args:
        flame: the flame graph; all its frames are written, except those that `Flame.stacks` omits from very
            deep stacks.
        exporter: name and version of the program that writes the file.
    """
    frames: dict[str, int] = {}
    samples, weights = [], []
    for names, self_ns in flame.stacks():
        samples.append([frames.setdefault(name, len(frames)) for name in names])
        weights.append(self_ns)
    name = f"Memory at the peak by {flame.by}" if flame.weight.unit == "bytes" else f"GPU time by {flame.by}"
    profile = {
        "type": "sampled",
        "name": name,
        "unit": "bytes" if flame.weight.unit == "bytes" else "nanoseconds",
        "startValue": 0,
        "endValue": flame.total_ns,
        "samples": samples,
        "weights": weights,
    }
    return {
        "$schema": SCHEMA,
        "exporter": exporter,
        "name": f"{name}: {', '.join(flame.meta.inputs)}",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": frame} for frame in frames]},
        "profiles": [profile],
    }
