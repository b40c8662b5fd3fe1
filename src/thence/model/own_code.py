"""Which source files are the user's own code: one rule for Python frames and for stacks in the HLO.

A file is not the user's own if its path shows this: ``site-packages``, ``dist-packages``, the folder of the
standard library, code without a file (``<frozen os>``), code that torch.compile or Triton generated.

Profilers of PyTorch write paths relative to the entry of ``sys.path`` that holds them, so that
``transformers/models/llama/modeling_llama.py`` and the user's ``model/net.py`` look alike. A relative path is
not the user's own if its first part is

- a module of the standard library,
- a package of `PACKAGES`, a fixed table of packages that programs on GPUs commonly install,
- a package that the same trace shows below ``site-packages`` or ``dist-packages`` elsewhere.

The packages installed on the analysing machine are not considered, because the result must be the same on every
machine. An installed package that none of these rules recognises therefore counts as the user's own; ``--own
'!PACKAGE'`` excludes it, and ``--own PACKAGE`` includes a package.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_IN_SITE_PACKAGES = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/]+)")
_ELSEWHERE = re.compile(
    r"(?:^|/)(?:site|dist)-packages/|(?:^|/)lib(?:64)?/python[\d.]+/|/python\d+\.zip/|"
    # Written by torch.compile (Inductor) and by Triton.
    r"(?:^|/)torchinductor_[^/]*/|/\.triton/|"
    # Code without a file. Notebook cells and code typed at a prompt are the user's own.
    r"^<(?!ipython-input|stdin>|console>)"
)
_STANDARD_LIBRARY = frozenset(
    """
    __future__ _abc _bootlocale _collections_abc _compat_pickle _compression _markupbase _osx_support
    _py_abc _pydatetime _pydecimal _pyio _pylong _sitebuiltins _strptime _sysconfigdata _threading_local
    _weakrefset abc aifc argparse ast asynchat asyncio asyncore base64 bdb binascii bisect bz2 calendar
    codecs codeop collections colorsys compileall concurrent configparser contextlib
    contextvars copy copyreg cProfile csv ctypes curses dataclasses datetime dbm decimal difflib dis
    distutils doctest encodings ensurepip enum filecmp fileinput fnmatch fractions ftplib
    functools genericpath getopt getpass gettext glob graphlib gzip hashlib heapq hmac html http imaplib
    importlib inspect io ipaddress json keyword lib2to3 linecache locale logging lzma mailbox
    mimetypes modulefinder multiprocessing netrc ntpath nturl2path opcode operator
    optparse os pathlib pdb pickle pickletools pkgutil plistlib poplib posixpath pprint
    pty py_compile pyclbr pydoc queue quopri random re reprlib rlcompleter runpy secrets
    selectors shelve shlex shutil signal smtplib sndhdr socket socketserver sqlite3 sre_compile
    sre_constants sre_parse ssl stat stringprep struct subprocess sunau symtable
    sysconfig tabnanny tarfile telnetlib tempfile textwrap threading timeit tkinter tokenize
    tomllib traceback tracemalloc tty turtle types typing unittest urllib uuid venv warnings weakref
    webbrowser wsgiref xdrlib xml xmlrpc zipapp zipfile zipimport zoneinfo
    """.split()  # noqa: SIM905 - as a list it would fill pages
)
"""Modules of the standard library of Python 3.8 to 3.14. Modules that launch nothing and whose names are common for
users' scripts are left out: code, profile, statistics, test, trace and the like."""
PACKAGES = frozenset(
    """
    accelerate aiohttp aiter albumentations apex bitsandbytes botorch causal_conv1d chex click cloudpickle
    colossalai compressed_tensors cupy cupyx cutlass deep_ep deep_gemm deepspeed detectron2
    diffusers distrax dgl einops fairscale fairseq fairseq2 fastapi fla flash_attn flash_attn_3
    flashinfer flax fsspec gpytorch grain gym gymnasium haiku hf_transfer huggingface_hub hydra ipykernel
    IPython ignite jax jaxlib jaxopt jaxtyping joblib jraph keras kornia liger_kernel lightning
    lightning_fabric lightning_utilities lmdeploy mamba_ssm megatron mlflow mmcv mmengine mpi4py msgspec
    networkx numba numpy numpyro nvidia nvtx omegaconf onnxruntime open_clip optax orbax packaging pandas
    paxml peft PIL polars praxis psutil pyarrow pydantic pyro pytest pytorch_lightning pytorch_metric_learning
    pytorch_optimizer ray requests safetensors scipy seqio setuptools sgl_kernel sglang sklearn
    sentence_transformers sentencepiece simple_parsing six starlette tensorboard tensordict tensorflow
    tensorflow_datasets tensorrt tensorrt_llm tensorstore tiktoken timm tokenizers torch torch_geometric
    torch_scatter torch_sparse torch_tensorrt torch_xla torchao torchaudio torchdata torchdiffeq torchft
    torchmetrics torchrec torchtext torchtune torchvision tqdm transformer_engine transformers triton
    triton_kernels trl tyro typing_extensions unsloth uvicorn uvloop verl vllm wandb xformers yaml zmq
    """.split()  # noqa: SIM905 - as a list it would fill pages
)
"""Top-level packages that count as installed if a relative path begins with them. Packages whose names are common for
users' folders and scripts are left out: datasets, evaluate."""


