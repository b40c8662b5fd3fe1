"""Turns the chains that the compiled probe reads from stacks into places and boundaries.

At each launch, and at every other call and boundary that the probe sees, it reads the chain that the thread is
in: the innermost module, the line from which the outermost frame was reached, and the user's functions with the
position in each. This module looks up the places of chains, and makes a boundary of each change of place. Lines are
looked up when rows are written, not at the launch.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.capture.boundaries.log import COLUMNS, READ
from thence.capture.boundaries.node_places import LEAF, MAX_ROWS, NodePlaces
from thence.capture.boundaries.places import LINE, MODULE, PHASE, Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, ModuleType

    from thence.capture.boundaries.places import Places

    Columns = dict[str, np.ndarray[Any, Any]]

WATCHED, MODULE_CALL, ENGINE, GENERATED, FIRST_OWN = range(1, 6)
"""Kinds of code objects in the probe (_stack.h): code whose events are passed on to Python, the call of a module, the
call of autograd's engine, code that a compiler generated; each number from `FIRST_OWN` on is one user function."""
_CHANGE = np.dtype(
    [("time", "<i8"), ("before", "<i8"), ("node", "<u8")]
    + [(name, "<u4") for name in ("number", "thread", "chain", "maker")]
)
"""``Change`` of _stack.c."""
_MADE = np.dtype(
    [(name, "<u8") for name in ("begin", "end", "inside")]
    + [(name, "<u4") for name in ("thread", "chain", "maker", "inside_maker")]
)
"""``Made`` of _stack.c."""


