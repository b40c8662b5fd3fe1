"""Work of activities: every call once, shared among its kernels, from the best source; counted by hand."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import DATA
from thence.attribution.work.activity_work import activity_work
from thence.attribution.work.flop import FLOP
from thence.attribution.work.operator_calls import calls_in_graphs
from work_traces import Work

if TYPE_CHECKING:
    from pathlib import Path

GRAPHS = DATA / "torch" / "graphs"


def work_of(trace: thence.Trace) -> pl.DataFrame:
    tables = trace.tables
    return tables.gpu.select("name", "duration").hstack(activity_work(tables))


def test_a_call_of_two_kernels_counts_once(tmp_path: Path) -> None:
    made = Work()
    made.call("aten::mm", [[64, 128], [128, 32]], ("gemm_splitk_bf16", 30.0), ("reduce", 10.0))
    found = work_of(made.opened(tmp_path))
    whole, moved = 2 * 64 * 128 * 32, 2 * (64 * 128 + 128 * 32 + 64 * 32)
    assert found["flop"].to_list() == [pytest.approx(whole * 0.75), pytest.approx(whole * 0.25)]
    assert found["bytes"].to_list() == [pytest.approx(moved * 0.75), pytest.approx(moved * 0.25)]
    assert found["work_rule"].to_list() == ["operator", "operator"]
    assert found["dtype"][1] == "bfloat16", "the type of its inputs"


def test_a_memset_among_the_kernels_of_a_call_takes_no_part_in_its_work(tmp_path: Path) -> None:
    made = Work()
    kernels = (("gemm_splitk_bf16", 30.0), ("Memset (Device)", 5.0), ("reduce", 10.0))
    made.call("aten::mm", [[64, 128], [128, 32]], *kernels)
    found = work_of(made.opened(tmp_path))
    whole = 2 * 64 * 128 * 32
    assert found["flop"].to_list() == [whole * 0.75, None, whole * 0.25]


def test_a_part_of_a_call_has_its_share_and_work_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Work()
    made.call("aten::mm", [[64, 128], [128, 32]], ("gemm_splitk_bf16", 30.0), ("reduce", 10.0))
    trace = made.opened(tmp_path)
    asked: list[str] = []
    monkeypatch.setitem(FLOP, "aten::mm", lambda _: asked.append("mm") or 4000)
    assert work_of(trace.select(only="reduce"))["flop"].to_list() == [1000]
    assert work_of(trace.select(devices=(0,)))["flop"].to_list() == [3000, 1000]
    assert trace.report("kernel").rows["flop"].sum() == trace.roofline("op").totals["flop"] == 4000
    assert len(asked) == 1


@pytest.mark.parametrize(("step", "tokens", "known"), [
    ("execute_5_context_1(sq4sk4sqsq16sqsk16)_generation_1(sq1sk11sqsq1sqsk11)", 8, True),  # of a graph for 8 tokens
    ("execute_5_context_1(sq4sk4sqsq16sqsk16)_generation_1(sq1sk11sqsq1sqsk11)", 4, False),
    ("execute_context_1(4)_generation_1(1)", 8, False),
])  # fmt: skip
def test_attention_of_servers_has_the_pairs_that_the_step_states(
    tmp_path: Path, step: str, tokens: int, *, known: bool
) -> None:
    """Eight heads of 64 share two of keys and values: 4 + 3 + 2 + 1 + 11 pairs, 15 keys, 5 queries and results."""
    made = Work()
    made.range(step, "user_annotation", 0.0, 100.0)
    dims = [[tokens, 8, 64], [tokens, 2, 64], [tokens, 2, 64], [tokens, 8, 64]]
    made.call("vllm::unified_attention_with_output", dims, ("flash_fwd_splitkv", 30.0), ("combine", 10.0))
    found = work_of(made.opened(tmp_path))
    expected = 2 * 21 * 8 * (64 + 64) if known else 0
    assert found["flop"].sum() == expected
    assert found["flop"].to_list() == ([0.75 * expected, 0.25 * expected] if known else [None, None])
    assert found["bytes"].sum() == (2 * (15 * 2 * (64 + 64) + 5 * 8 * (64 + 64)) if known else 0)


@pytest.mark.parametrize("latent", [False, True])
def test_decoding_in_sglang_moves_the_keys_of_all_requests(tmp_path: Path, latent: bool) -> None:
    """32 requests of 32,785 keys together; a page holds 64 keys of 8 heads. Latent attention has more keys than k."""
    made = Work()
    step = (
        "step[DECODE bs=32 toks=32 c=0 g=32 c_sq=0 c_sk=0 c_sqsq=0 c_sqsk=0 g_sq=32 g_sk=32785 g_sqsq=32 g_sqsk=32785]"
    )
    made.range(step, "user_annotation", 0.0, 100.0)
    pages, none = [1000, 64, 8, 128], []
    dims = [[32, 32, 128], pages, pages, none, none, [32, 32, 512] if latent else none]
    types = ["c10::BFloat16"] * 3 + ["", "", "c10::BFloat16" if latent else ""]
    made.call("sgl_kernel::fwd", dims, ("flash_fwd_splitkv", 59.0), types=types)
    found = work_of(made.opened(tmp_path)).row(0, named=True)
    moved = 2 * 256 * (32_785 * 8 + 32 * 32)
    assert (found["flop"], found["bytes"]) == ((None, None) if latent else (2 * 32_785 * 32 * 256, moved))


def test_a_product_is_of_the_type_that_is_multiplied_not_of_its_result(tmp_path: Path) -> None:
    made = Work()
    fp8 = ["c10::BFloat16", "c10::Float8_e4m3fn", "c10::Float8_e4m3fn", "float", "float"]
    made.call("_C::cutlass_scaled_mm", [[8, 4], [8, 16], [16, 4], [1], [1]], ("Kernel2", 30.0), types=fp8)
    assert work_of(made.opened(tmp_path)).select("flop", "dtype").row(0) == (2 * 8 * 16 * 4, "float8")


def test_copies_have_their_own_bytes_and_those_on_the_device_read_and_write(tmp_path: Path) -> None:
    made = Work()
    of_xla = ("MemcpyD2D", "MemcpyH2D")
    for name in ("Memcpy DtoD (Device -> Device)", "Memcpy HtoD (Pinned -> Device)", *of_xla, "Memset (Device)"):
        made.activity("gpu_memcpy" if "cpy" in name else "gpu_memset", name, 10.0, bytes=1000)
    assert work_of(made.opened(tmp_path))["bytes"].to_list() == [2000, 1000, 2000, 1000, 1000]


def test_elements_of_any_type_have_the_size_that_the_kernel_names(tmp_path: Path) -> None:
    made = Work()
    dims: list[Any] = [[[8, 4], [8, 2]], []]
    kernel = "void at::native::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 3, 128, 1>"
    made.call("aten::cat", dims, (kernel, 5.0), types=["TensorList", "Scalar"])
    assert work_of(made.opened(tmp_path))["bytes"].to_list() == [2 * 2 * 48]


def raw_products(path: Path) -> int:
    """FLOP of the products in a raw file, of which each launched its kernels itself."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    total = 0
    for event in events:
        dims = event.get("args", {}).get("Input Dims")
        if event.get("cat") == "cpu_op" and dims and event["name"] in {"aten::mm", "aten::bmm", "aten::addmm"}:
            left, right = dims[event["name"] == "aten::addmm" :][:2]
            batch = left[0] if len(left) == 3 else 1
            total += 2 * batch * left[-2] * left[-1] * right[-1]
    return total


