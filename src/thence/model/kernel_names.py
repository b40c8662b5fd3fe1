"""Short names of GPU kernels for tables.

A C++ kernel name is a whole function signature, often of thousands of characters. The short name keeps
the function and the operation that it was instantiated for::

    void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>(int, ...)
    -> vectorized_elementwise_kernel<FillFunctor>

Producers differ in their spelling (``{lambda(float)#1}`` and ``[lambda(float) (instance 1)]``,
``8`` and ``(int)8``); the short name does not.

Kernels of AMD's libraries have Itanium-mangled names, which are read without a demangler: ``__cxa_demangle`` refuses
names of more than 1,024 characters, its result may grow exponentially with the number of back references, and a
machine may have no C++ runtime. The part of a name that a table needs is at its beginning, where each identifier
follows its length::

    _ZN2ck16kernel_gemm_xdlINS_21GridwiseGemm_xdl_implINS_13tensor_layout4gemm8RowMajorE...
    -> ck::kernel_gemm_xdl<GridwiseGemm_xdl_impl>

Grammar: https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import math
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_DESCRIPTOR_SUFFIX = re.compile(r"(?:\.kd| \[clone \.kd\])$")
_MANGLED_LENGTH = re.compile(r"L?([1-9][0-9]{0,3})")
_MANGLED_QUALIFIERS = re.compile(r"N[rVK]{0,3}[RO]?")
_MAX_PARTS = 32
_PARSED = 32_768  # characters of a name that are parsed; the rest only enters its hash
MAX_SHORTENED = 20_000  # names of one trace: each takes 0.1 ms, and a file may hold a million
_FOLDED = 60  # operations that make a short name longer than this are left out
_LONGEST = 96  # a detailed short name that is longer than this is replaced by one with a hash
_DEEPEST = 4  # template levels that are examined
_REWRITES = (
    (re.compile(r"\(anonymous namespace\)::|<unnamed>::| \[clone [^\]]{0,40}\]$"), ""),
    (re.compile(r"operator ?\(\)"), "operator"),
    (re.compile(r"[{\[](?=lambda\()|#[0-9]+\}| \(instance [0-9]+\)\]"), ""),
    (re.compile(r"\([\w: ]{1,80}\)(?=-?[0-9])"), ""),  # the cast of (int)8
)
_SIGNATURE = re.compile(r"[<(]|::")
_MARKS = re.compile(r"::|(?<!-)>|[<(),]")
_QUALIFIERS = re.compile(r"\b(?:const|volatile|struct|class|enum|typename)\b|[*&]")
_LITERAL = re.compile(r"-?[0-9].*|true|false|'.*'")
_ELEMENT_TYPE = re.compile(
    r"(?:unsigned |signed )?(?:char|short|int|long|long long|__int128)|unsigned|float|double|bool"
    r"|u?int[0-9]*(?:_t)?|size_t|__int64|[fbt]?float[0-9]+(?:_t)?|float_\w+|(?:__)?half2?|half_t"
    r"|Half|BFloat16|__(?:nv|hip)_\w+|Float[48]_\w+|[fb]f?[0-9]+_\w+|complex"
)
_SCAFFOLDING = re.compile(  # types for how a kernel accesses its data, not for what it computes
    r"[Aa]rray|\w*OffsetCalculator\w*|(?:Load|Store)With\w+|\w*TensorListMetadata|device_ptr|C|void"
    r"|integral_constant|\w*[Pp]olicy\w*|identity_decomposer_t|\w*Iterator\w*|\w+_iterator|[Tt]uple"
    r"|CUDAGeneratorImpl|cublas\w*(?:Batched|Pointer)\w*|\w*Params\w*|T[0-9]+"
    r"|\w+_(?:arch|config|selector)|"
)
_TRAITS = re.compile(r"\w*[Tt]raits\w*|OpaqueType")  # no operation, but their numbers matter
_WRAPPERS = re.compile(r"ReduceOp|func_wrapper_t|ParallelForAgent|enable_sm\w+")
_GENERIC = ("functor", "impl", "kernel", "op")  # mean nothing without their namespace
_CALLS = ("lambda", "operator")
_BOOLEANS = {"false": "0", "true": "1"}  # other tools print (bool)0


def without_suffix(name: str) -> str:
    """A kernel's name without the suffix ``.kd``, which AMD's compiler gives to the kernel's descriptor."""
    return _DESCRIPTOR_SUFFIX.sub("", name)


