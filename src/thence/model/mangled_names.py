"""The function that an Itanium-mangled name is of, read without a demangler.

``__cxa_demangle`` refuses names of more than 1,024 characters and may explode on names with many back references,
and kernels of AMD's libraries have such names; and a machine may have no C++ runtime. What a table needs is at the
beginning of the name, each part written with its length::

    _ZN2ck16kernel_gemm_xdlINS_21GridwiseGemm_xdl_implINS_13tensor_layout4gemm8RowMajorE...
    -> ck::kernel_gemm_xdl<GridwiseGemm_xdl_impl>

Grammar: https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling.
"""

from __future__ import annotations

import re

__all__ = ["function_of", "without_suffix"]

_SUFFIX = re.compile(r"(?:\.kd| \[clone \.kd\])$")
_LENGTH = re.compile(r"L?([1-9][0-9]{0,3})")
_QUALIFIERS = re.compile(r"N[rVK]{0,3}[RO]?")
_MOST_PARTS = 32


def without_suffix(name: str) -> str:
    """A kernel's name without the ending by which AMD's compiler names its descriptor."""
    return _SUFFIX.sub("", name)


def function_of(name: str) -> str | None:
    """The function with its namespaces, and the first class that it is instantiated for.

    Args:
        name: such as ``_ZN2ck6kernelINS_4GemmEEvv``.

    Returns:
        ``ck::kernel<Gemm>``; None if it is not mangled like that.
    """
    if not name.startswith("_Z"):
        return None
    parts, end = _path(name, 2)
    if not parts:
        return None
    function = "::".join(parts)
    if name[end : end + 1] != "I":
        return function
    inner, _ = _path(name, end + 1)
    return f"{function}<{inner[-1]}>" if inner else function


def _path(name: str, at: int) -> tuple[list[str], int]:
    """Names with their lengths from a place on, as far as they go, and where they end."""
    parts: list[str] = []
    if nested := _QUALIFIERS.match(name, at):
        at = nested.end()
    for mark, meaning in (
        ("St", "std"),
        ("S_", None),
        ("S0_", None),
    ):  # what stands for an enclosing name
        if name.startswith(mark, at):
            at += len(mark)
            parts += [meaning] if meaning else []
            break
    most = _MOST_PARTS if nested else len(parts) + 1  # what follows another name are the parameters
    while len(parts) < most and (length := _LENGTH.match(name, at)):
        begin, size = length.end(), int(length[1])
        part = name[begin : begin + size]
        if len(part) < size:
            break
        if not part.startswith("_GLOBAL__N"):  # an anonymous namespace
            parts.append(part)
        at = begin + size
    return parts, at
