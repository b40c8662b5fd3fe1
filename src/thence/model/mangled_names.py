"""Reads the function from an Itanium-mangled name without a demangler.

``__cxa_demangle`` refuses names of more than 1,024 characters, and its result may grow exponentially with the number
of back references; kernels of AMD's libraries have such names. Also, a machine may have no C++ runtime. The part of
a name that a table needs is at its beginning, where each identifier follows its length::

    _ZN2ck16kernel_gemm_xdlINS_21GridwiseGemm_xdl_implINS_13tensor_layout4gemm8RowMajorE...
    -> ck::kernel_gemm_xdl<GridwiseGemm_xdl_impl>

Grammar: https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling.
"""

from __future__ import annotations

import re

_SUFFIX = re.compile(r"(?:\.kd| \[clone \.kd\])$")
_LENGTH = re.compile(r"L?([1-9][0-9]{0,3})")
_QUALIFIERS = re.compile(r"N[rVK]{0,3}[RO]?")
_MOST_PARTS = 32


def without_suffix(name: str) -> str:
    """A kernel's name without the suffix ``.kd``, which AMD's compiler gives to the kernel's descriptor."""
    return _SUFFIX.sub("", name)


def function_of(name: str) -> str | None:
    """The function with its namespaces, and the first class that it is instantiated for.

    Args:
        name: such as ``_ZN2ck6kernelINS_4GemmEEvv``.

    Returns:
        ``ck::kernel<Gemm>``; None if the name is not mangled in this way.
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
    """The identifiers with a length from position ``at`` on, and the position after the last of them."""
    parts: list[str] = []
    if nested := _QUALIFIERS.match(name, at):
        at = nested.end()
    for mark, meaning in (("St", "std"), ("S_", None), ("S0_", None)):  # abbreviations of an enclosing name
        if name.startswith(mark, at):
            at += len(mark)
            parts += [meaning] if meaning else []
            break
    most = _MOST_PARTS if nested else len(parts) + 1  # parameters follow an unnested name
    while len(parts) < most and (length := _LENGTH.match(name, at)):
        begin, size = length.end(), int(length[1])
        part = name[begin : begin + size]
        if len(part) < size:
            break
        if not part.startswith("_GLOBAL__N"):  # an anonymous namespace
            parts.append(part)
        at = begin + size
    return parts, at
