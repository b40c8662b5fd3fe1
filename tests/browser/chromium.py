"""A page in headless Chromium, driven by a script that is added to it: no driver, no package needed."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
ABSENT = "no Chromium on the path, and none named in the variable CHROMIUM"

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_FLAGS = (*FLAGS, "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom")
_BEFORE = """<script>
window.problems = [];
window.addEventListener("error", (event) => window.problems.push(String(event.message)));
document.addEventListener("securitypolicyviolation", (event) => window.problems.push(event.violatedDirective));
window.alert = () => window.problems.push("alert");
</script>"""
_AFTER = """<script>
(function () {
  const byId = (id) => document.getElementById(id);
  const canvas = byId("graph");
  const picture = () => canvas.toDataURL();
  const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
  const search = (text) => { byId("search").value = text; byId("search").dispatchEvent(new Event("input")); };
  const pointer = (type, x, y) => {
    const at = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new MouseEvent(type, {clientX: at.left + x, clientY: at.top + y, bubbles: true}));
  };
  const crumbs = () => [...document.querySelectorAll("#crumbs button")].map((button) => button.textContent);
  const result = {};
  try { (function () { %s })(); } catch (error) { window.problems.push(String(error)); }
  const output = document.createElement("pre");
  output.id = "outcome";
  output.textContent = JSON.stringify({problems: window.problems, result});
  document.body.append(output);
})();
</script>"""


def driven(page: str, folder: Path, script: str, *flags: str) -> dict[str, Any]:
    """What the script put into ``result``; fails when the page or the console reports any problem.

    Args:
        page: HTML text.
        folder: an empty one, for the page and the browser's profile.
        script: statements; byId, canvas, picture, press, search, pointer and crumbs are at hand.
        flags: more arguments for the browser.
    """
    assert CHROMIUM
    file = folder / "page.html"
    driven_page = page.replace("<title>", f"{_BEFORE}<title>", 1).replace("</body>", (_AFTER % script) + "</body>")
    file.write_text(driven_page, encoding="utf-8")
    run = subprocess.run(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, file.as_uri()],
        capture_output=True,
        timeout=60,
        check=True,
    )
    console = [line for line in run.stderr.decode().splitlines() if "CONSOLE" in line]
    assert console == []
    found = re.search(r'<pre id="outcome">(.*?)</pre>', run.stdout.decode(), re.DOTALL)
    assert found, run.stdout.decode()[-2000:]
    outcome = json.loads(html.unescape(found[1]))
    assert outcome["problems"] == []
    return outcome["result"]
