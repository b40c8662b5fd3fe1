"""How far shares of hardware counters are from known work, and whether their intervals hold it.

    python benchmarks/counters_truth.py [FILE.npz ...]

The files are those of `tests/data/counters` (ORIGIN.md there): kernels of 5 to 113 us of known work, back to back in
random order on an H200, with samples of counters. The first table is of all 180 launches of each work: error and stated
half of the 95 % interval. The second counts how often the truth is in the interval, for all launches, and for those of
each sixth and of each thirty-sixth of the time. Counters of a work that it does not determine are left out: how many
bytes a product reads depends on what is in the cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import polars as pl

from command_line import documented_parser
from thence.model.thresholds import COUNTER_ERROR_SHARE

sys.path += [str(Path(__file__).parents[1] / "tests" / name) for name in ("", "support")]
from known_counters import DATA, DETERMINED, LAUNCHES, PARTS, figures, inside, opened


def main() -> None:
    """Prints both tables of each file."""
    options = documented_parser(__doc__)
    options.add_argument("files", type=Path, nargs="*", default=sorted(DATA.glob("*.npz")))
    for path in options.parse_args().files:
        trace, data = opened(path)
        lasting = np.bincount(data["work"], data["kernel_length"]) / (1e3 * data["launch"].max() / 10)
        print(f"{path.name}: us of a launch, error ± half of the 95 % interval (%)")
        everything = figures(trace, data, LAUNCHES)
        for name in DETERMINED:
            rows = everything.filter(pl.col("counter") == name).sort("work").select("work", "error", "stated").rows()
            texts = (f"{lasting[work]:5.1f}: {100 * error:+.2f} ±{100 * stated:.2f}" for work, error, stated in rows)
            print(f"  {name:17}", "  ".join(texts))
        for text, launches in PARTS.items():
            count, shown, held = inside(figures(trace, data, launches), COUNTER_ERROR_SHARE)
            print(f"  {text:16} {count:4} figures, {shown:4} shown, truth inside of {held:4}: {held / shown:.1%}")


if __name__ == "__main__":
    main()
