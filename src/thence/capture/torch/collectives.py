"""PyTorch: labels the kernels of collectives with the facts of the call, also in CUDA graphs.

    import thence

    undo = thence.torch.label_collectives()      # every collective from here on
    ...                                          # capture graphs
    thence.save_labels("labels.json")

In an eager run PyTorch's profiler writes with every NCCL kernel which collective it belongs to, the
number of elements, and the process group. A graph replays the kernel without the call, so these facts
are missing; here they are taken when the graph is captured, under the names that the profiler uses.
A recording (`thence.record`) takes them from eager calls, too, and installs the labels by itself.

All calls go through PyTorch's dispatcher, also those from C++ (DistributedDataParallel) and from
compiled code (functional collectives); the labels are set there.
"""

from __future__ import annotations

import functools
import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from thence.capture.marks.marking import LibraryMark
from thence.capture.marks.watching import watch
from thence.errors import MissingRequirement
from thence.importing import torch_is_being_imported, when_imported
from thence.model.collectives import KINETO_KEYS, CallFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping


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
"""Operators of c10d, and the names that Kineto writes for them (RECORD_PARAM_COMMS in ProcessGroupNCCL.cpp)."""

_NAME, _DTYPE = KINETO_KEYS["collective"], KINETO_KEYS["element_type"]
_ELEMENTS = (KINETO_KEYS["in_elements"], KINETO_KEYS["out_elements"])
_PEERS = (KINETO_KEYS["source_rank"], KINETO_KEYS["destination_rank"])
_SEQUENCE = KINETO_KEYS["sequence"]

_OUTPUTS = {"output", "outputs", "output_tensor", "output_tensors", "output_lists"}
_INPUTS = {"input", "inputs", "input_tensor", "input_tensors", "input_list"}
_SAME = {"tensors"}
_POINT_TO_POINT = {"send", "recv_", "recv_any_source_"}
_MAX_RANKS = 30
"""Limit on the ranks of a group that Kineto writes before an ellipsis (kTruncatLength in profiler/util.cpp)."""
_MAX_CALLS = 1024
"""Limit on the distinct calls of a group whose facts are cached."""
_LOG = logging.getLogger("thence.torch")

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
"""Kineto's name for a torch.dtype; for other types it is the name of the dtype with a capital first letter."""


@contextmanager
def collective(op: str, tensor_in: Any, tensor_out: Any, group: Any = None) -> Iterator[None]:
    """Labels the work launched inside as one collective, for communication that does not go through PyTorch.

        with thence.torch.collective("allreduce", x, y, group):
            my_custom_all_reduce(x, y)

    Args:
        op: name of the collective, preferably as Kineto spells it: allreduce, _allgather_base,
            _reduce_scatter_base, all_to_all, broadcast ...
        tensor_in: tensor, or list of tensors, that this rank contributes.
        tensor_out: tensor, or list of tensors, that this rank receives.
        group: torch.distributed.ProcessGroup; None is the default group.

    Raises:
        MissingRequirement: torch.distributed is not initialised.
    """
    distributed = _initialised()
    group = distributed.group.WORLD if group is None else group
    known = _known(distributed, group)
    with _mark(op, known.lane, _facts(op, tensor_in, tensor_out) | known.facts):
        yield


def label_collectives() -> Callable[[], None]:
    """Labels every collective of torch.distributed from now on: in CUDA graphs, and in recordings.

    A process group's collectives share a lane, whatever stream they are on. Groups that are made
    later are included. Calling this again changes nothing. A recording does this by itself, for as long
    as it runs; after a call of this the labels stay when a recording ends.

    Returns:
        A function that undoes the call.

    Raises:
        MissingRequirement: torch is missing, or has no torch.distributed.
    """
    return hold_labels("the program")


_installed: list[Callable[[], None]] = []
_holders: set[Hashable] = set()
_lock = threading.Lock()


