"""The compiled probe, which is optional: everything else of the build stands in pyproject.toml.

It is built for the stable interface of CPython 3.11, so that one wheel serves all later versions. Where there is
no compiler, or a Python without a GIL, a wheel without it results, tagged as pure Python: thence then does the
same in Python (`thence.boundaries.probe`).
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

_OLDEST = "0x030B0000"
_SERVED = (
    sys.platform == "linux"
    and sys.implementation.name == "cpython"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
_PROBE = Extension(
    "thence.boundaries._probe",
    ["src/thence/boundaries/_probe.c"],
    define_macros=[("Py_LIMITED_API", _OLDEST)],
    extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra"],
    py_limited_api=True,
    optional=True,
)


class BuildProbe(build_ext):
    """Says in one line what it means if there is no probe."""

    def build_extension(self, ext: Extension) -> None:
        """A failure is a note: thence works without."""
        try:
            super().build_extension(ext)
        except Exception as error:  # noqa: BLE001 - whatever a compiler's absence looks like
            self.announce(f"note: thence is built without its compiled probe ({error})", level=2)

    def copy_extensions_to_source(self) -> None:
        """Of an editable installation; what was not built is not copied."""
        if all(Path(path).is_file() for path in self.get_outputs()):
            super().copy_extensions_to_source()


class Wheel(bdist_wheel):
    """Tagged by whether the probe is in it."""

    def run(self) -> None:
        """Build first: then it is known."""
        self.run_command("build")
        library = Path(self.get_finalized_command("build").build_lib)
        if not any(library.rglob("_probe*.so")):
            self.root_is_pure, self.py_limited_api = True, False
            self.distribution.ext_modules = []
        super().run()


setup(
    ext_modules=[_PROBE] if _SERVED else [],
    cmdclass={"build_ext": BuildProbe, "bdist_wheel": Wheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if _SERVED else {},
)
