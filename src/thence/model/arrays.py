"""Types of NumPy arrays by their elements, for annotations. Shapes are stated where they are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
"""Elements of any type."""
Int64 = npt.NDArray[np.int64]
"""Times and durations in nanoseconds, counts, sizes in bytes, and row numbers."""
Float64 = npt.NDArray[np.float64]
UInt8 = npt.NDArray[np.uint8]
"""Bytes, and codes of small tables."""
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
"""Which rows are meant."""
