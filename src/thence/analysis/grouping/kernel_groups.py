"""Classifies activities: GEMM, attention, communication, elementwise, reduction, copy, other.

The first rule that matches decides:

1. the patterns of the user, searched for in the full kernel name and, for XLA work, in the name of the HLO
   instruction, its opcodes and its op_name;
2. the table of collectives: activities that it describes are communication;
3. the kind: memcpy and memset are "copy";
4. `KERNEL_PATTERNS`, searched for in the full kernel name;
5. `OPCODE_PATTERNS`, searched for in the opcodes inside the HLO instruction, for kernels with generic
   names (``fusion_280``).

Everything else is "other". Convolutions count as GEMM, because libraries compute them as such. A kernel
that does several things has the group of the most expensive one: a GEMM with a bias and an activation
is a GEMM, a normalisation is a reduction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import UsageError
from thence.model.attributed import of_each_activity
from thence.model.columns import name_codes, row_numbers
from thence.model.tables import copies_or_sets
from thence.model.trees import numbered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.attributed import Attributed
    from thence.model.hlo import HloModule

COMMUNICATION, COPY, _OTHER = "communication", "copy", "other"
GROUPS = ("GEMM", "attention", COMMUNICATION, "elementwise", "reduction", COPY, _OTHER)
"""The built-in groups."""

_MOVES = "transpose|copy|concatenate|slice|dynamic_slice|dynamic_update_slice|pad|gather|reverse"

KERNEL_PATTERNS: tuple[tuple[str, str], ...] = (
    # Libraries of collectives, and the frameworks' own kernels for NVLink.
    (COMMUNICATION, r"(?i)^(?:nccl|rccl|nvshmem|msccl)|nvshmem|mscclpp|cross_device_reduce"),
    (COMMUNICATION, r"(?i)(?:one|two)_?shot_?\w*reduce|multimem_|symm_mem|userbuffers"),
    (COMMUNICATION, r"(?i)all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|all[-_]?to[-_]?all"),
    (COMMUNICATION, r"^(?:collective-|ragged-all|send|recv)"),
    # Inductor puts the kind of the kernel before the names of its ops, which would match wrong patterns below.
    ("reduction", r"^triton_(?:red|per|mix|spl)\w*_fused_"),
    ("elementwise", r"^triton_(?:poi|for)\w*_fused_|^triton_for_"),
    # Before GEMM: attention kernels are written with CUTLASS, too.
    ("attention", r"(?i)flash|fmha|sdpa|attention|attn|_mha|mha_|compute_dot_do_o|convert_dq_to"),
    ("GEMM", r"(?i)gemm|gemv|nvjet|cutlass|xmma|wmma|matmul|splitk|cublas|moe_kernel"),
    ("GEMM", r"(?i)^C(?:ustom_C)?ijk_|conv(?:olve|olution|_?[123]d)|implicit_con|[wd]grad|winograd"),
    ("GEMM", r"(?i)(?:^|_)(?:add|b|baddb|scaled_)?mm(?:_|$)|^triton_tem_|^dot(?:[._]\d+)?$"),
    # cuBLAS names its oldest kernels only by GPU, types and tensor-core shape.
    ("GEMM", r"(?i)^(?:maxwell|volta|turing|ampere|hopper)_\w*s?(?:884|1688|16816)_"),
    ("GEMM", r"^(?:loop|input|wrapped)_(?:\w+_)?dot(?:_general)?(?:_fusion)?(?:[._]\d+)*$"),
    # XLA: the names of loop_, input_ and wrapped_ fusions contain the names of the ops in the fusion.
    (COPY, rf"^(?:(?:loop|input|wrapped)_)?(?:(?:{_MOVES})_?)+(?:fusion)?(?:[._]\d+)*$"),
    (_OTHER, r"^(?:loop|input|wrapped)_(?:\w+_)?(?:scatter|sort)(?:_|$)"),
    ("reduction", r"^(?:loop|input|wrapped)_(?:\w+_)?reduce"),
    ("elementwise", r"^(?:loop|input|wrapped)_"),
    # Before elementwise: copies are instances of elementwise kernel templates.
    (COPY, r"(?i)^mem(?:cpy|set)|copy_kernel|copy_device|BatchedCopy|split_with_sizes|chunk_cat"),
    (COPY, r"(?i)transpose|permute_kernel"),
    ("reduction", r"(?i)reduce|reduction|soft_?max|(?:layer|rms|group|batch)_?norm"),
    ("reduction", r"(?i)LpNorm|GammaBeta|RowwiseMoments|welford|nll_loss|cross_entropy|arg(?:max|min)"),
    ("elementwise", r"(?i)elementwise|pointwise|multi_tensor_apply|foreach|functor|gelu|silu|dropout"),
    ("elementwise", r"(?i)rotary|rope|act_and_mul|cast|convert|quantize|adam|^fused_(?:add|mul)"),
)
"""Group and regular expression, searched for in full kernel names without `_NO_REDUCTION`; the first match decides.

