"""The fields of an event that thence reads: their keys, types, and values where they are missing.

Category names and argument keys: pytorch/kineto, libkineto/src/output_json.cpp.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from thence.model.collectives import KINETO_KEYS

MISSING = int(np.iinfo(np.int64).min)
"""Value (int64) in integer columns for an event that lacks the field."""
NO_TEXT = msgspec.Raw(b"")


class Args(msgspec.Struct, frozen=True, gc=False):
    """The arguments of an event that thence reads; everything else is skipped by the decoder."""

    external: int = msgspec.field(default=MISSING, name="External id")
    correlation: int = MISSING
    device: int = MISSING
    stream: int = MISSING
    original_stream: int = MISSING
    bytes: int = MISSING
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int = msgspec.field(default=MISSING, name="registers per thread")
    shared_memory: int = msgspec.field(default=MISSING, name="shared memory")
    graph: int = msgspec.field(default=0, name="graph id")
    node: int = msgspec.field(default=0, name="graph node id")
    from_device: int = msgspec.field(default=MISSING, name="fromDevice")
    sequence: int = msgspec.field(default=MISSING, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")
    # Fields of cuda_sync and cuda_event (waits on and records of CUDA events): -1 if Kineto does not know.
    wait_on_stream: int = MISSING
    wait_on_record: int = msgspec.field(default=MISSING, name="wait_on_cuda_event_record_corr_id")
    wait_on_event: int = msgspec.field(default=MISSING, name="wait_on_cuda_event_id")
    event_id: int = MISSING
    kernel_backend: Any = None
    kernel_file: Any = None
    kernel_hash: Any = None
    kernel_kwargs: Any = None
    kernel: Any = None  # of a launch on AMD's GPUs
    # Inputs of an operator. They stay text, because many operators have the same, and each is parsed once.
    dims: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Input type")
    strides: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Input Strides")
    values: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Concrete Inputs")
    label: str | int | None = msgspec.field(default=None, name="name")
    collective: str | None = msgspec.field(default=None, name=KINETO_KEYS["collective"])
    in_elements: int = msgspec.field(default=MISSING, name=KINETO_KEYS["in_elements"])
    out_elements: int = msgspec.field(default=MISSING, name=KINETO_KEYS["out_elements"])
    group_size: int = msgspec.field(default=MISSING, name=KINETO_KEYS["group_size"])
    element_type: str = msgspec.field(default="", name=KINETO_KEYS["element_type"])
    group_name: str = msgspec.field(default="", name=KINETO_KEYS["group_name"])
    group_description: str = msgspec.field(default="", name=KINETO_KEYS["group_description"])
    group_ranks: str | list[int] = msgspec.field(default="", name=KINETO_KEYS["group_ranks"])
    in_splits: str | list[int] = msgspec.field(default="", name=KINETO_KEYS["in_splits"])
    out_splits: str | list[int] = msgspec.field(default="", name=KINETO_KEYS["out_splits"])
    collective_sequence: int = msgspec.field(default=MISSING, name=KINETO_KEYS["sequence"])
    source_rank: int = msgspec.field(default=MISSING, name=KINETO_KEYS["source_rank"])
    destination_rank: int = msgspec.field(default=MISSING, name=KINETO_KEYS["destination_rank"])
    # Of events about memory. Any type: other tools use such keys for texts.
    memory_bytes: Any = msgspec.field(default=MISSING, name="Bytes")
    address: Any = msgspec.field(default=MISSING, name="Addr")
    allocated: Any = msgspec.field(default=MISSING, name="Total Allocated")
    reserved: Any = msgspec.field(default=MISSING, name="Total Reserved")
    device_type: Any = msgspec.field(default=MISSING, name="Device Type")
    device_id: Any = msgspec.field(default=MISSING, name="Device Id")
    # Labels of graphed activities, as thence writes them. Any type: other tools may use the same keys for anything.
    label_rule: Any = None
    label_confidence: Any = None
    label_detail: Any = None
    operator: Any = None
    operator_inputs: Any = None
    operator_node: Any = None
    operator_nodes: Any = None
    graph_label: Any = msgspec.field(default=None, name="label")
    module: Any = None
    op: Any = None
    ops: Any = None
    source: Any = None
    stack: Any = None
    phase: Any = None
    lane: Any = None
    annotations: Any = None
    # Arguments that show, like name, module and collective, that PyTorch or its tools annotated a graphed activity.
    annotated_stream: Any = None
    autograd_phase: Any = None
    module_fqn: Any = None
    annotation: Any = None
    annotation_text: Any = msgspec.field(default=None, name="str")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event. Times stay text (`msgspec.Raw`) so that they never pass through a float."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: msgspec.Raw = NO_TEXT
    dur: msgspec.Raw = NO_TEXT
    id: int | str = MISSING
    args: Args = NO_ARGS
