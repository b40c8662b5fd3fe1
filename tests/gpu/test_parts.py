"""The parts of the proof on GPUs as tests (``pytest -m gpu``), and their runner where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # scripts here find each other by their folder

import run
from parts import PARTS, Part

HERE = Path(__file__).parent


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_part(part: Part, tmp_path: Path) -> None:
    steps = ("record", "check")
    if why := run.obstacle(part, steps, run.gpus()):
        pytest.skip(why)
    result = run.run_part(part, steps, tmp_path, limit=600)
    assert result.state == "passed", result.why


def test_the_parts_are_listed_with_what_they_prove_and_their_seconds() -> None:
    listed = subprocess.run([sys.executable, HERE / "run.py"], capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == [part.name for part in PARTS]
    assert all(part.proves in line for part, line in zip(PARTS, listed.splitlines(), strict=True))


def test_every_part_has_its_script_and_every_script_of_parts_is_one() -> None:
    assert [part.name for part in PARTS if not part.path.is_file()] == []
    used = "\n".join(path.read_text() for path in HERE.glob("*.py"))
    for path in HERE.glob("*.py"):
        name = path.stem
        imported = f"from {name} import" in used or f"import {name}\n" in used or f'"{name}.py"' in used
        assert imported or name == "test_parts" or any(part.path == path for part in PARTS), name


def test_a_step_that_fails_says_what_was_wrong(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.append({str(HERE)!r})\n"
        "from support import end, judge\n"
        "judge(True, 'first'); judge(sys.argv[1] == 'fine', 'second is ' + sys.argv[1]); end()\n"
    )
    part = Part("probe", "nothing", ("fine",), ("bad",), 1, script=str(script))
    only_recorded = run.run_part(part, ("record",), tmp_path, limit=60)
    assert (only_recorded.state, only_recorded.why) == ("passed", "")
    both = run.run_part(part, ("record", "check"), tmp_path, limit=60)
    assert (both.state, both.why) == ("failed", "check exit code 1: WRONG: second is bad")
    assert (tmp_path / "probe" / "record.log").read_text().splitlines() == [
        "right: first", "right: second is fine", "2 comparisons, 0 wrong",
    ]  # fmt: skip


def test_a_part_that_compared_nothing_has_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.append({str(HERE)!r})\nfrom support import end\nend()\n")
    result = run.run_part(Part("empty", "nothing", (), None, 1, script=str(script)), ("record",), tmp_path, limit=60)
    assert (result.state, result.why) == ("failed", "record exit code 1: 0 comparisons, 0 wrong")


def test_a_step_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)\n")
    result = run.run_part(Part("slow", "nothing", (), None, 1, script=str(script)), ("record",), tmp_path, limit=0.5)
    assert (result.state, result.why) == ("failed", "record ran for more than 0 s")
    assert result.seconds < 30


def test_what_is_missing_is_said_instead_of_running() -> None:
    part = Part("probe", "nothing", (), None, 1, gpus=2, packages=("sys", "no_such_package"))
    assert run.obstacle(part, ("record", "check"), devices=8) == "not installed: no_such_package"
    part = Part("probe", "nothing", (), None, 1, gpus=2, packages=("sys",))
    assert run.obstacle(part, ("record",), devices=1) == "needs 2 GPUs, 1 are there"
    assert run.obstacle(part, ("check",), devices=0) == ""
