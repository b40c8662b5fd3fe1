"""Labels of CUDA graphs that lie in a folder with an input."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from thence.errors import InputError
from thence.readers.files import STANDARD_INPUT, Source
from thence.readers.graph_labels import PATTERNS, read_labels, sniff

if TYPE_CHECKING:
    from thence.model.tables import Tables

__all__ = ["with_labels_beside"]

_MOST_FILES = 1000  # of labels in one folder


def with_labels_beside(tables: Tables) -> Tables:
    """The tables with the labels in the folders of their inputs, after those that are among the inputs.

    What cannot be read there is a warning, never an error.
    """
    known = {Path(name).resolve() for name in tables.meta.inputs}
    known |= {Path(one.source).resolve() for one in tables.graph_labels}
    folders = {
        Path(name).parent
        for name in tables.meta.inputs
        if name != STANDARD_INPUT and Path(name).is_file()
    }
    found, warnings = [], []
    paths = sorted(
        {path for folder in folders for pattern in PATTERNS for path in folder.glob(pattern)}
    )
    for path in paths[:_MOST_FILES]:
        if path.resolve() in known:
            continue
        try:
            with Source.open(str(path)) as source:
                is_labels = sniff(source.head())
            if is_labels:
                found.append(read_labels(path))
        except InputError as error:
            warnings.append(f"{error}; not joined")
    if not found and not warnings:
        return tables
    labels = (*tables.graph_labels, *found)
    return dataclasses.replace(tables, graph_labels=labels).with_warnings(warnings)
