"""Writes and runs the example notebooks: ``python examples/build_notebooks.py``.

Needs thence, and nbformat, nbclient and ipykernel. Charts are stored as SVG alone, without their HTML, in which GitHub
shows no SVG.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
MOST_BYTES = 600_000

Cells = tuple[str, ...]
"""Text of each cell; those that begin with ``#`` are prose."""

PYTORCH: Cells = (
    (
        "# Where the GPU time of a PyTorch run went\n\n"
        "A recording of `torch.profiler` with Python stacks: two training steps of a small GPT on one H200."
    ),
    (
        'import thence\n\ntrace = thence.open("../src/thence/data/torch_eager_stack_rank0.json.gz")\n'
        "trace  # the first answers, by the kind of place that says most of this trace"
    ),
    "trace.self_check()  # what was attributed and what was not add up, for every kind of place",
    "## Why the GPU was idle\n\nEvery idle nanosecond has one cause, and where the host was.",
    "trace.idle()",
    (
        "## By module, and by function of one's own code\n\n"
        "Backward kernels belong to the module and function of their forward op."
    ),
    'trace.plot_by("module")',
    'trace.report(by="source")',
    "## Every stream over time\n\nThe gaps are idle time: this run is limited by its launches.",
    "trace.plot_timeline()",
    "## As a flame graph\n\n`thence flame` writes a page that zooms, searches and filters.",
    'trace.plot_flame("module")',
    (
        "## Several ranks\n\nTwo steps under FSDP2 on four GPUs, one file a rank. Clocks are aligned at the ends of "
        "the collectives that the ranks share."
    ),
    (
        'ranks = thence.open("../tests/data/torch/torch_fsdp_rank*.json.gz")\n'
        'ranks.report(by="rank").rows.select("name", "count", "total_ns", "share")'
    ),
    "ranks.plot_concurrency()",
    "ranks.plot_streams()",
    (
        "## Collectives: bandwidth, waits, last arrivals\n\n"
        "The best kernels reach 180 to 250 GB/s of bus bandwidth, the average far less: most of the time is "
        "waiting for a rank that starts late, and it is ranks 1 and 3 that do."
    ),
    "ranks.plot_bandwidth()",
    "ranks.plot_waits()",
    "ranks.plot_last_arrivals()",
    "## Questions of one's own\n\n`activities` is a Polars frame: every device activity with where it came from.",
    (
        "import polars as pl\n\n"
        "(\n"
        '    trace.activities.filter(pl.col("phase") == "backward")\n'
        '    .group_by("op")\n'
        '    .agg(pl.len().alias("count"), total_us=pl.col("duration").sum() / 1e3)\n'
        '    .sort("total_us", descending=True)\n'
        "    .head(8)\n"
        ")"
    ),
    (
        "## One page to pass on\n\n"
        "`trace.report_html()`, or `thence report traces/ -o report.html`: all of this in one file "
        "that needs no network."
    ),
    'f"{len(trace.report_html().encode()) / 1e6:.1f} MB"',
)

JAX: Cells = (
    (
        "# Where the GPU time of a JAX run went\n\n"
        "A recording of `jax.profiler`: training steps of a transformer sharded over two H200s of one process. "
        "Neither JAX nor TensorFlow is needed to read it. The steps are those of the notebook of nsys-jax, a call "
        "for each; its archives open the same way.\n\n"
        "Warm-up and what XLA's autotuner ran have rows of their own."
    ),
    (
        'import polars as pl\n\nimport thence\n\ntrace = thence.open("../tests/data/jax/jax_fsdp2.xplane.pb.gz")\n'
        "trace.self_check()  # attributed and unattributed time add up"
    ),
    "## Programs\n\nHow often each XLA program ran, for how long, and when the GPU was idle: `thence programs`.",
    (
        "programs = trace.programs()\nprint(programs.phases.counted_statement)\n"
        'programs.programs.select("name", "share", "executions", "^span_ns_.*$", "^thunks_.*$", "^idle_.*$")'
    ),
    "trace.plot_programs()",
    "trace.plot_timeline()",
    "## The longest instructions, with their op_name\n\n`thence report profile_dir/ --by hlo`.",
    'trace.report(by="hlo")',
    "## GPU time by opcode\n\nThe GPU's idle time during the programs is beside the bars that add up.",
    'trace.plot_by("opcode")',
    (
        "## Compile time\n\nArchives of nsys-jax and recordings of `thence record` hold XLA's compile phases; this "
        "is one of the latter. `thence compile` says the total, and each rank's where there are several."
    ),
    'recorded = thence.open("../tests/data/jax/recording")\nrecorded.plot_compile()',
    (
        'compilation = recorded.compile()\nprint(f"{compilation.wall_ns / 1e6:.1f} ms in all")\n'
        "compilation.phases.head(compilation.covering(0.99))"
    ),
    (
        "## Flame graphs by op and by source\n\n"
        "A run on one GPU with command buffers switched off, so that every kernel leads to its HLO "
        "op. A fusion's time is "
        "shared among the source lines inside it by what its instructions cost. "
        "`thence flame profile_dir/ --by source -o flame.svg` writes an image, `.html` a page."
    ),
    'single = thence.open("../tests/data/jax/jax_single_nocb.xplane.pb.gz")\nsingle.plot_flame("op_name")',
    'single.plot_flame("source")',
    'single.report(by="source")',
    "## Bandwidth against message size\n\nPoints are transfers without waits; lines go through their medians.",
    "trace.plot_bandwidth()",
    (
        "sizes = trace.collectives().by_size\n"
        'sizes.select("collective", "bytes", "count", "^transfer_bus.*$", "exposed_ns", "hidden_ns", "^wait.*$")'
    ),
    "## Waits\n\nHow long each collective waited for the last device that it needs to start.",
    "trace.plot_wait_histogram()",
    "trace.plot_wait_sizes()",
    "trace.plot_waits()",
    (
        "## Spread\n\n"
        "The same computation should always take the same time. What lies high and is large is worth a look."
    ),
    "single.plot_spread()",
    'single.spread().filter(pl.col("count") > 1).sort("spread", descending=True).head(8)',
    "## One page to pass on\n\n`thence report profile_dir/ -o report.html`: all of this in one file.",
    'f"{len(trace.report_html().encode()) / 1e6:.1f} MB"',
)


def build(name: str, cells: Cells) -> None:
    """Writes one notebook with the outputs of its cells."""
    notebook = nbformat.v4.new_notebook()
    for number, text in enumerate(cells):
        prose = text.startswith("#")
        cell = nbformat.v4.new_markdown_cell(text) if prose else nbformat.v4.new_code_cell(text)
        cell["id"] = f"cell-{number}"  # the same each time, so that changes are those of content
        notebook.cells.append(cell)
    client = NotebookClient(notebook, timeout=120, record_timing=False, resources={"metadata": {"path": str(HERE)}})
    client.execute()
    for output in (each for cell in notebook.cells for each in cell.get("outputs", ())):
        if "image/svg+xml" in output.get("data", {}):
            output["data"].pop("text/html", None)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    target = HERE / name
    nbformat.write(notebook, target)
    size = target.stat().st_size
    print(f"{name}: {size / 1000:.0f} kB")
    assert size < MOST_BYTES, "too large to keep"


if __name__ == "__main__":
    build("pytorch.ipynb", PYTORCH)
    build("jax.ipynb", JAX)