@dataclass(frozen=True)
class OwnCode:
    """The rule for one trace.

    Attributes:
        patterns: further files that count as the user's own code: names of packages, folders or files
            (``transformers``), or glob patterns that the path matches (``*/site-packages/mylib/*``); a leading
            ``!`` excludes instead. The last pattern that matches decides.
        installed: packages that the trace itself shows to be installed, see `packages_shown`.
    """

    patterns: tuple[str, ...] = ()
    installed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, patterns: Sequence[str] = (), installed: Iterable[str] = ()) -> OwnCode:
        """The rule with these patterns and installed packages."""
        return cls(tuple(patterns), frozenset(installed))

    def __call__(self, file: str) -> bool:
        """Whether a source file is the user's own code.

        Args:
            file: its path, as the producer wrote it; an empty path is not the user's own.
        """
        if not file:
            return False
        path = file.replace("\\", "/")
        for pattern in reversed(self.patterns):
            if _matches(path, pattern.removeprefix("!")):
                return not pattern.startswith("!")
        if _ELSEWHERE.search(path):
            return False
        if path.startswith("/") or path[1:2] == ":":
            return True
        first = path.removeprefix("./").partition("/")[0].removesuffix(".py")
        return not (first in _STANDARD_LIBRARY or first in PACKAGES or first in self.installed)


def packages_shown(files: Iterable[str]) -> tuple[str, ...]:
    """Names, sorted, of the packages that any of these paths shows in ``site-packages`` or ``dist-packages``."""
    matches = (_IN_SITE_PACKAGES.search(file.replace("\\", "/")) for file in files)
    return tuple(sorted({match[1].removesuffix(".py") for match in matches if match}))


SOURCE_PLACE = re.compile(r"(?P<folder>.*/)?(?P<file>[^/]+:\d+)(?P<name> .*)?", re.DOTALL)
"""A place in a source file: ``/home/user/project/train.py:12 Trainer.step``; a file without a line is none."""


def short_places(places: Iterable[str]) -> dict[str, str]:
    """Source places with paths as the program's own: relative to the folder that holds all of its files.

    Files of installed packages are relative to the folder of packages, so that they begin with the package. Places
    that would become equal keep their full paths, as do those that are no absolute path.

    Args:
        places: distinct places, as in the column ``source``.

    Returns:
        the short form of each place.
    """
    own_code = OwnCode()
    matches = {place: SOURCE_PLACE.fullmatch(place) for place in places}
    folders = {place: match["folder"] for place, match in matches.items() if match and match["folder"]}
    own = {folder for place, folder in folders.items() if folder.startswith("/") and own_code(place)}
    shared = "/".join(_common([folder.split("/")[:-1] for folder in own])) + "/" if own else "/"
    short = {place: _relative(place, shared) for place in matches}
    uses = Counter(short.values())
    return {place: text if uses[text] == 1 else place for place, text in short.items()}


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """The parts with which all paths begin."""
    return [same[0] for same in takewhile(lambda same: len({*same}) == 1, zip(*paths, strict=False))]


def _relative(place: str, folder: str) -> str:
    if folder != "/" and place.startswith(folder):
        return place[len(folder) :]
    installed = _IN_SITE_PACKAGES.search(place)
    return place[installed.start(1) :] if installed else place


def _matches(path: str, pattern: str) -> bool:
    parts = path.split("/")
    return pattern in parts or f"{pattern}.py" in parts or fnmatchcase(path, pattern)
