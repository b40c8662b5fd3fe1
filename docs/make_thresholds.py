"""Writes the table of thresholds in docs/numbers.md, from `thence.model.thresholds`.

python docs/make_thresholds.py
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

from thence.model import thresholds

PAGE = Path(__file__).parent / "numbers.md"
BEGIN, END = "<!-- thresholds: made by docs/make_thresholds.py -->\n", "<!-- end of thresholds -->\n"
UNITS = {"_NS": "ns", "_SHARE": "share"}


def table() -> str:
    """The thresholds as Markdown, in the sections of their module: name, value, what it decides and why."""
    source = Path(thresholds.__file__).read_text(encoding="utf-8")
    sections = {number: line[6:] for number, line in enumerate(source.splitlines(), 1) if line.startswith("# --- ")}
    body = ast.parse(source).body
    parts = []
    for assigned, text in itertools.pairwise(body):
        if not (isinstance(assigned, ast.Assign) and isinstance(assigned.targets[0], ast.Name)):
            continue
        assert isinstance(text, ast.Expr), "every threshold has a text"
        begun = [section for number, section in sections.items() if number < assigned.lineno]
        parts += [f"\n**{begun[-1]}**\n\n| threshold | value | what it decides, and why |\n|---|--:|---|"] * (
            assigned.lineno - 2 in sections
        )
        name = assigned.targets[0].id
        words = " ".join(str(ast.literal_eval(text.value)).split()).replace("|", "\\|")
        parts.append(f"| `{name}` | {shown(name, getattr(thresholds, name))} | {words} |")
    return "\n".join(parts).lstrip("\n") + "\n"


def shown(name: str, value: float) -> str:
    """The value with the unit that its name ends in."""
    unit = next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")
    return f"{100 * value:.4g} %" if unit == "share" else f"{value:,} {unit}".strip()


def page(text: str) -> str:
    """The page with the table in its place."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
