"""Traces of captures and of replays made by hand: what an inference server records on AMD's and NVIDIA's GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helpers import event

Call = tuple[str, str, str, str]
"""Kernel, innermost operator, label, and kind: kernel, memcpy or memset."""


def layers(count: int, prefix: str = "") -> list[Call]:
    """The calls of a small decoder with some layers."""
    calls = [("indexSelectLargeIndex", "aten::index_select", f"{prefix}embedding", "kernel")]
    for layer in range(count):
        label = f"{prefix}layer{layer}"
        calls += [
            ("layer_norm_kernel", "aten::native_layer_norm", f"{label}/attention", "kernel"),
            ("Cijk_Ailk_MT128_gemm", "aten::addmm", f"{label}/attention", "kernel"),
            ("", "aten::copy_", f"{label}/attention", "memcpy"),
            ("softmax_warp_forward", "aten::_softmax", f"{label}/attention", "kernel"),
            ("Cijk_Ailk_MT64_gemm", "aten::addmm", f"{label}/mlp", "kernel"),
            ("GeluCUDAKernel", "aten::gelu", f"{label}/mlp", "kernel"),
            ("elementwise_kernel<CUDAFunctor_add>", "aten::add", f"{label}/mlp", "kernel"),
        ]
    return [*calls, ("", "aten::zero_", f"{prefix}sample", "memset")]


def compiled(count: int) -> list[Call]:
    """The calls of a compiled decoder with some layers: generated kernels, products, and operators of a server."""
    calls = [_generated("triton_poi_fused_embedding_0", "embedding")]
    for layer in range(count):
        label = f"layer{layer}"
        calls += [
            _generated(f"triton_red_fused_norm_{1 if layer else 9}", f"{label}/norm"),
            ("nvjet_gemm_a", "aten::mm", f"{label}/qkv", "kernel"),
            _generated("triton_poi_fused_rope_2", f"{label}/rope"),
            ("reshape_and_cache", "vllm::unified_attention", f"{label}/attention", "kernel"),
            ("flash_fwd_splitkv", "vllm::unified_attention", f"{label}/attention", "kernel"),
            ("nvjet_gemm_b", "aten::mm", f"{label}/out", "kernel"),
            _generated("triton_red_fused_norm_3", f"{label}/norm2"),
            ("nvjet_gemm_c", "aten::mm", f"{label}/up", "kernel"),
            ("act_and_mul_kernel", "_C::silu_and_mul", f"{label}/act", "kernel"),
            ("nvjet_gemm_b", "aten::mm", f"{label}/down", "kernel"),
        ]
    return [*calls, _generated("triton_red_fused_norm_4", "head")]


def _generated(kernel: str, label: str) -> Call:
    return kernel, kernel, label, "kernel"


@dataclass
class Recorder:
    """Writes calls, captured and run, and replays, in the words of one producer.

    Attributes:
        amd: whether launches name their kernels.
        events: what was written.
        now: us.
    """

    amd: bool
    events: list[dict[str, Any]] = field(default_factory=list)
    now: float = 0.0
    correlation: int = 0

    @property
    def api(self) -> str:
        """Prefix of the names of API calls."""
        return "hip" if self.amd else "cuda"

    def capture(self, calls: list[Call], *, bounds: bool = True, run: bool = False) -> None:
        """Calls between the beginning and the end of a capture; without bounds, simply calls."""
        if bounds:
            self._call("StreamBeginCapture")
        for number, (kernel, operator, label, kind) in enumerate(calls):
            began, names = self.now, label.split("/")
            self.now += len(names) + 2
            arguments = {"External id": 10_000 * len(self.events) + number}
            self._call(
                {"kernel": "LaunchKernel", "memcpy": "MemcpyAsync", "memset": "MemsetAsync"}[kind],
                **({"kernel": kernel} if self.amd and kind == "kernel" else {}),
            )
            if run:
                self._activity(kernel, kind, self.correlation, self.now + 5, 7, None)
            ended = self.now
            self.now += len(names) + 2
            for depth, name in enumerate(names):
                whole = self.now - began - 2 * depth
                self.events.append(event("user_annotation", name, began + depth, whole))
            self.events.append(event("cpu_op", operator, began + len(names), ended - began, args=arguments))
            self.now += 2
        if bounds:
            self._call("StreamEndCapture")

    def replay(self, calls: list[Call], *, streams: int = 1, nodes: int | None = None, order: Any = None) -> None:
        """One launch of a graph: its activities one after the other, on some streams, with node numbers or without."""
        self._call("GraphLaunch")
        at = self.now + 10
        for place in order or range(len(calls)):
            kernel, _, _, kind = calls[place]
            if self.amd and kind != "kernel":
                kernel, kind = (f"__amd_rocclr_{'copyBuffer' if kind == 'memcpy' else 'fillBuffer'}Aligned", "kernel")
            node = None if nodes is None else (nodes << 32) + 2 * place
            self._activity(kernel, kind, self.correlation, at, 7 + place % streams, node)
            at += 4
        self.now = at + 10

    def _call(self, name: str, **arguments: Any) -> None:
        self.correlation += 1
        found = {"correlation": self.correlation, **arguments}
        self.events.append(event("cuda_runtime", f"{self.api}{name}", self.now, 1, args=found))
        self.now += 2

    def _activity(self, kernel: str, kind: str, correlation: int, at: float, stream: int, node: int | None) -> None:
        category = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}[kind]
        name = kernel or {"memcpy": "Memcpy DtoD (Device -> Device)", "memset": "Memset (Device)"}[kind]
        arguments = {"device": 0, "stream": stream, "correlation": correlation}
        if node is not None:
            arguments |= {"graph id": node >> 32, "graph node id": node}
        self.events.append(event(category, name, at, 3, args=arguments) | {"pid": 0, "tid": stream})
