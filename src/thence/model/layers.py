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
_MAX_CHARACTERS = 8_000_000
"""Characters of all names together up to which any is folded, to bound the memory: the paths of a model have far fewer,
a label for each of a hundred thousand nested ranges has more."""
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
    if int(frame["name"].str.len_bytes().sum()) > _MAX_CHARACTERS:
        return frame.select("name", folded="name", layer=pl.lit(None, pl.String))
    pieces = _pieces(frame)
    state = frame.select(
        "id", raw=pl.lit(""), folded=pl.lit(""), layer=pl.lit(None, pl.String), inside=pl.lit(value=False)
    )
    for number in sorted(pieces["number"].unique().to_list()):
        state = _with_piece(state, pieces.filter(pl.col("number") == number).drop("number"))
    whole = pl.col("raw") == pl.col("name")  # not of a name that contains the separator
    return frame.join(state, on="id", how="left", maintain_order="left").select(
        "name", folded=pl.when(whole).then("folded").otherwise("name"), layer=pl.when(whole).then("layer")
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
        .agg(pl.col("before", "key", "part").str.join(), pl.col("digits", "after").last())
        .select(
            "id",
            "number",
            before=pl.when(last).then("part").otherwise("before"),
            digits=pl.when(~last).then("digits"),
            after=pl.when(last).then(pl.lit("")).otherwise("after"),
            key=pl.concat_str("key", pl.col("after").str.replace_all(")", "", literal=True)),
        )
    )


def _with_piece(state: pl.DataFrame, pieces: pl.DataFrame) -> pl.DataFrame:
    """Appends the next piece to the paths so far, folded if its index counts layers.

    Args:
        state: id, and the path so far: as it is (``raw``) and folded; the indices of its folded layers; whether it
            is inside of a folded layer.
        pieces: of some of the names, as `_pieces` returns them, of one number.
    """
    rows = state.join(pieces, on="id", how="left", maintain_order="left").with_columns(
        value=pl.col("digits").cast(pl.Int64), named=pl.col("key").str.ends_with("_")
    )
    # Numbers instead of texts, because they are grouped several times.
    rows = rows.with_columns(pl.col("folded", "key", "raw").cast(pl.Categorical).to_physical().name.suffix("_id"))
    places = _places(rows.drop_nulls("value"))
    rows = rows.join(places, on=_PLACE, how="left", maintain_order="left")
    positions = _positions(rows.filter("instance"))
    rows = rows.join(positions, on=[*_PLACE, "raw_id", "value"], how="left", maintain_order="left")
    before, digits, after = (pl.col(name).fill_null("") for name in ("before", "digits", "after"))
    layer = pl.concat_str("layer", "digits", separator=".", ignore_nulls=True)
    return rows.select(
        "id",
        raw=pl.concat_str("raw", before, digits, after),
        folded=pl.concat_str(
            "folded",
            before,
            pl.when(pl.col("position").is_not_null())
            .then(pl.format("*[{}]", "position"))
            .when(pl.col("instance") | pl.col("counts"))
            .then(pl.lit("*"))
            .otherwise(digits),
            after,
        ),
        layer=pl.when("counts").then(layer).otherwise("layer"),
        inside=pl.col("inside") | pl.col("counts").fill_null(value=False),
    )


_PLACE = ("folded_id", "key_id")
"""Where an index stands: the folded path before it, and the text between that and the index."""


def _places(indices: pl.DataFrame) -> pl.DataFrame:
    """For each place of an index whether it counts layers (``counts``), or instances inside of them (``instance``).

    Args:
        indices: the place, ``raw_id`` (the path before it as it is), value, inside and named (whether the text before
            it ends with an underscore) of each index.
    """
    values = pl.col("value").n_unique()
    # Instances: no number is in two layers.
    apart = pl.struct("raw_id", "value").n_unique() == values
    instance = pl.col("inside").first() & pl.col("named").first()
    needed = pl.when(pl.col("inside").first()).then(MIN_INNER).otherwise(MIN_LAYERS)
    span = pl.col("value").max() - pl.col("value").min() + 1
    return (
        indices.group_by(_PLACE)
        .agg(
            instance=instance & (pl.col("raw_id").n_unique() > 1) & apart,
            counts=(values >= needed) & (values >= _MIN_DENSITY * span),
        )
        .with_columns(counts=pl.col("counts") & ~pl.col("instance"))
    )


def _positions(instances: pl.DataFrame) -> pl.DataFrame:
    """The position of each instance in its layer; null unless every layer has the same number, more than one.

    Args:
        instances: the place, ``raw_id`` (the layer) and value of each.
    """
    held = instances.select(*_PLACE, "raw_id", "value").unique()
    size = pl.len().over(*_PLACE, "raw_id")
    return held.with_columns(size=size).select(
        *_PLACE,
        "raw_id",
        "value",
        position=pl.when((pl.col("size") > 1) & (pl.col("size").n_unique().over(_PLACE) == 1)).then(
            pl.col("value").rank("dense").over(*_PLACE, "raw_id") - 1
        ),
    )
