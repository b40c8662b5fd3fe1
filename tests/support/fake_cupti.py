"""The libcupti of the tests: compiled once a session, driven from Python.

Records are made from ``tests/data/cupti/layouts.json``: the offsets that the C compiler saw in CUPTI's
headers, not those that the package has.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LAYOUTS = json.loads((HERE.parent / "data" / "cupti" / "layouts.json").read_text())
CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}


@functools.cache
def library_path() -> str:
    """The compiled library; where there is no compiler, and CC names none, the test is skipped."""
    named = os.environ.get("CC")
    compiler = named or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        import pytest  # not above: recorded programs import this module too, and pytest takes longer than they do

        pytest.skip("no C compiler on the path, and none named in the variable CC")
    path = Path(tempfile.mkdtemp(prefix="thence-fake-cupti-"), "libcupti.so.13")
    command = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    sources = [str(HERE / name) for name in ("fake_cupti.c", "fake_pm_sampling.c", "fake_pc_sampling.c")]
    subprocess.run([*command, *sources, "-o", str(path)], check=True)
    path.with_name("libnvperf_host.so").touch()  # beside it, as in the wheel; nothing calls it
    return str(path)


class Fake:
    """One process's copy of the library, and records for it."""

    def __init__(self, path: str, wheel: str = "13.0.85") -> None:
        self.library = ctypes.CDLL(path)
        self.layout = LAYOUTS[wheel]["records"]
        self.library.fake_version(LAYOUTS[wheel]["version"])
        self.kept: list[Any] = []
        for record in self.layout.values():
            self.library.fake_size(record["kind"], ctypes.c_size_t(record["bytes"]))
        self.library.fake_size(4, ctypes.c_size_t(self.layout["RUNTIME"]["bytes"]))  # DRIVER

    def text(self, value: str) -> int:
        """Address of a C string."""
        self.kept.append(ctypes.create_string_buffer(value.encode()))
        return ctypes.addressof(self.kept[-1])

    def record(self, what: str, kind: int | None = None, **fields: int) -> bytes:
        """The bytes of one record; fields by their names in the header."""
        layout = self.layout[what]
        content = bytearray(layout["bytes"])
        values = {"kind": layout["kind"] if kind is None else kind, **fields}
        for name, value in values.items():
            offset, size = layout["fields"][name]
            struct.pack_into("<" + CODES[size], content, offset, value)
        return bytes(content)

    def emit(self, *records: bytes) -> None:
        """Records as CUPTI would make them now."""
        content = b"".join(records)
        self.library.fake_emit(content, ctypes.c_size_t(len(content)))

    def kernels(self, record: bytes, count: int, start: int, step: int, *, own_thread: bool = False) -> None:
        """Many kernels; see the C file."""
        self.library.fake_kernels(
            record, ctypes.c_size_t(count), ctypes.c_uint64(start), ctypes.c_uint64(step), own_thread
        )

    def asks_cuda(self, **fields: int) -> None:
        """A call that allocates or returns memory, with CUPTI's record of it."""
        record = self.record("MEMORY2", **fields)
        self.library.fake_allocate_memory(record, ctypes.c_size_t(len(record)))

    def launch(self) -> int:
        """The number of a launch that happens now."""
        return int(ctypes.c_uint32(self.library.fake_launch()).value)

    def fail(self, call: str, code: int) -> None:
        """Have a call return an error from now on."""
        self.library.fake_fail(call.encode(), code)
