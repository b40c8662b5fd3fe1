"""The hardware counters of a recording: their names, units, and the metrics of CUPTI behind them.

The table ``counters`` of a recording has a column for each of those that were sampled, and a row holds the amount of
one sample: what a counter of the whole device counted from its start to its end. Where a producer states shares of a
peak alone, the amount is time: the share times the length of the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

_TRIAGE = "TPC.TriageCompute."
"""Prefix of the metrics that CUPTI can sample through one multiprocessor's triage group, summed over all of them."""


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter.

    Attributes:
        name: of the column.
        unit: of its values: cycles, instructions, bytes, joules or ns.
        metric: CUPTI's name of it; None where a recording does not sample it by CUPTI.
        text: what it counts, in words.
    """

    name: str
    unit: str
    metric: str | None
    text: str


COUNTERS = (
    Counter("gr_active_cycles", "cycles", "gr__cycles_active.sum", "cycles in which the graphics engine worked"),
    Counter("gr_elapsed_cycles", "cycles", "gr__cycles_elapsed.max", "cycles of the graphics engine's clock"),
    Counter(
        "sm_active_cycles",
        "cycles",
        "sm__cycles_active.sum",
        "cycles in which a multiprocessor held a warp, summed over multiprocessors",
    ),
    Counter("sm_elapsed_cycles", "cycles", "sm__cycles_elapsed.max", "cycles of the multiprocessors' clock"),
    Counter("instructions", "instructions", "sm__inst_executed_realtime.sum", "instructions of warps"),
    Counter(
        "tensor_cycles",
        "cycles",
        f"{_TRIAGE}sm__pipe_tensor_op_hmma_cycles_active_realtime.sum",
        "cycles of tensor cores in floating point, summed over sub-partitions",
    ),
    Counter(
        "tensor_int_cycles",
        "cycles",
        f"{_TRIAGE}sm__pipe_tensor_op_imma_cycles_active_realtime.sum",
        "cycles of tensor cores in integers, summed over sub-partitions",
    ),
    Counter(
        "fma_instructions",
        "instructions",
        f"{_TRIAGE}sm__inst_executed_pipe_fma_realtime.sum",
        "instructions of warps in the pipe of multiplications and additions in single precision",
    ),
    Counter(
        "fp64_cycles",
        "cycles",
        f"{_TRIAGE}sm__pipe_fp64_cycles_active_realtime.sum",
        "cycles of the pipe of double precision",
    ),
    Counter(
        "warps",
        "cycles",
        f"{_TRIAGE}tpc__warps_active_realtime.sum",
        "warps that multiprocessors held, summed over cycles",
    ),
    Counter("dram_read_bytes", "bytes", "dram__bytes_read.sum", "bytes read from the device's memory"),
    Counter("dram_write_bytes", "bytes", "dram__bytes_write.sum", "bytes written to the device's memory"),
    Counter("l2_bytes", "bytes", "lts__t_bytes.sum", "bytes that the L2 cache was asked for"),
    Counter("pcie_read_bytes", "bytes", "pcie__read_bytes.sum", "bytes that the device received over PCIe"),
    Counter("pcie_write_bytes", "bytes", "pcie__write_bytes.sum", "bytes that the device sent over PCIe"),
    Counter("nvlink_receive_bytes", "bytes", "nvlrx__bytes.sum", "bytes received over NVLink"),
    Counter("nvlink_transmit_bytes", "bytes", "nvltx__bytes.sum", "bytes sent over NVLink"),
    Counter("sm_active_ns", "ns", None, "time in which multiprocessors held a warp, the mean over multiprocessors"),
    Counter("tensor_active_ns", "ns", None, "time in which tensor cores worked, the mean over multiprocessors"),
    Counter("dram_busy_ns", "ns", None, "time that the device's memory needs for what it did, at its peak"),
    Counter("pcie_busy_ns", "ns", None, "time that PCIe needs for what it did, at its peak"),
    Counter("nvlink_receive_ns", "ns", None, "time that NVLink needs for what was received, at its peak"),
    Counter("nvlink_transmit_ns", "ns", None, "time that NVLink needs for what was sent, at its peak"),
    Counter("energy_joules", "joules", None, "energy that the device used, by NVML, in rows of their own"),
)
"""All counters, in the order of their columns. Those that a chip lacks, or that were not asked for, have no column."""

BY_NAME = {counter.name: counter for counter in COUNTERS}
ENERGY = "energy_joules"
DEFAULT = (
    "gr_active_cycles",
    "sm_active_cycles",
    "sm_elapsed_cycles",
    "instructions",
    "tensor_cycles",
    "fma_instructions",
    "dram_read_bytes",
    "dram_write_bytes",
    "l2_bytes",
)
"""Those that are sampled where nothing else is asked for."""
COUNTERS_TABLE = "counters"
"""The table of a recording that holds them: device, start and end (ns on CUPTI's clock), and their columns."""
