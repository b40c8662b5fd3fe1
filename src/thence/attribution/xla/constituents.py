"""Splits kernels into constituents: the HLO instructions inside each executed instruction, with weights.

A fusion has one op_name and one source line, but does the work of dozens of instructions. `constituents_by_cost`
divides its time among the instructions inside, in all levels of called computations, in proportion to their estimated
work. nsys-jax's notebook gives equal parts to the places that it finds on the first level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import values_or
from thence.model.thresholds import LIMIT_SHARPNESS, MATRIX_FLOPS_PER_BYTE, VECTOR_OPERATIONS_PER_BYTE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.arrays import Float64, Int64, Mask
    from thence.model.hlo import HloModule


_CONSTITUENTS: dict[str, pl.DataType] = {"instruction": pl.UInt32(), "constituent": pl.UInt32(), "weight": pl.Float64()}
"""Rows of HloModule.instructions, and a share from 0 to 1; the shares of an instruction sum to 1."""

OPERATIONS: Mapping[str, float] = {
    "atan2": 50,
    "cbrt": 19,
    "compare": 1.6,
    "cosine": 45,
    "divide": 10,
    "erf": 26,
    "exponential": 10,
    "exponential-minus-one": 33,
    "floor": 5,
    "ceil": 5,
    "log": 28,
    "log-plus-one": 31,
    "logistic": 21,
    "power": 110,
    "remainder": 53,
    "round-nearest-afz": 5,
    "round-nearest-even": 5,
    "rsqrt": 7,
    "select": 1.6,
    "sine": 39,
    "sqrt": 7,
    "tan": 34,
    "tanh": 25,
}
"""How many multiplications of float32 an operation takes as long as; others take as long as one. Measured on an H100 by
repeating each operation 16 to 64 times and twice as often (`benchmarks/gpu_fusion_lines.py`, group opcodes), except
atan2, ceil, logistic (the sum of its parts) and round-*, which are estimates. A power takes 110 for the first 16 times
and 44 for the next, whose values are another path."""

_SLICING = ("dynamic-slice", "gather", "slice")  # read only as much of operand 0 as they return
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcodes that XLA runs in place, with the operand whose size is the number of bytes that they write."""
_FUSED = ("custom-call", "fusion")  # their computations run as one kernel with the caller
PRODUCTS = ("convolution", "dot", "ragged-dot")
_RENAMING = ("bitcast", "get-tuple-element", "reshape")  # no work inside a kernel
_FREE = (*_RENAMING, "after-all", "constant", "iota", "parameter", "tuple")
_LEVELS = 8  # of fusions in fusions; XLA creates two


def constituents_by_cost(module: HloModule) -> pl.DataFrame:
    """Shares in proportion to the estimated cost of each instruction inside a kernel.

    A kernel moves bytes and computes at the same time, so it takes about as long as the longer one of the two. Its
    time is divided by what limits it: by bytes if that is memory, by operations if that is arithmetic, and by both
    where they are close. With the times in bytes,

        b = bytes read from the kernel's parameters + bytes written of the kernel's results
        o = flops of dot and convolution / 200 + elements * `OPERATIONS` of all others / 10

    of an instruction, their sums B and O over the kernel, and the time of the kernel taken as

        T = (B^s + O^s)^(1/s), with s = `LIMIT_SHARPNESS`

    the share of an instruction is by how many percent T grows if its work grows by one percent:

        share = (B^s * b/B + O^s * o/O) / (B^s + O^s)

    Values that one instruction passes to the next stay in registers and cost nothing. A parameter that several
    instructions read is read once, and each of them has a part. A slice or gather reads as many bytes as it returns,
    an in-place update writes as many as its update has. Parameters, constants, tuples and bitcasts are free. If
    everything inside is free, the kernel is its only constituent.

    Returns:
        Columns of `_CONSTITUENTS` for the instructions on the top level, which are those that run.
    """
    graph = KernelGraph(module)
    return graph.shares(_cost(module, graph))


