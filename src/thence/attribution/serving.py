"""What ranges of inference servers show: the part of serving, and the passes, which are runs of the model.

The part of serving is stated by names of servers (`thence.model.server_steps`) or users.
The name of a user's range must be ``prefill`` or ``decode``, optionally followed by a number or by brackets.

Servers open several ranges around one run, such as vLLM's ``execute_context_1(7)_generation_0(0)`` around ``step[EXTEND
bs=1 toks=7]``. Of ranges of servers inside each other on a thread, the outermost is the pass. If its name does not say
which part of serving it is, the first range inside it whose name does describes it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW, chain_to
from thence.model.phases import Serving
from thence.model.server_steps import server_step

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask
    from thence.model.server_steps import ServerStep


_USERS = re.compile(r"(prefill|decode)(?:[\s:#_]*\d+|\s*[(\[].*)?", re.IGNORECASE)


def serving_of(name: str) -> Serving | None:
    """The part of serving that the name of a range states, None if it states none."""
    step = server_step(name)
    if step is not None:
        return step.serving
    user = _USERS.fullmatch(name)
    return Serving(user[1].lower()) if user else None


def server_passes(host: pl.DataFrame, parent: Int64) -> tuple[Mask, dict[int, ServerStep]]:
    """The host rows that are passes, and what each of them computes.

    Args:
        parent: parent of each row, `NO_ROW` for none.

    Returns:
        Whether each row is a pass; and for each row that is one, what it computes.
    """
    of_server = np.zeros(host.height, np.bool_)
    marked = (host["category"] == "step").to_numpy()
    if not marked.any():
        return of_server, {}
    step = host[["name"]].with_row_index("row")[np.flatnonzero(marked)]
    names = step["name"].unique().drop_nulls().cast(pl.String)
    step_of_name = {name: parsed for name in names if (parsed := server_step(name)) is not None}
    rows = step.filter(pl.col("name").cast(pl.String).is_in(list(step_of_name)))
    row = rows["row"].cast(pl.Int64).to_numpy()
    of_server[row] = True
    top = of_server.copy()
    top[row] = chain_to(parent, parent[row], of_server) == NO_ROW
    around = chain_to(parent, row, top)
    step_of_pass: dict[int, ServerStep] = {}
    for pass_row, name in zip(around.tolist(), rows["name"].cast(pl.String), strict=True):
        previous = step_of_pass.get(pass_row)
        if previous is None or (previous.serving is None and step_of_name[name].serving is not None):
            step_of_pass[pass_row] = step_of_name[name]
    return top, step_of_pass
