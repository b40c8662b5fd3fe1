"""Which kernels of two sides are one row: by place, by family, by group; and time that moved."""

from __future__ import annotations

import polars as pl
import pytest

from thence.analysis.diff.matching import family, matched_names, moved_time
from thence.analysis.grouping.kernel_groups import groups_of_names

PLACES = ("label", "module", "op_name", "op")


def side(*kernels: tuple[str, str | None, str | None, float]) -> pl.DataFrame:
    """Kernels by name, label, op and ns."""
    rows = [(name, label, None, None, op, ns, 1.0) for name, label, op, ns in kernels]
    text = dict.fromkeys(("name", *PLACES), pl.String)
    return pl.DataFrame(rows, schema={**text, "ns": pl.Float64, "count": pl.Float64}, orient="row")


def matches(before: pl.DataFrame, after: pl.DataFrame, *sources: set[str]) -> list[tuple[object, ...]]:
    one, other = sources or (set(), set())
    return [(m.rule, m.before, m.after) for m in matched_names(before, after, (one, other))]


FAMILIES = [
    ("triton_poi_fused_add_mul_3", "triton_poi_fused_add_mul_17"),
    ("triton_poi_fused_add_0d1d2de", "triton_poi_fused_add_0d1d2d3de"),
    ("_attn_fwd_3fa9c02b11", "_attn_fwd_77be0d12aa"),
    ("sm90_xmma_gemm_bf16bf16_tn_n_tilesize128x128x64_stage4", "sm90_xmma_gemm_bf16bf16_tn_n_tilesize64x64x64_stage3"),
    ("nvjet_sm90_tst_64x128_64x8_2x1_v_bz_NTN", "nvjet_sm90_tst_256x128_64x4_1x2_v_bz_NTN"),
    ("void gemm<128, 64, float>(float*)", "void gemm<64, 32, float>(float*)"),
    ("loop_add_fusion_12", "loop_add_fusion_7"),
]


@pytest.mark.parametrize(("one", "other"), FAMILIES)
def test_builds_of_one_kernel_are_of_one_family(one: str, other: str) -> None:
    assert family(one) == family(other)


def test_different_kernels_are_of_different_families() -> None:
    names = [
        "triton_poi_fused_add_3", "triton_poi_fused_mul_3", "triton_red_fused_add_3",
        "sm90_xmma_gemm_bf16bf16_tn_n", "sm90_xmma_gemm_f32f32_tn_n", "loop_add_fusion_2", "loop_multiply_fusion_2",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)",
    ]  # fmt: skip
    assert len({family(name) for name in names}) == len(names)


def test_equal_names_are_never_matched_with_others() -> None:
    both = side(("gemm_a", "x", "mm", 5), ("gemm_b", "y", "mm", 5))
    assert matches(both, both) == []


def test_a_place_with_one_kernel_on_either_side_decides_before_the_family() -> None:
    before = side(("gemm_64x64", "x", "mm", 5), ("gemm_32x32", "y", "mm", 5))
    after = side(("other_kernel", "x", "mm", 5), ("gemm_128x64", "y", "mm", 5))
    assert matches(before, after) == [
        ("place", ("gemm_32x32",), ("gemm_128x64",)),
        ("place", ("gemm_64x64",), ("other_kernel",)),
    ]


def test_a_family_holds_where_the_place_changed() -> None:
    before = side(("triton_poi_fused_add_1", None, None, 5), ("triton_poi_fused_add_2", None, None, 5))
    after = side(("triton_poi_fused_add_4", None, None, 5))
    assert matches(before, after) == [
        ("family", ("triton_poi_fused_add_1", "triton_poi_fused_add_2"), ("triton_poi_fused_add_4",))
    ]


def test_the_only_attention_of_a_label_is_the_same_row() -> None:
    before = side(("flash_fwd_kernel", "x", "aten::_flash", 5), ("some_copy", "x", "aten::copy_", 1))
    after = side(("fmha_cutlassF_bf16", "x", "aten::_efficient", 7), ("fill_it", "x", "aten::fill_", 1))
    assert matches(before, after) == [("group", ("flash_fwd_kernel",), ("fmha_cutlassF_bf16",))]
    attention = pl.Series(["flash_fwd_kernel", "fmha_cutlassF_bf16"])
    assert groups_of_names(attention).to_list() == ["attention", "attention"]


def test_lines_of_a_function_that_moved_are_one_row() -> None:
    nothing = side()
    found = matches(nothing, nothing, {"train.py:12 step", "model.py:3 f"}, {"train.py:14 step", "model.py:3 f"})
    assert found == [("line", ("train.py:12 step",), ("train.py:14 step",))]


def test_time_moves_at_a_place_and_between_places_of_one_path() -> None:
    before = side(("a", "x/y", "op", 50), ("b", "x/y", "op", 30), ("kept", "x/y", "op", 9), ("c", "z", "op", 20))
    after = side(("ab", "x/y", "op", 60), ("kept", "x/y", "op", 9), ("d", "z/inner", "op", 25))
    found = moved_time(before, after, 100)
    assert [(row["place"], row["from"], row["to"], row["before_ns"], row["after_ns"]) for row in found] == [
        ("x/y", ["a", "b"], ["ab"], 80, 60),
        ("z", ["c"], ["d"], 20, 25),
    ]
    assert moved_time(before, before, 100) == []
    assert [row["place"] for row in moved_time(before, after, 30_000)] == ["x/y"]  # the other is below 30 ns