def _cost(module: HloModule, graph: KernelGraph) -> Float64:
    """Cost of each instruction as part of a kernel; see `constituents_by_cost`."""
    table = module.instructions
    opcode = table["opcode"]
    matrix = opcode.is_in(PRODUCTS).to_numpy()
    flops = table["own_flops"].to_numpy().astype(np.float64)
    times = opcode.cast(pl.String).replace_strict(
        list(OPERATIONS), pl.Series(list(OPERATIONS.values()), dtype=pl.Float64), default=1.0
    )
    work = np.where(matrix, flops / MATRIX_FLOPS_PER_BYTE, flops * times.to_numpy() / VECTOR_OPERATIONS_PER_BYTE)
    free = graph.free | opcode.is_in(_FUSED).to_numpy()
    moved, work = (np.where(free, 0.0, each) for each in (graph.bytes_read() + graph.bytes_written(), work))
    of_kernel = [np.bincount(graph.kernel, each, graph.count + 1) for each in (moved, work)]
    longest = np.maximum(*of_kernel)
    cost = np.zeros(graph.count)
    for amount, each in zip((moved, work), of_kernel, strict=True):
        relative = np.divide(each, longest, out=np.zeros_like(each), where=longest > 0)
        part = np.divide(relative**LIMIT_SHARPNESS, each, out=np.zeros_like(each), where=each > 0)
        cost += amount * part[graph.kernel]
    return cost


