"""Compares the compiled scanner of Kineto events with Python on mutants: the same columns, or refused.

    python tests/fuzz/scanner.py --minutes 8 [--processes 16] [--seed N]

Prints how many mutants there were, how many of them the scanner read, and every piece for which the two ways differ.
A mutant is told by seed and number. With a scanner that was built with AddressSanitizer, reads beyond a piece are
found too: every piece is scanned in memory of its own that has no byte more.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from fuzz.mutations import damaged, mutated
from thence.readers.compiled import SCANNER
from thence.readers.kineto import events
from thence.readers.kineto.scanner import is_scanned

DATA = Path(__file__).parents[1] / "data"
MOST_EVENTS = 8
_COUNTED = re.compile(r"^counted: (\d+) mutants, (\d+) read by the scanner, (\d+) different$", re.MULTILINE)
_SHAPES: tuple[dict[str, Any], ...] = ({}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False})
"""How a piece is laid out."""


def recorded() -> list[list[Any]]:
    """The events of the recordings, every kind of event as often as any other."""
    kinds: dict[tuple[str, ...], list[Any]] = {}
    for path in sorted(DATA.rglob("*.json.gz")):
        document = json.loads(gzip.decompress(path.read_bytes()))
        found = document.get("traceEvents", []) if isinstance(document, dict) else []
        for event in found if isinstance(found, list) else []:
            arguments = event.get("args", {})
            keys = sorted(arguments) if isinstance(arguments, dict) else ()
            kinds.setdefault((str(event.get("ph")), str(event.get("cat")), *keys), []).append(event)
    return list(kinds.values())


def mutant(kinds: list[list[Any]], dice: random.Random) -> bytes:
    """A piece of some events with a few changes of values, of bytes, of both, or of neither."""
    tree = [dice.choice(dice.choice(kinds)) for _ in range(dice.randrange(1, MOST_EVENTS))]
    if dice.random() < 0.5:  # most events are like one before them, as the scanner expects
        tree *= 2
    kind = dice.randrange(8)
    text = "[]"
    with suppress(RecursionError):  # changes may nest deeper than Python copies or writes
        if kind < 6:
            tree = mutated(tree, dice)
        text = json.dumps(tree, default=lambda value: value.decode("latin-1"), **dice.choice(_SHAPES))
    piece = text.encode("utf-8", "surrogatepass")
    return damaged(piece, dice) if kind in (5, 6) else piece


def columns(piece: bytes, way: str, *, annotated: bool) -> dict[str, Any]:
    """The columns of a piece, arrays as dtype, shape and bytes."""
    os.environ[SCANNER.variable] = way
    found = events.decode(piece, annotated=annotated)
    return {
        name: (values.dtype.str, values.shape, values.tobytes()) if isinstance(values, np.ndarray) else values
        for name, values in found.items()
    }


def compare(seed: int, minutes: float) -> int:
    """Compares mutants for so long; returns how many differ."""
    if SCANNER.load() is None:
        raise SystemExit("the scanner was not built")
    kinds = recorded()
    began = time.monotonic()
    read = different = number = 0
    for number in count(1):
        dice = random.Random(f"scanner {seed} {number}")
        piece = mutant(kinds, dice)
        annotated = dice.random() < 0.5
        os.environ[SCANNER.variable] = "c"
        read += is_scanned(np.frombuffer(piece, np.uint8).copy().data)
        if columns(piece, "c", annotated=annotated) != columns(piece, "python", annotated=annotated):
            different += 1
            print(f"seed {seed}, number {number}, annotated {annotated}: {piece!r}", flush=True)
        if time.monotonic() - began > 60 * minutes:
            break
    print(f"counted: {number} mutants, {read} read by the scanner, {different} different", flush=True)
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.processes == 1:
        return int(compare(options.seed, options.minutes) > 0)
    command = [sys.executable, __file__, "--minutes", str(options.minutes), "--seed"]
    running = [
        subprocess.Popen([*command, f"{options.seed + number}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for number in range(options.processes)
    ]
    sums, ended = [0, 0, 0], 0
    for process in running:
        text = process.communicate()[0].decode(errors="replace")
        told = _COUNTED.search(text)
        if told is None or process.returncode:
            print(f"{process.args}: exit code {process.returncode}\n{text[-4000:]}", flush=True)
        ended += told is None
        sums = [one + int(other) for one, other in zip(sums, told.groups() if told else (0, 0, 0), strict=True)]
    print(f"{options.processes} processes, {ended} of them ended early; ", end="")
    print(f"counted: {sums[0]} mutants, {sums[1]} read by the scanner, {sums[2]} different", flush=True)
    return int(sums[2] > 0 or ended > 0)


if __name__ == "__main__":
    sys.exit(main())
