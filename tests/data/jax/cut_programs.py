"""Cuts the first executions of XLA programs out of a recording, and counts the kernels of each HLO op in another.

    PYTHONPATH=tests:tests/support python tests/data/jax/cut_programs.py WITH WITHOUT EXECUTIONS OUT.tar.xz PROGRAM...

What made ``programs/*.tar.xz`` from recordings of ``tests/gpu/jax_programs.py``: WITH is the directory of one
process that had command buffers, WITHOUT the same program without. Of WITH is kept what the first EXECUTIONS
executions of the programs launched, on each thread, with their calls, NVTX ranges, names, and the HLO modules as far
as thence reads them. Paths of files and the name of the host are rewritten.

``expected.json`` in OUT has how often each program was executed in what is kept, and what each HLO op ran in these
executions: PROGRAM/OP to [kernel, grid, block, times]. Either all executions are kept, or all run the same. It is
counted in WITHOUT, from the tables of the recording alone: a kernel is of the innermost range of a thunk around the
call with its correlation id. A copy or set of the driver, or a kernel of it that copies, is ``copy``; one to the host
is ``decision``, by which XLA reads a predicate there.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from support.archives import pack
from thence.model.column_file import decode, encode
from thence.readers.jax.protos.hlo_pb2 import HloModuleProto

if TYPE_CHECKING:
    from collections.abc import Iterator

_BEGINS, _ENDS = 2, 4  # CUPTI_ACTIVITY_FLAG_MARKER_START and _END
_OF_NAMES = ("name", "domain", "function")
_THUNK = re.compile(r"Thunk:#(?:[^#]*,)?hlo_op=([^#,]+)")
_MODULE = re.compile(r"XlaModule:#hlo_module=([^#,]+)")
_TO_HOST = 2  # CUPTI_ACTIVITY_MEMCPY_KIND_DTOH
_NONE = pl.DataFrame(schema={"correlation": pl.Int64, "copy_kind": pl.Int64})
_KEPT = (
    *("format", "version", "launches", "began_ns", "stopped_ns", "finished", "xla_flags"),
    *("devices", "versions"),
)
_REWRITTEN = ((rb"/[\w./-]+?(?=/benchmarks/)", b"/home/user/programs"), (rb"/[\w./-]+?/\.venv", b"/home/user/.venv"))


def tables_of(recording: Path) -> dict[str, pl.DataFrame]:
    """The tables that matter, parts put together."""
    return {
        name: pl.concat(
            [pl.DataFrame(dict(decode(part.read_bytes()))) for part in sorted(recording.glob(f"{name}-*.npz"))],
            how="vertical_relaxed",
        )
        for name in ("kernels", "copies", "sets", "ranges", "calls", "names")
        if any(recording.glob(f"{name}-*.npz"))
    }  # fmt: skip


def spans_of(tables: dict[str, pl.DataFrame]) -> list[tuple[int, int, int, str]]:
    """Ranges: thread, begin, end and name, in the order in which they begin."""
    texts = _texts(tables)
    ranges = tables["ranges"].select("id", "flags", "time", "thread", "name")
    ends = {number: time for number, flags, time, _, _ in ranges.iter_rows() if flags & _ENDS}
    return sorted(
        (
            (thread, time, ends[number], texts.get(name, ""))
            for number, flags, time, thread, name in ranges.iter_rows()
            if flags & _BEGINS and number in ends
        ),
        key=lambda span: (span[1], -span[2]),
    )


def counts_of(tables: dict[str, pl.DataFrame], kept: dict[str, int]) -> dict[str, list[list[Any]]]:
    """What each HLO op runs in so many executions of each program."""
    spans = [span for span in spans_of(tables) if _THUNK.match(span[3]) or _MODULE.match(span[3])]
    executions = Counter(program for _, _, _, name in spans for program in _MODULE.findall(name))
    op_of = _ops_of_calls(tables, spans, list(kept))
    counted: dict[tuple[str, str], Counter[Any]] = {}
    for correlation, ran in _activities(tables):
        if correlation in op_of:
            counted.setdefault(op_of[correlation], Counter())[ran] += 1
    expected = {}
    for (program, op), found in sorted(counted.items()):
        each = {ran: divmod(n * kept[program], executions[program]) for ran, n in found.items()}
        assert not any(rest for _, rest in each.values()), (program, op, found, executions)
        expected[f"{program}/{op}"] = [[*ran, times] for ran, (times, _) in each.items()]
    return expected


def _ops_of_calls(
    tables: dict[str, pl.DataFrame], spans: list[tuple[int, int, int, str]], programs: list[str]
) -> dict[int, tuple[str, str]]:
    """Program and HLO op of each call inside a thunk, by correlation id."""
    op_of = {}
    calls = tables["calls"].select("start", "thread", "correlation").sort("start")
    of_thread = {thread: [s for s in spans if s[0] == thread] for thread, *_ in spans}
    begun = dict.fromkeys(of_thread, 0)
    still: dict[int, list[tuple[int, int, int, str]]] = {thread: [] for thread in of_thread}
    for start, thread, correlation in calls.iter_rows():
        own = of_thread.get(thread, [])
        while begun.get(thread, 0) < len(own) and own[begun[thread]][1] <= start:
            still[thread].append(own[begun[thread]])
            begun[thread] += 1
        still[thread] = [s for s in still.get(thread, []) if start <= s[2]]
        around = [s[3] for s in still[thread]]
        module = [found[1] for name in around if (found := _MODULE.match(name))]
        thunk = [found[1] for name in around if (found := _THUNK.match(name))]
        if module and thunk and module[-1] in programs:
            op_of[correlation] = module[-1], thunk[-1]
    return op_of


def _activities(tables: dict[str, pl.DataFrame]) -> Iterator[tuple[int, Any]]:
    """Correlation id of each activity, and what ran: kernel, grid and block."""
    texts = _texts(tables)
    sizes = [f"{what}_{axis}" for what in ("grid", "block") for axis in "xyz"]
    kernels = tables["kernels"].select("correlation", "name", *sizes)
    for correlation, name, *size in kernels.iter_rows():
        copies = texts[name].startswith(("memcpy", "memset"))
        own = (texts[name], tuple(size[:3]), tuple(size[3:]))
        yield correlation, ("copy", (), ()) if copies else own
    copies = tables.get("copies", _NONE).select("correlation", "copy_kind")
    for correlation, kind in copies.iter_rows():
        yield correlation, ("decision" if kind == _TO_HOST else "copy", (), ())
    for (correlation,) in tables.get("sets", _NONE).select("correlation").iter_rows():
        yield correlation, ("copy", (), ())


def _texts(tables: dict[str, pl.DataFrame]) -> dict[int, str]:
    names = tables["names"].select("number", pl.coalesce("demangled", "name").fill_null(""))
    return dict(names.iter_rows())


def cut(recording: Path, executions: int, programs: list[str]) -> tuple[dict[str, bytes], dict[str, int]]:
    """The files of the cut recording, and how often each program was executed in it."""
    tables = tables_of(recording)
    spans = spans_of(tables)
    modules = [s for s in spans if (found := _MODULE.match(s[3])) and found[1] in programs]
    threads = {span[0] for span in modules}
    kept = [s for thread in threads for s in [s for s in modules if s[0] == thread][:executions]]
    inside = [
        (thread, begin, end) for thread, begin, end, _ in spans
        if any(k[0] == thread and k[1] <= begin <= k[2] for k in kept)
    ]  # fmt: skip
    begun = tables["ranges"].filter((pl.col("flags") & _BEGINS) != 0)
    wanted = pl.DataFrame(inside, ("thread", "time", "end"), orient="row").select("thread", "time").unique()
    of = begun.join(wanted, on=["thread", "time"], how="semi")["id"]
    tables["ranges"] = tables["ranges"].filter(pl.col("id").is_in(of.implode()))
    spanned = [(pl.col("thread") == k[0]) & pl.col("start").is_between(k[1], k[2]) for k in kept]
    calls = tables["calls"].filter(pl.any_horizontal(spanned))
    later = tables["calls"].filter(pl.col("start") > max(k[2] for k in kept))["correlation"]
    began = min(k[1] for k in kept)
    # Bodies of conditional nodes have the correlation id 0: they end before what was launched later begins.
    until = {
        device: part.filter(pl.col("correlation").is_in(later.implode()))["start"].min()
        for (device,), part in tables["kernels"].group_by("device")
    }
    for kind in tables.keys() & {"kernels", "copies", "sets"}:
        own = pl.col("correlation").is_in(calls["correlation"].implode())
        ends = pl.col("device").replace_strict(until, default=None)
        body = (pl.col("correlation") == 0) & (pl.col("start") >= began) & (pl.col("start") < ends.fill_null(1 << 62))
        tables[kind] = tables[kind].filter(own | body)
    tables["calls"] = calls
    ran = Counter(found[1] for k in kept if (found := _MODULE.match(k[3])))
    return _files(recording, programs, tables), dict(ran)


def _files(recording: Path, programs: list[str], tables: dict[str, pl.DataFrame]) -> dict[str, bytes]:
    numbers = [
        table[column].cast(pl.Int64)
        for kind, table in tables.items() if kind != "names"
        for column in table.columns if column in _OF_NAMES
    ]  # fmt: skip
    used = pl.concat(numbers).unique()
    names = tables["names"].filter(pl.col("number").cast(pl.Int64).is_in(used.implode()))
    tables["names"] = names
    index = json.loads((recording / "hlo" / "compiled.json").read_bytes())
    last = {entry["name"]: entry | {"thread": None, "ended_ns": None} for entry in index["modules"]}
    listed = [last[program] for program in programs]  # the recorder may have found one twice
    about = json.loads((recording / "recording.json").read_bytes())
    about = {key: about[key] for key in _KEPT if key in about}
    about |= {
        "counts": {kind: table.height for kind, table in tables.items()},
        "parts": dict.fromkeys(tables, 1), "host": "host", "pid": 1, "threads": {}, "program": "program.py",
    }  # fmt: skip
    files = {
        "recording.json": json.dumps(about).encode(),
        "hlo/compiled.json": json.dumps(index | {"modules": listed}).encode(),
    }
    for entry in listed:
        files[f"hlo/{entry['file']}"] = _module((recording / "hlo" / entry["file"]).read_bytes())
    for kind, table in tables.items():
        columns = {
            name: values.to_list() if values.dtype == pl.String else values.to_numpy()
            for name, values in zip(table.columns, table, strict=True)
        }
        files[f"{kind}-000001.npz"] = encode(columns)
    return files


def _module(proto: bytes) -> bytes:
    """An HloModuleProto without the fields that thence does not read; paths become others of the same length."""
    module = HloModuleProto.FromString(proto)
    module.DiscardUnknownFields()
    content = module.SerializeToString()
    for pattern, other in _REWRITTEN:
        content = re.sub(pattern, lambda found, other=other: other.ljust(len(found[0]), b"_")[: len(found[0])], content)
    return content


def main(with_buffers: Path, without: Path, executions: int, out: Path, programs: list[str]) -> None:
    """Writes the archive."""
    kept, ran = cut(with_buffers, executions, programs)
    files = {f"recording/host-rank0-1/{name}": data for name, data in kept.items()}
    expected = {"executions": ran, "ops": counts_of(tables_of(without), ran)}
    files["expected.json"] = json.dumps(expected, indent=0).encode()
    pack(files, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