class Chains:
    """The chains of one recording.

    Args:
        native: the compiled probe, which can read stacks here (`thence.capture.boundaries.stacks.why_unreadable`).
        places: takes numbers for lines.
        lines: whether lines are noted, or only modules.

    Attributes:
        observed: called when an observer is set.
        nodes: the places in which autograd nodes were made.
        phases: numbers of the phases of what autograd nodes launch, and of what leaves' nodes launch.
    """

    phases = (0, 0)

    def __init__(self, native: ModuleType, places: Places, *, lines: bool = True) -> None:
        self.native = native
        self._places = places
        self._kinds = (MODULE, LINE) if lines else (MODULE,)
        self._nowhere = {kind: places.nothing(kind) for kind in (MODULE, LINE)}
        self._codes: list[CodeType] = []
        self._kept: list[object] = []
        self._starts: dict[int, tuple[list[int], list[int]]] = {}
        self._of_chain = np.array([[self._nowhere[MODULE], self._nowhere[LINE]]], np.uint32)
        self._last: dict[tuple[int, int], int] = {}
        self._later = np.empty(0, _CHANGE)
        self.nodes = NodePlaces(self._nowhere[LINE])
        self._unreported: list[tuple[Any, Any, Any]] = []
        self._moved: dict[tuple[int, int], int] = {}
        self.observed: Callable[[], None] = lambda: None
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Read stacks from now on."""
        self.native.begin_stacks(0)

    def end(self) -> None:
        """Read no more stacks. What was read can still be taken."""
        self.native.end_stacks()

    def own(self, code: CodeType) -> None:
        """Register a function of the user's; its code is kept alive, so that no other code gets its address."""
        with self._lock:
            self._codes.append(code)
            self.native.add_code(id(code), FIRST_OWN + len(self._codes) - 1)

    def kind(self, code: CodeType) -> int:
        """The kind of a code object; 0 if it was not registered."""
        return self.native.code_kind(id(code))  # type: ignore[no-any-return]

    def watch(self, code: CodeType, what: int) -> None:
        """Register other code, of kind `WATCHED`, `MODULE_CALL`, `ENGINE` or `GENERATED`."""
        self._kept.append(code)
        self.native.add_code(id(code), what)

    def here(self) -> tuple[int, int]:
        """Numbers of the places of module and line that the calling thread is in."""
        chain, node, maker = self.native.here()
        module, line = self.places(chain)
        if not maker:
            return module, line
        with self._lock:
            self._note_made()
            around = self.nodes.find(np.array([maker]), np.array([node], np.uint64))
            own = np.array([module], np.uint32), np.array([line], np.uint32)
            modules, lines = self._inside(*own, *around)
        return int(modules[0]), int(lines[0])

    def places(self, chain: int) -> tuple[int, int]:
        """Numbers of the places of module and line of a chain."""
        if chain >= len(self._of_chain):
            self._resolve()
        module, line = self._of_chain[chain].tolist()
        return module, line

    def observe(self, observer: Callable[[int], None] | None) -> None:
        """Call the observer with each place that a thread enters, on that thread; None removes the observer."""
        if observer is None:
            self.native.observe_stacks(None)
            return
        last: dict[int, tuple[int, int]] = {}

        def crossed(chain: int) -> None:
            here = self.places(chain)
            thread = threading.get_ident()
            before = last.get(thread, (0, 0))
            last[thread] = here
            for place, other in zip(here, before, strict=True):
                if place != other:
                    observer(place)

        self.native.observe_stacks(crossed)
        self.observed()

    def take_made(self) -> list[tuple[Any, Any, Any]]:
        """The autograd nodes made since the last call and their places, without nodes made inside of other nodes.

        Returns:
            in portions: rows of ``_MADE``, and the numbers of the places of module and line of each row.
        """
        with self._lock:
            self._note_made()
            unreported, self._unreported = self._unreported, []
        return unreported

    def _note_made(self) -> None:
        """Find the places of the nodes that were made since the last call."""
        rows = np.frombuffer(self.native.take_made(), _MADE)
        modules, lines = self._arrays(rows["chain"])
        outer = rows["inside_maker"] == 0
        if outer.any():
            self._unreported.append((rows[outer], modules[outer], lines[outer]))
        while len(self._unreported) > 1 and sum(len(made) for made, _, _ in self._unreported) > MAX_ROWS:
            del self._unreported[0]
        ready = outer
        while len(rows):
            if not ready.any():
                ready = ~ready  # the remaining rows lie in nodes that are not known
            made = rows[ready]
            around = self.nodes.find(made["inside_maker"], made["inside"])
            places = self._inside(modules[ready], lines[ready], *around)
            self.nodes.add(made["maker"], made["begin"], made["end"], *places)
            rows, modules, lines = rows[~ready], modules[~ready], lines[~ready]
            ready = self.nodes.find(rows["inside_maker"], rows["inside"])[0] > 0

    def _inside(self, modules: Any, lines: Any, around: Any, below: Any) -> tuple[Any, Any]:
        """Places of module and line, within the places `around` and `below` of the running node; those are 0 for none.

        The node's module is taken where a row has no module; the node's line becomes the outermost caller of a line.
        """
        modules = np.where((modules == self._nowhere[MODULE]) & (around > 0), around, modules)
        mine = np.flatnonzero(below > 0)
        keys = lines[mine].astype(np.uint64) << 32 | below[mine]  # each different pair is looked up once
        pairs, which = np.unique(keys, return_inverse=True)
        moved = [self._above(*divmod(pair, 1 << 32)) for pair in pairs.tolist()]
        lines = lines.copy()
        lines[mine] = np.array(moved, np.uint32)[which]
        return modules, lines

    def _above(self, line: int, below: int) -> int:
        """The place of a line, with the line `below` as its outermost caller."""
        if not below or below == self._nowhere[LINE]:
            return line
        known = self._moved.get((line, below))
        if known is None:
            known = below
            for number in self._path(line):
                known = self._places.number(self._places[number]._replace(parent=known))
            self._moved[line, below] = known
        return known

    def take(self, until: int) -> Columns:
        """Boundaries at which a thread's module or line changed since the last call, as `BoundaryLog.take`.

        Args:
            until: Unix ns; later boundaries are left for the next call.
        """
        with self._lock:
            rows = np.concatenate([self._later, np.frombuffer(self.native.take_changes(), _CHANGE)])
            self._note_made()  # after the changes: nodes are noted before they run
            due = rows["time"] <= until
            self._later, rows = rows[~due], rows[due]
            order = np.argsort(rows["thread"], kind="stable")
            resolved = self._arrays(rows["chain"])
            if rows["maker"].any():
                resolved = self._inside(*resolved, *self.nodes.around(rows, order))
            places = dict(zip((MODULE, LINE), resolved, strict=True))
            parts = [self._changes(kind, rows, places[kind], order) for kind in self._kinds]
            parts.append(self._phases_of(rows, order))
        whole = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
        in_time = np.argsort(whole["time"], kind="stable")
        return {name: whole[name][in_time].astype(dtype) for name, dtype in COLUMNS.items()}

    def lost(self) -> tuple[int, int, int]:
        """Numbers of changes and ranges of nodes lost for lack of memory, and of chains cut to their innermost line."""
        return self.native.lost_stacks()  # type: ignore[no-any-return]

    def _changes(self, kind: int, rows: Any, place: Any, order: Any) -> Columns:
        """Boundaries at which a thread's place of a kind differs from that of its previous row.

        Between the end of the previous call and this call, the thread was in the innermost place that contains both
        places: for two lines of one function, in this function.
        """
        place = place[order]
        before = self._before(kind, rows["thread"][order], place, self._nowhere[kind])
        changed = place != before
        rows, place, before = rows[order][changed], place[changed], before[changed]
        pairs, which = np.unique(before.astype(np.uint64) << 32 | place, return_inverse=True)
        common = [self._common(kind, *divmod(pair, 1 << 32)) for pair in pairs.tolist()]
        between = np.array(common, np.uint32)[which]
        gap = (between != before) & (rows["before"] > 0) & (rows["before"] < rows["time"])
        new = ~(gap & (between == place))
        # The caller's sort by time is stable: of rows at one moment those for the time between calls come last.
        whole = {
            "counter": (rows["number"], rows["number"]),
            "time": (rows["time"], rows["before"]),
            "thread": (rows["thread"], rows["thread"]),
            "place": (place, between),
            "flags": (np.full(len(rows), READ),) * 2,
        }
        return {name: np.concatenate([a[new], b[gap]]) for name, (a, b) in whole.items()}

    def _before(self, kind: int, thread: Any, place: Any, nowhere: int) -> Any:
        """The previous place of each row's thread; rows are sorted by thread and time."""
        first = np.ones(len(thread), bool)
        first[1:] = thread[1:] != thread[:-1]
        before = np.roll(place, 1)
        before[first] = [self._last.get((kind, number), nowhere) for number in thread[first].tolist()]
        last = np.append(first[1:], [True])[: len(thread)]
        self._last.update(
            ((kind, number), last_place)
            for number, last_place in zip(thread[last].tolist(), place[last].tolist(), strict=True)
        )
        return before

    def _phases_of(self, rows: Any, order: Any) -> Columns:
        """Boundaries at which a thread enters the phase of autograd nodes, or of leaves' nodes.

        Hooks note other phases inside of a node, and at their end the phase of the node again.
        """
        rows = rows[order]
        place = np.where(rows["node"] == LEAF, self.phases[1], self.phases[0])
        place = np.where(rows["maker"] > 0, place, 0)
        new = (place != self._before(PHASE, rows["thread"], place, 0)) & (place > 0)
        rows = rows[new]
        kept = {name: rows[name] for name in ("time", "thread")}
        flags = np.full(len(rows), READ)
        return {**kept, "counter": rows["number"], "place": place[new], "flags": flags}

    def _common(self, kind: int, first_number: int, second_number: int) -> int:
        """The innermost place that contains two places: for two lines of one function, this function."""
        above, paths = 0, [self._path(number) for number in (first_number, second_number)]
        for a, b in zip(*paths, strict=False):
            if a != b:
                first, second = self._places[a], self._places[b]
                if kind == LINE and first[2:4] == second[2:4]:
                    return self._places.number(first._replace(line=0))
                break
            above = a
        return above or self._nowhere[kind]

    def _path(self, number: int) -> list[int]:
        """The numbers of the places around a place, outermost first, and its own; empty for no place."""
        path: list[int] = []
        while number and self._places[number].name is not None:
            path.append(number)
            number = self._places[number].parent
        return path[::-1]

    def _arrays(self, chains: Any) -> tuple[Any, Any]:
        if len(chains) and int(chains.max()) >= len(self._of_chain):
            self._resolve()
        numbers = self._of_chain[chains]
        return numbers[:, 0], numbers[:, 1]

    def _resolve(self) -> None:
        """Find the places of the chains that are new since the last call."""
        with self._lock:
            known = len(self._of_chain)
            words = np.frombuffer(self.native.chains_from(known), np.uint32).tolist()
            placed = []
            position = 0
            while position < len(words):
                length = words[position]
                placed.append(self._placed(words[position + 1 : position + 1 + length]))
                position += 1 + length
            if placed:
                self._of_chain = np.concatenate([self._of_chain, np.array(placed, np.uint32)])

    def _placed(self, words: list[int]) -> tuple[int, int]:
        module, line = words[:2]
        if line == self._nowhere[LINE]:
            line = 0
        for position in range(len(words) - 2, 1, -2):
            code = self._codes[words[position] - FIRST_OWN]
            number = self._line(words[position] - FIRST_OWN, words[position + 1])
            line = self._places.number(Place(LINE, line, code.co_qualname, code.co_filename, number))
        return module or self._nowhere[MODULE], line or self._nowhere[LINE]

    def _line(self, code: int, position: int) -> int:
        """The line of a position: an odd position is twice the line and 1, an even one the offset of an instruction."""
        if position & 1:
            return position >> 1
        if code not in self._starts:
            ranges = [(start, line or 0) for start, _, line in self._codes[code].co_lines()]
            self._starts[code] = [start for start, _ in ranges], [line for _, line in ranges]
        starts, lines = self._starts[code]
        index = bisect_right(starts, position) - 1
        return lines[index] if index >= 0 else 0
