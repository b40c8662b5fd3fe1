"""Changes that have a name: compiler, precision, attention backend, waits; and what is said first."""

from __future__ import annotations

import polars as pl

from thence.analysis.diff.explanation import explain
from thence.analysis.diff.signs import signs

SIDE = {
    "name": pl.String,
    "ns": pl.Float64,
    "count": pl.Float64,
    "label": pl.String,
    "op": pl.String,
}
ROW = {
    "by": pl.String, "name": pl.String, "short_name": pl.String, "before_ns": pl.Float64, "after_ns": pl.Float64,
    "difference_ns": pl.Float64, "difference_share": pl.Float64, "verdict": pl.String,
    "before_count": pl.Float64, "after_count": pl.Float64,
}  # fmt: skip


def side(**kernels: float) -> pl.DataFrame:
    return pl.DataFrame(
        [(name, ns, 4.0, "x", None) for name, ns in kernels.items()], schema=SIDE, orient="row"
    )


def rows(*given: tuple[str, str, float, float, str, float, float]) -> pl.DataFrame:
    full = [
        (by, name, name, a, b, b - a, (b - a) / a if a else None, verdict, n, m)
        for by, name, a, b, verdict, n, m in given
    ]
    return pl.DataFrame(full, schema=ROW, orient="row")


def texts(before: pl.DataFrame, after: pl.DataFrame) -> list[str]:
    return [sign.text for sign in signs(before, after)]


def test_inductor_appears() -> None:
    eager, compiled = side(gemm=50, add_kernel=50), side(gemm=50, triton_poi_fused_add_0=20)
    assert texts(eager, compiled)[0].startswith(
        "torch.compile: 0 -> 4 kernels a step are made by Inductor"
    )
    assert texts(compiled, eager)[0].startswith("no torch.compile")
    assert texts(compiled, compiled) == []


def test_precision_of_matrix_products() -> None:
    exact, fast = (
        side(ampere_sgemm_128x64_tn=90, reduce=5),
        side(sm80_xmma_gemm_f32f32_tf32f32_f32_tn=30, reduce=5),
    )
    assert texts(exact, fast) == ["precision of matrix products: FP32 -> TF32"]
    half = side(sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn=20)
    assert texts(fast, half) == ["precision of matrix products: TF32 -> BF16"]


def test_attention_backend() -> None:
    flash, other = side(flash_fwd_kernel=10), side(fmha_cutlassF_bf16_aligned=20)
    assert texts(flash, other) == [
        "attention backend: flash attention -> memory-efficient attention"
    ]


def total(before: float, after: float, verdict: str) -> dict[str, object]:
    shares = {
        "difference_share": (after - before) / before,
        "low_share": 0.069,
        "high_share": 0.079,
    }
    return {
        "before_ns": before,
        "after_ns": after,
        "difference_ns": after - before,
        "verdict": verdict,
        "more_runs": 3,
        **shares,
    }


def first(
    given: pl.DataFrame,
    before: float = 12.1e6,
    after: float = 13.0e6,
    verdict: str = "slower",
    added: pl.DataFrame | None = None,
) -> str:
    """The first sentence; added: kernels of the side after that the side before lacks."""
    kernels = side(k=1), side(k=1) if added is None else pl.concat([side(k=1), added])
    return explain(total(before, after, verdict), given, [], kernels, between=True)[0]


def test_the_first_line_names_the_cause() -> None:
    label = ("label", "forward/attention", 3e6, 3.8e6, "slower", 8.0, 8.0)
    others = (
        ("busy", "all", 12e6, 12.9e6, "slower", 0, 0),
        ("kernel", "k", 2e6, 2.8e6, "slower", 1.0, 1.0),
    )
    assert first(rows(label, *others)) == (
        "step 12.10 ms -> 13.00 ms (+7.4 %, 95 % interval +6.9 to +7.9 %): label forward/attention +800.0 us (+26.7 %)"
    )


def test_what_goes_the_other_way_is_no_cause() -> None:
    wrong = ("label", "x", 5e6, 1e6, "faster", 1.0, 1.0)
    right = ("op", "aten::mm", 1e6, 1.9e6, "slower", 1.0, 2.0)
    assert first(rows(wrong, right)).endswith(
        "op aten::mm +900.0 us (+90.0 %) [1 -> 2 times a step]"
    )


def test_waits_explain_idle_time() -> None:
    """The copy of the number takes far less than a thousandth of the step, and has no row."""
    copy = [("Memcpy DtoH", 1e3, 1.0, "x", "aten::_local_scalar_dense")]
    idle = ("idle", "all", 0.1e6, 1.0e6, "slower", 0.0, 0.0)
    text = first(rows(idle), added=pl.DataFrame(copy, schema=SIDE, orient="row"))
    assert (
        ": the host waits for the GPU in aten::_local_scalar_dense, 0 -> 1 times a step (idle +900.0 us)"
        in text
    )


def test_a_cause_of_idle_time_is_named_before_all_of_it() -> None:
    idle = ("idle", "all", 0.1e6, 1.0e6, "slower", 0.0, 0.0)
    assert first(rows(idle, ("idle", "loader", 0.0, 0.8e6, "slower", 0.0, 0.0))).endswith(
        "idle loader +800.0 us"
    )
    assert first(rows(idle)).endswith("idle +900.0 us (+900.0 %)")


def test_what_is_not_told_apart_says_how_many_runs_would_tell() -> None:
    text = first(rows(("label", "x", 1e6, 1.1e6, "slower", 1, 1)), verdict="unknown")
    assert (
        "cannot be told from noise; about 3 more runs a side would tell; but certainly label x +100.0 us"
        in text
    )
    assert first(rows(), verdict="same").endswith(": the same")
