"""What a report page costs: its size, the time to write it, and in Chromium to open it and to zoom its timeline.

    python benchmarks/report_page.py TRACE... [--before SRC] [--rounds N]      SRC: the src folder of another checkout

Each side writes the page of each trace in a process of its own, in turns, and each page is opened as often; the least
CPU time counts. The Python that runs this needs what both checkouts import.
Chromium is the one on the path, or that of the variable CHROMIUM; without one, the times in a browser are left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from command_line import documented_parser

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

WRITE = """
import json, sys, time
import thence
trace = thence.open(sys.argv[1])
trace.tables
begin, wall = time.process_time(), time.perf_counter()
page = trace.report_html()
print(json.dumps([trace.tables.gpu.height, time.process_time() - begin, time.perf_counter() - wall]))
open(sys.argv[2], "w").write(page)
"""
DRAW = """(() => {
  const view = thenceTimeline.view, times = [];
  const timed = (action) => { const begin = performance.now(); action(); return performance.now() - begin; };
  const whole = timed(view.draw);
  for (let i = 0; i < 24; i++) times.push(timed(() => { view.zoom(0.5); view.draw(); }));
  view.show(0, view.all.to);
  const input = document.getElementById("timeline-search");
  input.value = "gemm";
  return [whole, Math.max(...times), timed(() => input.dispatchEvent(new Event("input")))];
})()"""


def written(source: Path, trace: str, page: Path) -> tuple[int, float, float]:
    """Activities, and seconds of CPU and of the clock to write the page with one checkout."""
    run = subprocess.run(
        [sys.executable, "-c", WRITE, trace, str(page)],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        check=True,
        text=True,
    )
    activities, cpu, wall = json.loads(run.stdout)
    return activities, cpu, wall


def browsed(page: Path, profile: Path, rounds: int) -> str:
    """Seconds to open, and milliseconds to draw all, to zoom (the slowest of 24 steps) and to search."""
    from browser.chromium import ABSENT, CHROMIUM

    if CHROMIUM is None:
        return ABSENT
    from browser.live import living_page

    costs = []
    for number in range(rounds):  # the browser counts from its start
        with living_page(profile / str(number)) as browser:
            browser.call("Performance.setTimeDomain", timeDomain="threadTicks")
            browser.call("Performance.enable")
            browser.open(page)
            costs.append({m["name"]: m["value"] for m in browser.call("Performance.getMetrics")["metrics"]})
    opened = f"opened in {min(cost['TaskDuration'] for cost in costs):.2f} s of CPU"
    with living_page(profile / "drawn") as browser:
        browser.open(page)
        if not browser.js("!!window.thenceTimeline"):
            return opened
        whole, zoom, search = browser.js(DRAW)
        return f"{opened}; draws all in {whole:.1f} ms, zooms in {zoom:.1f} ms, searches in {search:.1f} ms"


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--before", type=Path, help="src folder of another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    sides = ({"before": asked.before} if asked.before else {}) | {"now": ROOT / "src"}
    for trace in asked.traces:
        with tempfile.TemporaryDirectory() as folder:
            least = dict.fromkeys(sides, float("inf"))
            for _ in range(asked.rounds):
                for side, source in sides.items():
                    page = Path(folder) / f"{side}.html"
                    activities, cpu, _wall = written(source, trace, page)
                    least[side] = min(least[side], cpu)
            print(f"{trace}: {activities:,} activities", flush=True)
            for side in sides:
                page = Path(folder) / f"{side}.html"
                text = page.read_text()
                timeline = re.search(r'id="timeline-data">([^<]*)<', text)
                of_it = f", {len(timeline[1]) / 1e6:.2f} MB of them the timeline" if timeline else ""
                print(f"  {side}: written in {least[side]:.2f} s of CPU, {len(text.encode()) / 1e6:.2f} MB{of_it}")
                print(f"    {browsed(page, Path(folder) / side, asked.rounds)}")


if __name__ == "__main__":
    main()
