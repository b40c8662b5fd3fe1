"""Draws docs/report.svg, the picture in the README, from the recording that ships with thence.

python docs/make_picture.py
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from rich.console import Console

import thence
from thence.cli.demo import RECORDING
from thence.writers.text.summary import attribution_table, heading, row_table

WIDTH = 104


def main() -> None:
    """Writes the picture beside this script."""
    console = Console(record=True, width=WIDTH, file=Path("/dev/null").open("w"))  # noqa: SIM115
    with resources.as_file(resources.files("thence") / "data" / RECORDING) as path:
        trace = thence.open(path)
    console.print(f"[green]$ thence report {RECORDING} --by label[/]")
    console.print(heading(trace.summary()))
    console.print()
    console.print(row_table(trace.summary("label"), 8, WIDTH))
    console.print(f"\n[green]$ thence report {RECORDING} --by kernel --top 8[/]")
    console.print(row_table(trace.summary("kernel"), 8, WIDTH))
    console.print()
    console.print(attribution_table(trace.summary(), WIDTH))
    svg = console.export_svg(title="thence report", unique_id="thence")
    # Fonts from the network would make the picture depend on it; the reader's own will do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "Menlo, Consolas, DejaVu Sans Mono")
    Path(__file__).with_name("report.svg").write_text(svg)


if __name__ == "__main__":
    main()
