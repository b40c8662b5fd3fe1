"""Prints the lowest versions that pyproject.toml allows of what thence needs, as constraints for pip."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
wanted = [*project["dependencies"], *project["optional-dependencies"]["report"]]
for requirement in wanted:
    found = re.fullmatch(r"([A-Za-z0-9_.-]+)>=([0-9][0-9a-z.]*)", requirement)
    if found is None:
        sys.exit(f"pyproject.toml: {requirement!r} states no lowest version as NAME>=VERSION")
    sys.stdout.write(f"{found[1]}=={found[2]}\n")
