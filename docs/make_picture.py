"""Draws the pictures in the README.

docs/report.svg is the terminal, with the recording that ships with thence; docs/report_page.png the page of four
ranks in Chromium, where there is one, or where the variable CHROMIUM names it.

python docs/make_picture.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from rich.console import Console

import thence
from thence.cli.demo import RECORDING
from thence.writers.text.first_screen import heading
from thence.writers.text.summary import attribution_table, row_table

WIDTH = 104


PAGE = (1400, 1185)
RANKS = Path(__file__).parents[1] / "tests" / "data" / "torch"
SELECT = """<script>
const wait = setInterval(() => {
  if (!window.thenceTimeline) return;
  clearInterval(wait);
  const track = thenceTimeline.data.tracks.find((each) => each.name === "rank 1 GPU 1: stream 7");
  const {names, rows} = thenceTimeline.data;
  let row = Math.floor((track.from + track.to) / 2);
  while (!names[rows.name[row]][0].startsWith("nvjet")) row++;
  thenceTimeline.select({track, row});
}, 50);
</script>"""


def main() -> None:
    """Writes the pictures beside this script."""
    draw_terminal()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium:
        draw_page(chromium)


def draw_page(chromium: str) -> None:
    """The page of four ranks, with one kernel selected."""
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder) / "traces"
        traces.mkdir()
        for rank in range(4):
            shutil.copy(RANKS / f"torch_fsdp_rank{rank}.json.gz", traces)
        before = Path.cwd()
        os.chdir(folder)  # the page shows the paths as they were given
        page = thence.open("traces").report_html().replace("</body>", SELECT + "</body>")
        os.chdir(before)
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        target = Path(__file__).with_name("report_page.png")
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000")
        size = f"--window-size={PAGE[0]},{PAGE[1]}"
        command = [chromium, *options, size, f"--screenshot={target}", file.as_uri()]
        subprocess.run(command, check=True, capture_output=True)


def draw_terminal() -> None:
    """The report in a terminal."""
    console = Console(record=True, width=WIDTH, file=Path("/dev/null").open("w"))  # noqa: SIM115
    with resources.as_file(resources.files("thence") / "data" / RECORDING) as path:
        trace = thence.open(path)
    console.print(f"[green]$ thence report {RECORDING} --by label[/]")
    console.print(heading(trace.first_screen()))
    console.print()
    console.print(row_table(trace.typical.report("label"), 8, WIDTH))
    console.print(f"\n[green]$ thence report {RECORDING} --by kernel --top 8[/]")
    console.print(row_table(trace.typical.report("kernel"), 8, WIDTH))
    console.print()
    console.print(attribution_table(trace.typical.report(), WIDTH))
    svg = console.export_svg(title="thence report", unique_id="thence")
    # Fonts from the network would make the picture depend on it; the reader's own will do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "Menlo, Consolas, DejaVu Sans Mono")
    Path(__file__).with_name("report.svg").write_text(svg)


if __name__ == "__main__":
    main()
