"""The screen of `thence report`: its words, its columns at every width, and the options for layers."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from helpers import DATA, TORCH, event, kernel, launch, output, run_thence, written

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = TORCH / "layers" / "layers36.json.gz"
EAGER = TORCH / "torch_eager_rank0.json.gz"
JAX = DATA / "jax" / "jax_single_nocb.xplane.pb.gz"
WIDTHS = ("80", "100", "140", "200")

Capture = pytest.CaptureFixture[str]


def screen(width: str, *arguments: str | Path) -> list[str]:
    """The lines that a terminal of this width shows."""
    done = run_thence(*arguments, COLUMNS=width)
    assert done.returncode == 0, done.stderr
    return [line.rstrip() for line in done.stdout.decode().splitlines()]


def server(folder: Path) -> Path:
    """Two decode steps of a server with six layers and a kernel of a long name in each."""
    name = "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(Flash_fwd_params)"
    events = []
    for step in range(2):
        start = 1000 * step
        events.append(event("user_annotation", "step[DECODE bs=4]", start, 900))
        for layer in range(6):
            at, number = start + 10 * layer + 1, 10 * step + layer + 1
            events += [
                event("python_function", f"nn.Module: Qwen3DecoderLayer_{layer}", at, 8),
                launch(number, at + 1),
                kernel(number, 10_000 + 20 * number, 5, name=name),
            ]
    return written(folder / "server.json", events)


def test_activities_are_named_as_in_cuda() -> None:
    text = "\n".join(screen("100", "report", EAGER))
    assert "753 kernels 5.414 ms, 75 memsets 56.77 us" in text


def test_sums_over_gpus_are_called_so() -> None:
    ranks = [TORCH / f"torch_fsdp_rank{rank}.json.gz" for rank in range(2)]
    lines = screen("100", "report", *ranks)
    (number,) = [n for n, line in enumerate(lines) if line.startswith("span ")]
    assert lines[number - 1] == "whole recording, summed over 2 GPUs:"
    one = screen("100", "report", ranks[0])
    assert not any("summed over" in line for line in one)
    idle = screen("100", "idle", *ranks)
    assert re.fullmatch(r"idle: [\d.]+ m?s, summed over 2 GPUs", idle[0])


def test_kinds_of_steps_keep_their_figures(tmp_path: Path) -> None:
    """Six layers of 2 steps with one kernel of 5 us each: 12 kernels, 60 us, 30 us per step."""
    trace = server(tmp_path)
    for width in WIDTHS:
        lines = screen(width, "report", trace, "--by", "step-kind")
        (heading,) = [n for n, line in enumerate(lines) if "layers" in line and "kernel " in line]
        assert lines[heading].split()[-5:] == ["kernel", "count", "total", "per", "step"]
        assert re.search(r" 6 +\S.* 12 +60\.00 us +30\.00 us$", lines[heading + 1])
        assert not any("columns left out" in line for line in lines[heading:])
        assert max(map(len, lines[heading : heading + 2])) <= int(width)


def test_names_are_shortened_before_a_figure_is_lost() -> None:
    """Beside names of 28 characters, 100 columns hold count, total, mean, share, headroom and FLOP/s."""
    lines = screen("100", "report", EAGER, "--by", "kernel")
    (heading,) = [n for n, line in enumerate(lines) if line.startswith("GPU time by kernel")]
    assert {"count", "total", "mean", "share", "headroom", "TFLOP/s"} <= {*lines[heading].split()}
    assert any("…" in line for line in lines[heading + 1 : heading + 13])
    assert max(map(len, lines[heading : heading + 13])) <= 100


@pytest.mark.parametrize("width", WIDTHS)
def test_layers_fold_at_every_width(width: str) -> None:
    lines = screen(width, "report", LAYERS)
    (heading,) = [n for n, line in enumerate(lines) if line.startswith("GPU time by module")]
    for column in ("layers", "total", "share", "differs most"):
        assert column in lines[heading]
    assert re.search(r" 36 .*333\.0 us .*11\.9 %.* 17: \+100\.0 %$", lines[heading + 1])
    assert "--each lists all 435 rows" in " ".join(lines)
    assert max(map(len, lines[heading : heading + 13])) <= int(width)


def test_each_lists_every_layer() -> None:
    text = "\n".join(screen("140", "report", LAYERS, "--each"))
    assert "Model_0/DecoderLayer_17/MLP_17/Linear_126" in text
    assert "--top 435 shows all" in text


def test_depth_shows_a_tree(capsys: Capture) -> None:
    """A layer takes 2 + 2 us of norms, 4 x 9 + 5 us of attention, 3 x 9 + 2.75 us of MLP, 2 us itself; one 9 more."""
    lines = screen("100", "report", LAYERS, "--depth", "2")
    (heading,) = [n for n, line in enumerate(lines) if line.startswith("GPU time by module")]
    assert lines[heading + 1].split()[:2] == ["Model_0", "-"]
    assert re.search(r"^  DecoderLayer_\* +36 +612 +2\.772 ms +72\.00 us ", lines[heading + 2])
    document = json.loads(output(capsys, "report", LAYERS, "--depth", "2", "--format", "json")[0])
    assert document["by"] == "module"
    (layers,) = [node for node in document["tree"] if node["part"] == "DecoderLayer_*"]
    assert layers["total_ns"] == 36 * 76_750 + 9_000
    assert layers["self_ns"] == 36 * 2_000


def test_a_tree_of_kernels_is_refused(capsys: Capture) -> None:
    errors = output(capsys, "report", LAYERS, "--by", "kernel", "--depth", "2", code=2)[1]
    assert "--depth makes a tree by op_name, label, module, not by kernel" in errors


def test_json_keeps_rows_and_adds_folded(capsys: Capture) -> None:
    document = json.loads(output(capsys, "report", LAYERS, "--by", "module", "--format", "json")[0])
    assert len(document["rows"]) == 435
    assert len(document["folded"]) == 15
    first = document["folded"][0]
    assert first["name"] == "Model_0/DecoderLayer_*/MLP_*/Linear_*[2]"
    assert (first["layers"], first["count"], first["total_ns"]) == (36, 36, 333_000)
    assert sum(row["total_ns"] for row in document["folded"]) == document["sum_ns"]


def test_jax_opens_on_the_programs_own_lines() -> None:
    lines = screen("100", "report", JAX)
    assert re.search(r"\d+ kernels .*, 60 memcpys .*, 5 memsets", "\n".join(lines))
    (heading,) = [n for n, line in enumerate(lines) if line.startswith("GPU time by source line")]
    rows = lines[heading + 2 : heading + 7]  # the heading takes two lines
    places = [line.split("  ")[0] for line in rows]
    assert all(re.fullmatch(r"jax_gpt\.py:\d+ \S+", place) for place in places)


def test_nsight_traces_of_jax_do_not_open_on_nvtx_ranges() -> None:
    trace = DATA / "nsight" / "jax_train.sqlite.gz"
    text = "\n".join(screen("200", "report", trace))
    assert "GPU time by kernel" in text
    labels = "\n".join(screen("200", "report", trace, "--by", "label"))
    assert "XlaModule" not in labels.partition("idle because of")[0]