def function_of(name: str) -> str | None:
    """The function with its namespaces, and the first class that it is instantiated for.

    Args:
        name: such as ``_ZN2ck6kernelINS_4GemmEEvv``.

    Returns:
        ``ck::kernel<Gemm>``; None if the name is not mangled in this way.
    """
    if not name.startswith("_Z"):
        return None
    parts, end = _mangled_path(name, 2)
    if not parts:
        return None
    function = "::".join(parts)
    if name[end : end + 1] != "I":
        return function
    inner, _ = _mangled_path(name, end + 1)
    return f"{function}<{inner[-1]}>" if inner else function


def _mangled_path(name: str, position: int) -> tuple[list[str], int]:
    """The identifiers with a length from position ``position`` on, and the position after the last of them."""
    parts: list[str] = []
    if nested := _MANGLED_QUALIFIERS.match(name, position):
        position = nested.end()
    for mark, meaning in (("St", "std"), ("S_", None), ("S0_", None)):  # abbreviations of an enclosing name
        if name.startswith(mark, position):
            position += len(mark)
            parts += [meaning] if meaning else []
            break
    most = _MAX_PARTS if nested else len(parts) + 1  # parameters follow an unnested name
    while len(parts) < most and (length := _MANGLED_LENGTH.match(name, position)):
        begin, size = length.end(), int(length[1])
        part = name[begin : begin + size]
        if len(part) < size:
            break
        if not part.startswith("_GLOBAL__N"):  # an anonymous namespace
            parts.append(part)
        position = begin + size
    return parts, position


@dataclass(slots=True)
class _Part:
    """One component of ``a::b<c>(d)``: its name, template arguments and parameters."""

    name: str = ""
    arguments: list[_Path] | None = None
    parameters: list[_Path] | None = None


_Path: TypeAlias = list[_Part]  # a::b::c


def demangle(name: str) -> str:
    """The readable form of an Itanium-mangled name, by the C++ runtime of this machine.

    Args:
        name: a symbol such as ``_Z3fooIfEvPT_i``; any other text is returned as it is, without AMD's suffix.

    Returns:
        ``void foo<float>(float*, int)``. If the runtime is missing or refuses the name (GCC 9 and later: more
        than 1024 characters), or if its back references could expand exponentially, only the function, as
        `function_of` reads it, or else the name itself. AMD's suffix ``.kd`` is removed.
    """
    name = without_suffix(name)
    if not name.startswith("_Z") or not name.isascii() or "\0" in name:
        return name
    references = Counter(re.findall(r"S[0-9A-Z]*_", name)).values()
    demangler = _demangler() if math.prod(1 + n for n in references) <= 1_000_000 else None
    text = name if demangler is None else demangler(name)
    return text if text != name else function_of(name[:_PARSED]) or name


@cache
def _demangler() -> Callable[[str], str] | None:
    """``__cxa_demangle`` of the C++ runtime as a function of text; None where there is none."""
    runtime = _runtime()
    if runtime is None:
        return None
    convert, free = runtime["__cxa_demangle"], runtime["free"]
    convert.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    convert.restype = ctypes.c_void_p
    free.argtypes, free.restype = [ctypes.c_void_p], None

    def call(name: str) -> str:
        address = convert(name.encode("ascii"), None, None, None)
        text = ctypes.string_at(address).decode("utf-8", "replace") if address else name
        free(address)  # which may be null
        return text

    return call


