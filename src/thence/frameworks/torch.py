"""PyTorch: the facts of a collective, kept for the kernels of CUDA graphs.

    import thence

    undo = thence.torch.label_collectives()      # every collective from here on
    ...                                          # capture graphs
    thence.save_labels("labels.json")

In an eager run the profiler writes beside every NCCL kernel which collective it is, of how many
elements, in which process group. A graph replays the kernel without the call, so these facts are
missing; here they are taken when the graph is captured, under the names that the profiler gives them.

All calls pass PyTorch's dispatcher, also those from C++ (DistributedDataParallel) and from compiled
code (functional collectives), and are seen there.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from thence.errors import MissingRequirement
from thence.marks.marking import LibraryMark
from thence.marks.watching import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["collective", "label_collectives"]

_KINETO_NAMES = {
    "allreduce_": "allreduce",
    "allreduce_coalesced_": "allreduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "_allgather_base",
    "allgather_coalesced_": "allgather_coalesced",
    "allgather_into_tensor_coalesced_": "allgather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recvAnySource",
}
"""Operators of c10d and what Kineto calls them (RECORD_PARAM_COMMS in ProcessGroupNCCL.cpp)."""

_OUTPUTS = {"output", "outputs", "output_tensor", "output_tensors", "output_lists"}
_INPUTS = {"input", "inputs", "input_tensor", "input_tensors", "input_list"}
_SAME = {"tensors"}
_POINT_TO_POINT = {"send", "recv_", "recv_any_source_"}

_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
}
"""torch.dtype and what Kineto calls it; types that are not here only begin with a capital there."""


@contextmanager
def collective(op: str, tensor_in: Any, tensor_out: Any, group: Any = None) -> Iterator[None]:
    """Labels what runs inside as one collective, for communication that does not go through PyTorch.

        with thence.torch.collective("allreduce", x, y, group):
            my_custom_all_reduce(x, y)

    Args:
        op: name of the collective, best as Kineto spells it: allreduce, _allgather_base,
            _reduce_scatter_base, all_to_all, broadcast ...
        tensor_in: tensor, or list of tensors, that this rank contributes.
        tensor_out: tensor, or list of tensors, that it gets.
        group: torch.distributed.ProcessGroup; the default one if left out.

    Raises:
        MissingRequirement: torch.distributed is not initialised.
    """
    distributed = _initialised()
    group = distributed.group.WORLD if group is None else group
    facts = _facts(op, tensor_in, tensor_out) | _group_facts(distributed, group)
    with LibraryMark(f"nccl:{op}", _lane(group), **facts):
        yield


def label_collectives() -> Callable[[], None]:
    """Labels every collective of torch.distributed that a CUDA graph captures from now on.

    A process group's collectives share a lane, whatever stream they are on. Groups that are made
    later are seen, too. Calling it again changes nothing.

    Returns:
        A function that undoes it.

    Raises:
        MissingRequirement: torch is missing, or has no torch.distributed.
    """
    distributed = _distributed()
    if _installed:
        return _undo_all
    torch = __import__("torch")
    library = torch.library.Library("c10d", "IMPL")
    for name in _KINETO_NAMES:
        operator = getattr(torch.ops.c10d, name, None)
        if operator is not None:
            library.impl(
                name,
                _labelled(torch, distributed, name, operator.default),
                "BackendSelect",  # comes by in every call, also in inference mode and from C++
                with_keyset=True,
            )
    _installed.append(library._destroy)  # noqa: SLF001 - torch has no other way to take it back
    _installed.extend(_patch_coalescing(distributed.ProcessGroup))
    return _undo_all


_installed: list[Callable[[], None]] = []


def _undo_all() -> None:
    while _installed:
        _installed.pop()()


def _labelled(torch: Any, distributed: Any, name: str, operator: Any) -> Callable[..., Any]:
    """An operator of c10d that opens a label and calls itself."""
    names = [argument.name for argument in operator._schema.arguments]  # noqa: SLF001 - no public name
    this = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)  # noqa: SLF001

    def labelled(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not watch.live:
            return operator.redispatch(keys - this, *args, **kwargs)
        values = dict(zip(names, args, strict=False)) | kwargs
        group = distributed.ProcessGroup.unbox(values["process_group"])
        opened = LibraryMark(
            f"nccl:{_KINETO_NAMES[name]}",
            _lane(group),
            **_call_facts(distributed, name, values, group),
        )
        if name not in _POINT_TO_POINT:
            opened.metadata["Seq"] = group._get_sequence_number_for_group() + 1  # noqa: SLF001
        _remember(group, opened)
        with opened:
            return operator.redispatch(keys - this, *args, **kwargs)

    return labelled


def _call_facts(
    distributed: Any, name: str, values: dict[str, Any], group: Any
) -> dict[str, object]:
    """Metadata of a call of a c10d operator."""

    def tensors(wanted: set[str]) -> Any:
        return [value for key, value in values.items() if key in wanted | _SAME]

    kineto = _KINETO_NAMES[name]
    if name == "alltoall_base_" and (values["output_split_sizes"] or values["input_split_sizes"]):
        kineto = "all_to_allv"
    facts = _facts(kineto, tensors(_INPUTS), tensors(_OUTPUTS))
    facts |= _group_facts(distributed, group)
    ranks = distributed.get_process_group_ranks(group)
    here = distributed.get_rank()
    if name == "send":
        facts |= {"Src Rank": here, "Dst Rank": ranks[values["dst"]]}
    elif name == "recv_":
        facts |= {"Src Rank": ranks[values["src"]], "Dst Rank": here}
    return facts


def _facts(op: str, tensors_in: Any, tensors_out: Any) -> dict[str, object]:
    """Name, element counts and element type."""
    taken, given = list(_flat(tensors_in)), list(_flat(tensors_out))
    facts: dict[str, object] = {
        "Collective name": op,
        "In msg nelems": sum(tensor.numel() for tensor in taken),
        "Out msg nelems": sum(tensor.numel() for tensor in given),
    }
    if taken or given:
        dtype = str((taken or given)[0].dtype).removeprefix("torch.")
        facts["dtype"] = _DTYPES.get(dtype, dtype.capitalize())
    return facts


def _flat(tensors: Any) -> Iterator[Any]:
    """The tensors of a nest of lists."""
    if isinstance(tensors, list | tuple):
        for one in tensors:
            yield from _flat(one)
    elif tensors is not None:
        yield tensors


def _group_facts(distributed: Any, group: Any) -> dict[str, object]:
    ranks: Sequence[int] = distributed.get_process_group_ranks(group)
    return {
        "Group size": group.size(),
        "Process Group Name": group.group_name,
        "Process Group Description": group.group_desc,
        "Process Group Ranks": str(list(ranks)),
    }


def _lane(group: Any) -> str:
    """The lane of a process group: always the same."""
    return f"{group.group_desc} (process group {group.group_name})"


_coalesced: dict[int, list[LibraryMark]] = {}
"""Calls since a group began to coalesce, by the group's id: their kernel is launched at its end."""


