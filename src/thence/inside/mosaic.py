"""In-kernel profiles of raw Mosaic GPU kernels (``jax.experimental.mosaic.gpu.as_gpu_kernel``).

    from jax.experimental.mosaic import gpu as mgpu
    from thence.inside import mosaic

    spec = mosaic.ProfilerSpec(capacity=64)
    with mlir.make_ir_context(), ir.Location.unknown():     # as_gpu_kernel requires both
        kernel = mgpu.as_gpu_kernel(body, grid, block, inputs, outputs, scratch, prof_spec=spec)
    y = kernel(x); jax.effects_barrier()
    spec.save("kernel.npz")                                 # every execution

The ranges are the ``with ctx.named_region("load"):`` blocks in ``body``, as with JAX's own profiler.
The records differ from JAX's (see ``thence_inside.cuh``): they have both clocks, in 64 bits, at the
start and end of each trace, so that cycles become true nanoseconds; events that do not fit are
dropped and counted; there is no barrier at the end.

JAX's launch code creates a ``jax.experimental.mosaic.gpu.profiler.OnDeviceProfiler`` for any spec that
it is given. The first `ProfilerSpec` therefore replaces this class by a function that creates the
`OnDeviceProfiler` of this module for a `ProfilerSpec` of this module, and JAX's for any other spec.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.errors import MissingRequirement, UsageError
from thence.inside.description import HEADER_WORDS, Description
from thence.inside.files import save_each
from thence.inside.launches import launch_facts, three

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SCOPES = {"warpgroup": (2, 128), "warp": (3, 32)}  # number in the records, threads
_MAGIC = 0x7E4CE001
_ENTER, _EXIT = 0, 1 << 30
_MAX_NAMES = 1 << 28

# $0 whether this thread records, $1 address of the record, $2 block, $3 trace in the block, $4 scope,
# $5 capacity. The end times are zero until the trace has finished.
_BEGIN = f"""{{
.reg .b64 t, c; .reg .b32 s, m, z;
mov.b32 m, {_MAGIC};
mov.b32 z, 0;
mov.u64 t, %globaltimer;
mov.u64 c, %clock64;
mov.u32 s, %smid;
@$0 st.global.v2.b32 [$1], {{m, $4}};
@$0 st.global.v2.b32 [$1+8], {{s, $2}};
@$0 st.global.v2.b32 [$1+16], {{$3, z}};
@$0 st.global.v2.b32 [$1+24], {{z, $5}};
@$0 st.global.b64 [$1+32], t;
@$0 st.global.b64 [$1+40], 0;
@$0 st.global.b64 [$1+48], c;
@$0 st.global.b64 [$1+56], 0;
}}"""

# $0 whether this thread records and there is room, $1 address in shared memory, $2 tag
_EVENT = """{
.reg .b32 c;
mov.u32 c, %clock;
@$0 st.shared.v2.b32 [$1], {$2, c};
}"""

# $0 whether this thread records, $1 address of the record, $2 address of its events in shared memory,
# $3 events stored, $4 events dropped
_END = f"""{{
.reg .pred p; .reg .b64 t, c, from, to; .reg .b32 i, a, b;
mov.u64 t, %globaltimer;
mov.u64 c, %clock64;
@$0 st.global.b32 [$1+20], $3;
@$0 st.global.b32 [$1+24], $4;
@$0 st.global.b64 [$1+40], t;
@$0 st.global.b64 [$1+56], c;
mov.b64 from, $2;
add.s64 to, $1, {4 * HEADER_WORDS};
mov.b32 i, 0;
@!$0 mov.b32 i, $3;
more:
setp.ge.u32 p, i, $3;
@p bra done;
ld.shared.v2.b32 {{a, b}}, [from];
st.global.v2.b32 [to], {{a, b}};
add.s64 from, from, 8;
add.s64 to, to, 8;
add.u32 i, i, 1;
bra more;
done:
mov.b32 i, 0;
}}"""


class ProfilerSpec:
    """An argument for ``as_gpu_kernel(prof_spec=...)`` that makes the kernel write records of thence.

    Attributes:
        interned_names: maps each range's name to its number; filled while the kernel is lowered.
        dump_path: folder in which JAX opens a file for each execution; `dump` removes the file.
    """

    def __init__(
        self, capacity: int = 64, *, scope: str = "warpgroup", kernel: str = "", overhead_cycles: float | None = None
    ) -> None:
        """Prepare a profile.

        Args:
            capacity: events that fit into a trace; a range has two, and JAX adds ranges of its own.
            scope: the thread group whose first thread records: "warpgroup" or "warp".
            kernel: name of the kernel, for the report.
            overhead_cycles: cycles for recording one event, where known.

        Raises:
            UsageError: a number is out of range.
            MissingRequirement: jax is older than 0.8, or has no Mosaic GPU.
        """
        if scope not in _SCOPES:
            raise UsageError(f"scope={scope!r}: a trace belongs to a {' or a '.join(_SCOPES)}.")
        if not 1 <= capacity <= 1 << 24:
            raise UsageError(f"capacity={capacity}: between 1 and 2**24 events fit into a trace.")
        _install()
        self.interned_names: dict[str, int] = {}
        self.dump_path = tempfile.gettempdir()
        self.executions: list[tuple[np.ndarray[Any, np.dtype[np.uint32]], Description]] = []
        self.capacity = capacity
        self.scope_number, self.scope_threads = _SCOPES[scope]
        self._kernel, self._overhead_cycles = kernel, overhead_cycles
        self._lock = threading.Lock()

    @property
    def trace_words(self) -> int:
        """Words of one trace in global memory."""
        return HEADER_WORDS + 2 * self.capacity

    def traces_per_block(self, block: Sequence[int]) -> int:
        """Warps or warpgroups of a block.

        Raises:
            UsageError: the block does not consist of whole warps or warpgroups.
        """
        threads = math.prod(block)
        if threads % self.scope_threads:
            raise UsageError(
                f"block {tuple(block)} has {threads} threads, which is not a multiple of {self.scope_threads}."
            )
        return threads // self.scope_threads

    def describe(self, grid: Sequence[int], block: Sequence[int]) -> Description:
        """The description of a buffer; its names are complete once the kernel was lowered."""
        return Description(
            names=tuple(self.interned_names),
            grid=three(tuple(grid) or (1,), "grid"),
            block=three(tuple(block), "block"),
            traces_per_block=self.traces_per_block(block),
            capacity=self.capacity,
            kernel=self._kernel,
            overhead_cycles=self._overhead_cycles,
        )

    def save(self, path: str | Path) -> list[Path]:
        """Write every execution into a file: ``path`` for one, ``path-0`` ... for several.

        Raises:
            UsageError: the kernel was not executed, or ``jax.effects_barrier()`` not called.
        """
        if not self.executions:
            raise UsageError("There is no execution: call the kernel, then jax.effects_barrier(), then save().")
        return save_each(path, self.executions)

    # The methods that JAX's launch code calls on a spec.

    def jax_buffer_type(self, grid: Sequence[int], block: Sequence[int]) -> Any:
        """Shape and type of the buffer as an output of the kernel."""
        import jax  # type: ignore[import-not-found, unused-ignore]

        return jax.ShapeDtypeStruct((self._words(grid, block),), np.uint32)

    def mlir_buffer_type(self, grid: Sequence[int], block: Sequence[int]) -> Any:
        """MLIR type of the buffer as an output of the kernel."""
        ir = _dialects().ir
        return ir.MemRefType.get((self._words(grid, block),), ir.IntegerType.get_signless(32))

    def smem_i32_elements(self, block: Sequence[int]) -> int:
        """Words of shared memory that a block needs."""
        return 2 * self.capacity * self.traces_per_block(block)

    def smem_bytes(self, block: Sequence[int]) -> int:
        """Bytes of shared memory that a block needs."""
        return 4 * self.smem_i32_elements(block)

    def intern_name(self, name: str) -> int:
        """The number of a name; a new name gets the next number."""
        number = self.interned_names.setdefault(name, len(self.interned_names))
        if number >= _MAX_NAMES:
            raise UsageError(f"{number:,} names: fewer than {_MAX_NAMES:,} fit into a record.")
        return number

    def dump(self, buffer: Any, f: Any, grid: Sequence[int], block: Sequence[int]) -> None:
        """Store the buffer of one execution, and remove the file that JAX opened for it."""
        import jax  # type: ignore[import-not-found, unused-ignore]

        Path(f.name).unlink(missing_ok=True)
        words = np.array(buffer, dtype=np.uint32).reshape(-1)
        launch = launch_facts("taken_ns")
        with self._lock:
            if jax.local_device_count() > 1:
                launch["device"] = f"one of {jax.local_device_count()}; jax does not say which"
            elif self.executions:
                launch["previous_ns"] = self.executions[-1][1].launch["taken_ns"]
            description = dataclasses.replace(self.describe(grid, block), launch=launch)
            self.executions.append((words, description))

    def _words(self, grid: Sequence[int], block: Sequence[int]) -> int:
        return math.prod(grid) * self.traces_per_block(block) * self.trace_words


class OnDeviceProfiler:
    """Emits the records: the counterpart of JAX's class of this name.

    Under warpgroup semantics, the code of each record must be in the body of an operation of its own
    (``CustomPrimitiveOp``). The profiler's values are therefore operands of each such operation, and
    the body uses its block arguments instead.
    """

    def __init__(self, spec: ProfilerSpec, smem_buffer: Any, gmem_buffer: Any, *, wrap: bool = False) -> None:
        """Emit the beginning of a trace at the insertion point, which is the start of the kernel.

        Args:
            smem_buffer: memref of ``spec.smem_i32_elements`` words in shared memory.
            gmem_buffer: memref of the whole buffer.
            wrap: whether the kernel uses warpgroup semantics.
        """
        d = self._dialects = _dialects()
        self.spec = spec
        self._wrap = wrap
        self._traces = d.ir.MemRefType(smem_buffer.type).shape[0] // (2 * spec.capacity)
        i32 = d.ir.IntegerType.get_signless(32)
        thread = self._linear(d.gpu.thread_id, d.gpu.block_dim, i32)
        scope = self._constant(i32, spec.scope_threads)
        zero = self._constant(i32, 0)
        leader = d.arith.cmpi(d.arith.CmpIPredicate.eq, d.arith.remui(thread, scope), zero)
        seen = d.memref.alloca(d.ir.MemRefType.get((), i32), [], [])
        d.memref.store(zero, seen, [])
        self._values = (leader, d.arith.divui(thread, scope), seen, smem_buffer, gmem_buffer)
        with self._body() as (leader, trace, _, _, gmem):
            block = self._linear(d.gpu.block_id, d.gpu.grid_dim, i32)
            self._asm(
                _BEGIN,
                "b,l,r,r,r,r",
                leader,
                self._record_address(gmem, trace, block),
                block,
                trace,
                self._constant(i32, spec.scope_number),
                self._constant(i32, spec.capacity),
            )

    @contextlib.contextmanager
    def record(self, name: str) -> Iterator[None]:
        """Emit a range ``name`` around the operations that are emitted within the ``with`` block."""
        number = self.spec.intern_name(name)
        self._event(number | _ENTER)
        yield
        self._event(number | _EXIT)

    def finalize(self, grid: Sequence[int], block: Sequence[int]) -> None:
        """Emit, at the insertion point, the end of the trace and its copy to global memory.

        Raises:
            UsageError: the block does not consist of whole warps or warpgroups.
        """
        self.spec.describe(grid, block)
        d = self._dialects
        i32 = d.ir.IntegerType.get_signless(32)
        with self._body() as (leader, trace, seen, smem, gmem):
            linear = self._linear(d.gpu.block_id, d.gpu.grid_dim, i32)
            count = d.memref.load(seen, [])
            stored = d.arith.minui(count, self._constant(i32, self.spec.capacity))
            self._asm(
                _END,
                "b,l,l,r,r",
                leader,
                self._record_address(gmem, trace, linear),
                self._events_address(smem, trace),
                stored,
                d.arith.subi(count, stored),
            )

    def _event(self, tag: int) -> None:
        d = self._dialects
        i32, i64 = (d.ir.IntegerType.get_signless(bits) for bits in (32, 64))
        with self._body() as (leader, trace, seen, smem, _):
            count = d.memref.load(seen, [])
            capacity = self._constant(i32, self.spec.capacity)
            room = d.arith.cmpi(d.arith.CmpIPredicate.ult, count, capacity)
            offset = d.arith.muli(d.arith.extui(i64, count), self._constant(i64, 8))
            self._asm(
                _EVENT,
                "b,l,r",
                d.arith.andi(leader, room),
                d.arith.addi(self._events_address(smem, trace), offset),
                self._constant(i32, tag),
            )
            d.memref.store(d.arith.addi(count, self._constant(i32, 1)), seen, [])

    @contextlib.contextmanager
    def _body(self) -> Iterator[tuple[Any, ...]]:
        """Sets the insertion point for operations, and yields the values that they may use there."""
        if not self._wrap:
            yield self._values
            return
        d = self._dialects
        operation = d.mgpu.CustomPrimitiveOp(
            result=[],
            operands_=list(self._values),
            in_layouts=[],
            in_transforms=[d.ir.ArrayAttr.get([])],  # one for each operand in shared memory
            out_layouts=[],
        )
        block = operation.body.blocks.append(*(value.type for value in self._values))
        with d.ir.InsertionPoint(block):
            yield tuple(block.arguments)
            d.mgpu.return_([])

    def _record_address(self, gmem: Any, trace: Any, block: Any) -> Any:
        d = self._dialects
        i64 = d.ir.IntegerType.get_signless(64)
        per_block = self._constant(i64, self._traces)
        index = d.arith.addi(d.arith.muli(d.arith.extui(i64, block), per_block), d.arith.extui(i64, trace))
        offset = d.arith.muli(index, self._constant(i64, 4 * self.spec.trace_words))
        return d.arith.addi(d.address(gmem, shared=False), offset)

    def _events_address(self, smem: Any, trace: Any) -> Any:
        d = self._dialects
        i64 = d.ir.IntegerType.get_signless(64)
        size = self._constant(i64, 8 * self.spec.capacity)
        return d.arith.addi(d.address(smem, shared=True), d.arith.muli(d.arith.extui(i64, trace), size))

    def _linear(self, index: Any, size: Any, i32: Any) -> Any:
        """Linear index of a thread or block in CUDA's order: x + size.x * (y + size.y * z)."""
        d = self._dialects
        dimensions = list(d.gpu.Dimension)
        value = index(dimensions[2])
        for dimension in (dimensions[1], dimensions[0]):
            value = d.arith.addi(d.arith.muli(value, size(dimension)), index(dimension))
        return d.arith.index_cast(i32, value)

    def _constant(self, kind: Any, value: int) -> Any:
        d = self._dialects
        return d.arith.constant(kind, d.ir.IntegerAttr.get(kind, value))

    def _asm(self, text: str, constraints: str, *operands: Any) -> None:
        d = self._dialects
        d.llvm.inline_asm(d.ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)


