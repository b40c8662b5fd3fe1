"""What the tests of the code's form look for in a module's source."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HOLDS_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


@functools.cache
def tree(path: Path) -> ast.Module:
    """A module's syntax tree, parsed once for all tests of a process."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module's syntax tree."""
    return tuple(ast.walk(tree(path)))


def import_statements(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import of a module: for types only and in functions, too.

    Expressions, most of a tree, hold none and are not looked into.
    """
    left: list[ast.AST] = [tree(path)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        else:
            left += [n for n in ast.iter_child_nodes(node) if isinstance(n, _HOLDS_STATEMENTS)]
