"""The skill for agents: short, made from the code, and all of its commands work."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from helpers import STACK, output
from thence.cli.skill import MAX_CHARS, pages
from thence.cli.verbs import VERBS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_every_command_of_the_skill_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output(capsys, "explain", "--install-skill", tmp_path)
    text = (tmp_path / "thence" / "SKILL.md").read_text()
    assert len(text) <= MAX_CHARS
    assert text.startswith("---\nname: thence\ndescription: ")
    commands = re.findall(r"^ *thence .*$", text, re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        words = shlex.split(command)[1:]
        words = [str(STACK) if word in ("TRACE", "BEFORE", "AFTER") else word for word in words]
        output(capsys, *words)


def test_the_pages_that_it_names_are_there() -> None:
    made = pages()
    for name in re.findall(r"references/\S+\.md", made["SKILL.md"]):
        assert name in made or name == "references/verbs/VERB.md"
    assert {f"references/verbs/{verb}.md" for verb in VERBS} <= made.keys()
