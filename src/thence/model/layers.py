"""Folds the names of a model's layers: ``layers.0.mlp`` to ``layers.35.mlp`` are one name, ``layers.*.mlp``.

An index is a number at the end of a part of a path: ``layers.3``, ``h.3``, ``block3``, ``blocks_3``, ``layers[3]``,
``jvp(block3)``, ``layer_3_attention``, ``DecoderLayer_0``. Parts are separated by ``/`` and ``.``. Not every number at
the end of a part counts layers (``fc1``, ``w2``, ``bfloat16``), so an index is folded by these rules:

outermost   it takes at least `MIN_LAYERS` values at its place in the path, and these are at least half of all numbers
            between the smallest and the largest. The place is the path before it, with the indices there folded;
            wrappers of JAX such as ``transpose(jvp(...))`` do not count.
instance    PyTorch's profiler numbers the instances of a class over the whole model, so the numbers inside of a
            layer go on from one layer to the next (``DecoderLayer_0/Linear_0``, ``DecoderLayer_1/Linear_7``). They
            are folded, and if every layer has the same number of instances, more than one, each has its position
            in the layer: ``DecoderLayer_*/Linear_*[0]`` is the first.
inner       any other index inside of a layer distinguishes parts of the layer (``mlp.0``, ``mlp.2``) unless it takes
            at least `MIN_INNER` values, like the experts of a mixture.
"""

from __future__ import annotations

import polars as pl

__all__ = ["MIN_INNER", "MIN_LAYERS", "folded_names"]

MIN_LAYERS = 4
"""Values of an index from which it is folded. Parts of one layer are numbered, too, but in the models of PyTorch and
JAX there are at most three of them: fc1 and fc2, w1 to w3, conv1 to conv3, norm1 to norm3."""
MIN_INNER = 8
"""The same inside of a layer that is folded already. Flax numbers the parts of a module by their class, and a block of
a transformer has up to six Dense; mixtures have eight experts or more."""
_MIN_DENSITY = 0.5
"""Share of the numbers between the smallest and the largest index that must occur. Layers of a kind that alternates
with another are at least half; sizes such as bucket_1024, bucket_2048 are far less."""
_MAX_INDICES = 16
"""Indices of one name that are examined; further ones stay as they are."""
_MAX_DIGITS = 9
"""Digits of an index. Longer numbers are addresses and identifiers."""
_SPLIT = "\x1f"
"""Stands between the parts of a path while it is split. A name that contains it is not folded."""
_BEFORE_PART = r"([/.\[])"
_AFTER_NUMBER = r"([0-9])([_\- :])"
_INDEX = rf"^((?:[^,=]*[A-Za-z_/.\[ #-])?)([0-9]{{1,{_MAX_DIGITS}}})([)\]]*)$"
"""A part that ends in an index: the text before, the number, and the brackets that it closes."""
_WRAPPERS = r"^([/.]?)(?:\w*\()+"


def folded_names(names: pl.Series) -> pl.DataFrame:
    """The folded form of each name.

    Args:
        names: distinct names of places of one kind.

    Returns:
        one row per name, in the same order: ``name``, ``folded`` (the name itself if no index of it is folded) and
        ``layer`` (the indices of the folded layers, ``3`` or ``3.17``; null if there is none).
    """
    frame = pl.DataFrame({"name": names.cast(pl.String)}).with_row_index("id")
    pieces = _pieces(frame)
    state = frame.select(
        "id",
        raw=pl.lit(""),
        folded=pl.lit(""),
        layer=pl.lit(None, pl.String),
        inside=pl.lit(value=False),
    )
    for number in sorted(pieces["number"].unique().to_list()):
        state = _with_piece(state, pieces.filter(pl.col("number") == number).drop("number"))
    whole = pl.col("raw") == pl.col("name")  # not of a name that contains the separator
    return frame.join(state, on="id", how="left", maintain_order="left").select(
        "name",
        folded=pl.when(whole).then("folded").otherwise("name"),
        layer=pl.when(whole).then("layer"),
    )


