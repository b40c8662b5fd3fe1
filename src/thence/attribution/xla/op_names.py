"""Paths that frameworks write on HLO instructions: ``jit(step)/transpose(jvp(layer1))/mlp/dot_general``.

The parts are what was open when the operation was traced, functions and the scopes that the user named
(``jax.named_scope``) with transformations around them, and last the primitive. XLA joins the paths of
instructions that it merges, as ``(a:b)`` or, if they have the same beginning, ``prefix/(a:b)``; some of its
passes write ``a;b``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WRAPPED = re.compile(r"(?P<transformation>[A-Za-z_][\w.-]*)\((?P<inner>.*)\)", re.DOTALL)
_FUNCTIONS = frozenset(("jit", "pjit", "xla_call", "pmap", "xmap", "core_call", "closed_call"))
"""Written around the name of a function, which is not a scope that the user named."""
_TRANSFORMATIONS = frozenset(
    ("jvp", "transpose", "vmap", "linearize", "remat", "checkpoint", "shard_map", "custom_vjp")
)
_STRUCTURE = frozenset(
    (
        *("while", "scan", "compute_on", "checkpoint", "remat", "remat2", "rematted_computation", "shmap_body"),
        *("shard_map", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "pjit"),
        *("custom_vjp_call_jaxpr", "custom_lin", "jit", "pallas_call"),
    )
)
"""Parts that jax writes for its own control flow and transformations."""
_AFTER = {"while": ("body", "cond"), "cond": ("branch_",), "scan": ("body",)}
_MAX_PARTS = 1000  # of one op_name: in a hostile one, each merged path can hold merged paths


def parts_of(op_name: str) -> list[str]:
    """The paths of the operations that were merged into one op_name; the op_name itself if none were."""
    waiting, done = _split(op_name, ";")[::-1], list[str]()
    while waiting and len(waiting) + len(done) < _MAX_PARTS:
        path = waiting.pop()
        segments = _split(path, "/")
        last = segments[-1]
        inner = _split(last[1:-1], ":") if last.startswith("(") and last.endswith(")") else []
        if not inner or not _closes_at_end(last):
            done.append(path)
            continue
        prefix = "/".join(segments[:-1])
        waiting += [f"{prefix}/{part}" if prefix else part for part in reversed(inner)]
    return [*done, *reversed(waiting)]


def segments_of(path: str) -> list[str]:
    """The parts of a path, outermost first, split at each ``/`` outside of brackets and quotes."""
    return _split(path, "/")


def scopes_of(path: str) -> tuple[str, ...]:
    """The names of scopes and functions in a path, outermost first, without what jax writes around them."""
    scopes = []
    for segment in segments_of(path)[:-1]:
        name, depth = segment, 0
        match = _WRAPPED.fullmatch(name)
        while match and depth < _MAX_PARTS:
            name, depth = match["inner"], depth + 1
            match = _WRAPPED.fullmatch(name)
        scopes += _split(name, "/")
    return tuple(scopes)


def labels(op_names: Iterable[str]) -> dict[str, tuple[str | None, str]]:
    """The path of named scopes in each op_name of one module, and the code of the rule, or of why there is none.

    The last part is the primitive, unless another op_name continues below it: XLA also writes the
    common beginning of several paths.
    """
    scopes_of = {
        name: [_scopes(part) for part in parts_of(name) if is_traced(part)] for name in dict.fromkeys(op_names)
    }
    inner = {path[:length] for paths in scopes_of.values() for path in paths for length in range(1, len(path))}
    return {name: _label(paths, inner) for name, paths in scopes_of.items()}


def is_traced(path: str) -> bool:
    """Whether the path starts with a transformed function, jit(f), and not with an argument's name."""
    return "(" in path.partition("/")[0]


def _label(paths: list[tuple[str, ...]], scopes: set[tuple[str, ...]]) -> tuple[str | None, str]:
    if not paths:
        return None, "argument"
    named = {path if path in scopes else path[:-1] for path in paths}
    if len(named) == 1:
        label, rule = "/".join(named.pop()), "named_scope"
    else:
        label, rule = "/".join(_common(sorted(named))), "common_scope"
    if label:
        return label, rule
    scoped = any(len(path) > 1 for path in paths)
    return None, "different_scopes" if scoped else "no_scope"


def _common(paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    first, last = paths[0], paths[-1]
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def _scopes(path: str) -> tuple[str, ...]:
    """Scopes, outermost first, and the primitive; "" where the path ends without one."""
    segments = _split(path, "/")
    scopes = list(_unwrapped(segments))
    return (*scopes, "") if _WRAPPED.fullmatch(segments[-1]) else tuple(scopes)


def _unwrapped(segments: list[str]) -> Iterator[str]:
    """The segments without transformations and jax's own structure; the last one is kept."""
    previous = ""
    for number, segment in enumerate(segments):
        is_last = number == len(segments) - 1
        match = _WRAPPED.fullmatch(segment)
        depth = 0
        while match and match["transformation"] in _TRANSFORMATIONS and depth < _MAX_PARTS:
            segment, depth = match["inner"], depth + 1  # noqa: PLW2901 - peeled layer by layer
            match = _WRAPPED.fullmatch(segment)
        if match and match["transformation"] in _FUNCTIONS:
            continue
        structural = segment in _STRUCTURE or segment.startswith(_AFTER.get(previous, ("\0",)))
        structural = structural or segment == "cond" or "->" in segment  # jnp.einsum's own scope
        previous = segment
        if structural and not is_last:
            continue
        if segment:
            yield from _split(segment, "/") if depth else (segment,)


def _split(text: str, separator: str) -> list[str]:
    """Splits text at separators outside of brackets and quotes."""
    if separator not in text:
        return [text]
    parts, depth, begin, quote = [], 0, 0, ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and depth:
            quote = character
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == separator and depth <= 0:
            parts.append(text[begin:position])
            begin = position + 1
    return [*parts, text[begin:]]


def _closes_at_end(text: str) -> bool:
    """Whether the opening bracket at the start of the text is closed by its last character."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position == len(text) - 1
    return False
