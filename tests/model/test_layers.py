"""What counts the layers of a model is folded, and nothing else."""

from __future__ import annotations

import re

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.model.layers import MIN_INNER, MIN_LAYERS, folded_names


def folded(*names: str) -> list[str]:
    """The folded form of each name."""
    return folded_names(pl.Series(names, dtype=pl.String))["folded"].to_list()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.{}", "layers.*"),
        ("model.layers.{}.mlp.down_proj", "model.layers.*.mlp.down_proj"),
        ("transformer.h.{}.attn", "transformer.h.*.attn"),
        ("block{}", "block*"),
        ("step/block{}/mlp", "step/block*/mlp"),
        ("blocks_{}/attention", "blocks_*/attention"),
        ("layers[{}].mlp", "layers[*].mlp"),
        ("DecoderLayer_{}/MLP", "DecoderLayer_*/MLP"),
        ("jit(f)/jvp(block{})/mlp/dot_general", "jit(f)/jvp(block*)/mlp/dot_general"),
        ("jit(f)/transpose(jvp(block{}))/mul", "jit(f)/transpose(jvp(block*))/mul"),
        ("lm/x_layers_{}/ff.apply", "lm/x_layers_*/ff.apply"),
        ("layer_{}_attention", "layer_*_attention"),
        ("layer {}", "layer *"),
        ("layer-{}: mlp", "layer-*: mlp"),
    ],
)
def test_an_index_is_folded_in_every_way_of_writing_it(pattern: str, expected: str) -> None:
    found = folded_names(pl.Series([pattern.format(n) for n in range(MIN_LAYERS)]))
    assert found["folded"].to_list() == [expected] * MIN_LAYERS
    assert found["layer"].to_list() == [str(n) for n in range(MIN_LAYERS)]


@pytest.mark.parametrize(
    "names",
    [
        ["fc1", "fc2"],
        ["w1", "w2", "w3"],
        ["attn1.to_q", "attn2.to_q"],
        ["bucket_256", "bucket_512", "bucket_1024", "bucket_2048", "bucket_4096"],
        ["to_float8", "to_float16", "to_float32", "to_float64"],
        [f"reduce_sum[axes=(0, {n})]" for n in range(1, 8)],
        [f"0x7f{n}00a{n * 7919}" for n in range(1, 9)],
        [f"request {n}" for n in (17, 1000, 31337, 99999)],
    ],
)
def test_other_numbers_stay(names: list[str]) -> None:
    assert folded(*names) == names


def test_numbers_of_parts_inside_of_a_layer_stay() -> None:
    names = [f"layers.{n}.{part}" for n in range(6) for part in ("mlp.0", "mlp.2", "fc1", "fc2")]
    assert sorted({*folded(*names)}) == [*("layers.*.fc1", "layers.*.fc2", "layers.*.mlp.0", "layers.*.mlp.2")]
    flax = [f"m/Block_{n}/Dense_{part}/dot" for n in range(6) for part in range(6)]
    assert sorted({*folded(*flax)}) == [f"m/Block_*/Dense_{part}/dot" for part in range(6)]


def test_experts_inside_of_a_layer_are_folded() -> None:
    names = [f"layers.{n}.experts.{e}.w{w}" for n in range(4) for e in range(MIN_INNER) for w in (1, 2, 3)]
    found = folded_names(pl.Series(names))
    assert sorted(found["folded"].unique()) == [f"layers.*.experts.*.w{w}" for w in (1, 2, 3)]
    assert found["layer"][0] == "0.0"
    assert found["layer"][-1] == f"3.{MIN_INNER - 1}"


def test_instances_that_the_profiler_numbers_over_the_whole_model_keep_their_position() -> None:
    """Two norms in every layer: 0 and 1, 2 and 3 ...; one attention: 0, 1 ..."""
    norms = [f"Net_0/Layer_{n // 2}/Norm_{n}" for n in range(12)]
    attention = [f"Net_0/Layer_{n}/Attention_{n}" for n in range(6)]
    assert folded(*norms, *attention, "Net_0/Norm_12") == [
        *(f"Net_0/Layer_*/Norm_*[{n % 2}]" for n in range(12)),
        *["Net_0/Layer_*/Attention_*"] * 6,
        "Net_0/Norm_12",
    ]


def test_instances_of_layers_that_differ_in_number_are_one_row() -> None:
    names = [f"Layer_{n}/Norm_{n}" for n in range(6)] + ["Layer_5/Norm_6"]
    assert {*folded(*names)} == {"Layer_*/Norm_*"}


def test_layers_that_alternate_with_others_are_folded() -> None:
    names = [f"layers.{n}.{'mamba' if n % 2 else 'attn'}" for n in range(8)]
    assert {*folded(*names)} == {"layers.*.mamba", "layers.*.attn"}


def test_forward_and_backward_of_a_block_stay_apart() -> None:
    names = [w.format(n) for n in range(4) for w in ("jvp(block{})/mul", "transpose(jvp(block{}))/mul")]
    assert {*folded(*names)} == {"jvp(block*)/mul", "transpose(jvp(block*))/mul"}


def test_a_phase_that_lacks_a_layer_is_folded_with_the_layers_of_the_others() -> None:
    """The number of values is counted over all wrappers: three blocks in the backward, four in the forward."""
    names = [f"jvp(block{n})/mul" for n in range(4)] + [f"transpose(jvp(block{n}))/mul" for n in range(3)]
    assert {*folded(*names)} == {"jvp(block*)/mul", "transpose(jvp(block*))/mul"}


def test_digits_are_kept_as_they_are_written() -> None:
    found = folded_names(pl.Series([f"layer_{n:03}" for n in range(5)]))
    assert found["layer"].to_list() == ["000", "001", "002", "003", "004"]


def test_a_name_with_the_internal_separator_stays() -> None:
    names = [f"a\x1fblock{n}" for n in range(9)]
    assert folded(*names) == names


parts = st.sampled_from(["layers", "h", "mlp", "Linear_", "block", "[", "]", ".", "/", "(", ")", "_"])
numbers = st.integers(0, 12).map(str)
texts = st.lists(st.one_of(parts, numbers), max_size=9).map("".join)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(texts, max_size=60, unique=True))
def test_a_folded_name_is_the_name_with_stars_for_numbers(names: list[str]) -> None:
    found = folded_names(pl.Series(names, dtype=pl.String))
    assert found["name"].to_list() == names
    for name, text, layer in found.iter_rows():
        pattern = re.escape(re.sub(r"\*\[\d+\]", "*", text)).replace(r"\*", r"\d+")
        assert re.fullmatch(pattern, name), (name, text)
        assert (layer is None) or "*" in text


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(texts, max_size=40, unique=True))
def test_the_order_of_the_names_does_not_matter(names: list[str]) -> None:
    one, other = (folded_names(pl.Series(n, dtype=pl.String)) for n in (names, names[::-1]))
    assert dict(one.select("name", "folded").iter_rows()) == dict(other.select("name", "folded").iter_rows())


def test_more_text_than_models_have_is_not_folded() -> None:
    names = [f"layers.{n}.{'x' * 100_000}" for n in range(100)]
    assert folded(*names) == names