The expressions mean the same to Python and to Polars: they look neither ahead nor behind."""
_GROUP_OF_PATTERN = pl.Series([group for group, _ in KERNEL_PATTERNS], dtype=pl.Enum(GROUPS))
# Numbers of patterns take a byte for each name and pattern, groups as text sixteen.
_FIRST_PATTERN = pl.coalesce(
    pl.when(pl.col("text").str.contains(pattern)).then(pl.lit(number, pl.UInt8))
    for number, (_, pattern) in enumerate(KERNEL_PATTERNS)
)
"""The number of the first pattern that ``text`` matches."""
_NO_REDUCTION = r"(?i)reduce_precision"
"""An operator that rounds numbers, in spite of its name."""
_NAMES_AT_A_TIME = 20_000

_MOVING = (
    "fusion|parameter|constant|bitcast|copy|transpose|reshape|slice|dynamic-slice|gather|reverse|tuple|pad"
    "|dynamic-update-slice|concatenate|get-tuple-element|copy-start|copy-done"
)

OPCODE_PATTERNS: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"^(?:all-|reduce-scatter|collective-|ragged-all|send|recv)"),
    ("attention", r"(?i)^custom-call \S*(?:fmha|attn|attention|flash)"),
    ("GEMM", r"(?i)^custom-call \S*(?:gemm|matmul|cublas|conv)"),
    ("GEMM", r"^[^|]*\b(?<!-)(?:dot|convolution|ragged-dot|scaled-dot)\b(?!-)"),
    ("GEMM", r"^custom-call [^|]*\|.*/(?:dot_general|conv_general_dilated)$"),
    ("reduction", r"^[^|]*\b(?<!-)(?:reduce|reduce-window)\b(?!-)"),
    (COPY, rf"^(?:(?:{_MOVING}) )+\|"),
    (_OTHER, r"^[^|]*\b(?:scatter|sort|rng|custom-call|fft|cholesky|while|conditional)\b"),
    ("elementwise", r"^fusion "),
)
"""Group and regular expression, searched for in ``opcode ... | op_name``: the opcode of the
instruction, followed by the target of a custom call or the sorted opcodes inside a fusion."""


_MAX_CACHED_TEXTS = 1 << 12
"""Size of the cache of groups by instruction text: XLA has thousands of texts of some kilobytes each."""


@dataclass(frozen=True)
class Patterns:
    """Groups that the user defined; they take precedence over the built-in groups.

    Attributes:
        pairs: group and regular expression, in order; a name in `GROUPS` extends that built-in group.
    """

    pairs: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, expression in self.pairs:
            if not re.fullmatch(r"[^\s=<>!](?:[^=<>!]*[^\s=<>!])?", name):
                raise UsageError(
                    f"{name!r} is not a valid group name: it must not be empty, begin or end with a blank, or contain "
                    "= < > !, the operators of --expect"
                )
            try:
                re.compile(expression)
            except re.error as error:
                raise UsageError(f"group {name}: {expression!r} is not a valid regular expression: {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all groups, those of the user first."""
        return tuple(dict.fromkeys([*(name for name, _ in self.pairs), *GROUPS]))


NO_PATTERNS = Patterns()
"""No groups of the user: only the built-in groups."""