def _runtime() -> ctypes.CDLL | None:
    for find in (str, ctypes.util.find_library):  # find_library starts processes
        for name in ("libstdc++.so.6", "libc++abi.so.1", "libc++abi.dylib", "stdc++", "c++abi"):
            with suppress(OSError):
                library = ctypes.CDLL(find(name) or name)
                if hasattr(library, "__cxa_demangle") and hasattr(library, "free"):
                    return library
    return None


def function_name(name: str) -> str:
    """The function of a kernel with its namespaces, without template arguments and parameters.

    Example:
        ``void at::native::fill<4, float>(int)`` and ``_ZN2at6native4fillILi4EfEEvi`` give
        ``at::native::fill``.
    """
    return "::".join(part.name for part in _function(demangle(name)[:_PARSED])) or name


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Short names of kernels, different for different full names.

    The short name depends only on the full name, unless two of the given names would share it. Such names
    also show their element types, then their namespaces, too, then instead all types and numbers among their
    template arguments, and finally a hash of the full name. Names after the first 20,000 stay as they are.

    Args:
        names: full names as the trace has them, mangled or not, the most important first.

    Returns:
        full name -> short name, in the order of the first occurrence.
    """
    names = list(dict.fromkeys(names))
    spellings = {name: _spellings(name) for name in names[:MAX_SHORTENED]}
    short = {name: next(spelling) for name, spelling in spellings.items()}
    while len(set(short.values())) < len(short):
        uses = Counter(short.values())
        for name in [name for name, text in short.items() if uses[text] > 1]:
            short[name] = next(spellings[name])
    return short | {name: name for name in names[MAX_SHORTENED:]}


def clip(name: str, width: int) -> str:
    """A name of at most ``width`` characters: its start and its end around an ellipsis."""
    if len(name) <= width:
        return name
    end = max(0, (width - 1) // 2)
    return f"{name[: width - 1 - end]}…{name[len(name) - end :]}" if width > 0 else ""


def _spellings(name: str) -> Iterator[str]:
    """Short names of one kernel, from the shortest to the most distinctive; the last ones contain a hash."""
    readable = demangle(name)
    texts = _signatures(readable[:_PARSED]) or [readable]
    yield from texts
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass")).hexdigest()
    yield from (f"{texts[:2][-1]}#{digest[:digits]}" for digits in range(6, len(digest) + 1))


def _signatures(name: str) -> list[str]:
    """A folded signature, then more detailed ones that are short enough; none if the name is no signature."""
    path = _function(name)
    if not path:
        return []
    head, arguments = _qualified(path), path[-1].arguments or []
    operations = _inside(arguments)
    folded = operations[:4]
    while len(folded) > 1 and len(_join(head, folded)) > _FOLDED:
        folded.pop()
    leaves = [leaf for argument in arguments for leaf in _leaves(argument)]
    typed = list(dict.fromkeys([*folded, *filter(_ELEMENT_TYPE.fullmatch, leaves)]))
    namespaces = "::".join(part.name for part in path)
    detailed = _join(head, typed), _join(namespaces, typed), _join(head, operations + leaves)
    return [_join(head, folded), *(text for text in detailed if len(text) <= _LONGEST)]


def _join(head: str, tokens: list[str]) -> str:
    return f"{head}<{', '.join(tokens)}>" if tokens else head


def _function(name: str) -> _Path:
    """The path of the function in a kernel name; empty if the name is no C++ signature."""
    if not _SIGNATURE.search(name):
        return []
    for pattern, replacement in _REWRITES:
        name = pattern.sub(replacement, name)
    path = _named(_parse(name))
    return path if path and path[-1].name else []


def _parse(text: str) -> _Path:
    """The path of a (possibly truncated or unbalanced) signature up to its parameters."""
    path: _Path = [_Part()]
    siblings = [path]
    outer: list[tuple[str, _Path, list[_Path]]] = []
    start = 0
    for match in _MARKS.finditer(text):
        mark = match[0]
        if start < match.start():
            _add_text(path, text[start : match.start()])
        start = match.end()
        if mark == "::":
            path.append(_Part())
        elif mark in "(," and not outer:
            return path if _opens_parameters(text, match.start()) else []
        elif mark == ",":
            path = [_Part()]
            siblings.append(path)
        elif mark in "<(":
            outer.append((mark, path, siblings))
            siblings = [[_Part()]]
            if mark == "<":
                path[-1].arguments = siblings
            else:
                path[-1].parameters = siblings
            path = siblings[0]
        elif outer and outer[-1][0] == ("<" if mark == ">" else "("):
            _, path, siblings = outer.pop()
    _add_text(path, text[start:])
    return outer[0][1] if outer else path


def _opens_parameters(text: str, start: int) -> bool:
    """Whether a bracket opens C++ parameters, and not a remark such as in ``Memset (Device)``."""
    tail = text[text.rfind(")") + 1 :]
    ends = tail in ("", " const") or "(" in tail  # the name may be cut off
    return ends and text[start] == "(" and start > 0 and not text[start - 1].isspace()


def _add_text(path: _Path, text: str) -> None:
    """Appends the text between two brackets; words before the last one are a return type or a cast."""
    words = (text,) if text.isidentifier() else _words(text)
    last = path[-1]
    if len(words) == 1 and not last.name and last.arguments is last.parameters is None:
        last.name = words[0]
    elif words:
        path[:] = [_Part(words[-1])]


@lru_cache(maxsize=4096)
def _words(text: str) -> tuple[str, ...]:
    words = _QUALIFIERS.sub(" ", text).split()
    whole = " ".join(words)
    return (whole,) if _ELEMENT_TYPE.fullmatch(whole) else tuple(words)


def _named(path: _Path) -> _Path:
    """The path up to the function or class around its lambdas and call operators."""
    while path and path[-1].name in _CALLS:
        path = path[:-1]
    return path


def _qualified(path: _Path) -> str:
    """The last name of a path, with the name before it if the last one is generic."""
    return "::".join(part.name for part in path[-2 if path[-1].name in _GENERIC else -1 :])


def _operations(path: _Path, depth: int) -> list[str]:
    """What a template argument computes: the function around a lambda, or the name of a functor.

    A launch helper (``gpu_kernel_impl<F>(...)::{lambda}``) and a known wrapper are replaced by what
    they wrap; an adaptor (``BUnaryFunctor<MulFunctor>``) keeps it in brackets.
    """
    named = _named(path)
    if not named or depth == _DEEPEST:
        return []
    last = named[-1]
    if not last.name and last.parameters:  # &(void f<int>(int))
        return _operations(last.parameters[0], depth + 1)
    if any(kind.fullmatch(last.name) for kind in (_LITERAL, _ELEMENT_TYPE, _SCAFFOLDING, _TRAITS)):
        return []
    adapted = _inside(last.arguments, depth + 1) if last.name.endswith("Functor") else []
    return _wrapped(last, depth) or [_join(_qualified(named), adapted)]


def _inside(arguments: list[_Path] | None, depth: int = 0) -> list[str]:
    operations = (operation for path in arguments or [] for operation in _operations(path, depth))
    return list(dict.fromkeys(operations))


def _wrapped(part: _Part, depth: int) -> list[str]:
    is_wrapper = part.parameters is not None or _WRAPPERS.fullmatch(part.name)
    return _inside(part.arguments, depth + 1) if is_wrapper else []


def _leaves(path: _Path, depth: int = 0) -> list[str]:
    """The element types and numbers of a template argument, in their order."""
    last = (_named(path) or path)[-1]
    if _LITERAL.fullmatch(last.name) or _ELEMENT_TYPE.fullmatch(last.name):
        return [_BOOLEANS.get(last.name, last.name)]
    repeats = depth and last.name.endswith("traits")  # nested traits repeat outer ones
    if repeats or depth == _DEEPEST or _SCAFFOLDING.fullmatch(last.name):
        return []
    inside = list(last.arguments or [])
    if path[-1].name == "lambda" and not _wrapped(last, depth):
        inside += path[-1].parameters or []
    return [leaf for inner in inside for leaf in _leaves(inner, depth + 1)]
