"""XSpace files (``*.xplane.pb`` of jax.profiler) as the tables of a trace: one host's devices and threads.

A log directory holds ``plugins/profile/<time>/<host>.xplane.pb``, one file for each host. No file states
which process of the job wrote it, so the rank of a file is its position among the files of such a folder,
sorted by name.

Device activities are assigned to executions of XLA programs (`_launching_ranges`, `_executions_by_repetition`) and to
runs of the same instruction within one execution, such as those of a loop body (`_iterations`). The HLO of the
programs comes from the file or from dumps in the same folder.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import DamagedInput, InputError
from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW, chain_to
from thence.model.launches import launch_correlations
from thence.model.losses import Loss, says_lost
from thence.model.tables import GPU, HOST, HOST_CATEGORIES, KINDS, PROGRAMS, THREADS, Device, Meta, Tables
from thence.readers.host_ranges import host_order, host_parents, parent_column, positions_of_functions
from thence.readers.jax.allocator import memory_tables
from thence.readers.jax.hlo import decode_hlo
from thence.readers.jax.hlo_dump import PATTERNS as HLO_PATTERNS
from thence.readers.jax.hlo_dump import hlo_dump_modules
from thence.readers.jax.sniffing import NAME, PATTERNS
from thence.readers.jax.xspace import XSpace, decode_xspace
from thence.readers.source import STANDARD_INPUT
from thence.units import listed, several

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from thence.model.arrays import Int64
    from thence.model.hlo import HloModule
    from thence.readers.jax.xspace import XSpace
    from thence.readers.source import Source

_FRAME = re.compile(r"\$(?P<file>[^ ]+):(?P<line>\d+) (?P<function>.*)", re.DOTALL)
# Overhead records of CUPTI, which XLA writes to separate lines (cupti_collector.cc).
_OVERHEAD = re.compile(r"BUFFER_FLUSH|<UNKNOWN>|CUPTI.*|RESOURCE|(?:DRIVER_)?COMPILER|INSTRUMENTATION")
_COMPILING = re.compile(r"Compil(?!ed)|HloPass|RunHlo|Autotun|^backend_compile")
_JITTED = r"^(?:PjitFunction|PmapFunction)\("
"""A call of a jitted function, the outermost range that jax itself opens (pjit.cc)."""
_EXECUTES = r"GpuExecutable::ExecuteThunks|:XLA GPU module$"
"""Host ranges that launch everything of one execution on one device (gpu_executable.cc)."""
COMMAND_BUFFER = r"^command_buffer_\d+$"
"""HLO op that XLA writes for every activity of a CUDA graph that it created (a command buffer)."""
_MAX_BYTES = (1 << 31) - 1  # the largest size of a protobuf message
_CHUNK = 1 << 24  # bytes of the file that are read at a time
_YEAR_2001_NS = 10**18  # later times are Unix times; earlier ones count from another zero


def host_table(space: XSpace, rank: int, process: int) -> pl.DataFrame:
    """The host events in the columns and the order of `HOST`.

    Each line is a thread. Ranges of jax and XLA (TraceMe) have the category ``op``. A range that
    encloses a call of a jitted function, and is not such a call itself, was opened by the user's
    program: all ranges of its name get the category ``range``.

    Args:
        rank: of the process.
        process: its id, 0 if unknown.
    """
    ranges, parent = _nested(_named(space))
    named_by_user = _around_jitted(ranges, parent)
    if named_by_user:
        category = pl.when(pl.col("shown").is_in(named_by_user) & (pl.col("category") == "op"))
        dtype = pl.Enum(HOST_CATEGORIES)
        changed = category.then(pl.lit("range", dtype)).otherwise("category")
        ranges, parent = _nested(ranges.with_columns(category=changed))
    return HOST.frame(
        {
            "rank": np.full(ranges.height, rank, np.int32),
            "process": np.full(ranges.height, process, np.int64),
            "thread": ranges["thread"],
            "category": ranges["category"],
            "name": ranges["shown"].cast(pl.Categorical()),
            "start": ranges["start"],
            "duration": ranges["duration"],
            "correlation": ranges["correlation"],
            "position": positions_of_functions((ranges["category"] == "python").to_numpy()),
            "parent": parent_column(parent),
        }
    )


def threads_table(space: XSpace, rank: int, process: int) -> pl.DataFrame:
    """The host threads in the columns of `THREADS`."""
    lines = space.lines.filter(pl.col("plane").str.starts_with("/host:")).unique(
        "line", keep="first", maintain_order=True
    )
    return THREADS.frame(
        {
            "rank": np.full(lines.height, rank, np.int32),
            "process": np.full(lines.height, process, np.int64),
            "thread": lines["line"],
            "name": lines["name"],
        }
    )


def _named(space: XSpace) -> pl.DataFrame:
    """Events with the name to show and the category; each distinct name is processed once."""
    name = pl.col("name").cast(pl.String).fill_null("")
    stepped = pl.format("{}#{}", name, pl.col("step"))
    events = space.host.select(
        "thread", "start", "duration", "correlation",
        name=pl.when(pl.col("step").is_not_null()).then(stepped).otherwise(name),
        sure=pl.when(pl.col("step").is_not_null()).then(pl.lit("step"))
        .when(pl.col("correlation").is_not_null()).then(pl.lit("driver")),
    )  # fmt: skip
    names = events.select("name").unique(maintain_order=True)
    texts = names["name"].to_list()
    names = names.with_columns(
        shown=pl.Series([_shown(text) for text in texts], dtype=pl.String),
        likely=pl.Series([_category(text) for text in texts], dtype=pl.String),
    )
    return (
        events.join(names, on="name", how="left", maintain_order="left")
        .with_columns(
            # XLA subscribes to the driver API; a call of the runtime API is recognized only by its name.
            category=pl.when((pl.col("sure") == "driver") & (pl.col("likely") == "runtime"))
            .then("likely")
            .otherwise(pl.coalesce("sure", "likely"))
            .cast(pl.Enum(HOST_CATEGORIES))
        )
        .drop("sure", "likely", "name")
    )


def _shown(name: str) -> str:
    """The name to show: frames of the Python tracer, ``$file.py:12 function``, in the form of HOST_CATEGORIES."""
    match = _FRAME.fullmatch(name)
    if match:
        return f"{match['file']}({match['line']}): {match['function']}"
    return name.removeprefix("$")


def _category(name: str) -> str:
    if name.startswith("$"):
        return "python"
    if re.match(r"cuda[A-Z]", name):
        return "runtime"
    if re.match(r"cu[A-Z]", name):
        return "driver"
    if _OVERHEAD.fullmatch(name):
        return "overhead"
    return "compile" if _COMPILING.search(name) and not re.match(_JITTED, name) else "op"


def _nested(ranges: pl.DataFrame) -> tuple[pl.DataFrame, Int64]:
    """The ranges in the order of `HOST`, and the row of each range's parent."""
    names = ("thread", "category", "start", "duration")
    columns = [ranges[name].to_physical().to_numpy() for name in names]
    order = host_order(*columns)
    return ranges[order], host_parents(*(column[order] for column in columns))


