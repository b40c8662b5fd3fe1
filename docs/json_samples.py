"""The JSON that every verb prints, looked at: which keys there are, of which type, on recordings in tests/data.

Keys are what the verbs really print, so that a new one appears by itself; what each means is in docs/json_keys.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thence.cli import main
from thence.cli.verbs import commands

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

DATA = Path(__file__).parents[1] / "tests" / "data"
_FSDP = "torch/torch_fsdp_rank[01].json.gz"
STORE = "job.store"
PAGE = "graph.html"
"""Stand for paths in a folder that is removed afterwards."""
_STACKS = "../../src/thence/data/torch_eager_stack_rank0.json.gz"
_WAITS = "torch/waits/group_rank[01].json.gz"
_STEP, _CHANGED = (f"torch/moved/{side}_0.json.gz" for side in ("before", "after"))
_MEMORY = "torch/memory/conv_training.json.gz"
_XLA = "jax/jax_single_nocb.xplane.pb.gz"
SAMPLES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "report": ((_STEP,), (_XLA, "--by", "hlo"), (_XLA, "--by", "source", "--steps", "0:1"), (_XLA, "--depth", "2")),
    "programs": ((_XLA,),),
    "collectives": (("recording/two_ranks",),),
    "ranks": ((_WAITS,), ("torch/waits/schedule_rank*.json.gz",)),
    "ingest": ((_WAITS, "-o", STORE, "--workers", "1"),),
    "compile": (("nsight/jax_train.sqlite.gz",),),
    "streams": (("jax/streams_moved.xplane.pb", "--expect", "GEMM>=2"),),
    "explain": ((_STACKS, "--max-chars", "100000"),),
    "idle": (("torch/checkpoints/with_stacks.json.gz",), (_FSDP,)),
    "roofline": ((_STEP,), ("counters/known_work", "--by", "kernel")),
    "memory": ((_MEMORY,),),
    "whatif": ((_STACKS,),),
    "check": ((_WAITS,),),
    "diff": (
        (_STEP, _CHANGED, "--anyway", "--within-run", "--fail-on", "total>5%"),
        ("jax/streams_default.xplane.pb", "jax/streams_moved.xplane.pb", "--anyway"),
        ("counters/known_work", "counters/known_work", "--anyway"),
    ),
    "history": (("--keep", "history/slower.jsonl", "--fail-on", "total>3%"),),
    "label": (("torch/graphs/compiled_replay.json.gz", "--graph", PAGE),),
    "inside": (("inside/gpu_triton.npz",), ("inside/mosaic.npy",), ("stalls/triton",)),
    "steps": ((_FSDP,), ("watch/node-rank0-100/summaries.jsonl",)),
    "top": (("watch/", "--once"),),
    "sql": ((_FSDP, "select rank, count(*) as n from gpu group by rank"),),
    "doctor": ((),),
}
"""Arguments of each verb, which together show every key; others get two ranks of a job."""
MORE: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "report": ((_FSDP,),),
    "ranks": ((_FSDP,),),
    "explain": (("recording/two_ranks", "--max-chars", "100000"),),
    "roofline": ((_FSDP,),),
    "memory": ((_MEMORY, _MEMORY, "--add"), (_MEMORY, "--by", "kind")),
    "check": ((_FSDP,), (_XLA,)),
    "diff": (
        ("torch/torch_eager_rank0.json.gz", "torch/torch_compile_rank0.json.gz", "--anyway", "--within-run"),
        (_STEP, _CHANGED),
        (_MEMORY, _MEMORY, "--anyway", "--within-run"),
    ),
}
"""Arguments that show no further key, but further types of some."""
_DEFAULT: tuple[tuple[str, ...], ...] = ((_FSDP,),)
Keys = dict[str, set[str]]
"""Paths, such as ``rows[].name``, and the JSON types found there."""


def verbs_with_json() -> list[str]:
    """Verbs that have ``--format json``."""
    return [str(command.name) for command in commands() if _offers_json(command)]


def _offers_json(command: click.Command) -> bool:
    formats = [p for p in command.params if "--format" in p.opts and isinstance(p.type, click.Choice)]
    return any("json" in p.type.choices for p in formats)  # type: ignore[union-attr]


def keys_of(verb: str, maps: Iterable[str]) -> Keys:
    """Every key that a verb prints for its samples.

    Args:
        verb: its name.
        maps: paths of objects whose keys are data; they become ``*``.
    """
    found: Keys = {}
    for arguments in (*SAMPLES.get(verb, _DEFAULT), *MORE.get(verb, ())):
        for path, kind in _walk(_document(verb, arguments), "", frozenset(maps)):
            found.setdefault(path, set()).add(kind)
    return found


def _document(verb: str, arguments: Iterable[str]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        places = {name: str(Path(folder) / name) for name in (STORE, PAGE)}
        return _printed(verb, [str(DATA / a) if "/" in a else places.get(a, a) for a in arguments])


def _printed(verb: str, given: Iterable[str]) -> Any:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main([verb, *given, "--format", "json"])
        except SystemExit as ended:
            if ended.code not in (0, 1):
                sys.exit(f"thence {verb} {' '.join(given)}: {errors.getvalue()}")
    return json.loads(printed.getvalue())


def _walk(value: Any, path: str, maps: frozenset[str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            name = "*" if path in maps else key
            where = f"{path}.{name}" if path else name
            yield where, _kind(inner)
            yield from _walk(inner, where, maps)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, f"{path}[]", maps)


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "integer", float: "number", str: "text", list: "list", dict: "object"}
    return "null" if value is None else kinds[type(value)]
