# ruff: noqa: A002, E501, I001, RUF023, RUF100, UP007, UP035, UP045 - generated
# fmt: off
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ThunkInfo(_message.Message):
    __slots__ = ("profile_annotation", "thunk_id")
    PROFILE_ANNOTATION_FIELD_NUMBER: _ClassVar[int]
    THUNK_ID_FIELD_NUMBER: _ClassVar[int]
    profile_annotation: str
    thunk_id: int
    def __init__(self, profile_annotation: _Optional[str] = ..., thunk_id: _Optional[int] = ...) -> None: ...

class ThunkMetadata(_message.Message):
    __slots__ = ("thunk_info", "thunk_kind")
    THUNK_INFO_FIELD_NUMBER: _ClassVar[int]
    THUNK_KIND_FIELD_NUMBER: _ClassVar[int]
    thunk_info: ThunkInfo
    thunk_kind: str
    def __init__(self, thunk_info: _Optional[_Union[ThunkInfo, _Mapping[str, object]]] = ..., thunk_kind: _Optional[str] = ...) -> None: ...

class ThunkMetadataList(_message.Message):
    __slots__ = ("thunk_metadata",)
    THUNK_METADATA_FIELD_NUMBER: _ClassVar[int]
    thunk_metadata: _containers.RepeatedCompositeFieldContainer[ThunkMetadata]
    def __init__(self, thunk_metadata: _Optional[_Iterable[_Union[ThunkMetadata, _Mapping[str, object]]]] = ...) -> None: ...
