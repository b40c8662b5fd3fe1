"""The data type in which a kernel computes: from its name, else from the inputs that the trace has of its operator."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.host_rows import gathered
from thence.model.attributed import of_each_activity
from thence.model.columns import name_codes, not_null
from thence.model.intervals import NO_ROW
from thence.model.trees import numbered

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

_NARROW = {
    "tf32": re.compile(r"tf32"),
    "float8": re.compile(r"e4m3|e5m2|[Ff]loat8|fp8"),
    "int8": re.compile(r"(?<![a-z])[is]8(?![0-9])|imma|igemm"),
    "bfloat16": re.compile(r"(?i)bf16|bfloat16|^nvjet_[a-z0-9]+_tst_"),
    # cuDNN calls its kernels for bfloat16 wgmma_f16, too.
    "float16": re.compile(
        r"(?<![a-z])(?<!wgmma_)f16|fp16|(?<![a-zA-Z])[hH]alf2?(?![a-z_])|hgemm|^nvjet_[a-z0-9]+_hsh_"
    ),
}
"""Types whose kernels often name a wider type, too: that of their sums."""
_WIDE = {
    "float32": re.compile(r"(?<![a-z])f32|sgemm|\bfloat\b"),
    "float64": re.compile(r"(?<![a-z])f64|dgemm|\bdouble\b"),
}
_ELEMENTS = {
    **dict.fromkeys(("Float", "float32"), "float32"),
    **dict.fromkeys(("Double", "float64"), "float64"),
    **dict.fromkeys(("Half", "float16"), "float16"),
    **dict.fromkeys(("BFloat16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("Char", "int8"), "int8"),
}
"""Data types by the names of element types that PyTorch writes."""


def data_type_of_name(kernel: str) -> str | None:
    """The data type in which a kernel computes, by its name; None if the name does not say it, or says several.

    Sums are often wider than what is multiplied: a kernel of bfloat16 and float computes in bfloat16.
    """
    if "complex" in kernel:
        return None
    for types in (_NARROW, _WIDE):
        named = [data_type for data_type, pattern in types.items() if pattern.search(kernel)]
        if named:
            return named[0] if len(named) == 1 else None
    return None


_NAMES = 1000
"""Names of kernels that are looked at together."""


@of_each_activity
def data_types(trace: Attributed) -> pl.Series:
    """The data type in which each row of ``trace.gpu`` computes (Categorical); null if it is unknown, and for copies.

    The kernel's name decides. Of a collective whose name says nothing, it is the element type that the trace describes.
    """
    names = trace.gpu["name"]
    kernels = np.flatnonzero((trace.gpu["kind"] == "kernel").to_numpy())
    number, first = numbered(name_codes(names[kernels]))
    # A slice at a time, and by number: names can be most of a trace.
    texts = names[kernels[first]].to_frame().iter_slices(_NAMES)
    types = [data_type_of_name(name) for part in texts for name in _texts(part)]
    row = np.full(len(names), NO_ROW)
    row[kernels] = number
    named = gathered(pl.Series("dtype", types, dtype=pl.String).cast(pl.Categorical()), row)
    if trace.collectives["element_type"].null_count() == trace.collectives.height:
        return named
    elements = trace.collectives.select("gpu", pl.col("element_type").cast(pl.String)).drop_nulls().unique("gpu")
    described = (
        pl.select(gpu=pl.int_range(len(names), dtype=pl.Int32))
        .join(elements, on="gpu", how="left", maintain_order="left")["element_type"]
        .replace_strict(_ELEMENTS, default=None, return_dtype=pl.String)
        .cast(pl.Categorical())
    )
    return named.zip_with(pl.Series(not_null(named)), described)


def _texts(names: pl.DataFrame) -> list[str]:
    return names.to_series().cast(pl.String).to_list()