@of_each_activity
def communicates(trace: Attributed) -> pl.Series:
    """Whether each row of ``trace.gpu`` is communication: described as a collective, or built-in `COMMUNICATION`.

    Groups of the user do not count, so that exposed time is the same number in every analysis.
    """
    return (kernel_groups(trace, NO_PATTERNS) == COMMUNICATION).rename("communicates")


def computes(trace: Attributed, communication: pl.Series) -> pl.Series:
    """Whether each row of ``trace.gpu`` is compute: a kernel or thunk that is not communication.

    Args:
        communication: as `communicates` returns it.
    """
    kind = trace.gpu["kind"]
    return (((kind == "kernel") | (kind == "thunk")) & ~communication).rename("computes")


def kernel_groups(trace: Attributed, patterns: Patterns) -> pl.Series:
    """The group of every row of ``trace.gpu``, in its order.

    Args:
        patterns: groups of the user.

    Returns:
        Categories among ``patterns.names``, as pl.Enum.
    """
    gpu, groups = trace.gpu, pl.Enum(patterns.names)
    described = np.zeros(gpu.height + 1, np.bool_)
    described[row_numbers(trace.collectives["gpu"])] = True  # NO_ROW is the last element
    result = pl.DataFrame(
        {
            "user": _of_user(trace, patterns),
            "described": described[:-1],
            "copied": copies_or_sets(gpu),
            "named": _of_names(trace).cast(groups),
            "computed": _of_opcodes(trace).cast(groups),
        }
    )
    group = pl.coalesce(
        "user",
        pl.when("described").then(pl.lit(COMMUNICATION, groups)),
        pl.when("copied").then(pl.lit(COPY, groups)),
        *("named", "computed"),
        pl.lit(_OTHER, groups),
    )
    return result.select(group=group).to_series()


def groups_of_names(names: pl.Series) -> pl.Series:
    """The group of each kernel by its name alone, by `KERNEL_PATTERNS`; null if no pattern matches.

    Args:
        names: full kernel names.

    Returns:
        Categories among `GROUPS`, as pl.Enum, one for each name.
    """
    text = pl.col("name").cast(pl.String).str.replace_all(_NO_REDUCTION, "precision").alias("text")
    # A trace may have a million names: in pieces, because each step makes a copy of its names.
    frame = names.alias("name").to_frame()
    pieces = (frame.slice(begin, _NAMES_AT_A_TIME) for begin in range(0, max(frame.height, 1), _NAMES_AT_A_TIME))
    number = pl.concat(piece.select(text).select(number=_FIRST_PATTERN) for piece in pieces)["number"]
    return _GROUP_OF_PATTERN[number.cast(pl.UInt32)]


@of_each_activity
def _of_names(trace: Attributed) -> pl.Series:
    """The group of each row of gpu by its name alone; each distinct name is looked at once."""
    names = trace.gpu["name"]
    number, first = numbered(name_codes(names))
    return groups_of_names(names[first])[number]


def _keys(trace: Attributed) -> pl.DataFrame:
    """Of each row of gpu: name, hlo, and the index of its HLO module, as integers."""
    gpu = trace.gpu
    return gpu.select(
        pl.col("name").to_physical(),
        pl.col("hlo").to_physical(),
        module=trace.programs["hlo"].gather(gpu["program"].cast(pl.UInt32)),
    )


def _of_opcodes(trace: Attributed) -> pl.Series:
    """The group of each row of gpu by the opcodes in its HLO instruction; null if there are none or none match."""
    if not trace.hlo:
        return pl.Series([None], dtype=pl.Enum(GROUPS)).new_from_index(0, trace.gpu.height)
    keys = _keys(trace)
    texts = _opcodes(trace, keys)
    groups = [_of_text(text) for text in texts["opcodes"]]
    grouped = texts.with_columns(group=pl.Series(groups, dtype=pl.Enum(GROUPS)))
    on = ["hlo", "module"]
    return keys.select(on).join(grouped, on=on, how="left", maintain_order="left")["group"]