def _around_jitted(ranges: pl.DataFrame, parent: Int64) -> list[str]:
    """Names of ranges that enclose a call of a jitted function and are not such calls themselves."""
    jitted = ranges["shown"].str.contains(_JITTED).to_numpy()
    around = np.zeros(ranges.height, np.bool_)
    level = np.flatnonzero(jitted)
    while len(level := np.unique(parent[level])) and level[-1] != NO_ROW:
        level = level[level != NO_ROW]
        level = level[~around[level]]
        around[level] = True
    rows = ranges.filter(pl.Series(around & ~jitted) & (pl.col("category") == "op"))
    return rows["shown"].unique(maintain_order=True).to_list()


@dataclass(frozen=True)
class RunPrograms:
    """The programs that ran: their HLO modules, and which module each program number has.

    Attributes:
        modules: of the programs whose HLO is known.
        index: program number to position in ``modules``.
        warnings: about programs whose HLO is missing or damaged.
    """

    modules: tuple[HloModule, ...]
    index: dict[int, int]
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, space: XSpace, events: pl.DataFrame, path: str) -> RunPrograms:
        """The programs of the device events; HLO from the file itself, else from dumps in its folder."""
        used = events.select("program", pl.col("hlo_module").cast(pl.String)).drop_nulls("program")
        names = dict(used.unique("program", keep="first", maintain_order=True).rows())
        protos = dict(space.programs.select("program", "proto").reverse().rows())
        hlo_of: dict[int, HloModule] = {}
        warnings = []
        for program in (p for p in names if p in protos):
            try:
                hlo_of[program] = decode_hlo(protos[program], path)
            except DamagedInput:
                warnings.append(f"the HLO of program {names[program]} ({program}) is damaged")
        lacking = {p: name for p, name in names.items() if p not in hlo_of}
        if lacking:
            dumped, damaged = _dumps_beside(path)
            warnings += damaged
            hlo_of |= _dumps_of_programs(lacking, dumped, events)
        without = [str(name or p) for p, name in lacking.items() if p not in hlo_of]
        if without:
            warnings.append(
                f"no HLO for {listed(sorted(set(without)))}, so that device time has no source lines, op names or "
                "labels: record the HLO with jax.profiler.ProfileOptions.enable_hlo_proto, or dump it with "
                'XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_proto" and put the dump next to the trace'
            )
        index = {program: number for number, program in enumerate(hlo_of)}
        return cls(tuple(hlo_of.values()), index, tuple(warnings))

    def identities(self, program: Iterable[int]) -> list[str]:
        """The fingerprint of each program, which is equal on all ranks; its number if it has none."""
        fingerprints = {p: self.modules[i].fingerprint for p, i in self.index.items()}
        return [fingerprints.get(p) or str(p) for p in program]


