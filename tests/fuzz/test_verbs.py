"""No verb and no option is forgotten: what the command line registers is fuzzed, or it is said why not."""

from __future__ import annotations

import random

import click

from fuzz.verbs import OTHER_OPTIONS, OTHERS, VALUES, VERBS, drawn, options_of
from thence.cli.verbs import VERBS as REGISTERED
from thence.cli.verbs import commands


def test_every_verb_is_fuzzed_or_it_is_said_why_not() -> None:
    fuzzed = {verb[0] for verb in VERBS}
    assert fuzzed | set(OTHERS) == set(REGISTERED)
    assert not fuzzed & set(OTHERS)


def test_every_option_of_a_fuzzed_verb_has_values() -> None:
    seen = set()
    for command in commands():
        if command.name in OTHERS:
            continue
        for name, option in options_of(command).items():
            seen.add(name)
            by_itself = option.is_flag or isinstance(option.type, click.Choice)
            assert by_itself or name in VALUES, (command.name, name)
    assert set(VALUES) <= seen
    every = {name for command in commands() for option in command.params for name in option.opts}
    assert set(OTHER_OPTIONS) <= every


def test_all_verbs_and_options_are_drawn() -> None:
    cases = [drawn(random.Random(i)) for i in range(6000)]
    assert {case[0] for case in cases} == {verb[0] for verb in VERBS}
    assert {word for case in cases for word in case} >= {"--window", "--split", "--add", "--scale"}
