"""HLO modules from files: dumps that ``--xla_dump_to`` left beside a trace."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING

from thence.errors import DamagedInput, InputError
from thence.readers.xla.hlo import decode_hlo

if TYPE_CHECKING:
    from thence.model.hlo import HloModule

__all__ = ["PATTERNS", "hlo_dump_modules"]

PATTERNS = ("*.hlo.pb", "*.hlo.pb.xz")
"""Files of a directory that hold an HLO module. A dump folder holds each module before and after
optimisation; where it does, only the latter count."""


def hlo_dump_modules(path: str) -> tuple[HloModule, ...]:
    """The optimized HLO modules in a file, a directory (not those below it), or behind a glob.

    Args:
        path: as the user named it; in a directory, files that match `PATTERNS` count.

    Raises:
        InputError: a file cannot be read, or nothing is there.
        DamagedInput: a file holds no HLO module.
    """
    modules = []
    for file in _files(path):
        try:
            data = file.read_bytes()
        except (OSError, ValueError) as error:
            raise InputError(str(file), f"cannot be opened ({error})") from error
        try:
            modules.append(decode_hlo(data, str(file)))
        except (ValueError, OverflowError) as error:
            raise DamagedInput(str(file), f"its HLO module cannot be read ({error})") from error
    return tuple(modules)


def _files(path: str) -> list[Path]:
    place = Path(path)
    if place.is_dir():
        found = sorted({f for pattern in PATTERNS for f in place.glob(pattern) if f.is_file()})
    elif place.exists() or not glob.has_magic(path):
        return [place]
    else:
        matches = glob.glob(path, recursive=True)  # noqa: PTH207 - the pattern may be absolute
        found = sorted(file for file in map(Path, matches) if file.is_file())
    if not found:
        raise InputError(path, f"holds no HLO module (looked for {', '.join(PATTERNS)})")
    optimized = [f for f in found if "before_optimizations" not in f.name]
    return optimized or found