def hold_labels(holder: Hashable) -> Callable[[], None]:
    """Labels collectives, as `label_collectives`, on behalf of a holder, until the last holder leaves.

    It neither initialises CUDA nor waits for torch's own locks.

    Args:
        holder: identifies the holder; further calls for the same holder have no effect.

    Returns:
        A function by which the holder leaves.

    Raises:
        MissingRequirement: torch is missing, or has no torch.distributed.
    """
    distributed = _distributed()

    def leave() -> None:
        with _lock:
            _holders.discard(holder)
            if not _holders:
                _undo_all()

    with _lock:
        if not _installed:
            try:
                _install(distributed)
            except BaseException:
                _undo_all()
                raise
        _holders.add(holder)
    return leave


def _install(distributed: Any) -> None:
    torch = __import__("torch")
    library = torch.library.Library("c10d", "IMPL")
    _installed.append(library._destroy)  # noqa: SLF001 - torch has no other way to remove the operators
    for name in _KINETO_NAMES:
        operator = getattr(torch.ops.c10d, name, None)
        if operator is not None:
            library.impl(
                name,
                _labelled(torch, distributed, name, operator.default),
                "BackendSelect",  # every call has this key, also in inference mode and from C++
                with_keyset=True,
            )
    _installed.extend(_patch_coalescing(distributed.ProcessGroup))


def _undo_all() -> None:
    while _installed:
        _installed.pop()()


