"""Hooks of MkDocs: pages that are made and not kept, and the order of all pages.

A page in docs/ that is named nowhere here stands under "Guides"; a verb, table or key that is new has its place
already (docs/make_reference.py).
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.exceptions import Abort
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

DOCS = Path(__file__).parent

_TUTORIALS = ("pytorch", "jax", "inference", "ci_and_notebooks")
_FIRST = (
    "recipes.md",
    "recording.md",
    "cuda_graphs.md",
    "inside.md",
    "idle.md",
    "memory.md",
    "counters.md",
    "diff.md",
    "history.md",
    "library.md",
)
_NUMBERS = ("numbers.md", "soundness.md", "reasons.md", "comparison.md")
_REFERENCE = ("reference/tables.md", "reference/kinds.md", "reference/json.md", "reference/exit_codes.md")
_PROJECT = ("architecture.md", "security.md", "contributing.md", "changelog.md")
_ROOT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the repository's root that are pages of the site, too."""


@functools.cache
def _made() -> dict[str, str]:
    sys.path.insert(0, str(DOCS))  # MkDocs takes back what a hook adds while it is loaded
    from make_reference import pages, undescribed

    if missing := undescribed():
        raise Abort("keys of --format json that docs/json_keys.py does not describe:\n" + "\n".join(missing))
    return pages()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The order of all pages."""
    there = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.glob("*.md"))]
    named = {"index.md", "formats.md", *_FIRST, *_NUMBERS, *_PROJECT}
    guides = [*_FIRST, "formats.md", *(page for page in there if page not in named)]
    verbs = [page for page in _made() if page.startswith("reference/verbs/")]
    rooms = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / "rooms").glob("*.md"))
    config.nav = [
        {"Home": "index.md"},
        {"Tutorials": [f"tutorials/{name}.md" for name in _TUTORIALS]},
        {"Guides": guides},
        {"Verbs": sorted(verbs, key=lambda page: not page.endswith("index.md"))},
        {"Reference": [*_REFERENCE, "reasons.md"]},
        {"Numbers": [page for page in _NUMBERS if page != "reasons.md"]},
        {"Project": [*_PROJECT, *rooms]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is made, and the pages of the repository's root."""
    root = {name: (DOCS.parent / source).read_text("utf-8") for name, source in _ROOT_PAGES.items()}
    for name, text in (_made() | root).items():
        files.append(File.generated(config, name, content=_links_from(name, text)))
    return files


def _links_from(name: str, text: str) -> str:
    """Links of a page of the root, as they are from docs/."""
    if name not in _ROOT_PAGES:
        return text
    return re.sub(r"\]\(docs/", "](", text)


def on_page_markdown(markdown: str, **_more: Any) -> str:
    """Remarks for the check of commands are no part of the page."""
    return re.sub(r"^<!-- not run: .*? -->\n", "", markdown, flags=re.MULTILINE)


_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*\brel=["']?(?:stylesheet|preconnect|icon)"""
    r"""["']?[^>]*\bhref=["']?(?:https?:)?//|<link\b[^>]*\bhref=["']?(?:https?:)?//[^>]*\brel=["']?(?:stylesheet|preconnect)"""
    r"""|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""
)
"""What a browser would load from elsewhere."""


def on_post_build(config: MkDocsConfig) -> None:
    """The site loads nothing from the network.

    Raises:
        Abort: a page would.
    """
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in {".html", ".css"} and (found := _LOADED.search(path.read_text("utf-8"))):
            raise Abort(f"{path}: loads something from the network: {found[0]}")
