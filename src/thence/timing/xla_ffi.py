"""XLA's foreign-function interface through ctypes, so that no compiler is needed.

XLA calls a Python function on the host, in program order: after it launched the operations before the
foreign call, and before it launches the operations after it. XLA passes its CUDA stream to the function.

A handler is a C function ``XLA_FFI_Error* handler(XLA_FFI_CallFrame*)``. XLA queries the handler's metadata
once (with an extension of type 1 on the call frame), and calls it each time the program reaches the call.
The structures are those of ``xla/ffi/api/c_api.h`` in jaxlib 0.6 to 0.12 (API 0.1 to 0.5). Only their
first fields are declared here, which are the same in all these versions; the offsets were checked by
compiling each version of the header.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import TYPE_CHECKING, Any

from thence.errors import ThenceError

if TYPE_CHECKING:
    from collections.abc import Callable

METADATA = 1
"""XLA_FFI_Extension_Metadata"""
EXECUTE = 3
"""XLA_FFI_ExecutionStage_EXECUTE"""
_INTERNAL = 13
"""XLA_FFI_Error_Code_INTERNAL"""
_OLDEST = 1
"""Minor version of the API whose metadata query does not include the version (``api`` is null)."""
_WITH_STATE_TYPE = 2
"""First minor version of the API in which XLA_FFI_Metadata ends with ``state_type_id``."""


class Version(Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class Metadata(Structure):
    """XLA_FFI_Metadata; ``state_type`` exists since API 0.2."""

    _fields_ = (("struct_size", c_size_t), ("version", Version), ("traits", c_uint32), ("state_type", c_int64))


class MetadataExtension(Structure):
    """XLA_FFI_Extension_Base (since API 0.4: XLA_FFI_InternalExtension), and the field that type 1 adds to it."""

    _fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(Metadata)))


class ErrorCreate(Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


class StreamGet(Structure):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("stream", c_void_p))


_ErrorCreate = ctypes.CFUNCTYPE(c_void_p, POINTER(ErrorCreate))
_StreamGet = ctypes.CFUNCTYPE(c_void_p, POINTER(StreamGet))


class Api(Structure):
    """XLA_FFI_Api up to its fifth function; the whole struct has 192 to 208 bytes."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("version", Version),
        ("internal", c_void_p),
        ("error_create", _ErrorCreate),
        ("error_get_details", c_void_p),
        ("error_destroy", c_void_p),
        ("handler_register", c_void_p),
        ("stream_get", _StreamGet),
    )


class CallFrame(Structure):
    """XLA_FFI_CallFrame up to its stage; the arguments and results behind it are not needed."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", POINTER(MetadataExtension)),
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
    )


Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))
"""XLA_FFI_Handler: returns an XLA_FFI_Error, or null on success."""


def handler(run: Callable[[int], None]) -> Any:
    """A C function that XLA can call. The caller must keep it alive as long as it is registered with XLA.

    Args:
        run: called each time the program reaches the foreign call, with the CUstream of the operations
            before and after it. An exception that it raises becomes the error of the program.
    """

    def called(frame: Any) -> int | None:
        call = frame.contents
        if _answers_metadata(call):
            return None
        if call.stage != EXECUTE:
            return None
        api = call.api.contents
        stream, error = _stream(api, call.context)
        if error:
            return error  # XLA destroys it
        try:
            run(stream)
        except ThenceError as failure:
            return _error(api, str(failure))
        except Exception as failure:  # noqa: BLE001 - nothing may be raised into C
            return _error(api, f"{type(failure).__name__}: {failure}")
        return None

    return Handler(called)


def _answers_metadata(call: CallFrame) -> bool:
    """Answers a metadata query of XLA with the API version of this handler; False for other calls."""
    if not call.extension or call.extension.contents.type != METADATA:
        return False
    metadata = call.extension.contents.metadata.contents
    version = call.api.contents.version if call.api else None
    metadata.version.major = version.major if version else 0
    metadata.version.minor = version.minor if version else _OLDEST
    metadata.traits = 0  # not to be captured into a CUDA graph: it must run each time
    if metadata.version.minor >= _WITH_STATE_TYPE:
        metadata.state_type = 0  # XLA_FFI_UNKNOWN_TYPE_ID: keeps no state
    return True


def _stream(api: Api, context: int | None) -> tuple[int, int | None]:
    """The CUstream of this call and null, or 0 and an XLA_FFI_Error."""
    if api.struct_size < ctypes.sizeof(Api):
        return 0, _error(api, f"this version of XLA's FFI is not known ({api.struct_size} bytes)")
    get = StreamGet(ctypes.sizeof(StreamGet), None, context, None)
    error: int | None = api.stream_get(byref(get))
    return get.stream or 0, error


def _error(api: Api, message: str) -> int | None:
    text = message.encode(errors="replace")
    what = ErrorCreate(ctypes.sizeof(ErrorCreate), None, text, _INTERNAL)
    created: int | None = api.error_create(byref(what))
    return created
