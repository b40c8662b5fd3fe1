"""The XLA programs in a profile of jax.profiler: their HLO, from the file or from dumps in the same folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import polars as pl

from thence.errors import DamagedInput, InputError
from thence.readers.jax.hlo import decode_hlo
from thence.readers.jax.hlo_dump import PATTERNS as HLO_PATTERNS
from thence.readers.jax.hlo_dump import hlo_dump_modules
from thence.readers.source import STANDARD_INPUT
from thence.units import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from thence.model.hlo import HloModule
    from thence.readers.jax.xspace import XSpace


@dataclass(frozen=True)
class RunPrograms:
    """The programs that ran: their HLO modules, and which module each program number has.

    Attributes:
        modules: of the programs whose HLO is known.
        index: program number to position in ``modules``.
        warnings: about programs whose HLO is missing or damaged.
    """

    modules: tuple[HloModule, ...]
    index: dict[int, int]
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, space: XSpace, events: pl.DataFrame, path: str) -> RunPrograms:
        """The programs of the device events; HLO from the file itself, else from dumps in its folder."""
        used = events.select("program", pl.col("hlo_module").cast(pl.String)).drop_nulls("program")
        names = dict(used.unique("program", keep="first", maintain_order=True).rows())
        protos = dict(space.programs.select("program", "proto").reverse().rows())
        hlo_of: dict[int, HloModule] = {}
        warnings = []
        for program in (p for p in names if p in protos):
            try:
                hlo_of[program] = decode_hlo(protos[program], path)
            except DamagedInput:
                warnings.append(f"the HLO of program {names[program]} ({program}) is damaged")
        lacking = {p: name for p, name in names.items() if p not in hlo_of}
        if lacking:
            dumped, damaged = _dumps_beside(path)
            warnings += damaged
            hlo_of |= _dumps_of_programs(lacking, dumped, events)
        without = [str(name or p) for p, name in lacking.items() if p not in hlo_of]
        if without:
            warnings.append(
                f"no HLO for {listed(sorted(set(without)))}, so that device time has no source lines, op names or "
                "labels: record the HLO with jax.profiler.ProfileOptions.enable_hlo_proto, or dump it with "
                'XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_proto" and put the dump next to the trace'
            )
        index = {program: number for number, program in enumerate(hlo_of)}
        return cls(tuple(hlo_of.values()), index, tuple(warnings))

    def identities(self, program: Iterable[int]) -> list[str]:
        """The fingerprint of each program, which is equal on all ranks; its number if it has none."""
        fingerprints = {p: self.modules[i].fingerprint for p, i in self.index.items()}
        return [fingerprints.get(p) or str(p) for p in program]


def _dumps_beside(path: str) -> tuple[tuple[HloModule, ...], list[str]]:
    """The modules of the HLO dumps in the folder of the trace, and a warning for each unreadable dump."""
    folder = PurePath(path).parent
    if path == STANDARD_INPUT:
        return (), []
    files = sorted({str(p) for pattern in HLO_PATTERNS for p in Path(folder).glob(pattern)})
    modules: list[HloModule] = []
    warnings = []
    for file in files:
        try:
            modules += hlo_dump_modules(file)
        except InputError as error:
            warnings.append(f"HLO dump left out: {error}")
    return tuple(modules), warnings


def _dumps_of_programs(
    lacking: dict[int, str | None], dumped: tuple[HloModule, ...], events: pl.DataFrame
) -> Iterator[tuple[int, HloModule]]:
    """The dump of each program: it has the program's name, and an instruction for every HLO op that ran.

    If several dumps fit, the one with the program's number is taken, else none.
    """
    if not dumped:
        return
    instructions = events.select("program", pl.col("hlo").cast(pl.String)).drop_nulls().unique()
    ops_that_ran = dict(instructions.group_by("program").agg("hlo").rows())
    for program, name in lacking.items():
        wanted = set(ops_that_ran.get(program, ()))
        fits = [m for m in dumped if m.name == name and wanted <= set(m.instructions["name"])]
        exact = [m for m in fits if m.id == program]
        if exact or len(fits) == 1:
            yield program, (exact or fits)[0]