def _remember(group: Any, call: LibraryMark) -> None:
    waiting = _coalesced.get(_key(group))
    if waiting is not None:
        waiting.append(call)


def _key(group: Any) -> int:
    return hash((group.group_name, group.group_desc))


def _patch_coalescing(group_class: Any) -> list[Callable[[], None]]:
    """Has the kernel that ends a coalescing labelled with what was coalesced."""
    start, end = group_class._start_coalescing, group_class._end_coalescing  # noqa: SLF001

    @functools.wraps(start)
    def start_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
        _coalesced[_key(group)] = []
        return start(group, *args, **kwargs)

    @functools.wraps(end)
    def end_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
        calls = _coalesced.pop(_key(group), [])
        if not calls:
            return end(group, *args, **kwargs)
        with _together(calls):
            return end(group, *args, **kwargs)

    def undo() -> None:
        group_class._start_coalescing, group_class._end_coalescing = start, end  # noqa: SLF001

    group_class._start_coalescing = start_coalescing  # noqa: SLF001
    group_class._end_coalescing = end_coalescing  # noqa: SLF001
    return [undo]


def _together(calls: list[LibraryMark]) -> LibraryMark:
    """One label for several calls: their elements added up."""
    first = calls[0]
    facts = dict(first.metadata)
    for key in ("In msg nelems", "Out msg nelems"):
        facts[key] = sum(int(str(call.metadata[key])) for call in calls)
    names = {str(call.metadata["Collective name"]) for call in calls}
    facts["Collective name"] = names.pop() if len(names) == 1 else "coalesced"
    for key in ("Src Rank", "Dst Rank"):  # of several peers none is the one
        if len({call.metadata.get(key) for call in calls}) > 1:
            facts.pop(key, None)
    return LibraryMark(f"nccl:{facts['Collective name']}", first.lane, **facts)


def _initialised() -> Any:
    distributed = _distributed()
    if not distributed.is_initialized():
        raise MissingRequirement(
            "there is no process group yet: call torch.distributed.init_process_group first"
        )
    return distributed


def _distributed() -> Any:
    try:
        from torch import distributed  # type: ignore[import-not-found,unused-ignore]  # optional
    except ImportError as error:
        raise MissingRequirement(
            "thence.torch needs PyTorch, which is not installed: pip install torch"
        ) from error
    if not distributed.is_available():
        raise MissingRequirement("this PyTorch was built without torch.distributed")
    return distributed
