"""One mutator for every format: trees of Python values, and bytes.

A tree is made of dicts, lists, texts, bytes, numbers, booleans and None. What each format makes of one is said in
`formats`; what it cannot express it writes as best it can.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

Tree = Any

INTEGERS = (
    0, 1, -1, 2, 127, 255, 1 << 15, (1 << 31) - 1, 1 << 31, -(1 << 31), (1 << 32) - 1, 1 << 32, 1 << 53, (1 << 62) + 1,
    (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1, 1 << 64, 10**19, 10**30, 9_223_372_036_854_775, 1_700_000_000,
)  # fmt: skip
FLOATS = (0.5, -0.0, 1e-9, 1e15, 9.3e18, 1e300, math.inf, -math.inf, math.nan)
TEXTS = (
    "", " ", "\0", "\n", "\r\n", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\u202e", "\ufeff", "é" * 300, "0", "-1",
    "007", "1e5", "NaN", "99999999999999999999", "[TP01] 5", "stream 7", "ProfilerStep#3", "nn.Module: A_0", "a/b",
    "../../etc/passwd", "model.py(12): forward", "_Z3fooIfEvPT_i", "a<" * 200, "(" * 300, "%s{}",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    "jit_step(1)", "<script>", "'; drop table gpu; --", "x" * 5000,
)  # fmt: skip
VALUES = (*INTEGERS, *FLOATS, *TEXTS, None, True, False, [], {}, b"", b"\xff\xfe", b"\0" * 64)
TOKENS = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\n", b"\x00", b"\xff", b"\xff" * 8, b"null", b"NaN", b"1e999",
    b"-1", b"99999999999999999999999", b"[[", b'"traceEvents":[', b'{"ph":"X"}', b"\xef\xbb\xbf", b"\\ud800",
    b"PK\x03\x04", b"PAR1", b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", b"\x1f\x8b", b"\x93NUMPY", b"{'descr': '|O'",
    b"SQLite format 3\0",
)  # fmt: skip


def mutated(tree: Tree, dice: random.Random) -> Tree:
    """A copy of a tree with one to a few changes."""
    tree = copy.deepcopy(tree)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        _change(tree, dice)
    return tree


def _change(tree: Tree, dice: random.Random) -> None:
    parent, key = _somewhere(tree, dice)
    if parent is None:
        return
    value = parent[key]
    kind = dice.randrange(10)
    if kind < 4:
        parent[key] = copy.deepcopy(dice.choice(VALUES))
    elif kind == 4:
        parent[key] = _near(value, dice)
    elif kind == 5:
        del parent[key]
    elif kind == 6:
        _repeat(parent, key, dice)
    elif kind == 7:
        _reorder(parent, key, dice)
    elif kind == 8:
        elsewhere, place = _somewhere(tree, dice)
        if elsewhere is not None:
            parent[key] = copy.deepcopy(elsewhere[place])
    else:
        parent[key] = _deep(value, dice)


def _somewhere(tree: Tree, dice: random.Random) -> tuple[Any, Any]:
    """A container within a tree, and one of its keys; small containers are as likely as large ones."""
    found: tuple[Any, Any] = (None, None)
    here = tree
    while isinstance(here, dict | list) and here:
        key = dice.choice(list(here)) if isinstance(here, dict) else dice.randrange(len(here))
        found = (here, key)
        if dice.random() < 0.12:
            break
        here = here[key]
    return found


def _near(value: Tree, dice: random.Random) -> Tree:
    """Nearly the same value."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return dice.choice((value + 1, -value, value * 1000, value << 40, str(value), float(value % (1 << 60))))
    if isinstance(value, float):
        return -value if dice.random() < 0.5 else value * 1e9
    if isinstance(value, str):
        at = dice.randrange(len(value) + 1)
        return value[:at] + dice.choice(TEXTS) + value[at + dice.choice((0, 1, 5)) :]
    if isinstance(value, bytes):
        return damaged(value, dice)
    return value


def _repeat(parent: Any, key: Any, dice: random.Random) -> None:
    if isinstance(parent, list):
        parent[key:key] = [copy.deepcopy(parent[key]) for _ in range(dice.choice((1, 2, 20)))]
    else:
        parent[f"{key}{dice.choice(TEXTS)}"[:300]] = copy.deepcopy(parent[key])


def _reorder(parent: Any, key: Any, dice: random.Random) -> None:
    if isinstance(parent, list):
        dice.shuffle(parent)
        return
    other = dice.choice(list(parent))
    parent[key], parent[other] = parent[other], parent[key]


def _deep(value: Tree, dice: random.Random) -> Tree:
    for _ in range(dice.choice((1, 5, 300))):
        value = [value] if dice.random() < 0.5 else {"a": value}
    return value


def damaged(content: bytes, dice: random.Random) -> bytes:
    """Bytes cut, flipped, repeated, moved, or with tokens among them."""
    if not content:
        return dice.choice(TOKENS)
    size = len(content)
    low, high = sorted((dice.randrange(size), dice.randrange(size)))
    kind = dice.randrange(6)
    if kind == 0:
        return content[:low]
    if kind == 1:
        return content[:low] + content[low:high] * dice.choice((2, 3, 50)) + content[high:]
    if kind == 2:
        return content[:low] + content[high:]
    if kind == 3:
        return content[high:] + content[low:high] + content[:low]
    changed = bytearray(content)
    for _ in range(dice.choice((1, 3, 30))):
        at = dice.randrange(len(changed))
        if kind == 4:
            changed[at] = dice.randrange(256)
        else:
            changed[at : at + dice.choice((0, 1, 8))] = dice.choice(TOKENS)
            changed = changed or bytearray(b"\0")
    return bytes(changed)