def _dumps_beside(path: str) -> tuple[tuple[HloModule, ...], list[str]]:
    """The modules of the HLO dumps in the folder of the trace, and a warning for each unreadable dump."""
    folder = PurePath(path).parent
    if path == STANDARD_INPUT:
        return (), []
    files = sorted({str(p) for pattern in HLO_PATTERNS for p in Path(folder).glob(pattern)})
    modules: list[HloModule] = []
    warnings = []
    for file in files:
        try:
            modules += hlo_dump_modules(file)
        except InputError as error:
            warnings.append(f"HLO dump left out: {error}")
    return tuple(modules), warnings


def _dumps_of_programs(
    lacking: dict[int, str | None], dumped: tuple[HloModule, ...], events: pl.DataFrame
) -> Iterator[tuple[int, HloModule]]:
    """The dump of each program: it has the program's name, and an instruction for every HLO op that ran.

    If several dumps fit, the one with the program's number is taken, else none.
    """
    if not dumped:
        return
    instructions = events.select("program", pl.col("hlo").cast(pl.String)).drop_nulls().unique()
    ops_that_ran = dict(instructions.group_by("program").agg("hlo").rows())
    for program, name in lacking.items():
        wanted = set(ops_that_ran.get(program, ()))
        fits = [m for m in dumped if m.name == name and wanted <= set(m.instructions["name"])]
        exact = [m for m in fits if m.id == program]
        if exact or len(fits) == 1:
            yield program, (exact or fits)[0]


