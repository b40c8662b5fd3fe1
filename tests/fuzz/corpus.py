"""Mutants that reached new lines of thence, as starting points of further mutants; and the smallest input that fails.

A mutant is told by the texts of the dice that made it, one for each generation, so a corpus is a text file of a line
for each mutant, and nothing of it is unpickled. The lines of code that some mutant reached are in a second file.
Python 3.12 and newer tell each line of code once (`sys.monitoring`), which costs almost nothing; before, there is no
corpus, and all mutants are made from the seed of the format.
"""

from __future__ import annotations

import copy
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import thence
from fuzz.mutations import mutated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType

PACKAGE = str(Path(thence.__file__).parent)
MAX_GENERATIONS = 20
FROM_CORPUS = 0.7
"""Share of the cases that begin with a mutant of the corpus."""
MAX_TRIES = 300
_BETWEEN = " > "
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def of_bytes(dice: random.Random, *, probed: bool) -> bool:
    """Whether a case damages bytes instead of a tree: the first thing that its dice decide."""
    return dice.random() < (0.05 if probed else 0.3)


@dataclass
class Corpus:
    """The mutants of one format that reached new lines.

    Attributes:
        chains: for each mutant, the texts of the dice of its generations.
        reached: lines of code, as ``file:line``, that some mutant reached.
        new: those that were reached for the first time since `begin`.
    """

    folder: Path
    name: str
    probed: bool
    chains: list[tuple[str, ...]] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    new: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, folder: Path, name: str, *, probed: bool) -> Corpus:
        """The corpus in a folder; empty if there is none."""
        made = cls(folder, name, probed)
        folder.mkdir(parents=True, exist_ok=True)
        for path, take in ((made._chains, made._add_chain), (made._lines, made.reached.add)):
            for line in path.read_text("utf-8").splitlines() if path.exists() else ():
                take(line)
        return made

    @property
    def _chains(self) -> Path:
        return self.folder / f"{self.name}.mutants"

    @property
    def _lines(self) -> Path:
        return self.folder / f"{self.name}.lines"

    def _add_chain(self, line: str) -> None:
        self.chains.append(tuple(line.split(_BETWEEN)))

    def watch(self) -> bool:
        """Begins to watch which lines are reached; False where Python does not tell."""
        monitoring = getattr(sys, "monitoring", None)
        if monitoring is None:
            return False
        tool = monitoring.COVERAGE_ID
        monitoring.use_tool_id(tool, "thence-fuzz")

        def reached(code: CodeType, line: int) -> Any:
            if code.co_filename.startswith(PACKAGE):
                place = f"{code.co_filename[len(PACKAGE) + 1 :]}:{line}"
                if place not in self.reached:
                    self.reached.add(place)
                    self.new.add(place)
            return monitoring.DISABLE  # each line once in a process

        monitoring.register_callback(tool, monitoring.events.LINE, reached)
        monitoring.set_events(tool, monitoring.events.LINE)
        return True

    def parent(self, dice: random.Random) -> tuple[str, ...]:
        """The generations of a mutant to begin with; none: the seed of the format."""
        if not self.chains or dice.random() >= FROM_CORPUS:
            return ()
        # Recent mutants reach what others do not, so they are drawn more often.
        chain = self.chains[-1 - int(len(self.chains) * dice.random() ** 2)]
        return chain if len(chain) < MAX_GENERATIONS else ()

    def grown(self, tree: Any, chain: tuple[str, ...]) -> Any:
        """The mutant of these generations."""
        for text in chain:
            dice = random.Random(text)
            if not of_bytes(dice, probed=self.probed):
                tree = mutated(tree, dice)
        return tree

    def ended(self, chain: tuple[str, ...], *, tree: bool) -> None:
        """Keeps a mutant if it reached new lines and is a tree, not bytes."""
        if not self.new:
            return
        with self._lines.open("a", encoding="utf-8") as lines:
            lines.writelines(f"{place}\n" for place in sorted(self.new))
        self.new.clear()
        if tree:
            self.chains.append(chain)
            with self._chains.open("a", encoding="utf-8") as chains:
                chains.write(_BETWEEN.join(chain) + "\n")


def kind_of(failure: str) -> str:
    """What tells a failure from others: innermost line of code and exception, or else the text without numbers."""
    frames = _FRAME.findall(failure)
    if frames:
        error = failure.strip().splitlines()[-1].partition(":")[0]
        return f"{frames[-1][0]}:{frames[-1][1]} {error}"
    return re.sub(r"\d+", "N", failure)[-80:]


def smallest(tree: Any, fails_alike: Callable[[Any], bool]) -> Any:
    """A tree from which nothing can be left out, after at most `MAX_TRIES` attempts, without ending the failure."""
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for path in list(_paths(tree)):
            candidate = _without(tree, path)
            if candidate is None:
                continue
            tries += 1
            if tries > MAX_TRIES:
                return tree
            if fails_alike(candidate):
                tree, smaller = candidate, True
                break
    return tree


def _paths(tree: Any) -> Iterator[tuple[Any, ...]]:
    """The paths to all values, those of the outermost containers first."""
    level: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while level:
        inner = []
        for path, value in level:
            keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
            inner += [((*path, key), value[key]) for key in keys]
        yield from (path for path, _ in inner)
        level = inner


def _without(tree: Any, path: tuple[Any, ...]) -> Any:
    """A copy of the tree without what is at the path; None if it is not there."""
    changed = copy.deepcopy(tree)
    here = changed
    try:
        for key in path[:-1]:
            here = here[key]
        del here[path[-1]]
    except (KeyError, IndexError, TypeError):
        return None
    return changed