class KernelGraph:
    """The kernel that contains each instruction, and the values that enter and leave each kernel."""

    def __init__(self, module: HloModule) -> None:
        table = module.instructions.with_row_index("row")
        self.table = table
        self.count = table.height
        self.result = table["result_bytes"].to_numpy()
        self.opcode = table["opcode"]
        self.top = table["top_level"].to_numpy()
        self.edges = self._edges()
        self.inner = self._inner()
        self.source = self._sources()
        self.in_reducer = self._in_reducer()
        self.is_output = self._outputs()
        self.kernel = self._kernels()

    def _edges(self) -> pl.DataFrame:
        """One row per operand: consumer and producer row, position of the operand."""
        ids = self.table.select(pl.col("id").alias("operands"), pl.col("row").alias("producer"))
        operands = self.table.filter(pl.col("operands").list.len() > 0)
        return (
            operands.select(pl.col("row").alias("consumer"), "operands")
            .explode("operands")
            .with_columns(position=pl.int_range(pl.len()).over("consumer"))
            .join(ids.unique("operands", keep="first"), on="operands", maintain_order="left")
            .drop("operands")
        )

    def _inner(self) -> pl.DataFrame:
        """One row per fused computation, with the row that calls it; XLA creates each for one caller."""
        calls = self.table.filter(pl.col("opcode").is_in(_FUSED) & (pl.col("called").list.len() > 0))
        return (
            calls.select(pl.col("row").alias("caller"), "called")
            .explode("called")
            .rename({"called": "computation"})
            .unique("computation", keep="first", maintain_order=True)
        )

    def _sources(self) -> Int64:
        """For each row, the row that computes its value; for instructions that compute, their own row.

        A bitcast passes on its operand, a parameter of a fusion inside a fusion passes on the operand that
        the outer fusion gives it, and the inner fusion passes on the root of its computation.
        """
        source = np.arange(self.count, dtype=np.int64)
        first = self.edges.filter(pl.col("position") == 0)
        renaming = self.table.filter(pl.col("opcode").is_in(_RENAMING)).select(pl.col("row").alias("consumer"))
        passed = first.join(renaming, on="consumer", how="semi")
        source[passed["consumer"].to_numpy()] = passed["producer"].to_numpy()
        nested = self.inner.filter(~pl.Series(self.top[self.inner["caller"].to_numpy()], dtype=pl.Boolean))
        members = self.table.join(nested, on="computation")
        roots = members.filter("is_root")
        source[roots["caller"].to_numpy()] = roots["row"].to_numpy()
        given = members.filter(pl.col("parameter").is_not_null()).join(
            self.edges, left_on=["caller", "parameter"], right_on=["consumer", "position"]
        )
        source[given["row"].to_numpy()] = given["producer"].to_numpy()
        for _ in range(_LEVELS):  # each round doubles the distance: 2 ** 8 renamings in a row
            source = source[source]
        return source

    def _in_reducer(self) -> Mask:
        """Instructions of computations applied per element (reducers); their cost is the caller's."""
        fused = self.inner["computation"].to_numpy()
        inside = np.isin(self.table["computation"].to_numpy(), fused)
        result: Mask = ~(inside | self.top)
        return result

    def _outputs(self) -> Mask:
        """Instructions whose value leaves their kernel: roots, and the operands of a root tuple."""
        kernels = self.inner.filter(pl.Series(self.top[self.inner["caller"].to_numpy()], dtype=pl.Boolean))
        roots = self.table.join(kernels, on="computation", how="semi").filter("is_root")
        results = self.source[roots["row"].to_numpy()]
        is_output = self.top.copy()
        is_output[results] = True
        tuples = results[(self.opcode == "tuple").to_numpy()[results]]
        gathered = np.isin(self.edges["consumer"].to_numpy(), tuples)
        is_output[self.source[self.edges["producer"].to_numpy()[gathered]]] = True
        return is_output

    def _kernels(self) -> Int64:
        """The kernel in which each instruction runs: the caller of its computation, and so on up; `count` for none."""
        caller = self.table.select("computation").join(self.inner, on="computation", how="left", maintain_order="left")[
            "caller"
        ]
        rows = np.arange(self.count, dtype=np.int64)
        kernel = np.where(self.top, rows, values_or(caller, self.count))
        kernel = np.append(kernel, self.count)  # the last entry: in no kernel
        for _ in range(_LEVELS):
            kernel = kernel[kernel]
        return np.where(np.append(self.top, [False])[kernel], kernel, self.count)[:-1]

    def bytes_read(self) -> Float64:
        """Bytes that each instruction reads from outside its kernel."""
        consumer = self.edges["consumer"].to_numpy()
        position = self.edges["position"].to_numpy()
        producer = self.edges["producer"].to_numpy()
        origin = self.source[producer]
        parameter = (self.opcode == "parameter").to_numpy()
        amount = self.result[producer].astype(np.float64)
        sliced = self.opcode.is_in(_SLICING).to_numpy()[consumer] & (position == 0)
        amount[sliced] = np.minimum(amount[sliced], self.result[consumer][sliced])
        kept = self.opcode.is_in(list(_IN_PLACE)).to_numpy()[consumer] & (position == 0)
        amount[kept | ~(parameter[origin] | self.top[consumer])] = 0.0
        passes_on = self.opcode.is_in([*_FREE, *_FUSED]).to_numpy()[consumer]
        shared = parameter[origin] & (amount > 0) & ~(sliced | passes_on | self.top[consumer])
        readers = np.bincount(origin[shared], minlength=self.count)
        amount[shared] /= readers[origin[shared]]
        return np.bincount(consumer, amount, self.count).astype(np.float64)

    def bytes_written(self) -> Float64:
        """Bytes that each instruction writes for what is outside its kernel."""
        writes = np.where(self.is_output, self.result.astype(np.float64), 0.0)
        for name, update in _IN_PLACE.items():
            chosen = (self.opcode == name).to_numpy()
            writes[chosen] = np.minimum(writes[chosen], self.operand_bytes(update)[chosen])
        return writes

    @property
    def free(self) -> Mask:
        """Instructions that do no work, or whose work is their caller's."""
        free: Mask = self.opcode.is_in(_FREE).to_numpy() | self.in_reducer
        return free

    def operand_bytes(self, position: int) -> Float64:
        """Bytes of one operand of each instruction."""
        given = self.edges.filter(pl.col("position") == position)
        result = np.zeros(self.count)
        result[given["consumer"].to_numpy()] = self.result[given["producer"].to_numpy()]
        return result

    def shares(self, cost: Float64) -> pl.DataFrame:
        """Every top-level instruction with its constituents, weighted by cost."""
        rows, kernel = np.arange(self.count, dtype=np.int64), self.kernel
        total = np.bincount(kernel, cost, self.count + 1)[: self.count]
        alone = self.top & (total <= 0)
        used = (cost > 0) & (kernel < self.count)
        parts = pl.DataFrame(
            {
                "instruction": np.concatenate([kernel[used], rows[alone]]),
                "constituent": np.concatenate([rows[used], rows[alone]]),
                "weight": np.concatenate([cost[used] / total[kernel[used]], np.ones(alone.sum())]),
            }
        )
        return parts.cast(pl.Schema(_CONSTITUENTS)).sort("instruction", maintain_order=True)
