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


def open_trace(
    *inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    hlo: Sequence[str] = (),
    own: Sequence[str] = (),
    run: str | None = None,
    add: bool = False,
    max_expansion: int = DEFAULT.ratio,
    progress: Callable[[str, int, int], None] = lambda _name, _done, _size: None,
) -> Trace:
    """Reads traces from files, directories, globs and URLs; several ranks become one trace.

    A store that ``thence ingest`` wrote is opened without reading its tables; each analysis reads what it needs.
    URLs (``s3://``, ``gs://`` ...) need the extra ``thence[remote]``.

    Labels of CUDA graphs (``*labels*.json``) among the inputs, or in the same folder as one of them, are joined if
    they are of the same process. ``meta.notes`` says that they were joined, ``meta.warnings`` why they were not.

    Args:
        inputs: what to read, one by one or in a list; the format is detected from the content.
        hlo: HLO modules for the XLA programs whose HLO the inputs lack: files, directories that
            ``--xla_dump_to`` wrote, or globs.
        own: further code that counts as the user's own: names of packages or folders (``transformers``), or glob
            patterns of paths; a leading ``!`` excludes instead. The last pattern that matches decides.
        run: the run to read from directories that hold several: the name of a folder, or a part of file names
            between dots. None: the newest, which `Trace.meta` notes.
        add: whether several files of the same rank are all read, each as a rank of its own.
        max_expansion: most decompressed bytes for each stored byte of a compressed input. An input that holds
            more than that, and more than 64 MiB, is refused.
        progress: called with the file being read, the number of its bytes read so far, and its size (0 if
            unknown).

    Raises:
        thence.InputError: an input is missing, of no known format, or damaged beyond reading.
        thence.UsageError: several of the given files hold the same rank and ``add`` is not set, no input was
            given, or a store was given with other inputs, or with options that apply only when it is written.
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


def _store(paths: Sequence[str | os.PathLike[str]], hlo: Sequence[str], own: Sequence[str]) -> Trace:
    """A store as a trace.

    Raises:
        UsageError: there are other inputs, or options that apply only when a store is written.
    """
    from thence.store.store import open_store
    from thence.store.stored_trace import StoredTrace

    if len(paths) > 1:
        raise UsageError(f"{paths[0]}: a store cannot be combined with other inputs")
    store = open_store(paths[0])
    if hlo or (own and tuple(own) != store.manifest.settings.own):
        raise UsageError(
            f"{paths[0]}: a store was attributed when it was written; --own and --hlo are options of thence ingest"
        )
    return StoredTrace(store)


def open_runs(*inputs: str | os.PathLike[str]) -> list[Trace]:
    """Reads traces that need not belong to one job, such as one trace for each capture of a server.

    Inputs whose ranks show that they are one job become one trace. Otherwise each file becomes a trace of its own.

    Args:
        inputs: files, directories of torch.profiler traces, or globs.

    Raises:
        thence.InputError: an input is missing, of no known format, or damaged beyond reading.
    """
    try:
        whole = open_trace(*inputs)
    except UsageError:
        return [open_trace(file) for file in expand([str(name) for name in inputs], PATTERNS)]
    # Of a directory with several runs, only the newest was read. And files that hold no device work and do not
    # state their rank show no times by which runs can be told from ranks.
    if set(whole.meta.formats) == {NAME}:
        files = expand([str(name) for name in inputs], PATTERNS)
        unknown = not whole.meta.ranks_stated and whole.tables.gpu["rank"].n_unique() < len(files)
        if len(files) > len(whole.meta.inputs) or (unknown and len(files) > 1):
            return [open_trace(file) for file in files]
    return [whole]


def _flat(inputs: Iterable[str | os.PathLike[str] | Iterable[str | os.PathLike[str]]]) -> list[str | os.PathLike[str]]:
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
