"""Parses the names that inference servers give to steps, as ranges around each run of the model.

`FORMATS` lists the forms of these names, as found in the sources of the servers, with the versions that write them.
As far as the name states them, a step has a number of requests (its batch size) and a number of tokens, of prompts
(prefill, context, extend) and of generated text (decode). ``TARGET_VERIFY`` runs the model on speculated tokens,
which counts as decoding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from thence.model.phases import Serving


@dataclass(frozen=True, slots=True)
class Lengths:
    """Sums over the requests of a step.

    Attributes:
        queries: tokens that are computed.
        keys: tokens that they attend to, with themselves and those that were computed before.
        pairs: pairs of a query and a key that it sees: of a request with q queries and k keys, q k - q (q - 1) / 2,
            because each query sees the keys up to its own.
    """

    queries: int
    keys: int
    pairs: int


@dataclass(frozen=True, slots=True)
class ServerStep:
    """A step, as far as its name describes it.

    Attributes:
        server: name of the server that ran it.
        serving: which part of serving it is; None if the name does not state it, or nothing ran.
        requests: number of requests that it computes at once; None if the name does not state it.
        tokens: number of tokens that it computes; None if the name does not state it.
        lengths: of queries and keys; None if the name does not state their sums.
    """

    server: str
    serving: Serving | None = None
    requests: int | None = None
    tokens: int | None = None
    lengths: Lengths | None = None

    def __str__(self) -> str:
        numbers = [] if self.requests is None else [f"bs={self.requests}"]
        if self.tokens is not None and (self.serving is not Serving.DECODE or self.tokens != self.requests):
            numbers.append(f"tokens={self.tokens}")
        return " ".join([self.serving.value if self.serving else "unknown", *numbers])


@dataclass(frozen=True, slots=True)
class Format:
    """One form of the names that a server gives to its steps.

    Attributes:
        server: its name.
        versions: the versions that write this form, and the place in their source.
        pattern: of the whole name. Groups: prefill and decode (requests of each part), prefill_tokens and
            decode_tokens, and sums of lengths as `_lengths` names them; new and cached (requests); mode (a key of
            `_MODES`) and facts (``name=value`` texts).
    """

    server: str
    versions: str
    pattern: re.Pattern[str]


_SUMS = r"sq(?P<{0}_tokens>\d+)sk(?P<{1}_sk>\d+)sqsq(?P<{1}_sqsq>\d+)sqsk(?P<{1}_sqsk>\d+)"

FORMATS = (
    Format(
        "vLLM", "since pull request 31193, of December 2025: annotate_profile of vllm/v1/worker/gpu_worker.py",
        re.compile(r"execute_context_(?P<prefill>\d+)\((?P<prefill_tokens>\d+)\)"
                   r"_generation_(?P<decode>\d+)\((?P<decode_tokens>\d+)\)"),
    ),
    Format(
        "vLLM", "since pull request 37524, of 2026, with detailed_trace_annotation: tokens in front, and sums of query "
        "and key lengths",
        re.compile(rf"execute_\d+_context_(?P<prefill>\d+)\({_SUMS.format('prefill', 'c')}\)"
                   rf"_generation_(?P<decode>\d+)\({_SUMS.format('decode', 'g')}\)"),
    ),
    Format(
        "vLLM", "other orders of the same", re.compile(
            r"execute_(?:\d+_)?context_(?P<prefill>\d+)\(.*\)_generation_(?P<decode>\d+)\(.*\)"
        ),
    ),
    Format(
        "vLLM", "from pull request 22496, of August 2025, to 31193: requests seen first in this step, and all others, "
        "which may still be at their prompts",
        re.compile(r"execute_new_(?P<new>\d+)_cached_(?P<cached>\d+)"),
    ),
    Format("vLLM", "ranges that say no more", re.compile(r"execute_model")),
    Format(
        "SGLang", "since pull request 23419, of April 2026: build_step_span_name of sglang/srt/utils/profile_utils.py; "
        "since 24911, of July 2026, also c and g, the requests of both parts, and sums of their lengths",
        re.compile(r"step\[(?P<mode>\w+)(?P<facts>(?: [\w-]+(?:=[^\s\]]*)?)*)\]"),
    ),
    Format(
        "ATOM", "ROCm/ATOM, since pull request 477, of July 2026, with more sums: run_model of its model runner; "
        "117/128 is a batch of 117 in a graph of 128",
        re.compile(r"(?:eager_)?(?P<mode>prefill|decode)\[(?P<facts>bs=.*)\]"),
    ),
    Format(
        "TensorRT-LLM", "_forward_step of tensorrt_llm/_torch/pyexecutor/py_executor.py",
        re.compile(r"(?:\[Executor\] )?_forward_step \d+: (?P<prefill>\d+) ctx reqs"
                   r"(?:, (?P<prefill_tokens>\d+) ctx tokens)?, (?P<decode>\d+) gen reqs.*"),
    ),
)  # fmt: skip
"""All known forms, in the order in which they are tried."""

_MODES = {
    "extend": Serving.PREFILL,
    "prefill": Serving.PREFILL,
    "split_prefill": Serving.PREFILL,
    "decode": Serving.DECODE,
    "target_verify": Serving.DECODE,
    "mixed": Serving.MIXED,
}
_FACT = re.compile(r"(\w+)=(\d+)")
_LONGEST = 400
"""Longer names are never steps; this bounds the cost of the search."""


@cache
def server_step(name: str) -> ServerStep | None:
    """The step that the name of a range describes; None if it is not the name of a server's step."""
    if len(name) > _LONGEST:
        return None
    for known in FORMATS:
        match = known.pattern.fullmatch(name)
        if match is None:
            continue
        said = match.groupdict()
        if "facts" in said:
            return _by_facts(known.server, said["mode"].lower(), said["facts"] or "")
        if "new" in said:
            new, cached = int(said["new"]), int(said["cached"])
            return ServerStep(known.server, Serving.PREFILL if new and not cached else None, new + cached)
        return _by_parts(known.server, {key: int(value) for key, value in said.items() if value})
    return None