def _pieces(frame: pl.DataFrame) -> pl.DataFrame:
    """The names in pieces, each up to and including an index; the last piece of a name may have none.

    Returns:
        columns id, number (of the piece in its name), before (its text before the index), digits (the index, null if
        there is none), after (brackets behind it), and key (``before`` without wrappers, and the brackets).
    """
    marked = pl.col("name").str.replace_all(_BEFORE_PART, _SPLIT + "$1")
    marked = marked.str.replace_all(_AFTER_NUMBER, "${1}" + _SPLIT + "$2")
    parts = (
        frame.select("id", part=marked.str.split(_SPLIT))
        .explode("part", empty_as_null=True, keep_nulls=True)
        .with_columns(found=pl.col("part").str.extract_groups(_INDEX))
        .select(
            "id",
            "part",
            before=pl.coalesce(pl.col("found").struct.field("1"), pl.col("part")),
            digits=pl.col("found").struct.field("2"),
            after=pl.col("found").struct.field("3").fill_null(""),
        )
        .with_columns(key=pl.col("before").str.replace(_WRAPPERS, "$1"))
    )
    indexed = pl.col("digits").is_not_null().cast(pl.Int64)
    number = (indexed.cum_sum().over("id") - indexed).clip(upper_bound=_MAX_INDICES)
    last = pl.col("number") == _MAX_INDICES
    return (
        parts.with_columns(number=number)
        .group_by("id", "number", maintain_order=True)
        .agg(
            pl.col("before", "key", "part").str.join(),
            pl.col("digits", "after").last(),
        )
        .select(
            "id",
            "number",
            before=pl.when(last).then("part").otherwise("before"),
            digits=pl.when(~last).then("digits"),
            after=pl.when(last).then(pl.lit("")).otherwise("after"),
            key=pl.concat_str("key", pl.col("after").str.replace_all(")", "", literal=True)),
        )
    )


_PLACE = ("folded", "key")
"""Where an index stands: the folded path before it, and the text between that and the index."""


def _with_piece(state: pl.DataFrame, pieces: pl.DataFrame) -> pl.DataFrame:
    """Appends the next piece to the paths so far, folded if its index counts layers.

    Args:
        state: id, and the path so far: as it is (``raw``) and folded; the indices of its folded layers; whether it
            is inside of a folded layer.
        pieces: of some of the names, as `_pieces` returns them, of one number.
    """
    rows = state.join(pieces, on="id", how="left", maintain_order="left")
    indices = rows.drop_nulls("digits").with_columns(value=pl.col("digits").cast(pl.Int64))
    decided = _decided(indices.select(*_PLACE, "raw", "digits", "value", "inside").unique())
    keys = [*_PLACE, "raw", "digits"]
    rows = rows.join(decided, on=keys, how="left", maintain_order="left")
    before, digits, after = (pl.col(name).fill_null("") for name in ("before", "digits", "after"))
    layer = pl.concat_str("layer", "digits", separator=".", ignore_nulls=True)
    return rows.select(
        "id",
        raw=pl.concat_str("raw", before, digits, after),
        folded=pl.concat_str("folded", before, pl.coalesce("shown", digits), after),
        layer=pl.when("counts").then(layer).otherwise("layer"),
        inside=pl.col("inside") | pl.col("counts").fill_null(value=False),
    )


def _decided(indices: pl.DataFrame) -> pl.DataFrame:
    """What stands in place of each index.

    Args:
        indices: distinct indices: their place, the path before them as it is, digits, value, and whether they are
            inside of a folded layer.

    Returns:
        the keys, ``shown`` (null for an index that is not folded) and ``counts`` (whether it is part of the number
        of the layer).
    """
    values = pl.col("value").n_unique().over(_PLACE)
    low, high = pl.col("value").min().over(_PLACE), pl.col("value").max().over(_PLACE)
    layers = pl.col("raw").n_unique().over(_PLACE)
    pairs = pl.struct("raw", "value").n_unique().over(_PLACE)
    instance = (
        pl.col("inside") & pl.col("key").str.ends_with("_") & (layers > 1) & (pairs == values)
    )
    needed = pl.when("inside").then(MIN_INNER).otherwise(MIN_LAYERS)
    dense = values >= _MIN_DENSITY * (high - low + 1)
    of_layer = pl.col("value").n_unique().over(*_PLACE, "raw")
    position = pl.col("value").rank("dense").over(*_PLACE, "raw") - 1
    return (
        indices.with_columns(instance=instance, counts=(values >= needed) & dense, size=of_layer)
        .with_columns(
            counts=pl.col("counts") & ~pl.col("instance"),
            position=pl.when(
                (pl.col("size") > 1) & (pl.col("size").n_unique().over(_PLACE) == 1)
            ).then(position),
        )
        .select(
            *_PLACE,
            "raw",
            "digits",
            "counts",
            shown=pl.when(pl.col("instance") & pl.col("position").is_not_null())
            .then(pl.format("*[{}]", "position"))
            .when(pl.col("instance") | pl.col("counts"))
            .then(pl.lit("*")),
        )
    )
