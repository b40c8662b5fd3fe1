"""What several test modules share: recordings, hand-written traces, and the command line."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import os
import subprocess
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from polars.testing import assert_frame_equal

import forking
import thence
from thence.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.model.tables import Tables

DATA = Path(__file__).parent / "data"
TORCH = DATA / "torch"
STACK = Path(str(resources.files("thence") / "data" / "torch_eager_stack_rank0.json.gz"))
FSDP = tuple(TORCH / f"torch_fsdp_rank{rank}.json.gz" for rank in range(4))
RECORDINGS = (*sorted(TORCH.glob("*.json.gz")), STACK)
DIFFERENT = tuple(path for path in RECORDINGS if path not in FSDP[1:])
"""One rank of the job: the others did the same, so what is true of any trace needs no three times more of them."""
TABLES = ("gpu", "host", "collectives", "threads")


def examples(thorough: int) -> int:
    """Examples of a property test: a quarter of a thorough run's, unless `make test-thorough` asks for all."""
    if os.environ.get("THENCE_THOROUGH"):
        return thorough
    return max(5, thorough // 30) if os.environ.get("THENCE_FEW") else max(10, thorough // 4)


def recording(name: str) -> Path:
    """A recording by its name without the ending."""
    return TORCH / f"{name}.json.gz"


@functools.cache
def shared(*paths: str | Path) -> thence.Trace:
    """The trace of files of the tests' data, read and attributed once for all tests of a process."""
    return thence.open(*paths)


def unzipped(path: Path) -> bytes:
    """Its JSON."""
    return gzip.decompress(path.read_bytes())


def written(path: Path, events: Iterable[Any], **metadata: Any) -> Path:
    """A trace with these events, as json.dumps lays it out."""
    path.write_text(json.dumps({"schemaVersion": 1, **metadata, "traceEvents": list(events)}))
    return path


def opened(folder: Path, events: Iterable[Any], **metadata: Any) -> thence.Trace:
    """The trace of these events, self-checked."""
    trace = thence.open(written(folder / "trace.json", events, **metadata))
    trace.self_check()
    return trace


def opened_text(folder: Path, text: str | bytes) -> thence.Trace:
    """The trace of a file with exactly this content, self-checked."""
    path = folder / "trace.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    trace = thence.open(path)
    trace.self_check()
    return trace


def event(category: str, name: str, start: Any, duration: Any, **rest: Any) -> dict[str, Any]:
    """A complete event on thread 2 of process 1; arguments are given as ``args``."""
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": 2, "ts": start, "dur": duration, **rest,
    }  # fmt: skip


def launch(correlation: int, start: Any, **rest: Any) -> dict[str, Any]:
    """A cudaLaunchKernel call."""
    arguments = {"correlation": correlation}
    return event("cuda_runtime", "cudaLaunchKernel", start, 1, args=arguments, **rest)


def kernel(correlation: int, start: Any, duration: Any = 5, **rest: Any) -> dict[str, Any]:
    """A kernel on stream 7 of device 0; ``args`` are added to what it needs."""
    arguments = {"device": 0, "stream": 7, "correlation": correlation} | rest.pop("args", {})
    defaults = {"pid": 0, "tid": 7, "args": arguments}
    return event("kernel", rest.pop("name", "gemm"), start, duration) | defaults | rest


# Two kernels, the first launched inside aten::mm inside a range, and what they must become.
OP = event("cpu_op", "aten::mm", 10, 20, args={"External id": 5})
LABEL = event("user_annotation", "train", "1.500", 99)
PAIR = [LABEL, OP, launch(1, "12.001"), kernel(1, "40.250", "5.125"), launch(2, 50), kernel(2, 60)]


def assert_same_tables(left: Tables, right: Tables) -> None:
    """Every table equal, whatever numbers stand behind the categories."""
    for table in TABLES:
        assert_frame_equal(getattr(left, table), getattr(right, table), categorical_as_str=True)


def run_thence(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The command line, run in this process, with its output kept; `run_process` is for what needs one of its own."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch.dict(os.environ, _environment(environment), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as stopped,
    ):
        main([str(argument) for argument in arguments])
    code = int(str(stopped.value.code))
    printed = (stream.detach().getvalue() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess([*map(str, arguments)], code, *printed)


def run_process(
    *arguments: str | Path, stdin: bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """``python -m thence`` in a process of its own, which is a fork, its output a file."""
    return forking.run(["-m", "thence", *map(str, arguments)], stdin=stdin, timeout=60, env=_environment(environment))


def _environment(changed: dict[str, str]) -> dict[str, str]:
    """This process's environment without what changes the form of output, and with the changes."""
    form = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    return {name: value for name, value in os.environ.items() if name not in form} | changed


def output(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> tuple[str, str]:
    """What the command line prints to standard output and standard error, run in this process."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == code, printed.err
    return printed.out, printed.err