class _Dialects:
    """The MLIR dialects of jaxlib, and JAX's own dialect and helpers for Mosaic GPU."""

    def __init__(self) -> None:
        try:
            from jax.experimental.mosaic.gpu import dialect, profiler, utils  # type: ignore[import-not-found, unused-ignore]
            from jaxlib.mlir import ir  # type: ignore[import-not-found, unused-ignore]
            from jaxlib.mlir.dialects import arith, gpu, llvm, memref  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise MissingRequirement(
                f"Mosaic GPU is not available ({error}): it needs jax 0.8 or newer, for CUDA."
            ) from error
        missing = [
            name
            for owner, name in ((dialect, "CustomPrimitiveOp"), (profiler, "OnDeviceProfiler"), (utils, "memref_ptr"))
            if not hasattr(owner, name)
        ]
        if missing or "wrap_in_custom_primitive" not in _parameters(profiler.OnDeviceProfiler):
            raise MissingRequirement("Profiles of raw Mosaic GPU kernels need jax 0.8 or newer.")
        self.ir: Any = ir
        self.arith: Any = arith
        self.gpu: Any = gpu
        self.llvm: Any = llvm
        self.memref: Any = memref
        self.mgpu: Any = dialect
        self.profiler: Any = profiler
        self._memref_ptr: Any = utils.memref_ptr

    def address(self, buffer: Any, *, shared: bool) -> Any:
        """Address of a memref's first element as an i64, in the memref's own address space."""
        needs_space = shared and "memory_space" in _parameters(self._memref_ptr)  # until jax 0.8
        pointer = self._memref_ptr(buffer, memory_space=3) if needs_space else self._memref_ptr(buffer)
        return self.llvm.ptrtoint(self.ir.IntegerType.get_signless(64), pointer)


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def _dialects() -> _Dialects:
    return _Dialects()


def _install() -> None:
    """Makes JAX create this module's `OnDeviceProfiler` for its `ProfilerSpec`; idempotent."""
    profiler = _dialects().profiler
    of_jax = profiler.OnDeviceProfiler
    if getattr(of_jax, "makes_those_of_thence", False):
        return

    def make(spec: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(spec, ProfilerSpec):
            return of_jax(spec, *arguments, **options)
        smem, gmem, *wrap = arguments
        wrapped = bool(wrap[0]) if wrap else bool(options.get("wrap_in_custom_primitive", False))
        return OnDeviceProfiler(spec, smem, gmem, wrap=wrapped)

    make.makes_those_of_thence = True  # type: ignore[attr-defined]
    make.__wrapped__ = of_jax  # type: ignore[attr-defined]  # inspect.signature shows JAX's
    profiler.OnDeviceProfiler = make
