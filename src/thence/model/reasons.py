"""Codes of the rules that find a place, and of the reasons why an activity has none.

Codes are stable; texts may change. Column ``<kind>_rule`` of ``Attributed.places`` holds a code: of `RULES`
if the activity has a place of that kind, else of `REASONS`. The text of a reason is the same for every
trace; the advice on how to record what is missing depends on the format of the trace: `ADVICE`. This
module imports only names, because documentation and command line read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from thence.model.formats import (
    KINETO_TRACE,
    NSIGHT_CSV,
    NSIGHT_EXPORT,
    NSYS_JAX_ARCHIVE,
    THENCE_RECORDING,
    XSPACE_TRACE,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

RULES: Mapping[str, str] = MappingProxyType(
    {
        # Host ranges around the launch.
        "launch_ranges": "ranges around the launch",
        "forward_op": "forward op of the backward op",
        "library_range": "range named by a library",
        "library_frame": "frame of an installed library",
        "function_frame": "function only: its line is not certain",
        "phase_noted": "phase noted while recording",
        "kernel_file": "file of the Triton kernel, which the trace names",
        "kernel_file_absent": "file of the Triton kernel, which the trace names; the file is not on this machine, so"
        " the line is unknown",
        "launch_time": "time of the launch",
        "loop_rounds": "thunks of the loop around the launch repeat in every iteration",
        "autograd_sequence": "autograd sequence number",
        "differentiated_module": "nn.Module call with operators that autograd differentiates",
        "library_phase": "range by which a library names the pass",
        "checkpoint": "forward pass of a checkpoint, run again in the backward pass",
        "optimizer_range": "range of an optimizer",
        "optimizer_frame": "frame of an optimizer's package",
        "loader_range": "range of a DataLoader",
        "input_copy": "copy to the device in a step, outside the model",
        "outside_autograd": "not part of the autograd graph",
        # HLO.
        "hlo_recorded": "recorded by the profiler",
        "hlo_creation": "XLA's range around the command when the CUDA graph was created",
        "hlo_thunk_number": "number of the CUDA graph's first thunk, and node numbers from there",
        "hlo_library_order": "order of the library calls in the CUDA graph against the HLO schedule",
        "hlo_instruction": "HLO instruction",
        "hlo_inside": "instruction inside",
        "hlo_moved": "instruction that produced the data it moves",
        "hlo_user": "instruction that uses its result",
        "hlo_around": "inherited from the conditional, while or fusion around it",
        "hlo_fusion": "line of the fusion: the instruction inside has none",
        "named_scope": "named scopes in op_name",
        "common_scope": "scopes that merged operations share",
        "transposed": "transposition in op_name",
        "not_transposed": "differentiation without transposition in op_name",
        "rematerialized": "rematerialization in op_name",
        "optimizer_scope": "scope of an optimizer in op_name",
        "not_differentiated": "no differentiation in op_name",
        "merged_phases": "merged from instructions of several phases",
        # Labels of CUDA graphs.
        "graph_node": "node id of the CUDA graph",
        "graph_number": "node number of the CUDA graph, instantiated anew, with equal kernels",
        "graph_child": "order of the nodes inside a child graph",
        "graph_alignment": "alignment to the captured CUDA graph",
        "eager_alignment": "alignment to an eager run",
        "eager_repetition": "alignment to an eager run whose kernels the CUDA graph repeats",
        "eager_kernel_name": "name of the kernel: what all its launches in the run or the captures have in common",
        "capture_names": "order of the launches in the trace of the capture, with equal kernel names",
        "capture_order": "by order only: order of the launches in the trace of the capture, which names no kernels",
        "capture_shared": "what all launches that match equally well have in common",
        "in_trace": "label that the trace itself holds",
    }
)
"""Code and meaning of every rule that finds a place."""

_COMMAND_BUFFER = "inside a CUDA graph (command buffer): the profiler recorded no HLO op"

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "not_recorded": "the trace does not say",
        "no_shapes": "the trace does not hold the inputs of its operator",
        "no_data_type": "neither its name nor what the trace holds of its inputs says its data type",
        # The launch.
        "no_launch": "the trace holds no API call that launched it",
        "launched_together": "launched while two threads were launching",
        "launched_unseen": "launched while none of the watched threads was in code that launches",
        "launched_before": "launched before thence noted the first place",
        "number_reused": "CUPTI gave its correlation number to two launches",
        "no_ranges": "no named ranges recorded",
        "no_modules": "no nn.Module calls recorded",
        "no_operators": "no operators recorded",
        "no_python_frames": "no Python frames recorded",
        "no_autograd": "no autograd ops recorded",
        "no_steps": "no steps found",
        "no_loops": "no range of an XLA loop recorded",
        "outside_loops": "launched outside every loop of an XLA program",
        "outside_ranges": "launched outside every named range",
        "outside_modules": "launched outside every nn.Module call",
        "outside_operators": "launched outside every operator",
        "outside_frames": "launched outside every recorded Python frame",
        "no_backward": "no backward pass follows in the trace: whether it is differentiated is unknown",
        "no_serving": "no range around it says prefill or decode",
        "outside_steps": "launched outside every step",
        "no_server_steps": "no range of an inference server's step recorded",
        "outside_server_steps": "launched outside every step of an inference server",
        # CUDA graphs.
        "graph": "inside a CUDA graph: the trace holds one launch for all of it",
        "graph_no_label": "inside a CUDA graph: no label was open when its node was captured",
        "graph_no_place": "inside a CUDA graph: the run that names its nodes holds no such place",
        "graph_ambiguous": "inside a CUDA graph: nodes with different labels fit it equally well",
        "graph_not_joined": "inside a CUDA graph that fits none of the labels",
        "graph_foreign": "inside a CUDA graph: no captured or eager launch corresponds to it",
        "graph_labels_differ": "inside a CUDA graph: label files contradict each other about its node",
        "graph_captures_differ": "inside a CUDA graph: several launches match equally well, and their places differ",
        # Code that torch.compile made.
        "compiled_before": "compiled before the recording: cached code does not say which module it belongs to",
        "made_by_compiler": "generated by the compiler itself, not from a line of the program",
        # XLA.
        "no_xla": "no XLA programs in this trace",
        "no_program": "part of no XLA program",
        "autotuning": "XLA's autotuner, while a program was being compiled",
        "warm_up": "warm-up: first executions of XLA programs",
        "incomplete": "incomplete: recording ended while an XLA program ran",
        "no_hlo_op": "the profiler recorded no HLO op",
        "no_hlo": "the HLO of its program is not in the trace",
        "no_instruction": "the HLO of its program has no such instruction",
        "no_op_name": "the HLO instruction has no op_name",
        "no_source": "the HLO instruction has no source line",
        "argument": "the op_name names an argument of the program",
        "no_scope": "no named scope around it",
        "different_scopes": "merged from different scopes",
        "command_buffer": _COMMAND_BUFFER,
        "command_buffer_no_schedule": f"{_COMMAND_BUFFER}, and the HLO of its program has no schedule",
        "command_buffer_no_fit": f"{_COMMAND_BUFFER}, and its kernels do not all fit the HLO schedule",
        "command_buffer_no_origin": f"{_COMMAND_BUFFER}, and neither the graph's creation nor the number of its first"
        " thunk is in the trace",
        "command_buffer_too_early": f"{_COMMAND_BUFFER}, and by the HLO schedule it would have started"
        " before the instruction whose result it reads",
        "command_buffer_library": f"{_COMMAND_BUFFER}, and the graph's library kernels cannot be distinguished",
        "command_buffer_reordered": f"{_COMMAND_BUFFER}, and by XLA_FLAGS its nodes are not in the order of the HLO"
        " schedule",
        "command_buffer_foreign": f"{_COMMAND_BUFFER}, and its kernel is not named after the HLO instruction at"
        " its place",
        "command_buffer_contradicted": f"{_COMMAND_BUFFER}, and what ran is not what the HLO schedule has at its place",
        "command_buffer_branch": f"{_COMMAND_BUFFER}, and by the HLO schedule a branch would have run only in part,"
        " or two branches of one conditional",
        "no_collective": "no collective",
        # Reasons of a whole trace, not of an activity.
        "no_gpu": "the trace holds no device activity",
        "no_collectives": "the trace describes no collectives, though there were some",
    }
)
"""Code and meaning of every reason why there is no place."""

SEPARATE = ("warm_up", "incomplete", "autotuning")
"""Codes of work that tables of an XLA trace show in separate rows, whether or not it has a place."""

CODES = (*RULES, *REASONS)
"""Values of the ``<kind>_rule`` columns."""

_JOINS = "thence label joins labels"
_FRAMES = "torch.profiler's with_stack=True records them, thence.mark names places"
_CALLS = "torch.profiler's with_stack=True records them, thence.mark names layers"
_EMIT_NVTX = "torch.autograd.profiler.emit_nvtx() names them"
_ARCHIVE = "nsys-jax keeps none in its archive"
_NCCL_RANGES = (
    "NCCL's NVTX ranges around the launches, which state the message sizes, are missing: nsys"
    " profile --trace cuda,nvtx records them; for JAX, --hlo reads the sizes from XLA's dump"
)
_OF_LAUNCHES = (*("no_ranges", "no_modules", "no_operators", "no_python_frames", "no_autograd", "no_steps"),)

_FOR_EVERYBODY: Mapping[str, str] = {
    "no_hlo": "--hlo DUMP_DIR adds it, dumped by a run with XLA_FLAGS=--xla_dump_to=DUMP_DIR",
    **dict.fromkeys(
        (code for code in REASONS if code.startswith("command_buffer")),
        "XLA_FLAGS=--xla_gpu_enable_command_buffer= runs without them",
    ),
}

ADVICE: Mapping[str, Mapping[str, str]] = {
    KINETO_TRACE: {
        "no_ranges": "record_function, NVTX",
        "no_modules": "with_stack=True records them",
        "no_operators": "ProfilerActivity.CPU records them",
        "no_python_frames": "with_stack=True records them",
        "no_steps": "profiler.step() marks them",
        "graph": _JOINS,
        "graph_no_place": "modules and lines are there if the run of --eager was recorded with with_stack=True",
        "no_gpu": "record with ProfilerActivity.CUDA",
        "no_collectives": (
            "torch 2.1 and newer describe collectives of torch.distributed, if the profiler records CPU"
            " and CUDA; for those of CUDA graphs: thence label"
        ),
    },
    THENCE_RECORDING: {
        "launched_together": "thence record --with launches records the thread of every launch",
        "compiled_before": "empty the compile cache, or set TORCH_COMPILE_CACHE_KEY_TAG for recorded runs",
        "no_loops": "loops inside a fusion or a CUDA graph have none; NVTX records the others",
        "no_ranges": "thence.mark, NVTX",
        "no_modules": _CALLS,
        "no_operators": "torch.profiler records them",
        "no_python_frames": _FRAMES,
        "no_autograd": "thence.mark around the forward records them",
        "no_steps": "recording.step() marks them",
        "graph": "thence.mark names it at capture",
        "no_collectives": (
            "it was recorded with --without collectives, or they are called neither through"
            " torch.distributed nor by JAX: thence.torch.collective(...) around such a call describes it"
        ),
    },
    NSIGHT_EXPORT: {
        "no_ranges": "thence.mark, NVTX",
        "no_modules": _CALLS,
        "no_operators": _EMIT_NVTX,
        "no_python_frames": _FRAMES,
        "no_autograd": _EMIT_NVTX,
        "no_steps": "an NVTX range ProfilerStep#1, 2 ... around each marks them",
        "graph": _JOINS,
        "no_gpu": "record with nsys profile --trace=cuda,nvtx",
        "no_collectives": _NCCL_RANGES,
    },
    NSIGHT_CSV: {
        **dict.fromkeys(_OF_LAUNCHES, "this CSV lists device work only, the SQLite export holds more"),
        "no_collectives": _NCCL_RANGES,
    },
    NSYS_JAX_ARCHIVE: {
        "no_ranges": "jax.named_scope",
        "no_modules": "jax.named_scope names layers",
        "no_operators": _ARCHIVE,
        "no_python_frames": _ARCHIVE,
        "no_steps": _ARCHIVE,
    },
    XSPACE_TRACE: {
        "no_ranges": "jax.named_scope, thence.mark",
        "no_modules": "jax.named_scope names layers",
        "no_operators": "host_tracer_level=2 of jax.profiler.ProfileOptions records them",
        "no_python_frames": "python_tracer_level=1 of jax.profiler.ProfileOptions records them",
        "no_steps": "jax.profiler.StepTraceAnnotation marks them",
        "no_gpu": "record with device_tracer_level=1 of jax.profiler.ProfileOptions",
        "no_collectives": "it holds no HLO that names them; if XLA dumped the HLO, --hlo DUMP_DIR adds it",
    },
}
"""By format of an input (``Meta.formats``) and code of the reason: how to record what is missing."""


_NOT_NVIDIA: Mapping[str, str | None] = {"no_ranges": "record_function", "no_collectives": None}
_NOT_READ = "thence reads device work of GPUs only"
_EAGER = "thence label --eager joins labels of an eager run"

OF_ACCELERATOR: Mapping[str, Mapping[str, str | None]] = {
    "rocm": {
        **_NOT_NVIDIA,
        "graph": _EAGER,
        "no_gpu": "record with ProfilerActivity.CUDA, which means AMD's GPUs too",
        "no_collectives": (
            "torch 2.1 and newer describe collectives of torch.distributed, if the profiler records"
            " ProfilerActivity.CPU and ProfilerActivity.CUDA, which means AMD's GPUs too"
        ),
    },
    "xpu": {**_NOT_NVIDIA, "graph": _EAGER, "no_gpu": "record with ProfilerActivity.XPU"},
    "mtia": {**_NOT_NVIDIA, "graph": None, "no_gpu": f"{_NOT_READ}, not of MTIA devices"},
    "privateuse1": {
        **_NOT_NVIDIA,
        "graph": None,
        "no_gpu": f"{_NOT_READ}; of other devices, it reads what is recorded as kernels",
    },
}
"""Advice for traces of torch.profiler that differs from that for NVIDIA's GPUs, by the accelerator on which the
program ran (``Meta.accelerators``) and the code of the reason; None: no advice."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a part of the GPU time has no place of some kind.

    Attributes:
        code: of `REASONS`.
        total_ns: how much GPU time it is, in ns.
        share: of the sum of all durations, from 0 to 1.
        text: what the code means.
        advice: how to record what is missing; None if that is impossible or unknown.
    """

    code: str
    total_ns: int
    share: float
    text: str
    advice: str | None

    def __str__(self) -> str:
        return f"{self.text} ({self.advice})" if self.advice else self.text


def reason_of(
    code: str,
    total_ns: int,
    sum_ns: int,
    formats: Iterable[str],
    *,
    labels_joined: bool = False,
    accelerators: Iterable[str] = (),
) -> Reason:
    """The reason of a code with its text and advice.

    Args:
        code: of `REASONS`.
        total_ns: durations of the work without a place for this reason.
        sum_ns: durations of all work.
        formats: of the inputs, as `advice` takes them.
        labels_joined: as `advice` takes it.
        accelerators: as `advice` takes them.
    """
    how = advice(code, formats, labels_joined=labels_joined, accelerators=accelerators)
    return Reason(code, total_ns, total_ns / max(sum_ns, 1), text_of(code), how)


def text_of(code: str) -> str:
    """The text of a code of `RULES` or `REASONS`."""
    return RULES.get(code) or REASONS[code]


def advice(
    code: str, formats: Iterable[str], *, labels_joined: bool = False, accelerators: Iterable[str] = ()
) -> str | None:
    """How to record the data that are missing according to a reason; None if that is impossible or unknown.

    Args:
        code: of `REASONS`.
        formats: of the trace's inputs. If they are of several producers, there is no advice for a producer, because
            advice for one does not fit the others.
        labels_joined: whether labels of CUDA graphs are joined already, so that joining them is not advised.
        accelerators: what the inputs ran on, as far as known. If there are several, there is no advice for one of
            them.
    """
    if code == "graph" and labels_joined:
        return None
    others = [OF_ACCELERATOR.get(name, {}) for name in set(accelerators)]
    if any(code in other for other in others):
        return others[0][code] if len(others) == 1 else None
    producers = {name for name in formats if name in ADVICE}
    of_format = ADVICE[producers.pop()] if len(producers) == 1 else {}
    return of_format.get(code) or _FOR_EVERYBODY.get(code)
