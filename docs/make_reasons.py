"""Writes docs/reasons.md, the page of codes, from `thence.model.reasons`.

python docs/make_reasons.py
"""

from __future__ import annotations

from pathlib import Path

from thence.model.reasons import ADVICE, REASONS, RULES, advice

HEAD = """# Rules and reasons

Every kind of place has a column `<kind>_rule` beside it (`trace.tables.places`, `activities` in SQL). Where an activity
has a place of that kind, it holds the code of how the place was found; where it has none, the code of the reason.
`thence report --format json` lists the reasons as `unattributed_ns`: for each kind `code`, `total_ns`, `text` and
`advice`. Codes stay; texts may improve. `detail` in `trace.tables.places` says more about single CUDA graphs, as
`thence report --details` does.

This page is made by `docs/make_reasons.py`.
"""


def page() -> str:
    """The page as Markdown."""
    parts = [HEAD, "## How a place was found\n", "| code | meaning |\n|---|---|"]
    parts += [f"| `{code}` | {text} |" for code, text in RULES.items()]
    parts += ["\n## Why there is none\n", "| code | meaning | what helps |\n|---|---|---|"]
    for code, text in REASONS.items():
        ways = dict.fromkeys(filter(None, (advice(code, [name]) for name in ADVICE)))
        parts.append(f"| `{code}` | {text} | {'; or '.join(ways)} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "reasons.md").write_text(page(), encoding="utf-8")
