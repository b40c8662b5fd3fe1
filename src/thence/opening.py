"""`thence.open`: reads files into a `Trace`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from thence.errors import UsageError
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.kineto.sniffing import NAME, PATTERNS
from thence.readers.registry import read
from thence.readers.source import expand
from thence.store.layout import is_store
from thence.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["open_runs", "open_trace"]


def open_trace(
    *inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    hlo: Sequence[str] = (),
    own: Sequence[str] = (),
    run: str | None = None,
    add: bool = False,
    max_expansion: int = DEFAULT.ratio,
    progress: Callable[[str, int, int], None] = lambda _name, _done, _size: None,
) -> Trace:
    """Reads traces: files, directories, globs, URLs; several ranks become one trace.

    A store that ``thence ingest`` wrote is opened without reading it: its answers read what they need.
    URLs (``s3://``, ``gs://`` ...) need the extra ``thence[remote]``.

    Labels of CUDA graphs (``*labels*.json``) among the inputs, or in a folder with one of them, are joined
    if they are of the same process; ``meta.warnings`` says so, or why not.

    Args:
        inputs: what to read, one by one or in a list; the format is told from the content.
        hlo: HLO modules for the XLA programs whose HLO the inputs lack: files, directories that
            ``--xla_dump_to`` left behind, or globs.
        own: what else counts as the user's own code, by source: names of packages or folders
            (``transformers``), or glob patterns of paths; after a ``!`` what does not. The last that matches
            decides.
        run: of directories that hold several runs, the one to read: a folder of that name, or files with it
            between the dots of their name. None: the newest, and `Trace.meta` notes it.
        add: read all of several files that hold one rank, each as a rank of its own.
        max_expansion: most decompressed bytes for each stored byte of a compressed input; files that hold more,
            and more than 64 MiB, are refused.
        progress: called with the file at hand, the bytes of it consumed, and its size (0 if unknown).

    Raises:
        thence.InputError: an input is missing, of no known format, or damaged beyond reading.
        thence.UsageError: files that were given hold one rank, and ``add`` is not set; or nothing was given.
    """
    paths = _flat(inputs)
    if any(is_store(path) for path in paths):
        return _store(paths, hlo, own)
    expansion = Expansion(max_expansion)
    tables = read(paths, progress, run=run, add=add, expansion=expansion)
    if hlo:
        from thence.readers.jax.hlo_dump import attach_hlo, hlo_dump_modules

        tables = attach_hlo(tables, [m for path in hlo for m in hlo_dump_modules(path, expansion)])
    if tables.graph_labels:
        from thence.attribution.cuda_graphs.labelling import with_labels

        tables = with_labels(tables)
    return Trace(tables, tuple(own))


def _store(
    paths: Sequence[str | os.PathLike[str]], hlo: Sequence[str], own: Sequence[str]
) -> Trace:
    """A store as a trace.

    Raises:
        UsageError: there are other inputs beside it, or options that only count when a store is written.
    """
    from thence.store.store import open_store
    from thence.store.stored_trace import StoredTrace

    if len(paths) > 1:
        raise UsageError(f"{paths[0]}: a store is an input of its own; give nothing beside it")
    store = open_store(paths[0])
    if hlo or (own and tuple(own) != store.manifest.settings.own):
        raise UsageError(
            f"{paths[0]}: a store has been attributed when it was written; give --own and --hlo to thence ingest"
        )
    return StoredTrace(store)


def open_runs(*inputs: str | os.PathLike[str]) -> list[Trace]:
    """Reads traces that need not be of one job, such as one of each capture of a server.

    Inputs that are one job, by their ranks, are one trace. Else each file is a trace of its own.

    Args:
        inputs: files, directories of torch.profiler traces, or globs.

    Raises:
        thence.InputError: an input is missing, of no known format, or damaged beyond reading.
    """
    try:
        whole = open_trace(*inputs)
    except UsageError:
        return [open_trace(file) for file in expand([str(name) for name in inputs], PATTERNS)]
    # Of a directory with several runs, the newest was read alone; and files without device work, that do not
    # say which rank they are of, show no time by which to tell runs from ranks.
    if set(whole.meta.formats) == {NAME}:
        files = expand([str(name) for name in inputs], PATTERNS)
        unknown = not whole.meta.ranks_stated and whole.gpu["rank"].n_unique() < len(files)
        if len(files) > len(whole.meta.inputs) or (unknown and len(files) > 1):
            return [open_trace(file) for file in files]
    return [whole]


def _flat(
    inputs: Iterable[str | os.PathLike[str] | Iterable[str | os.PathLike[str]]],
) -> list[str | os.PathLike[str]]:
    """Paths given one by one, in lists, or both."""
    paths: list[str | os.PathLike[str]] = []
    for given in inputs:
        if isinstance(given, str | os.PathLike):
            paths.append(given)
        else:
            paths.extend(given)
    if not paths:
        raise UsageError("no input was given; thence.open takes files, directories or globs")
    return paths