def _by_parts(server: str, numbers: dict[str, int]) -> ServerStep:
    """The step of a name that states the number of prefill and of decode requests."""
    if "prefill" not in numbers:
        return ServerStep(server)
    prefill, decode = numbers["prefill"], numbers["decode"]
    both = Serving.PREFILL if prefill else Serving.DECODE if decode else None
    tokens = None
    if "prefill_tokens" in numbers:
        # Only TensorRT-LLM does not state the decode tokens: one per request, but more with speculation.
        tokens = numbers["prefill_tokens"] + numbers["decode_tokens"] if "decode_tokens" in numbers else None
    counted = {"c_sq": numbers.get("prefill_tokens"), "g_sq": numbers.get("decode_tokens")}
    known = numbers | {name: sum_ for name, sum_ in counted.items() if sum_ is not None}
    serving = Serving.MIXED if prefill and decode else both
    return ServerStep(server, serving, prefill + decode, tokens, _lengths(known, tokens))


def _by_facts(server: str, mode: str, text: str) -> ServerStep:
    """The step of a name that states the mode, and numbers as ``name=value``."""
    facts = {key: int(value) for key, value in _FACT.findall(text)}
    tokens = facts.get("toks", facts.get("tok"))
    if tokens is None and ("c_sq" in facts or "g_sq" in facts):
        tokens = facts.get("c_sq", 0) + facts.get("g_sq", 0)
    serving = _MODES.get(mode)
    if server == "ATOM" and facts.get("p") and facts.get("d"):
        serving = Serving.MIXED
    requests = facts.get("bs")
    return ServerStep(server, serving, requests, tokens, _lengths(facts, requests if tokens is None else tokens))


def _lengths(facts: dict[str, int], tokens: int | None) -> Lengths | None:
    """The sums of lengths of a step; None if they are not stated, or cannot be.

    Args:
        facts: of prompts (``c_``), of generated text (``g_``), or of both together (no prefix): ``sq`` and ``sk``, sums
            of the lengths of queries and keys, ``sqsq`` and ``sqsk``, sums of their products.
        tokens: that the step computes, if one part does not state its ``sq``.
    """
    sums = ("sq", "sk", "sqsq", "sqsk")
    parts = [part for part in ("c_", "g_", "") if any(f"{part}{name}" in facts for name in sums)]
    queries = keys = pairs = 0
    for part in parts:
        sq = facts.get(f"{part}sq", tokens if len(parts) == 1 else None)
        sk, sqsq, sqsk = (facts.get(f"{part}{name}") for name in sums[1:])
        if sq is None or sk is None or sqsq is None or sqsk is None or not sq <= sqsq <= sqsk or sk < sq:
            return None
        queries, keys, pairs = queries + sq, keys + sk, pairs + sqsk - (sqsq - sq) // 2
    return Lengths(queries, keys, pairs) if parts else None
