"""Takes docs/report_page.png, the picture in the README: the HTML report of four FSDP ranks, in Chromium.

python docs/make_page_picture.py     CHROMIUM names the browser where it is not found as chromium
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import thence

DOCS = Path(__file__).parent
RANKS = DOCS.parent / "tests" / "data" / "torch"
SIZE = "1280,1000"


def main() -> None:
    """Writes the picture beside this script."""
    browser = os.environ.get("CHROMIUM", "chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        (Path(folder) / "traces").mkdir()
        for file in RANKS.glob("torch_fsdp_rank*.json.gz"):
            shutil.copy(file, Path(folder) / "traces")
        with contextlib.chdir(folder):  # the page names its inputs as they were given
            page.write_text(thence.open("traces/").report_html(), "utf-8")
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
        )
        patience = ("--virtual-time-budget=10000", f"--window-size={SIZE}")
        picture = f"--screenshot={DOCS / 'report_page.png'}"
        command = [browser, *options, *patience, picture, page.as_uri()]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if run.returncode:
        sys.exit(f"{browser}: {run.stderr}")


if __name__ == "__main__":
    main()
