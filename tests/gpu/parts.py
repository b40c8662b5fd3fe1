"""The parts of the proof on GPUs: what each shows, what it needs, and its time.

A part is a script here. What it runs on the GPU needs the
packages named, and NumPy; what it checks afterwards needs thence with all that it depends on, and may run elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
READER = ("polars", "msgspec", "isal")
"""What thence needs to read traces, and a machine with a GPU may lack."""

HUGGING_FACE = ("trl_sft", "trl_grpo", "hf_trainer", "accelerate_loop", "peft_lora")
OTHER_TORCH = ("timm_vit", "sentence_encode", "sentence_training", "lightning_resnet", "geometric_gcn")
OF_JAX = ("flax_training", "numpyro_nuts", "equinox_mlp")
"""Programs of ``real_programs.py``, some for each part, as a step has a limit of ten minutes."""


@dataclass(frozen=True)
class Part:
    """One script, run by ``run.py``.

    Attributes:
        name: of the part.
        proves: what is known if it passes.
        record: arguments of the script on the GPU; ``{out}`` stands for the folder of the part.
        check: arguments of the script afterwards, on any machine; None if the first run compares by itself.
        seconds: estimate for an H100 with 16 cores, the check included; the runner prints what a part really took.
        gpus: how many it needs.
        packages: without which it cannot run on the GPU.
        script: its path in the repository, if it is not ``tests/gpu/NAME.py``.
    """

    name: str
    proves: str
    record: tuple[str, ...]
    check: tuple[str, ...] | None
    seconds: int
    gpus: int = 1
    packages: tuple[str, ...] = ("torch",)
    script: str = ""

    @property
    def path(self) -> Path:
        """The script."""
        return ROOT / (self.script or f"tests/gpu/{self.name}.py")


PARTS = (
    Part(
        "record_torch",
        "a recording of PyTorch has torch.profiler's kernels and times, right labels, and survives being killed",
        ("agreement", "labels", "killed", "launcher"),
        None,
        60,
        packages=("torch", *READER),
    ),
    Part(
        "record_jax",
        "every kernel of JAX programs in command buffers has its HLO op, as by XLA's thunks and by jax.profiler",
        ("{out}",),
        None,
        150,
        packages=("jax", *READER),
    ),
    Part(
        "record_ranks",
        "all ranks of torchrun are recorded by one command, with the collectives that torch.profiler describes",
        (),
        None,
        90,
        gpus=2,
        packages=("torch", *READER),
    ),
    Part(
        "record_jax_ranks",
        "JAX on several GPUs, in one process and in one for each, has its HLO ops and equal collectives",
        (),
        None,
        120,
        gpus=2,
        packages=("jax", *READER),
    ),
    Part(
        "launch_numbers",
        "launches found by CUPTI's number of them are on the thread, and after the boundary, of their call",
        ("record", "{out}"),
        ("check", "{out}"),
        40,
    ),
    Part(
        "unannotated",
        "modules of a Llama that nobody annotated are torch.profiler's, kernel by kernel",
        ("{out}", "truth", "programs"),
        ("{out}", "check"),
        200,
        packages=("torch", "transformers"),
    ),
    Part(
        "compiled",
        "compiled training steps have module, line and phase of each kernel, as many as the eager run",
        ("record", "{out}"),
        ("check", "{out}"),
        240,
    ),
    *(
        Part(
            f"real_programs_{group}",
            f"training loops of {libraries} end as they do alone",
            ("record", "{out}", *names),
            ("check", "{out}"),
            40 * len(names),
            packages=packages,
            script="tests/gpu/real_programs.py",
        )
        for group, libraries, packages, names in (
            ("hf", "TRL, Trainer, Accelerate and PEFT", ("torch",), HUGGING_FACE),
            ("torch", "timm, Sentence Transformers, Lightning and PyTorch Geometric", ("torch",), OTHER_TORCH),
            ("jax", "Flax, NumPyro and Equinox", ("jax",), OF_JAX),
        )
    ),
    Part(
        "graph_labels",
        "labels of nodes of CUDA graphs are those of the eager run, and of cudaGraphGetNodes",
        ("{out}",),
        None,
        60,
        packages=("torch", *READER),
    ),
    Part(
        "capture_traces",
        "replayed kernels get their launch from a trace of the capture, and none from a damaged one",
        ("record", "{out}"),
        ("check", "{out}"),
        60,
    ),
    Part(
        "read_torch",
        "figures of a torch.profiler trace are those that torch itself holds in memory",
        ("{out}",),
        None,
        40,
        packages=("torch", *READER),
    ),
    Part(
        "read_jax",
        "figures of a jax.profiler trace are those of JAX's own decoder",
        ("{out}",),
        None,
        80,
        packages=("jax", *READER),
    ),
    Part(
        "jax_programs",
        "JAX programs of many kinds have the same kernels under the same HLO op with command buffers and without",
        ("record", "{out}"),
        ("check", "{out}"),
        400,
        packages=("jax",),
    ),
    Part(
        "jax_streams",
        "thence.jax.on_stream moves work to a stream, and thence shows it there",
        ("{out}",),
        None,
        90,
        packages=("jax", *READER),
    ),
    Part(
        "measure",
        "thence.measure gives CUPTI's times in both modes, beside other profilers",
        (),
        None,
        120,
        packages=("torch", "jax", *READER),
    ),
    Part(
        "inside",
        "times of in-kernel profiles are CUPTI's; overflow and real buffers are read",
        ("{out}",),
        None,
        200,
        packages=("torch", "jax", "cupy", *READER),
    ),
    Part(
        "idle",
        "planted causes of idle time are named, with their time and their line",
        ("record", "{out}"),
        ("check", "{out}"),
        70,
    ),
    Part(
        "host_samples",
        "planted pauses of the host are named as the first row of idle time, with their time",
        ("record", "{out}"),
        ("check", "{out}"),
        120,
    ),
    Part(
        "whatif",
        "predictions of what-if are the gains of the changed programs",
        ("record", "{out}"),
        ("check", "{out}"),
        300,
        packages=("torch", "transformers"),
    ),
    Part(
        "roofline",
        "FLOP of a Llama and of a JAX step are those of closed forms, rates are within the data sheet's",
        ("record", "{out}"),
        ("check", "{out}"),
        300,
        packages=("torch", "transformers", "jax"),
    ),
    Part(
        "memory_peaks",
        "peaks, leaks, failures and fragments of memory are PyTorch's and XLA's own, to the byte",
        ("record", "{out}", "--together", "6"),
        ("check", "{out}"),
        80,
        packages=("torch", "jax"),
    ),
    Part(
        "memory_record",
        "peaks of recorded memory are PyTorch's, memory that was planted outside is named; what it costs a step",
        ("record", "{out}"),
        ("check", "{out}"),
        180,
        packages=("torch", "jax"),
    ),
    Part(
        "graph_page",
        "nodes, edges and critical path of the page of a CUDA graph are those of torch's dump of it",
        ("record", "{out}"),
        ("check", "{out}"),
        120,
        packages=("torch", "jax"),
    ),
    Part(
        "waits",
        "waits and late ranks of jobs are those that the raw events show",
        ("record", "{out}"),
        ("check", "{out}"),
        180,
        gpus=4,
    ),
    Part(
        "jobs",
        "jobs of FSDP, tensor parallel, pipelines, experts, JAX: coverage, collectives and late ranks are true",
        ("record", "{out}", "--seconds", "240"),
        ("check", "{out}"),
        420,
        gpus=2,
    ),
)