def test_replays_have_the_work_of_the_eager_run() -> None:
    replay, eager = (thence.open(GRAPHS / f"block_{name}.json.gz") for name in ("replay", "eager"))
    expected = raw_products(GRAPHS / "block_eager.json.gz")
    assert expected > 0
    assert work_of(replay)["flop"].sum() == 0
    labelled = work_of(replay.label(eager=eager))
    assert labelled["flop"].sum() == pytest.approx(5 * expected, rel=1e-12)
    assert set(labelled.drop_nulls("flop")["work_rule"]) == {"graph_operator"}


def in_graph(nodes: list[tuple[int, int]], inputs: str = "{}") -> Any:
    """The tables of a launch of a graph with these parts of calls: position and number of parts."""
    places = pl.DataFrame(
        {
            "gpu": range(len(nodes)),
            "operator": ["aten::mm"] * len(nodes),
            "inputs": [inputs] * len(nodes),
            "node": [node for node, _ in nodes],
            "nodes": [count for _, count in nodes],
        }
    )
    gpu = pl.DataFrame({"start": range(len(nodes))}).with_columns(rank=0, correlation=1, graph=2)
    return SimpleNamespace(graph_places=places, gpu=gpu)


def test_parts_of_equal_calls_belong_together_in_their_order() -> None:
    found = calls_in_graphs(in_graph([(0, 2), (1, 2), (0, 2), (1, 2), (0, 1)]))
    calls = dict(found.select("index", "call").iter_rows())
    assert calls[0] == calls[1]
    assert calls[2] == calls[3]
    assert len(set(calls.values())) == 3


def test_a_call_of_which_a_part_is_missing_is_left_out() -> None:
    found = calls_in_graphs(in_graph([(0, 2), (0, 2), (1, 2)]))
    assert sorted(found["index"].to_list()) == [0, 2], "the second call has no second part"


def test_a_step_of_jax_has_the_flop_of_its_model() -> None:
    """The closed form of the transformer that was recorded: five steps of forward, and twice as much backward."""
    width, layers, length, words, batch = 512, 4, 256, 8192, 8
    tokens = batch * length
    attention = 4 * batch * length**2 * width
    forward = layers * (2 * tokens * width * 12 * width + attention) + 2 * tokens * width * words
    for name in ("jax_single_nocb", "jax_single"):  # without and with command buffers
        found = work_of(thence.open(DATA / "jax" / f"{name}.xplane.pb.gz"))
        assert found["flop"].sum() == pytest.approx(5 * 3 * forward, rel=1e-9)
        assert set(found.drop_nulls("flop")["work_rule"]) == {"hlo"}