def _opcodes(trace: Attributed, keys: pl.DataFrame) -> pl.DataFrame:
    """Each HLO instruction that ran: hlo and module as in `_keys`, and its text (column opcodes)."""
    distinct = keys.select("hlo", "module").drop_nulls().unique(maintain_order=True)
    texts = _texts(trace.gpu["hlo"])
    modules = [_HloTexts(module) for module in trace.hlo]
    opcodes = [modules[module].text(texts[hlo]) for hlo, module in distinct.iter_rows()]
    return distinct.with_columns(opcodes=pl.Series(opcodes, dtype=pl.String))


def _texts(column: pl.Series) -> dict[int, str]:
    """The text of each category that occurs, by its integer."""
    values = column.drop_nulls().unique()
    return dict(zip(values.to_physical(), values.cast(pl.String), strict=True))


def _of_user(trace: Attributed, patterns: Patterns) -> pl.Series:
    """The group that the user's patterns give each row of gpu; null if none matches."""
    groups = pl.Enum(patterns.names)
    if not patterns.pairs:
        return pl.Series([None], dtype=groups).new_from_index(0, trace.gpu.height)
    keys = _keys(trace)
    compiled = _compiled(patterns.pairs)
    names, instructions = _texts(trace.gpu["name"]), _texts(trace.gpu["hlo"])
    opcodes = {(hlo, module): text for hlo, module, text in _opcodes(trace, keys).iter_rows()}
    distinct = keys.unique(maintain_order=True)
    matches = [
        _first(compiled, (names.get(name), instructions.get(hlo), opcodes.get((hlo, module))))
        for name, hlo, module in distinct.iter_rows()
    ]
    of_keys = distinct.with_columns(group=pl.Series(matches, dtype=groups))
    joined = keys.join(of_keys, on=keys.columns, how="left", nulls_equal=True, maintain_order="left")
    return joined["group"]


@cache
def _compiled(pairs: tuple[tuple[str, str], ...]) -> list[tuple[str, re.Pattern[str]]]:
    return [(name, re.compile(expression)) for name, expression in pairs]


# Many instructions share their texts, as do the ranks of a job, and one analysis classifies activities several times.
@lru_cache(_MAX_CACHED_TEXTS)
def _of_text(text: str) -> str | None:
    """The group of an HLO instruction by its opcodes."""
    return _first(_compiled(OPCODE_PATTERNS), (text,))


def _first(patterns: list[tuple[str, re.Pattern[str]]], texts: Sequence[str | None]) -> str | None:
    matches = (name for name, p in patterns if any(p.search(text) for text in texts if text))
    return next(matches, None)


@dataclass(frozen=True)
class _HloTexts:
    """Texts of a module's instructions for `OPCODE_PATTERNS`."""

    module: HloModule

    @cached_property
    def _rows(self) -> dict[str, tuple[str, str | None, str | None, list[int]]]:
        columns = ("name", "opcode", "custom_call_target", "op_name", "called")
        rows = self.module.instructions.filter("top_level").select(columns)
        return {name: tuple(rest) for name, *rest in rows.iter_rows()}

    @cached_property
    def _inside(self) -> dict[int, tuple[set[str], list[int]]]:
        """Opcodes of each computation, and the computations that it calls."""
        grouped = self.module.instructions.group_by("computation").agg(
            pl.col("opcode").unique(), pl.col("called").explode().drop_nulls().unique()
        )
        return {number: (set(codes), called) for number, codes, called in grouped.iter_rows()}

    def text(self, name: str) -> str:
        """Opcodes, each followed by a space, then ``| op_name``; empty for an unknown instruction."""
        if name not in self._rows:
            return ""
        opcode, target, op_name, called = self._rows[name]
        codes, waiting, seen = set[str](), list(called), set[int]()
        while waiting and opcode == "fusion":
            number = waiting.pop()
            if number in seen or number not in self._inside:
                continue
            seen.add(number)
            inside, further = self._inside[number]
            codes |= inside
            waiting += further
        words = (opcode, *([target] if target else ()), *sorted(codes - {opcode}))
        return f"{' '.join(words)} | {op_name or ''}"