def read(source: Source, progress: Callable[[int], None]) -> Tables:
    """The tables of one XSpace file.

    Args:
        progress: called with the number of stored bytes consumed so far.

    Raises:
        DamagedInput: its content cannot be read, or is larger than protobuf allows (2 GiB).
    """
    recorded = decode_xspace(_content(source, progress), source.name)
    negative = int((recorded.gpu["duration"] < 0).sum())
    space, repairs = _repaired(recorded)
    rank, stated = _rank(source.name)
    process = int(space.devices["process"].drop_nulls().first() or 0)  # type: ignore[arg-type]
    host = host_table(space, rank, process)
    events = _activities(space)
    programs = RunPrograms.of(space, events, source.name)
    events = _with_executions(events, host)
    executions = _executions(events, host, programs, rank)
    events = events.with_columns(iteration=_iterations(events))
    memory, memory_totals = memory_tables(space, rank, process)
    warnings = [
        *(f"the profiler reports an error: {text}" for text in space.errors),
        *(f"the profiler reports: {text}" for text in space.warnings),
        *repairs,
        *programs.warnings,
        *_warnings(space, events),
    ]
    return Tables(
        gpu=_gpu_table(events, rank),
        host=host,
        threads=threads_table(space, rank, process),
        programs=executions,
        hlo=programs.modules,
        memory=memory,
        memory_totals=memory_totals,
        meta=Meta(
            inputs=(source.name,),
            formats=(NAME,),
            epoch_ns=_epoch(space),
            facts=(dict(space.versions),),
            devices=_devices(space, rank),
            ranks_stated=stated,
            warnings=tuple(f"{source.name}: {text}" for text in warnings),
            losses=_losses(space, negative, source.name),
        ),
    )


def _repaired(space: XSpace) -> tuple[XSpace, list[str]]:
    """The space with negative durations set to 0, and a warning for each kind of event that had any."""
    negative = pl.col("duration") < 0
    counts = {
        what: frame.filter(negative).height
        for what, frame in (("device activity", space.gpu), ("host range", space.host))
    }
    if not any(counts.values()):
        return space, []
    clipped = pl.col("duration").clip(0)
    fixed = dataclasses.replace(space, gpu=space.gpu.with_columns(clipped), host=space.host.with_columns(clipped))
    sentence = "with a negative duration; counted as 0"
    return fixed, [f"{several(n, what)} {sentence}" for what, n in counts.items() if n]


def _losses(space: XSpace, negative: int, name: str) -> tuple[Loss, ...]:
    """The losses that the profiler reports, and the number of device activities with negative durations."""
    failed = [Loss("recorder_error", name, 1, f"{name}: {text}") for text in space.errors]
    dropped = [Loss("dropped", name, 1, f"{name}: {text}") for text in space.warnings if says_lost(text)]
    if not negative:
        return (*failed, *dropped)
    text = f"{name}: {several(negative, 'device activity')} with a negative duration"
    return (*failed, *dropped, Loss("repaired", name, negative, text))


