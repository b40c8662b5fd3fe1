"""The figures of a run for trackers of experiments: W&B, MLflow, TensorBoard, or any that takes names and numbers."""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from thence.errors import MissingRequirement

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from thence.capture.session.record import Recording
    from thence.trace import Trace

SCALARS: Mapping[str, str] = MappingProxyType(
    {
        "thence/steps": "number of steps",
        "thence/step_ms": "ms: median step, without recording where that is known",
        "thence/recorded_step_ms": "ms: median step while it was recorded",
        "thence/gpu_busy_ms": "ms: median time of a step in which a GPU worked",
        "thence/gpu_busy_share": "share of a step in which a GPU worked, 0 to 1; without steps, of the recorded time",
        "thence/gpu_idle_share": "the rest of it",
        "thence/exposed_communication_share": "share of a step in which a GPU communicated and computed nothing",
        "thence/idle/CAUSE_share": "share of a step in which a GPU was idle for this cause, such as launch or loader",
        "thence/phase/PHASE_share": "share of the GPU's time in a phase, such as forward, backward or optimizer",
        "thence/late_ranks": "number of ranks that make the others wait",
        "thence/sound": "1 if the recording is complete, 0 if work is missing in it",
    }
)
"""Names of the scalars, with units, and what they mean. CAUSE and PHASE stand for the names of causes of idle time
and of phases; what is unknown is left out."""


class Logged:
    """What is logged of a run.

    Attributes:
        trace: of the run.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def scalars(self) -> dict[str, float]:
        """Numbers by name (`SCALARS`).

        Raises:
            MissingData: the run holds no work of a GPU.
        """
        return dict(_scalars(self.trace))

    @cached_property
    def page(self) -> str:
        """The report as one HTML page that needs no network.

        Raises:
            MissingData: the run holds no work of a GPU.
        """
        return self.trace.report_html()

    @cached_property
    def text(self) -> str:
        """The headline as Markdown.

        Raises:
            MissingData: the run holds no work of a GPU.
        """
        return "\n".join(f"- {line}" for line in self.trace.headline.lines)

    def to_wandb(self, run: Any) -> None:
        """Logs scalars and page to a run of W&B (``wandb.init``), the page as ``thence/page``.

        Raises:
            MissingRequirement: wandb is not installed.
        """
        wandb = _library("wandb")
        run.log({**self.scalars, "thence/page": wandb.Html(self.page, inject=False)})

    def to_mlflow(self, run_id: str | None = None) -> None:
        """Logs scalars, and the page as artifact ``thence.html``, to a run of MLflow; None: the active one.

        Raises:
            MissingRequirement: mlflow is not installed.
        """
        mlflow = _library("mlflow")
        mlflow.log_metrics(self.scalars, run_id=run_id)
        mlflow.log_text(self.page, "thence.html", run_id=run_id)

    def to_tensorboard(self, writer: Any, step: int = 0) -> None:
        """Logs scalars and headline to a SummaryWriter; TensorBoard shows no pages."""
        for name, value in self.scalars.items():
            writer.add_scalar(name, value, step)
        writer.add_text("thence", self.text, step)


def log(run: str | os.PathLike[str] | Recording | Trace) -> Logged:
    """The figures of a run for a tracker of experiments.

        logged = thence.integrations.log("run")
        logged.scalars  # numbers by name, for any tracker; `SCALARS` says what they mean
        logged.to_wandb(wandb.run), logged.to_mlflow(), logged.to_tensorboard(writer)

    Args:
        run: what `thence.open` takes, a recording that has ended, or a trace.

    Raises:
        ThenceError: it cannot be opened.
    """
    from thence.opening import open_trace
    from thence.trace import Trace

    if isinstance(run, Trace):
        return Logged(run)
    opened: Trace = run.open() if hasattr(run, "open") and hasattr(run, "folder") else open_trace(run)
    return Logged(opened)


def _scalars(trace: Trace) -> Iterator[tuple[str, float]]:
    headline = trace.headline
    steps, measured = headline.steps, headline.measured
    if steps is not None:
        plain = steps.median_ns if steps.plain is None else steps.plain.plain.median_ns
        yield "thence/steps", steps.count
        yield "thence/step_ms", plain / 1e6
        yield "thence/recorded_step_ms", steps.median_ns / 1e6
        yield "thence/gpu_busy_ms", steps.busy_ns / 1e6
    yield "thence/gpu_busy_share", measured.busy
    yield "thence/gpu_idle_share", 1 - measured.busy
    yield "thence/exposed_communication_share", measured.exposed
    for cause, share in (measured.causes or {}).items():
        yield f"thence/idle/{cause}_share", share
    phases = trace.typical.report("phase").rows
    for name, share in phases.select("name", "share").iter_rows():
        yield f"thence/phase/{str(name).replace(' ', '_')}_share", share
    if trace.rank_numbers[1:]:
        yield "thence/late_ranks", len(measured.late)
    yield "thence/sound", float(trace.check().sound)


def _library(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise MissingRequirement(f"{name} is not installed ({error}); pip install {name}") from error
