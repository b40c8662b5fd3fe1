"""Laws of short kernel names that hold for any text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.model.kernel_names import clip, demangle, short_names

PIECES = st.sampled_from(
    [
        "at::native::",
        "(anonymous namespace)::",
        "<unnamed>::",
        "kernel",
        "FillFunctor",
        "ReduceOp",
        "Flash_kernel_traits",
        "float",
        "unsigned int",
        "const ",
        "void ",
        "(int)8",
        "128",
        "false",
        "{lambda(float)#1}",
        "[lambda(long) (instance 1)]",
        "operator()",
        "operator ()() const",
        "->",
        "&(",
        "::",
        "<",
        ">",
        "(",
        ")",
        ", ",
        " ",
        "#",
        "_Z",
        "_ZN2at6native4fillIfEEvPT_",
        "S_",
    ]
)
SIGNATURES = st.lists(PIECES, max_size=25).map("".join)
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)  # lone surrogates too
NAMES = st.lists(st.one_of(SIGNATURES, ANY_TEXT), max_size=12)


@given(st.one_of(SIGNATURES, ANY_TEXT))
def test_demangling_never_fails_and_touches_mangled_names_only(name):
    assert name.startswith("_Z") or demangle(name) == name


@settings(max_examples=examples(300))
@given(NAMES)
def test_different_full_names_get_different_short_names(names):
    short = short_names(names)
    assert list(short) == list(dict.fromkeys(names))
    assert len(set(short.values())) == len(short)


@given(NAMES)
def test_short_names_given_back_as_full_names_stay_distinct_beside_them(names):
    everything = [*names, *short_names(names).values()]
    assert len(set(short_names(everything).values())) == len(set(everything))


@given(NAMES, st.randoms(use_true_random=False))
def test_the_same_set_gets_the_same_short_names_in_any_order(names, chance):
    shuffled = chance.sample(names, len(names))
    assert short_names(names) == short_names(names) == short_names(shuffled)


@given(ANY_TEXT, st.integers(-3, 50))
def test_a_clipped_name_fits_and_is_made_of_both_ends(name, width):
    clipped = clip(name, width)
    assert len(clipped) <= max(0, width)
    if len(name) <= width:
        assert clipped == name
    elif width > 0:
        start, end = clipped[: width // 2], clipped[width // 2 + 1 :]
        assert clipped[width // 2] == "…"
        assert name.startswith(start)
        assert name.endswith(end)
