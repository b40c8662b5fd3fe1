"""Interning of texts: each text is written once and then referred to by number (Perfetto's InternedData).

Field numbers: protos/perfetto/trace/interned_data/interned_data.proto.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.writers.timelines.perfetto.wire import bytes_field, text_field, uint_field

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.model.arrays import Int64


@dataclass
class Texts:
    """Distinct texts of one kind, numbered from 1; 0 stands for none.

    Attributes:
        number: field of InternedData that holds the texts. Each of its messages has the text's number as
            field 1 and the text as field 2.
        numbers: the number of each text.
    """

    number: int
    numbers: dict[str, int] = field(default_factory=dict)

    def of(self, text: str) -> int:
        """The number of a text; a new text gets the next number."""
        return self.numbers.setdefault(text, len(self.numbers) + 1)

    def column(self, values: pl.Series) -> Int64:
        """The number of each value in a column of categories or texts; 0 for null."""
        if not isinstance(values.dtype, pl.Categorical | pl.Enum):
            values = values.cast(pl.String).cast(pl.Categorical)
        distinct = values.drop_nulls().unique(maintain_order=True)
        codes = distinct.to_physical().to_numpy()
        table = np.zeros(int(codes.max(initial=0)) + 1, np.int64)
        table[codes] = [self.of(text) for text in distinct.cast(pl.String).to_list()]
        numbers: Int64 = table[values.to_physical().fill_null(0).to_numpy()]
        numbers[values.is_null().to_numpy()] = 0
        return numbers


@dataclass
class Interned:
    """All interned texts of one file."""

    categories: Texts = field(default_factory=lambda: Texts(1))
    names: Texts = field(default_factory=lambda: Texts(2))
    keys: Texts = field(default_factory=lambda: Texts(3))
    texts: Texts = field(default_factory=lambda: Texts(29))

    def messages(self) -> Iterator[bytes]:
        """Yields InternedData messages with all texts, 4,096 texts in each."""
        entries = [
            bytes_field(kind.number, uint_field(1, number) + text_field(2, text))
            for kind in (self.categories, self.names, self.keys, self.texts)
            for text, number in kind.numbers.items()
        ]
        for first in range(0, len(entries), 4096):
            yield b"".join(entries[first : first + 4096])