def _labelled(torch: Any, distributed: Any, name: str, operator: Any) -> Callable[..., Any]:
    """An implementation of a c10d operator that opens a label and redispatches to the operator."""
    names = [argument.name for argument in operator._schema.arguments]  # noqa: SLF001 - no public name
    this = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)  # noqa: SLF001
    unbox = distributed.ProcessGroup.unbox

    def label(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LibraryMark | None:
        values = dict(zip(names, args, strict=False)) | kwargs
        group = unbox(values["process_group"])
        known = _known(distributed, group)
        facts = known.of_call(name, values)
        if facts is None:
            return None
        opened = _mark(_KINETO_NAMES[name], known.lane, facts)
        if name not in _POINT_TO_POINT:
            known.number(group, opened.metadata)
        if _coalesced:
            _remember(group, opened)
        return opened

    def labelled(keys: Any, *args: Any, **kwargs: Any) -> Any:
        opened = None
        if watch.live:
            try:
                opened = label(args, kwargs)
            except Exception as error:  # noqa: BLE001 - the program comes first
                _complain(error)
        if opened is None:
            return operator.redispatch(keys - this, *args, **kwargs)
        with opened:
            return operator.redispatch(keys - this, *args, **kwargs)

    return labelled


_complained: set[type[Exception]] = set()


def _complain(error: Exception) -> None:
    if type(error) not in _complained:
        _complained.add(type(error))
        _LOG.warning("thence: collectives run without labels, because this failed: %r", error)


class _Known:
    """The facts that all collectives of a process group share.

    Attributes:
        facts: size, name, description and ranks of the group.
        lane: the lane in which its collectives are shown.
    """

    def __init__(self, distributed: Any, group: Any) -> None:
        self.ranks: list[int] = []
        self.here: int | None = None
        self._calls: dict[Hashable, dict[str, object]] = {}
        self._numbered = True
        self._size = int(group.size())
        self.facts: dict[str, object] = {
            KINETO_KEYS["group_size"]: self._size,
            KINETO_KEYS["group_name"]: group.group_name,
            KINETO_KEYS["group_description"]: group.group_desc,
        }
        self.lane = f"{group.group_desc} (process group {group.group_name})"
        try:  # they do not know groups that were made without torch.distributed's own functions
            self.ranks = list(distributed.get_process_group_ranks(group))
            self.here = distributed.get_rank()
        except (KeyError, ValueError, RuntimeError):
            return
        more = ", ..." * (len(self.ranks) > _MAX_RANKS)
        shown = ", ".join(map(str, self.ranks[:_MAX_RANKS]))
        self.facts[KINETO_KEYS["group_ranks"]] = f"[{shown}{more}]"

    @property
    def complete(self) -> bool:
        """Whether torch.distributed knows the group, which it does once the group is completely set up."""
        return self.here is not None

    def of_call(self, name: str, values: Mapping[str, Any]) -> dict[str, object] | None:
        """Metadata of a call of a c10d operator; None if sizes are symbolic, as nothing is run then."""
        taken = [v for k, v in values.items() if k in _INPUTS or k in _SAME]
        given = [v for k, v in values.items() if k in _OUTPUTS or k in _SAME]
        taken = _flat(taken)
        given = taken if "tensors" in values else _flat(given)
        elements = _elements(taken)
        sizes = (elements, elements if given is taken else _elements(given))
        # Ranks other than the root have tensors on one side only; Kineto writes the root's sizes on every rank.
        if name == "scatter_":
            sizes = (sizes[1] * self._size, sizes[1])
        elif name == "gather_":
            sizes = (sizes[0], sizes[0] * self._size)
        if not all(type(size) is int for size in sizes):
            return None
        peer = values.get("dst") if name == "send" else values.get("src")
        peer = peer if name in ("send", "recv_") else None
        uneven = name == "alltoall_base_" and bool(values.get("output_split_sizes") or values.get("input_split_sizes"))
        dtype = (taken or given)[0].dtype if taken or given else None
        key = (name, *sizes, dtype, peer, uneven)
        facts = self._calls.get(key)
        if facts is None:
            kineto = "all_to_allv" if uneven else _KINETO_NAMES[name]
            facts = _moved(kineto, *sizes, dtype) | self.facts | self._ends(name, peer)
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            self._calls[key] = facts
        return facts

    def number(self, group: Any, metadata: dict[str, object]) -> None:
        """Adds the sequence number of the collective in its group, if the group's backend counts them."""
        if self._numbered:
            try:
                metadata[_SEQUENCE] = group._get_sequence_number_for_group() + 1  # noqa: SLF001
            except RuntimeError:
                self._numbered = False

    def _ends(self, name: str, peer: int | None) -> dict[str, object]:
        if peer is None or not 0 <= peer < len(self.ranks):
            return {}
        peer_ranks = self.ranks[peer]
        source, destination = (self.here, peer_ranks) if name == "send" else (peer_ranks, self.here)
        return dict(zip(_PEERS, (source, destination), strict=True))


_groups: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
"""Facts by process group, compared by identity: a group that reuses an old name is a different group."""


def _known(distributed: Any, group: Any) -> _Known:
    known = _groups.get(group)
    if known is None:
        known = _Known(distributed, group)
        if known.complete:
            _groups[group] = known
    return known


def _facts(op: str, tensors_in: Any, tensors_out: Any) -> dict[str, object]:
    """Name, element counts and element type."""
    taken, given = _flat(tensors_in), _flat(tensors_out)
    dtype = (taken or given)[0].dtype if taken or given else None
    return _moved(op, _elements(taken), _elements(given), dtype)


def _moved(op: str, taken: int, given: int, dtype: Any) -> dict[str, object]:
    facts: dict[str, object] = {_NAME: op, _ELEMENTS[0]: taken, _ELEMENTS[1]: given}
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        facts[_DTYPE] = _DTYPES.get(name, name.capitalize())
    return facts


def _elements(tensors: list[Any]) -> Any:
    return sum([tensor.numel() for tensor in tensors])


def _flat(tensors: Any) -> list[Any]:
    """The tensors in nested lists."""
    if not isinstance(tensors, list | tuple):
        return [] if tensors is None else [tensors]
    flat: list[Any] = []
    for item in tensors:
        if isinstance(item, list | tuple):
            flat += _flat(item)
        elif item is not None:
            flat.append(item)
    return flat


_coalesced: dict[int, list[LibraryMark]] = {}
"""Calls since a group began to coalesce, by `_key` of the group: the kernel is launched when coalescing ends."""


def _remember(group: Any, call: LibraryMark) -> None:
    waiting = _coalesced.get(_key(group))
    if waiting is not None:
        waiting.append(call)


def _key(group: Any) -> int:
    return hash((group.group_name, group.group_desc))


def _patch_coalescing(group_class: Any) -> list[Callable[[], None]]:
    """Labels the kernel that is launched at the end of coalescing with the coalesced calls."""
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
    """One label for several coalesced calls, with the sum of their elements."""
    first = calls[0]
    facts = dict(first.metadata)
    for key in _ELEMENTS:
        facts[key] = sum(int(str(call.metadata[key])) for call in calls)
    names = {str(call.metadata[_NAME]) for call in calls}
    facts[_NAME] = names.pop() if len(names) == 1 else "coalesced"
    for key in _PEERS:  # left out if the calls have different peers
        if len({call.metadata.get(key) for call in calls}) > 1:
            facts.pop(key, None)
    return _mark(str(facts[_NAME]), first.lane, facts)


def _mark(name: str, lane: str | None, facts: dict[str, object]) -> LibraryMark:
    """The mark around a collective."""
    mark = LibraryMark(f"nccl:{name}", lane)
    mark.metadata = CallFacts(facts)
    return mark


def _initialised() -> Any:
    distributed = _distributed()
    if not distributed.is_initialized():
        raise MissingRequirement("there is no process group yet: call torch.distributed.init_process_group first")
    return distributed


def _distributed() -> Any:
    try:
        from torch import distributed  # type: ignore[import-not-found,unused-ignore]  # optional
    except ImportError as error:
        raise MissingRequirement("thence.torch needs PyTorch, which is not installed: pip install torch") from error
    if not distributed.is_available():
        raise MissingRequirement("this PyTorch was built without torch.distributed")
    return distributed


class CollectiveLabels:
    """Labels collectives for as long as a recording runs, unless someone else holds the labels, too.

    A recording may begin before torch is imported, or during its import. Then imports are watched until torch has
    been imported. This is the case at the latest when CUDA is initialised, and no kernel of NCCL runs before that.

    Nothing here raises, initialises CUDA or waits for the lock of torch.cuda's initialisation: it may be
    called from within that initialisation.
    """

    def __init__(self) -> None:
        self._leave: Callable[[], None] | None = None
        self._waiting = False
        self._no_longer: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Label collectives from now on, or as soon as torch has been imported."""
        self._waiting = True
        if torch_is_being_imported():
            self._no_longer.append(when_imported("torch.cuda", self._ask_cuda))
        self._no_longer.append(when_imported("torch", lambda _torch: self._install()))

    def end(self) -> None:
        """Stop labelling, unless other holders want the labels."""
        self._stop_waiting()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def forked(self) -> None:
        """Leave the labels installed in this child process, where they cost little without a consumer.

        Removing them needs a lock of torch's, which another thread of the parent may have held.
        """
        self._stop_waiting()
        self._leave = None

    def _ask_cuda(self, torch_cuda: Any) -> None:
        """Queue the installation for CUDA's initialisation, as torch.cuda._lazy_call does, but without its lock."""
        calls = getattr(torch_cuda, "_queued_calls", None)
        if isinstance(calls, list):
            calls.append((self._install, []))

    def _install(self) -> None:
        if not self._waiting:
            return
        self._stop_waiting()
        try:
            self._leave = hold_labels(self)
        except MissingRequirement:
            pass  # this PyTorch has no torch.distributed, so there are no collectives
        except Exception as error:  # noqa: BLE001 - the program comes first
            _LOG.warning("thence: the collectives of PyTorch are recorded without facts: %r", error)

    def _stop_waiting(self) -> None:
        self._waiting = False
        while self._no_longer:
            self._no_longer.pop()()