def _content(source: Source, progress: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := source.read(_CHUNK):
        parts.append(part)
        size += len(part)
        progress(source.consumed)
        if size > _MAX_BYTES:
            raise DamagedInput(source.name, "is larger than 2 GiB, the limit for an XSpace message")
    if source.damage:
        raise DamagedInput(source.name, f"cannot be read to the end: {source.damage}")
    return b"".join(parts)


def _rank(name: str) -> tuple[int, bool]:
    """The position of a file in its folder of a jax log directory, and whether the folder has other files.

    A file outside of a log directory gets rank 0 and False, because nothing states its rank.
    """
    path = Path(name)
    if name == STANDARD_INPUT or path.parent.parent.name != "profile":
        return 0, False
    beside = {p.name.removesuffix(".gz") for pattern in PATTERNS for p in path.parent.glob(pattern)}
    names = sorted({*beside, path.name.removesuffix(".gz")})
    return names.index(path.name.removesuffix(".gz")), len(names) > 1


def _activities(space: XSpace) -> pl.DataFrame:
    """Device events in the order of `GPU`.

    An event of kind ``other`` is a kernel if it has an HLO op or a correlation id, else it is left out.
    """
    other = pl.col("kind") == "other"
    launched = pl.col("hlo_op").is_not_null() | pl.col("correlation").is_not_null()
    return (
        space.gpu.filter(~other | launched)
        .with_columns(
            kind=pl.when(other).then(pl.lit("kernel")).otherwise(pl.col("kind").cast(pl.String)),
            hlo=_null_if_match(pl.col("hlo_op").cast(pl.String), COMMAND_BUFFER).cast(pl.Categorical()),
        )
        .sort("device", "start", "stream", maintain_order=True)
    )


def _null_if_match(name: pl.Expr, pattern: str) -> pl.Expr:
    return pl.when(~name.str.contains(pattern) & (name != "")).then(name)


def _with_executions(events: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """Columns launch_row (host row that launched the execution) and execution (row in programs)."""
    launch = pl.Series("launch_row", _launching_ranges(events, host)).replace(NO_ROW, None)
    events = events.with_columns(launch, repetition=_executions_by_repetition(events))
    has_launch = pl.col("launch_row").is_not_null()
    key = pl.struct(
        "device", "program", "launch_row",
        repetition=pl.when(~has_launch).then("repetition"),
    )  # fmt: skip
    keyed = events.with_columns(key=pl.when(pl.col("program").is_not_null()).then(key))
    order = (
        keyed.filter(pl.col("program").is_not_null())
        .group_by("key", maintain_order=True)
        .agg(pl.col("device").first(), pl.col("start").min())
        .sort("device", "start", maintain_order=True)
        .select("key", execution=pl.int_range(pl.len(), dtype=pl.Int32))
    )
    return keyed.join(order, on="key", how="left", maintain_order="left").drop("key", "repetition")


def _executions(events: pl.DataFrame, host: pl.DataFrame, programs: RunPrograms, rank: int) -> pl.DataFrame:
    """Rows of `PROGRAMS`: one for each execution of a program on a device."""
    end = pl.col("start") + pl.col("duration")
    rows = (
        events.filter(pl.col("execution").is_not_null())
        .group_by("execution")
        .agg(
            pl.col("device", "program", "hlo_module", "launch_row").first(),
            start=pl.col("start").min(),
            duration=end.max() - pl.col("start").min(),
        )
        .sort("execution")
    )
    identity = pl.Series(programs.identities(rows["program"].to_list()), dtype=pl.String)
    launch = host[["start", "duration"]]
    return PROGRAMS.frame(
        {
            "rank": np.full(rows.height, rank, np.int32),
            "device": rows["device"],
            "program": identity,
            "name": rows["hlo_module"],
            "execution": rows.select(pl.int_range(pl.len()).over("device", identity.alias("identity"))).to_series(),
            "start": rows["start"],
            "duration": rows["duration"],
            "launch": launch["start"].gather(rows["launch_row"]),
            "launch_duration": launch["duration"].gather(rows["launch_row"]),
            "hlo": pl.Series([programs.index.get(p) for p in rows["program"].to_list()], dtype=pl.Int32),
        }
    )


def _warnings(space: XSpace, events: pl.DataFrame) -> list[str]:
    """Warnings about what the file lacks and what had to be assumed."""
    if space.devices.is_empty():
        return ["holds no data of a GPU: only host ranges can be shown"]
    warnings = []
    left_out = space.gpu.height - events.height
    if left_out:
        warnings.append(f"left out: {several(left_out, 'event')} of the profiler itself")
    total = int(events["duration"].sum())
    graphs = events.filter(pl.col("hlo_op").cast(pl.String).str.contains(COMMAND_BUFFER))
    if graphs.height:
        share = 100 * int(graphs["duration"].sum()) / max(total, 1)
        warnings.append(
            f"{several(graphs.height, 'activity')}, {share:.0f} % of device time, ran inside CUDA graphs (command "
            "buffers), where the profiler records no HLO op: the op is derived from the order of the graphs' nodes "
            "if that matches the HLO; to record it, set XLA_FLAGS=--xla_gpu_enable_command_buffer= (no value: no "
            "command buffers)"
        )
    unlaunched = events.filter(pl.col("execution").is_not_null() & pl.col("launch_row").is_null())
    if unlaunched.height:
        warnings.append(
            f"the launch of {several(unlaunched.height, 'activity')} was not recorded: executions of a program are "
            "separated at each repetition of its first kernel"
        )
    return warnings


def _gpu_table(events: pl.DataFrame, rank: int) -> pl.DataFrame:
    columns: dict[str, Any] = {
        name: events[name] for name in GPU.schema if name in events.columns and name not in ("kind", "program")
    }
    columns["rank"] = np.full(events.height, rank, np.int32)
    columns["kind"] = events["kind"].cast(pl.Enum(KINDS))
    columns["name"] = events["name"].fill_null("")
    columns["program"] = events["execution"]
    return GPU.frame(columns)


def _epoch(space: XSpace) -> int | None:
    if space.start_ns is not None:
        return space.start_ns
    first = space.gpu["start"].min() if space.gpu.height else space.host["start"].min()
    return 0 if isinstance(first, int) and first > _YEAR_2001_NS else None


def _devices(space: XSpace, rank: int) -> tuple[Device, ...]:
    columns = ("device", "name", "memory_bytes", "multiprocessors", "compute_capability")
    node = space.hostnames[0] if len(space.hostnames) == 1 else None
    return tuple(
        dataclasses.replace(Device(rank, *row), node=node) for row in space.devices.select(columns).iter_rows()
    )


def _launching_ranges(gpu: pl.DataFrame, host: pl.DataFrame) -> Int64:
    """For each activity, the host row of the range that executed its program.

    That range encloses the API call with the activity's correlation id; for the body of a conditional
    node of a CUDA graph, it encloses the launch of the graph.

    Args:
        gpu: with the columns device, graph, start and correlation.
        host: in the columns of `HOST`.

    Returns:
        Rows of ``host``, `NO_ROW` where the call or such a range was not recorded.
    """
    if host.is_empty():
        return np.full(gpu.height, NO_ROW, np.int64)
    calls = (
        host.with_row_index("call")
        .filter(pl.col("correlation").is_not_null())
        .select("correlation", pl.col("call").cast(pl.Int64))
        .unique("correlation", keep="first", maintain_order=True)
    )
    call = (
        launch_correlations(gpu.select(pl.lit(0).alias("rank"), "device", "graph", "start", "correlation"))
        .to_frame()
        .join(calls, on="correlation", how="left", maintain_order="left")["call"]
        .fill_null(NO_ROW)
        .to_numpy()
    )
    parent = row_numbers(host["parent"])
    names = host["name"].cast(pl.String)
    executes = names.str.contains(_EXECUTES).to_numpy() & (host["category"] == "op").to_numpy()
    inner = chain_to(parent, call, executes)
    # The two ranges nest; the outer one is the whole launch.
    outer = chain_to(parent, np.where(inner == NO_ROW, NO_ROW, parent[inner]), executes)
    return np.where(outer == NO_ROW, inner, outer)


def _executions_by_repetition(gpu: pl.DataFrame) -> pl.Series:
    """For each activity, the number of its execution, for files that lack the host ranges.

    A new execution begins whenever the program's first activity is repeated by another launch.

    Args:
        gpu: columns device, program, hlo_op, name and correlation, sorted by start.
    """
    place = ["device", "program"]
    same = (pl.col("name") == pl.col("name").first()) & pl.col("hlo_op").eq_missing(pl.col("hlo_op").first())
    marked = gpu.with_columns(first=same.over(place)).with_columns(
        launch=pl.when("first").then(pl.col("correlation").fill_null(pl.int_range(pl.len())))
    )
    previous = pl.col("launch").forward_fill().shift(1).over(place)
    begins = pl.col("first") & pl.col("launch").ne_missing(previous)
    return marked.with_columns(begins=begins).select(pl.col("begins").cum_sum().over(place) - 1)["begins"]


def _iterations(gpu: pl.DataFrame) -> pl.Series:
    """For each activity, the number of earlier runs of its instruction in the same execution.

    XLA gives every run of an instruction its own number (scope_range_id), which all activities of
    that run share. Older files lack it; there, each further activity of the same name is the next run.

    Args:
        gpu: columns execution, hlo, name and scope_range, sorted by start.

    Returns:
        Int32, null where the execution or the instruction is unknown.
    """
    instruction = ["execution", "hlo"]
    scope = pl.col("scope_range")
    numbered = scope.rank("dense").over(instruction) - 1
    counted = pl.int_range(pl.len()).over([*instruction, "name"])
    has_instruction = pl.col("execution").is_not_null() & pl.col("hlo").is_not_null()
    number = pl.when(scope.is_not_null() & (scope > 0)).then(numbered).otherwise(counted)
    return gpu.select(iteration=pl.when(has_instruction).then(number).cast(pl.Int32))["iteration"]
