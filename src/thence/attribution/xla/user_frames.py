"""Finds the frame that represents an HLO stack: the innermost frame of the user's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.optimizers import is_optimizer_file
from thence.model.hlo import Frame
from thence.model.intervals import NO_ROW, chain_to

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from thence.model.hlo import HloModule
    from thence.model.own_code import OwnCode


def source_frames(module: HloModule, own: OwnCode) -> pl.DataFrame:
    """The source place of each stack of a module.

    Args:
        module: with the frames.
        own: which files are the user's own code.

    Returns:
        one row per frame, in the order of ``module.frames``: ``shown``, number of the innermost frame of the
        user's own code in the stack that ends in this frame, else of the innermost frame with a file, else 0;
        ``source`` (as `Frame.place`) of that frame, null if there is none; ``own``, whether it is the user's.
    """
    by_user = _nearest(module, frames_with_file(module, own))
    by_name = _nearest(module, frames_with_file(module, bool))
    shown = np.where(by_user == NO_ROW, by_name, by_user)
    at = pl.Series(shown).replace(NO_ROW, None).cast(pl.UInt32)
    source = frame_places(module).gather(at).cast(pl.String)
    return pl.DataFrame({"shown": shown + 1, "source": source, "own": by_user != NO_ROW})


def frame_places(module: HloModule) -> pl.Series:
    """Each frame of a module as a place (`Frame.place`), Categorical."""
    columns = ["file", "line", "column", "function"]
    places = [Frame(*row).place for row in module.frames.select(columns).iter_rows()]
    return pl.Series(places, dtype=pl.Categorical())


def frames_in_optimizers(module: HloModule) -> npt.NDArray[np.bool_]:
    """Which stacks hold a frame of a library's optimizers, by number of their innermost frame; False for 0."""
    inside: npt.NDArray[np.bool_] = _nearest(module, frames_with_file(module, is_optimizer_file)) != NO_ROW
    return np.append([False], inside)


def frames_with_file(module: HloModule, wanted: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
    """Which frames have a file for which ``wanted`` returns true."""
    files = module.frames["file"]
    chosen = [file for file in files.unique() if wanted(file or "")]
    return files.is_in(pl.Series(chosen, dtype=pl.Categorical()).implode()).fill_null(value=False).to_numpy()


def _nearest(module: HloModule, wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Row of the innermost wanted frame in the stack that ends in each frame, `NO_ROW` without one."""
    parent = module.frames["parent"].cast(pl.Int64).to_numpy() - 1
    return chain_to(parent, np.arange(len(parent)), wanted)
