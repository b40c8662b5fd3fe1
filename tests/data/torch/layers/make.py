"""Makes layers36.json.gz: names of modules as PyTorch's profiler writes them for a model of 36 layers.

    pip install torch --index-url https://download.pytorch.org/whl/cpu
    python make.py layers36.json.gz

The host part is what torch.profiler recorded on a CPU, cut to modules and the operators that compute. The GPU part is
synthetic: each of these operators launches one kernel, whose duration is that in `KERNELS`, and of layer `SLOW` twice
that in its last linear layer.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

LAYERS = 36
SLOW = 17
KERNELS = {
    "aten::addmm": 9.0,
    "aten::native_layer_norm": 2.0,
    "aten::silu": 1.5,
    "aten::mul": 1.25,
    "aten::add": 1.0,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 6.0,
}
"""Operators that launch a kernel, and its duration in us."""
_KEPT = ("External id", "Python id", "Python parent id", "Python module id")


class Attention(nn.Module):
    """Four linear layers around attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class MLP(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.attention = nn.LayerNorm(16), Attention()
        self.post_norm, self.mlp = nn.LayerNorm(16), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Model(nn.Module):
    """All layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def recorded() -> list[dict[str, Any]]:
    """The events of one forward pass."""
    model, x = Model(), torch.randn(2, 4, 16)
    with torch.no_grad():
        model(x)
        with profile(activities=[ProfilerActivity.CPU], with_stack=True, with_modules=True) as found:
            model(x)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]


def main(path: str) -> None:
    events = recorded()
    modules = [e for e in events if e["name"].startswith("nn.Module: ")]
    timed = sorted((e for e in events if e["name"] in KERNELS), key=lambda e: e["ts"])
    first = min(e["ts"] for e in modules)
    out = []
    for e in (*modules, *timed):
        kept = {k: v for k, v in e.get("args", {}).items() if k in _KEPT}
        cut = {key: e[key] for key in ("ph", "cat", "name", "tid", "dur")}
        out.append({**cut, "pid": 1, "ts": round(e["ts"] - first, 3), "args": kept})
    free = 0.0
    slow = [m for m in modules if m["name"] == f"nn.Module: DecoderLayer_{SLOW}"]
    last = max(
        (e for e in timed if e["name"] == "aten::addmm" and any(_inside(e, m) for m in slow)), key=lambda e: e["ts"]
    )
    for number, e in enumerate(timed, 1):
        at = round(e["ts"] - first + 0.3 * e["dur"], 3)
        duration = KERNELS[e["name"]] * (2 if e is last else 1)
        start = max(free, e["ts"] - first + e["dur"])
        free = start + duration
        name, us = e["name"].removeprefix("aten::"), round(0.4 * e["dur"], 3)
        link = {"correlation": number}
        out.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": e["tid"],
                    "ts": at, "dur": us, "args": link})  # fmt: skip
        out.append({"ph": "X", "cat": "kernel", "name": f"{name}_kernel", "pid": 0, "tid": 7, "ts": round(start, 3),
                    "dur": duration, "args": link | {"device": 0, "stream": 7}})  # fmt: skip
    document = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": out}
    with gzip.GzipFile(path, "wb", mtime=0) as stream:
        stream.write(json.dumps(document, separators=(",", ":")).encode())


def _inside(event: dict[str, Any], module: dict[str, Any]) -> bool:
    return module["ts"] <= event["ts"] < module["ts"] + module["dur"]


if __name__ == "__main__":
    main(sys.argv[1])
