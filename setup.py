"""What of the build pyproject.toml cannot say: the compiled modules, man pages, and addresses in the README.

Three modules are compiled: the probe that notes launches, the scanner that reads Kineto files, and the unpickler that
reads snapshots of PyTorch's memory. They are optional, and built for the stable interface of CPython 3.11, so that one
wheel serves all later versions. Where there is no compiler, or a Python without a GIL, a wheel without them results,
tagged as pure Python: thence then does the same in Python (`thence.capture.boundaries.probe`,
`thence.readers.kineto.events`, `thence.readers.memory_snapshot.tape`).

``thence.pth`` is installed beside the package, also in an editable installation: it makes processes whose environment
has THENCE_RECORD record themselves, and does nothing in others. THENCE_PTH=no builds without it.

Man pages are made from the command line's own help when a wheel is built (`thence.cli.manual`).

THENCE_REPOSITORY, such as https://github.com/OWNER/NAME, says where the source is: the release workflow sets it. The
package then has project URLs, and its README absolute addresses of pictures and pages, as a package index needs
them. Without it the package says nothing of where it is.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

_ROOT = Path(__file__).parent
_OLDEST = "0x030B0000"
_SERVED = (
    sys.platform == "linux" and sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
)


def _extension(
    name: str, folder: str, headers: tuple[str, ...], optimized: str = "-O2", libraries: tuple[str, ...] = ()
) -> Extension:
    place = Path("src/thence") / folder
    return Extension(
        name,
        sorted(path.as_posix() for path in place.glob("*.c")),
        depends=[f"src/thence/{header}" for header in headers],
        define_macros=[("Py_LIMITED_API", _OLDEST)],
        extra_compile_args=["-std=c11", optimized, "-Wall", "-Wextra"],
        extra_link_args=["-s"],  # no debug information, which names folders of the machine that builds
        libraries=list(libraries),
        py_limited_api=True,
        optional=True,
    )


_EXTENSIONS = {
    # rt has timer_create, before glibc 2.34
    "compiled probe": _extension(
        "thence.capture.boundaries._probe", "capture/boundaries", ("capture/boundaries/_stack.h",), libraries=("rt",)
    ),
    "compiled scanner": _extension(
        "thence.readers.kineto._scanner", "readers/kineto", ("readers/kineto/_json.h", "readers/_memory.h"), "-O3"
    ),
    "compiled unpickler": _extension(
        "thence.readers.memory_snapshot._unpickler", "readers/memory_snapshot", ("readers/_memory.h",)
    ),
}


class BuildOptional(build_ext):
    """Says in one line what is missing if a module cannot be compiled."""

    def build_extension(self, ext: Extension) -> None:
        """A failure is a note: thence works without."""
        try:
            super().build_extension(ext)
        except Exception as error:  # noqa: BLE001 - whatever a compiler's absence looks like
            name = next(name for name, known in _EXTENSIONS.items() if known.name == ext.name)
            self.announce(f"note: thence is built without its {name} ({error})", level=2)

    def copy_extensions_to_source(self) -> None:
        """Of an editable installation; what was not built is not copied."""
        built = Path(self.build_lib)
        self.extensions = [ext for ext in self.extensions if (built / self.get_ext_filename(ext.name)).is_file()]
        super().copy_extensions_to_source()


class Wheel(bdist_wheel):
    """Tagged by whether a compiled module is in it."""

    def run(self) -> None:
        """Build first: then it is known."""
        self.run_command("build")
        library = Path(self.get_finalized_command("build").build_lib)
        if not any(library.rglob("*.so")):
            self.root_is_pure, self.py_limited_api = True, False
            self.distribution.ext_modules = []
        if self.distribution.data_files == _PTH:  # a pure wheel may have no folder purelib among its data
            shutil.copy(_ROOT / "src" / "thence.pth", library)
            self.distribution.data_files = []
        self.distribution.data_files.append(("share/man/man1", _man_pages(library.parent / "man")))
        super().run()


class WithData(Distribution):
    """Has the data files in editable installations, too: their builder asks for them under this name."""

    has_data = Distribution.has_data_files


def _man_pages(folder: Path) -> list[str]:
    """Paths of the pages, written to this folder, relative to that of the build."""
    sys.path.insert(0, str(_ROOT / "src"))
    from thence.cli.manual import man_pages

    folder.mkdir(parents=True, exist_ok=True)
    for name, text in man_pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    return [str(folder / name) for name in man_pages()]


def _readme(repository: str | None) -> str:
    """The README, with absolute addresses where the repository is known."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    if repository is None:
        return text
    version = _version()
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{repository}/raw/v{version}/", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\1{repository}/blob/v{version}/", text)


def _urls(repository: str | None) -> dict[str, str]:
    """Names and addresses that a package index shows."""
    if repository is None:
        return {}
    changelog = f"{repository}/blob/v{_version()}/CHANGELOG.md"
    return {"Source": repository, "Issues": f"{repository}/issues", "Changelog": changelog}


def _version() -> str:
    found = re.search(r'^version = "(.+)"', (_ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


_PTH = [("../purelib", ["src/thence.pth"])]
"""For editable installations: data files are below the folder ``data``, whose neighbour ``purelib`` is installed to
site-packages. Wheels have the file beside the package."""
_REPOSITORY = os.environ.get("THENCE_REPOSITORY", "").rstrip("/") or None


setup(
    ext_modules=list(_EXTENSIONS.values()) if _SERVED else [],
    data_files=[] if os.environ.get("THENCE_PTH") == "no" else _PTH,
    distclass=WithData,
    cmdclass={"build_ext": BuildOptional, "bdist_wheel": Wheel},
    long_description=_readme(_REPOSITORY),
    long_description_content_type="text/markdown",
    project_urls=_urls(_REPOSITORY),
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if _SERVED else {},
)
